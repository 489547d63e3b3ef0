"""Fixtures: the same bytes for the same case, valid metadata, history among NaN, one model cut for the ranks."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from v41_config import FLASH6, TINY, LayoutError, OperatorError, ParallelLayout, operators
from v41_goldens.errors import OperandError
from v41_goldens.fixtures import FixtureCase, fixture_batch, operator_fixture
from v41_goldens.fixtures.random_tensors import SENTINEL_BYTE, RandomTensors
from v41_goldens.judges import cache_tensors

CASE = FixtureCase(tokens=33, active_tokens=31, requests=6)


def same_bytes(left: Tensor, right: Tensor) -> bool:
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))


def differ(left: Tensor, right: Tensor) -> bool:
    return left.shape != right.shape or not same_bytes(left, right)


@pytest.mark.parametrize(
    "name", ["prefill_c1a_reindex_sharded", "decode_c2a_full", "return_to_source", "routed_experts"]
)
def test_a_case_is_its_bytes(name: str) -> None:
    case = FixtureCase(layout=ParallelLayout(2, 2), tokens=9, requests=2)
    first, again = operator_fixture(name, case), operator_fixture(name, case)
    other = operator_fixture(name, FixtureCase(layout=ParallelLayout(2, 2), tokens=9, requests=2, seed=1))
    assert first.extents == again.extents
    for rank in range(4):
        assert all(same_bytes(value, again.tensors(rank)[key]) for key, value in first.tensors(rank).items())
        assert any(differ(value, other.tensors(rank)[key]) for key, value in first.tensors(rank).items())


def test_every_random_tensor_depends_on_the_seed() -> None:
    """Torch looks at 32 bits of a seed."""
    first, other = (RandomTensors(seed, "stream").normal("name", (4,)) for seed in (0, 1))
    assert not torch.equal(first, other)
    fixtures = [operator_fixture("moe", FixtureCase(tokens=4, requests=1, seed=seed)).tensors(0) for seed in (0, 1)]
    assert all(differ(fixtures[0][name], fixtures[1][name]) for name in fixtures[0] if name != "out")


@pytest.mark.parametrize("name", operators())
def test_arguments_fit_the_contract_and_inactive_rows_are_marked(name: str) -> None:
    fixture = operator_fixture(name, FixtureCase(layout=ParallelLayout(2), tokens=7, active_tokens=5, requests=2))
    for rank, bound in enumerate(fixture.bounds):
        bound.check(fixture.arguments[rank])
        for tensor in fixture.spec.tensors:
            value = fixture.tensors(rank)[tensor.name]
            if tensor.direction == "out" and value.dtype is not torch.bool:
                assert value.view(torch.uint8).eq(SENTINEL_BYTE).all(), "nobody has written it"
            elif tensor.direction == "in" and tensor.dims[0] == "T" and "num_tokens" in fixture.arguments[rank]:
                rest = value[5:]
                if value.dtype in (torch.int32, torch.int64):
                    assert rest.eq(-1).all()
                elif value.dtype is not torch.bool:
                    assert rest.view(torch.uint8).eq(SENTINEL_BYTE).all(), "not zero, so that it shows"


def test_ragged_prefill_and_even_decode() -> None:
    prefill = fixture_batch(CASE).metadata
    assert int(prefill.query_lens.sum()) == 31
    assert len(set(prefill.query_lens.tolist())) > 2
    assert bool((prefill.kv_seq_lens == 0).any()), "new requests"
    assert bool((prefill.kv_seq_lens > 0).any()), "and later chunks"
    decode = fixture_batch(FixtureCase(phase="decode", tokens=33, active_tokens=31, requests=6)).metadata
    assert decode.query_lens.tolist() == [6, 5, 5, 5, 5, 5]
    assert int(decode.kv_seq_lens.max()) > 128, "more than a page"


def test_history_is_there_and_nothing_else() -> None:
    """Rows that stored tokens published are numbers, each other byte of the pools is 0xFF."""
    for done in (False, True):
        batch = fixture_batch(CASE, source_is_done=done)
        meta = batch.metadata
        for name, tensor in cache_tensors(batch.caches).items():
            kind, layer, *_ = name.split(".")
            rows = tensor.contiguous().view(torch.uint8).flatten(0, 1).flatten(1)
            written = int((rows != 0xFF).any(dim=1).sum())
            stored = meta.kv_seq_lens.long()
            if kind in ("compressed", "index_key"):
                ratio = TINY.layer_config(int(layer)).compress_ratio
                lens = meta.new_kv_seq_lens.long() if done else stored
                assert written == int((lens // ratio).sum()), name
            elif kind == "window":
                assert written == int(stored.sum()), name
            else:
                assert written == int(stored.clamp(max=4).sum()), name
                assert tensor.isnan().any()


@pytest.mark.parametrize(
    ("name", "operand", "axis"),
    [
        ("decode_swa", "wq_b", 0),
        ("decode_swa", "attn_sink", 0),
        ("decode_swa", "wo_b", 1),
        ("decode_swa", "wo_b_scale", 1),
        ("embed", "embed_weight", 0),
        ("moe", "w1", 0),
        ("sparse_attention", "q", 1),
        ("decode_swa_sharded", "x_hc", 0),
    ],
)
def test_ranks_hold_parts_of_one_whole(name: str, operand: str, axis: int) -> None:
    case = FixtureCase(layout=ParallelLayout(4), tokens=12, requests=2)
    parts = [operator_fixture(name, case).tensors(rank)[operand].view(torch.uint8) for rank in range(4)]
    whole = operator_fixture(name, FixtureCase(tokens=12, requests=2)).tensors(0)[operand].view(torch.uint8)
    assert torch.equal(torch.cat(parts, dim=axis), whole)


def test_groups_have_batches_of_their_own_and_one_model() -> None:
    case = FixtureCase(layout=ParallelLayout(2, 2), tokens=8, dp_tokens=(7, 1), requests=3)
    fixture = operator_fixture("prefill_c2a_full", case)
    assert [given["num_tokens"] for given in fixture.arguments] == [7, 7, 1, 1]
    first, third = fixture.tensors(0), fixture.tensors(2)
    assert same_bytes(first["wq_b"], third["wq_b"])
    assert not same_bytes(first["x_hc"], third["x_hc"])
    assert same_bytes(first["x_hc"], fixture.tensors(1)["x_hc"])
    assert first["query_start_loc"].tolist()[-1] == 7
    assert third["query_start_loc"].tolist()[-1] == 1


def test_a_selection_is_valid() -> None:
    fixture = operator_fixture("decode_attn_c1a_reuse", FixtureCase(phase="decode", tokens=6, requests=6))
    rows = fixture.tensors(0)["topk_rows"]
    batch = fixture_batch(FixtureCase(phase="decode", tokens=6, requests=6), source_is_done=True)
    scale = fixture.tensors(0)["compressed_kv_scale"].float().flatten(0, 2)
    for token, row in enumerate(rows):
        live = row[row >= 0]
        visible = int(batch.metadata.compressed_lens[6][token])
        assert len(live) == min(visible, TINY.index_topk) == len(live.unique())
        assert scale[live.long()].isfinite().all()
        assert (row[len(live) :] == -1).all()


def test_numbers_keep_their_size_through_a_layer() -> None:
    """At FLASH's widths too: neither vanishing nor overflowing, so that a bound means something."""
    from v41_goldens.operators import golden

    for config in (TINY, FLASH6):
        fixture = operator_fixture("quantized_linear", FixtureCase(config=config, tokens=4, requests=1))
        golden("quantized_linear").run(fixture.bounds[0], fixture.arguments[0])
        size = fixture.tensors(0)["out"].float().square().mean().sqrt()
        assert 0.2 < size < 5
        fixture = operator_fixture("q_proj_qr", FixtureCase(config=config, tokens=2, requests=1))
        golden("q_proj_qr").run(fixture.bounds[0], fixture.arguments[0])
        assert 0.5 < fixture.tensors(0)["qr"].float().square().mean().sqrt() < 2
        assert math.isfinite(float(size))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tokens": -1}, "tokens: expected 0 to 1048576, found -1"),
        ({"tokens": 10**9}, "tokens: expected 0 to 1048576"),
        ({"requests": 10**9}, "requests: expected 1 to 1048576"),
        ({"requests": 0}, "requests: expected 1 to 1048576, found 0"),
        ({"tokens": 3, "active_tokens": 4}, "active tokens: expected 0 to tokens = 3, found 4"),
        ({"dp_tokens": (1, 2)}, "dp_tokens: expected a count for each of 1 DP groups"),
        ({"tokens": 3, "dp_tokens": (4,)}, "active tokens: .* found 4"),
    ],
)
def test_cases_that_cannot_be(fields: dict[str, int], message: str) -> None:
    with pytest.raises(OperandError, match=message):
        FixtureCase(**fields)  # type: ignore[arg-type]


def test_what_a_model_does_not_have() -> None:
    with pytest.raises(OperatorError):
        operator_fixture("no_operator", CASE)
    with pytest.raises(LayoutError):
        operator_fixture("decode_swa", FixtureCase(layout=ParallelLayout(3)))
    layers = FLASH6.layers
    assert any(layer.mode.value == "c1a_reindex" for layer in layers)
    without = next(
        (mode for mode in ("c1a_reindex", "c2a_reuse") if all(layer.mode.value != mode for layer in layers)), None
    )
    if without is not None:
        with pytest.raises(OperandError, match="a model without"):
            operator_fixture(f"decode_attn_{without}", FixtureCase(config=FLASH6))
