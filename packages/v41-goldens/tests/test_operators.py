"""Every operator of the ABI as a golden: what the destination form reads and writes, alone and over ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from v41_config import TINY, AttentionMode, OperatorError, ParallelLayout, operators
from v41_config.dimensions import symbols_of
from v41_goldens import Capture, ForwardContext, LayerWeights, RopeRows, block
from v41_goldens.errors import GoldenError, OperandError
from v41_goldens.fixtures import FixtureCase, OperatorFixture, fixture_batch, operator_fixture
from v41_goldens.fixtures.batch import Phase
from v41_goldens.fixtures.operator_fixture import mode_of
from v41_goldens.fixtures.random_tensors import SENTINEL_BYTE, sentinel
from v41_goldens.judges import assert_equal_bits, assert_storage, cache_tensors, owned_rows, storage_snapshot
from v41_goldens.modes import ATTENTION
from v41_goldens.operators import golden, names
from v41_goldens.operators.call import Call
from v41_goldens.weights import HyperConnectionWeights

LAYOUTS = [ParallelLayout(), ParallelLayout(2, 2)]
CASE = FixtureCase(tokens=11, active_tokens=9, requests=3)
HALF_LAYERS = [name for name in names() if mode_of(operators()[name]) and "attn" not in name and "indexer" not in name]


def same_bytes(left: Tensor, right: Tensor) -> bool:
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))


def copied(fixture: OperatorFixture) -> list[dict[str, object]]:
    return [{k: v.clone() if isinstance(v, Tensor) else v for k, v in given.items()} for given in fixture.arguments]


def run(fixture: OperatorFixture) -> list[dict[str, Tensor]]:
    """The destinations of every rank."""
    arguments = copied(fixture)
    golden(fixture.spec.name).run_ranks(fixture.bounds, arguments)
    return [{name: given[name] for name in fixture.spec.destinations} for given in arguments]  # type: ignore[misc]


def test_there_is_a_golden_for_every_operator() -> None:
    assert names() == tuple(operators())
    assert len(names()) == 83
    for name in names():
        assert golden(name).spec is operators()[name]
        assert golden(name).name == name
        assert callable(golden(name).function)
        assert golden(name).function.__doc__
    with pytest.raises(OperatorError, match=r"operator: expected .*rms_norm.*, found 'rms_normal'"):
        golden("rms_normal")


def test_the_twelve_attention_entries_are_six_functions() -> None:
    for mode in AttentionMode:
        for phase in ("prefill", "decode"):
            assert golden(f"{phase}_attn_{mode.value}").function is ATTENTION[mode]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", names())
def test_only_active_rows_of_destinations_are_written(name: str, layout: ParallelLayout) -> None:
    """Destinations come filled with a sentinel. What is read keeps its bytes, padding rows of destinations keep the
    sentinel (or are zero where a slab is published), and what stands in padding rows of operands does not matter."""
    phase: Phase = "prefill" if name.startswith("prefill") else "decode"
    case = FixtureCase(layout=layout, phase=phase, tokens=11, active_tokens=9, requests=3)
    fixture = operator_fixture(name, case)
    arguments = copied(fixture)
    golden(name).run_ranks(fixture.bounds, arguments)
    other_padding = copied(fixture)
    for rank, (bound, given) in enumerate(zip(fixture.bounds, arguments, strict=True)):
        bound.check(given)
        call = Call.of(bound, given, rank)
        for tensor in fixture.spec.tensors:
            before, after = fixture.tensors(rank)[tensor.name], given[tensor.name]
            assert isinstance(after, Tensor)
            active = call.active_rows(tensor.dims[0])
            if tensor.direction == "in":
                assert same_bytes(after, before), tensor.name
                padding = other_padding[rank][tensor.name]
                assert isinstance(padding, Tensor)
                if padding.is_floating_point() and padding.dtype.itemsize > 1:
                    padding[active:] = torch.nan
                elif padding.dtype in (torch.int32, torch.int64) and active < len(padding):
                    padding[active:] = 1 << 30
            elif tensor.direction == "out":
                if name == "dispatch" and tensor.dims[0] == "R":
                    active = int(given["receive_counts"].sum())  # type: ignore[attr-defined]
                filler = torch.zeros_like(after) if call.is_cleared(tensor.dims[0]) else before
                assert same_bytes(after[active:], filler[active:]), tensor.name
                if after.is_floating_point():
                    assert not after[:active].isnan().any(), tensor.name
                if active and after.dtype.itemsize > 1:
                    assert not same_bytes(after[:active], sentinel(tuple(after.shape), after.dtype)[:active])
    golden(name).run_ranks(fixture.bounds, other_padding)
    for given, again in zip(arguments, other_padding, strict=True):
        for destination in fixture.spec.destinations:
            assert same_bytes(given[destination], again[destination]), destination  # type: ignore[arg-type]


@pytest.mark.parametrize("name", names())
def test_without_a_token_nothing_is_touched(name: str) -> None:
    """Zero active rows in extents that are not zero: no destination, no cache, no state; published slabs are zero."""
    fixture = operator_fixture(name, FixtureCase(tokens=5, active_tokens=0, requests=2))
    arguments = copied(fixture)
    for given in arguments:
        if "num_rows" in given:
            given["num_rows"] = 0
    golden(name).run_ranks(fixture.bounds, arguments)
    for tensor in fixture.spec.tensors:
        before, after = fixture.tensors(0)[tensor.name], arguments[0][tensor.name]
        assert isinstance(after, Tensor)
        if (
            tensor.direction == "out"
            and "T_local" in symbols_of(tensor.dims[0])
            and fixture.spec.scalars[0].name == ("num_tokens")
            and getattr(fixture.spec.scalars[0], "limit", "") == "T"
        ):
            assert not after.view(torch.uint8).any(), tensor.name
        elif name != "dispatch" or not tensor.name.endswith("counts"):
            assert same_bytes(after, before), tensor.name


@pytest.mark.parametrize("mode", AttentionMode, ids=lambda mode: mode.value)
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_an_entry_writes_the_cache_rows_that_its_slots_name(phase: str, mode: AttentionMode) -> None:
    """Against the mode's function over a context of the whole batch; storage by the judge that lowers it anew."""
    name = f"{phase}_attn_{mode.value}"
    case = FixtureCase(phase=phase, tokens=20, active_tokens=17, requests=4)  # type: ignore[arg-type]
    fixture = operator_fixture(name, case)
    found = run(fixture)[0]
    call = Call.of(fixture.bounds[0], fixture.arguments[0], 0)

    layer = next(layer for layer in TINY.layers if layer.mode is mode)
    reads_source = layer.kv_source is not None and not layer.owns_kv
    batch = fixture_batch(case, source_is_done=reads_source)
    context = ForwardContext(TINY, batch.metadata, batch.caches, RopeRows(batch.tables))
    if layer.index_source is not None and not layer.owns_index:
        context.topk[layer.index_source] = call["topk_rows"]
    if layer.candidate_source is not None:
        context.candidate_blocks = call["kept_blocks"]
    before = storage_snapshot(batch.caches)
    with torch.inference_mode():
        expected = ATTENTION[mode](context, layer, call.attention(), call["x"])
    assert_storage(before, cache_tensors(batch.caches), owned_rows(batch.metadata, layer), name)
    assert_equal_bits(found["output_partial"][:17], expected, "output_partial")
    pools = {"window_kv": batch.caches.window[layer.layer_id]}
    if layer.owns_kv:
        pools |= {"compressed_kv": batch.caches.compressed[layer.layer_id],
                  "index_key": batch.caches.index_key[layer.layer_id]}  # fmt: skip
    for pool, cache in pools.items():
        assert_equal_bits(found[pool], cache.payload, pool)
        assert_equal_bits(found[f"{pool}_scale"], cache.scale, f"{pool}_scale")
    if layer.owns_kv and layer.compress_ratio == 2:
        assert_equal_bits(found["state_cache"], batch.caches.state[layer.layer_id], "state_cache")
    if layer.owns_index:
        assert_equal_bits(found["topk_rows"][:17], context.topk[layer.layer_id], "topk_rows")
    if layer.makes_candidates:
        assert context.candidate_blocks is not None
        width = context.candidate_blocks.shape[1]
        assert_equal_bits(found["kept_blocks"][:17, :width], context.candidate_blocks, "kept_blocks")


@functools.cache
def half_layer_of_one_process(name: str, case: FixtureCase, parts: int) -> dict[str, Tensor]:
    """The attention half of `block`, in one process with the partials of `parts` ranks."""
    alone = FixtureCase(case.config, ParallelLayout(), case.phase, case.tokens, case.active_tokens, case.requests)
    replicated = name.removesuffix("_sharded")
    fixture = operator_fixture(replicated, alone)
    call = Call.of(fixture.bounds[0], fixture.arguments[0], 0)
    mode = mode_of(fixture.spec)
    layer = next(layer for layer in TINY.layers if layer.mode is mode)
    batch = fixture_batch(alone, source_is_done=layer.kv_source is not None and not layer.owns_kv)
    context = ForwardContext(TINY, batch.metadata, batch.caches, RopeRows(batch.tables), Capture())
    if layer.index_source is not None and not layer.owns_index:
        context.topk[layer.index_source] = call["topk_rows"]
    if layer.candidate_source is not None:
        context.candidate_blocks = call["kept_blocks"]
    moe_fixture = operator_fixture("moe", FixtureCase())
    moe = Call.of(moe_fixture.bounds[0], moe_fixture.arguments[0], 0).moe()
    weights = LayerWeights(
        call["attn_norm"], call["attn_norm"], call.attention(), call.hyper_connection("hc_attn_"),
        call.hyper_connection("hc_attn_"), moe,
    )  # fmt: skip
    assert isinstance(weights.hc_attn, HyperConnectionWeights)
    with torch.inference_mode():
        block(context, layer, weights, call["x_hc"], call["incoming_pre_mix"], parts)
    assert context.capture is not None
    tensors = context.capture.tensors
    return {name: tensors[f"layer.{layer.layer_id:02d}.{name}"] for name in ("attn_in", "attn_out", "hc_attn_pre")}


@pytest.mark.parametrize("tp", [1, 4])
@pytest.mark.parametrize("name", HALF_LAYERS)
def test_a_half_layer_is_the_attention_half_of_the_block(name: str, tp: int) -> None:
    """On every rank, whichever wiring, equal to the block in one process that adds as many partials."""
    phase = name.partition("_")[0]
    case = FixtureCase(TINY, ParallelLayout(tp), phase, 10, 9, 3)  # type: ignore[arg-type]
    expected = half_layer_of_one_process(name, case, tp)
    fixture = operator_fixture(name, case)
    results = run(fixture)
    slab = case.layout.slab_rows(10)
    for rank, result in enumerate(results):
        rows = slice(rank * slab, min(9, (rank + 1) * slab)) if name.endswith("_sharded") else slice(0, 9)
        count = max(0, rows.stop - rows.start)
        assert_equal_bits(result["attn_input"][:9], expected["attn_in"], "attn_input")
        assert_equal_bits(result["attn_output"][:count], expected["attn_out"][rows], "attn_output")
        assert_equal_bits(result["next_pre_mix"][:count], expected["hc_attn_pre"][rows], "next_pre_mix")
    for pool in {"window_kv", "compressed_kv", "index_key", "state_cache", "topk_rows"} & results[0].keys():
        for result in results[1:]:
            assert same_bytes(result[pool], results[0][pool]), "every rank of a group publishes the same"


def test_a_ranks_experts_return_what_one_process_computes() -> None:
    """Dispatch, experts, return and combination over 4 ranks equal `moe` in one process, row for row."""
    case = FixtureCase(TINY, ParallelLayout(4), "prefill", 10, 9, 3)
    alone = FixtureCase(TINY, ParallelLayout(), "prefill", 10, 9, 3)
    expected = run(operator_fixture("moe", alone))[0]["out"]
    slabs = run(operator_fixture("moe", case))
    together = torch.cat([slab["out"][: case.layout.active_rows(10, 9, rank)] for rank, slab in enumerate(slabs)])
    assert_equal_bits(together, expected[:9], "moe")


Break = Callable[[OperatorFixture, dict[str, object]], None]


def put(name: str, index: tuple[int | slice, ...], value: float) -> Break:
    def change(fixture: OperatorFixture, arguments: dict[str, object]) -> None:
        tensor = arguments[name]
        assert isinstance(tensor, Tensor)
        tensor[index] = value

    return change


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("compress_ratio_2", put("token_to_req_indices", (0,), 9), r"compress_ratio_2 request\[0\]: .* found 9"),
        ("compress_ratio_2", put("token_to_req_indices", (0,), -1), r"request\[0\]: .* found -1"),
        ("compress_ratio_2", put("state_block_table", (0, 0), 99), r"state_block\[0\]: .* found 99"),
        ("compress_ratio_2", put("compressor_source_token_indices", (0,), 10), r"closing\[0\]: .* 0 to 8, found 10"),
        ("compress_ratio_2", put("position_ids", (slice(None),), 6), r"position of closing\[0\]: .* odd.* found 6"),
        ("prefill_attn_c2a_full", put("token_to_req_indices", (0,), 5), r"token_to_req_indices\[0\]: .* found 5"),
        ("prefill_attn_c2a_full", put("query_start_loc", (1,), 1), "query_start_loc"),
        ("prefill_attn_c1a_full", put("token_to_req_indices", (0,), 2), "packed rows"),
        ("prefill_attn_c1a_full", put("compressed_block_table", (0, 0), 99), "compressed_block_table: .* found 99"),
        ("prefill_attn_c1a_reindex", put("compressed_lens", (0,), 1000), r"compressed_lens\[0\]: .* found 1000"),
        ("prefill_attn_swa", put("window_slots", (0,), 1 << 20), "RowCache.publish slots: .* found 1048576"),
        ("embed", put("token_ids", (3,), TINY.vocab_size), r"embed token_ids\[3\]: .* found 512"),
        ("dispatch", put("expert_ids", (0, 0), 16), "dispatch expert_ids of rank 0: .* found 16"),
        ("dispatch", put("expert_ids", (0, 0), -1), "dispatch expert_ids of rank 0: .* found -1"),
        ("prefill_attn_c1a_reindex", put("compressed_lens", (slice(None),), -1), r"compressed_lens\[0\]: .* found -1"),
        ("prefill_attn_c1a_full", put("compressed_lens", (2,), -1), r"compressed_lens\[2\]: expected 0 to .* found -1"),
        ("return_to_source", put("receive_counts", (0,), 1000), "return_to_source receive_counts of rank 0"),
        ("return_to_source", put("receive_counts", (0,), -1), "return_to_source receive_counts of rank 0"),
        ("return_to_source", put("receive_counts", (0,), 1), "return_to_source receive_counts: expected .* was sent"),
        ("return_to_source", put("send_counts", (0,), 1), "assignment_order of rank 0: expected each number below 1"),
        ("return_to_source", put("send_counts", (0,), 1000), "return_to_source send_counts of rank 0"),
        ("return_to_source", put("assignment_order", (0,), 1000), "return_to_source assignment_order of rank 0"),
        ("return_to_source", put("assignment_order", (slice(None),), 1), "return_to_source assignment_order of rank 0"),
        ("candidate_blocks", put("compressed_lens", (0,), 99), "candidate_blocks compressed_lens"),
        ("candidate_blocks", put("compressed_lens", (0,), -9), "candidate_blocks compressed_lens"),
        ("materialize_rope_rows", put("position_ids", (1,), 1 << 20), "position_ids: .* found 1048576"),
    ],
)  # fmt: skip
def test_operands_that_mean_nothing_are_refused(name: str, change: Break, message: str) -> None:
    fixture = operator_fixture(name, CASE)
    arguments = copied(fixture)[0]
    change(fixture, arguments)
    kept = {destination: arguments[destination].clone() for destination in fixture.spec.destinations}  # type: ignore[attr-defined]
    with pytest.raises(GoldenError, match=message):
        golden(name).run(fixture.bounds[0], arguments)
    for destination, before in kept.items():
        assert same_bytes(arguments[destination], before), f"{destination} is written already"  # type: ignore[arg-type]


def test_arguments_of_another_contract_are_refused() -> None:
    fixture = operator_fixture("rms_norm", CASE)
    given = dict(fixture.arguments[0])
    with pytest.raises(OperatorError, match=r"rms_norm: weight: expected .*, found no argument"):
        golden("rms_norm").run(fixture.bounds[0], {k: v for k, v in given.items() if k != "weight"})
    with pytest.raises(OperatorError, match="num_tokens: expected an integer from 0 to T = 11, found 12"):
        golden("rms_norm").run(fixture.bounds[0], given | {"num_tokens": 12})
    with pytest.raises(OperandError, match="arguments bound to this operator"):
        golden("mhc_pre").run(fixture.bounds[0], given)
    two = operator_fixture("decode_swa", FixtureCase(layout=ParallelLayout(2), phase="decode", tokens=11))
    with pytest.raises(OperandError, match="those of a TP group: run_ranks"):
        golden("decode_swa").run(two.bounds[0], two.arguments[0])
    with pytest.raises(OperandError, match="all 2 ranks of the layout"):
        golden("decode_swa").run_ranks(two.bounds, two.arguments[:1])
    with pytest.raises(OperandError, match="one active count and equal extents in a TP group"):
        golden("decode_swa").run_ranks(two.bounds, [two.arguments[0], two.arguments[1] | {"num_tokens": 4}])


def test_tensors_that_cannot_be_used_are_refused() -> None:
    fixture = operator_fixture("publish_window_kv", CASE)
    given = copied(fixture)[0]
    cache, rows = given["window_kv"], given["kv"]
    assert isinstance(cache, Tensor)
    assert isinstance(rows, Tensor)
    strided = cache.view(torch.uint8).repeat_interleave(2, dim=-1)[..., ::2].view(torch.uint8)
    publish = golden("publish_window_kv")
    with pytest.raises(OperandError, match="publish_window_kv window_kv: expected contiguous storage"):
        publish.run(fixture.bounds[0], given | {"window_kv": strided.view(cache.dtype)})
    with pytest.raises(OperandError, match="publish_window_kv slots: expected a torch tensor, found 'ndarray'"):
        publish.run(fixture.bounds[0], given | {"slots": given["slots"].numpy()})  # type: ignore[attr-defined]
    with pytest.raises(OperandError, match=r"publish_window_kv: expected tensors of one device, found .*cpu.*meta"):
        publish.run(fixture.bounds[0], given | {"kv": rows.to("meta")})
    publish.run(fixture.bounds[0], given | {"kv": rows.repeat_interleave(2, dim=1)[:, ::2]})


def test_constants_of_a_call_replace_the_models() -> None:
    fixture = operator_fixture("rms_norm", CASE)
    given = copied(fixture)[0]
    golden("rms_norm").run(fixture.bounds[0], given | {"eps": 1e4})
    out = given["out"]
    assert isinstance(out, Tensor)
    assert out[:9].abs().max() < 0.1
    assert out[9:].view(torch.uint8).eq(SENTINEL_BYTE).all()
