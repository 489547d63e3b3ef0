"""Storage outside owned rows, and rows behind the active ones: every byte counts."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from v41_config import STATE_CAPACITY, TINY, AttentionMode, LayerConfig, LayoutError, ModelConfig, ParallelLayout
from v41_goldens import ATTENTION, ForwardContext, LayerWeights, PagedCaches, ReferenceEngine
from v41_goldens.errors import OperandError
from v41_goldens.judges import (
    JudgementError,
    StorageVerdict,
    assert_storage,
    assert_untouched_rows,
    assert_zero_rows,
    assert_zero_shards,
    cache_tensors,
    judge_storage,
    judge_untouched_rows,
    judge_zero_rows,
    judge_zero_shards,
    owned_rows,
    storage_snapshot,
)

MakeLayer = Callable[[ModelConfig, int, int], LayerWeights]
MODE_LAYERS = {layer.mode: layer for layer in reversed(TINY.layers)}
FULL = MODE_LAYERS[AttentionMode.C2A_FULL]


def step(
    engine: ReferenceEngine, make_layer: MakeLayer, layer: LayerConfig, lengths: tuple[int, ...]
) -> ForwardContext:
    """One layer's attention on the next `lengths` tokens of requests 2, 0 and 1; other layers selected nothing."""
    ctx = engine.context([2, 0, 1], lengths)
    tokens = sum(lengths)
    x = torch.randn(tokens, TINY.hidden_size, generator=torch.Generator().manual_seed(tokens)).bfloat16()
    for source in TINY.index_source_layer_ids:
        ctx.topk[source] = torch.full((tokens, TINY.index_topk), -1, dtype=torch.int32)
    if layer.candidate_source is not None:
        ctx.candidate_blocks = torch.zeros(tokens, 100, dtype=torch.bool)
    ATTENTION[layer.mode](ctx, layer, make_layer(TINY, layer.layer_id, 1).attention, x)
    return ctx


def new_engine() -> ReferenceEngine:
    return ReferenceEngine(TINY, None, 3, 150, shuffle_seed=4, fill_byte=0xFF)


@pytest.mark.parametrize("mode", AttentionMode, ids=lambda mode: mode.value)
def test_each_mode_writes_its_own_rows_and_no_others(make_layer: MakeLayer, mode: AttentionMode) -> None:
    """Over NaN-filled caches, in three steps with an idle request, an open pair and a chunk longer than the ring."""
    engine, layer = new_engine(), MODE_LAYERS[mode]
    if layer.candidate_source is not None:  # scores of keys that its source would have published
        engine.caches.index_key[layer.candidate_source].scale.view(torch.uint8).fill_(120)
    for lengths in ((5, 0, 131), (1, 1, 0), (3, 7, 2)):
        before = storage_snapshot(engine.caches)
        ctx = step(engine, make_layer, layer, lengths)
        after, owned = cache_tensors(engine.caches), owned_rows(ctx.metadata, layer)
        verdict = judge_storage(before, after, owned)
        assert verdict
        assert verdict.tensors == len(before)
        assert verdict.rows > 0
        assert_storage(before, after, owned, mode.title)
        for name, rows in owned.items():
            without = {**owned, name: rows[:0]}
            written = int((rows >= 0).sum())
            assert bool(judge_storage(before, after, without)) == (written == 0), f"{name} was not written"
    assert {name.split(".")[0] for name in owned_rows(ctx.metadata, layer)} == {
        AttentionMode.C2A_FULL: {"window", "compressed", "index_key", "state"},
        AttentionMode.C1A_FULL: {"window", "compressed", "index_key"},
    }.get(mode, {"window"})


def test_every_owned_row_is_really_written(make_layer: MakeLayer) -> None:
    """`owned_rows` names no row that the golden leaves alone: each one, taken out of the set, shows as a change."""
    engine = new_engine()
    before = storage_snapshot(engine.caches)
    ctx = step(engine, make_layer, FULL, (5, 0, 13))
    owned = owned_rows(ctx.metadata, FULL)
    assert int((owned[f"state.{FULL.layer_id}"] >= 0).sum()) == 2 * STATE_CAPACITY
    for name, rows in owned.items():
        for at in (rows >= 0).nonzero().flatten().tolist():
            fewer = rows.clone()
            fewer[at] = -1
            verdict = judge_storage(before, cache_tensors(engine.caches), {**owned, name: fewer})
            assert verdict.bad_rows == 1
            assert verdict.first_place is not None
            assert verdict.first_place[:2] == (name, int(rows[at]))


@pytest.fixture
def published(make_layer: MakeLayer) -> tuple[dict[str, Tensor], PagedCaches, dict[str, Tensor]]:
    engine = new_engine()
    step(engine, make_layer, FULL, (5, 3, 40))
    before = storage_snapshot(engine.caches)
    ctx = step(engine, make_layer, FULL, (2, 1, 3))
    return before, engine.caches, owned_rows(ctx.metadata, FULL)


@pytest.mark.parametrize("name", ["window.2.payload", "window.2.scale", "window.5.payload", "compressed.2.payload",
                                  "compressed.4.scale", "index_key.2.scale", "index_key.6.payload", "state.2",
                                  "state.4"])  # fmt: skip
@pytest.mark.parametrize("bit", [0, 7])
def test_one_bit_of_one_byte_outside_is_found(
    published: tuple[dict[str, Tensor], PagedCaches, dict[str, Tensor]], name: str, bit: int
) -> None:
    before, caches, owned = published
    raw = cache_tensors(caches)[name].view(torch.uint8).flatten(0, 1).flatten(1)
    free = sorted(set(range(len(raw))) - set(owned.get(name, torch.empty(0)).tolist()))
    row, byte = free[len(free) // 2], raw.shape[1] - 1
    raw[row, byte] ^= 1 << bit
    verdict = judge_storage(before, cache_tensors(caches), owned)
    assert verdict.first_place == (name, row, byte)
    assert (verdict.changed_bytes, verdict.bad_rows) == (1, 1)
    with pytest.raises(JudgementError, match=rf"step: .*{name}: 1 bytes changed in 1 rows, first at row {row} byte"):
        assert_storage(before, cache_tensors(caches), owned, "step")


def test_what_stands_in_owned_rows_is_not_this_judges_question(
    published: tuple[dict[str, Tensor], PagedCaches, dict[str, Tensor]],
) -> None:
    before, caches, owned = published
    for name, rows in owned.items():
        flat = cache_tensors(caches)[name].view(torch.uint8).flatten(0, 1).flatten(1)
        flat[rows[rows >= 0]] = 0x55
    assert judge_storage(before, cache_tensors(caches), owned)


def test_tensors_that_vanish_appear_or_change_their_kind_are_rejected(
    published: tuple[dict[str, Tensor], PagedCaches, dict[str, Tensor]],
) -> None:
    before, caches, owned = published
    after = cache_tensors(caches)

    def reasons(verdict: StorageVerdict) -> str:
        assert not verdict
        return " ".join(verdict.reasons)

    fewer = {name: tensor for name, tensor in after.items() if name != "state.4"}
    assert reasons(judge_storage(before, fewer, owned)) == "state.4: expected before and after the call"
    assert "extra: expected" in reasons(judge_storage(before, {**after, "extra": after["state.4"]}, owned))
    assert "extra: expected" in reasons(judge_storage(before, after, {**owned, "extra": torch.tensor([0])}))
    smaller = {**after, "state.4": after["state.4"][1:]}
    assert "state.4: expected torch.float32 [3, 4, 128]" in reasons(judge_storage(before, smaller, owned))


def test_a_ring_row_is_a_token_of_a_block() -> None:
    """Rows of a state block are its ring slots: block * 4 + position % 4."""
    state = torch.zeros(3, STATE_CAPACITY, 8)
    after = state.clone()
    after[2, 1] = 1.0
    assert judge_storage({"state.2": state}, {"state.2": after}, {"state.2": torch.tensor([2 * STATE_CAPACITY + 1])})
    verdict = judge_storage({"state.2": state}, {"state.2": after}, {"state.2": torch.tensor([2 * STATE_CAPACITY])})
    assert verdict.first_place is not None
    assert verdict.first_place[:2] == ("state.2", 9)


DTYPES = (torch.bfloat16, torch.float32, torch.int32, torch.float8_e4m3fn, torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_inactive_rows_must_be_zero_in_every_byte(dtype: torch.dtype) -> None:
    rows = torch.zeros(7, 2, 3, dtype=torch.uint8).to(dtype)
    rows[:4] = torch.ones(4, 2, 3).to(dtype)
    verdict = judge_zero_rows(rows, 4)
    assert verdict
    assert (verdict.rows, verdict.bad_rows, verdict.first_index) == (3, 0, None)
    assert judge_zero_rows(rows, torch.arange(7) < 4)
    assert not judge_zero_rows(rows, 3)
    assert judge_zero_rows(rows, 7).rows == 0
    raw = rows.view(torch.uint8)
    for bit in (0, 7):
        raw[5, 1, -1] ^= 1 << bit
        verdict = judge_zero_rows(rows, 4)
        assert (verdict.bad_rows, verdict.first_index) == (1, (5, 1, 2))
        with pytest.raises(JudgementError, match=r"out: .*1 elements that are not zero, first at \[5, 1, 2\]"):
            assert_zero_rows(rows, 4, "out")
        raw[5, 1, -1] ^= 1 << bit


def test_minus_zero_and_nan_are_not_zero() -> None:
    for value in (-0.0, math.nan, 1e-40):
        rows = torch.zeros(3, 4)
        rows[2, 1] = value
        assert judge_zero_rows(rows, 2).first_index == (2, 1)


def test_inactive_rows_must_be_as_they_were() -> None:
    before = torch.full((6, 4), math.nan)
    before[3:] = 7.0
    after = before.clone()
    after[:3] = 1.0
    assert judge_untouched_rows(after, before, 3)
    assert_untouched_rows(after, before, torch.arange(6) < 3, "out")
    assert judge_untouched_rows(after, before, 2).first_index == (2, 0)
    after[4, 3] = 0.0
    verdict = judge_untouched_rows(after, before, 3)
    assert (verdict.rows, verdict.bad_rows, verdict.first_index) == (3, 1, (4, 3))
    with pytest.raises(JudgementError, match=r"out: .*1 elements that were written, first at \[4, 3\]"):
        assert_untouched_rows(after, before, 3, "out")
    assert not judge_untouched_rows(after.bfloat16(), before, 3)
    assert not judge_untouched_rows(after[:5], before, 3)


LAYOUT = ParallelLayout(tp=4)


def shards(capacity: int, active: int) -> list[Tensor]:
    """Slabs of every rank: ones in active rows, zeros behind them."""
    rows = LAYOUT.slab_rows(capacity)
    return [
        torch.cat([torch.ones(n, 8), torch.zeros(rows - n, 8)])
        for n in (LAYOUT.active_rows(capacity, active, rank) for rank in range(LAYOUT.tp))
    ]


@pytest.mark.parametrize(("capacity", "active"), [(32, 24), (33, 31), (7, 1), (3, 2), (8, 0), (8, 8)])
def test_every_shard_is_judged_on_its_own(capacity: int, active: int) -> None:
    rows = LAYOUT.slab_rows(capacity)
    verdict = judge_zero_shards(shards(capacity, active), LAYOUT, capacity, active)
    assert verdict
    assert verdict.rows == rows * LAYOUT.tp - active
    for rank in range(LAYOUT.tp):
        first = LAYOUT.active_rows(capacity, active, rank)
        for row in range(first, rows):
            wrong = shards(capacity, active)
            wrong[rank][row, 3] = 7.0
            verdict = judge_zero_shards(wrong, LAYOUT, capacity, active)
            assert (verdict.bad_rows, verdict.first_index) == (1, (rank, row, 3))
            with pytest.raises(JudgementError, match=rf"hidden: .*rank {rank}: 1 elements that are not zero"):
                assert_zero_shards(wrong, LAYOUT, capacity, active, "hidden")


def test_shards_of_another_size_are_rejected_and_of_another_number_a_typed_error() -> None:
    right = shards(7, 1)
    verdict = judge_zero_shards([*right[:3], right[3][:1]], LAYOUT, 7, 1)
    assert verdict.reasons == ("rank 3: expected 2 rows, found 1",)
    with pytest.raises(OperandError, match="shards"):
        judge_zero_shards(right[:3], LAYOUT, 7, 1)
    with pytest.raises(LayoutError):
        judge_zero_shards(right, LAYOUT, 7, 8)
    for active in (-1, 3):
        with pytest.raises(OperandError, match="active"):
            judge_zero_rows(right[0], active)
