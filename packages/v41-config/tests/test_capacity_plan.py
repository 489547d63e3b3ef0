"""Capacity plans: bytes of the model's facts, published figures, what fits, and refusals."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from v41_config import (
    FLASH,
    FLASH6,
    TINY,
    CacheLayout,
    CapacityAssumptions,
    CapacityError,
    CapacityPlan,
    LayoutError,
    ParallelLayout,
    SourceTokens,
    parse_bytes,
)
from v41_config.weight_table import WeightClass, weight_bytes

DOCS = Path(__file__).parents[1] / "docs" / "capacity.md"
EIGHT_CARDS = ParallelLayout(tp=4, dp=2)
MILLION = 1 << 20
GB = 10**9
GIB = 1 << 30


def flash(requests: int = 32, context: int = MILLION, **assumed: Any) -> CapacityPlan:
    return CapacityPlan(FLASH, EIGHT_CARDS, context, requests, CapacityAssumptions(**assumed))


# Sizes of the released checkpoint by class, as its index and headers give them.
CHECKPOINT_BYTES = {
    "routed_experts": 288_777_830_400,
    "shared_experts": 1_416_960_000,
    "attention": 5_069_721_600,
    "compressed_attention": 81_835_008,
    "router": 157_409_280 - 40 * 384 * 4,  # without the bias for image tokens
    "hyper_connections": 157_295_040,
    "norms": 829_440,
    "embedding": 1_323_827_200,
    "head": 1_323_827_200,
}


def test_one_rank_holds_the_checkpoint() -> None:
    whole = {kind.value: nbytes for kind, nbytes in weight_bytes(FLASH, ParallelLayout()).items()}
    assert whole == CHECKPOINT_BYTES
    assert sum(whole.values()) == 298_309_535_168 - 40 * 384 * 4
    plan = CapacityPlan(FLASH, ParallelLayout(), 1, 1)
    assert plan.sections["weights"]["engram_tables"] == 202_758_032_400
    assert plan.sections["weights"]["engram_projections"] == 315_043_840


def test_a_card_of_eight() -> None:
    weights = flash().sections["weights"]
    assert weights["routed_experts"] == 36_097_228_800
    assert weights["engram_tables"] == 25_344_754_050
    assert weights["embedding"] == weights["head"] == 1_323_827_200 // 4
    # by hand, a layer's part that four ranks share: wq_b, wo_a, wo_b with a scale per 32 x 32, and 64 sinks
    shared = (32768 * 1280 + 8192 * 4096 + 5120 * 8192) * 1025 // 1024 + 64 * 4
    assert weights["attention"] == 5_069_721_600 - 40 * shared * 3 // 4
    for whole in ("shared_experts", "compressed_attention", "router", "hyper_connections", "norms"):
        assert weights[whole] == CHECKPOINT_BYTES[whole]


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("dp", [1, 2, 4, 8])
def test_shares_of_all_cards_add_up(tp: int, dp: int) -> None:
    layout = ParallelLayout(tp, dp)
    card = weight_bytes(FLASH, layout)
    assert card[WeightClass.ROUTED_EXPERTS] * layout.ep == CHECKPOINT_BYTES["routed_experts"]
    assert card[WeightClass.HEAD] * tp == CHECKPOINT_BYTES["head"]


def other_weights(plan: CapacityPlan) -> int:
    weights = plan.sections["weights"]
    return plan.section_bytes("weights") - weights["routed_experts"] - weights["engram_tables"]


PUBLISHED = [
    (0.94, flash(1).cache_bytes_per_request),
    (3.37, flash(1, bf16_cache=True).cache_bytes_per_request),
    (30.2, flash(32).section_bytes("caches")),
    (107.8, flash(32, bf16_cache=True).section_bytes("caches")),
    (36.1, flash().sections["weights"]["routed_experts"]),
    (25.3, flash().sections["weights"]["engram_tables"]),
    (4.7, other_weights(flash(bf16_wo_a=True))),
    (66, flash(bf16_wo_a=True).section_bytes("weights")),
]


@pytest.mark.parametrize(("published", "planned"), PUBLISHED)
def test_published_figures_within_one_percent(published: float, planned: int) -> None:
    assert abs(planned / GB / published - 1) < 0.01


def test_the_documented_figures_are_the_plans() -> None:
    row = re.compile(r"^\|[^|]*\| ([\d.]+) GB \| ([\d.]+) GB \| ([\d.]+) % \|", re.MULTILINE)
    documented = [tuple(map(float, found)) for found in row.findall(DOCS.read_text(encoding="utf-8"))]
    computed = [
        (published, round(planned / GB, 3), round(abs(planned / GB / published - 1) * 100, 2))
        for published, planned in PUBLISHED
    ]
    assert documented == computed
    assert "4.019 GB" in DOCS.read_text(encoding="utf-8")
    assert round((other_weights(flash()) - flash().sections["weights"]["engram_projections"]) / GB, 3) == 4.019


def test_a_request_of_a_million_tokens_by_hand() -> None:
    compressed = 3 * (MILLION // 2) * (288 + 68) + MILLION * (288 + 68)
    assert compressed == 890 * MILLION
    window = 40 * 3 * 128 * 528  # a step's 6 rows see 133 positions, which can lie on three pages
    state = 3 * 4 * 1024 * 4
    assert flash(1).cache_bytes_per_request == compressed + window + state
    bf16 = 3 * (MILLION // 2) * 640 * 2 + MILLION * 640 * 2 + 40 * 3 * 128 * 512 * 2 + state
    assert flash(1, bf16_cache=True).cache_bytes_per_request == bf16


def test_caches_are_those_of_the_cache_layout() -> None:
    for config, context in ((FLASH, 5000), (TINY, 77)):
        plan = CapacityPlan(config, ParallelLayout(2, 2), context, 3, CapacityAssumptions(decode_tokens=2))
        layout = CacheLayout.for_rank(config, ParallelLayout(2, 2), 3, requests=6, context=SourceTokens(context),
                                      step_tokens=SourceTokens(2))  # fmt: skip
        assert {**plan.sections["caches"], "window_prefill": 0} == {**layout.bytes_by_pool, "window_prefill": 0}


@given(st.lists(st.integers(0, 700), min_size=1, max_size=8), st.lists(st.integers(0, 127), min_size=8, max_size=8))
def test_window_pages_suffice_for_any_prefill_step(rows: list[int], offsets: list[int]) -> None:
    """However a step's rows are shared out and wherever requests stand in their pages."""
    plan = CapacityPlan(FLASH, ParallelLayout(), 4096, len(rows), CapacityAssumptions(prefill_tokens=sum(rows)))
    page = 40 * 128 * 528
    pages = (plan.sections["caches"]["window"] + plan.sections["caches"]["window_prefill"]) // page
    needed = 0
    for own, offset in zip(rows, offsets, strict=False):
        first, last = 1024 + offset - 127, 1024 + offset + own - 1
        needed += last // 128 - first // 128 + 1
    assert needed <= pages


def test_communication_by_hand() -> None:
    windows = flash().sections["communication"]
    assert windows["attention_all_gather"] == 4096 * 5120 * 2
    assert windows["attention_reduce_scatter"] == 4096 * 5120 * 4
    received = 2 * 4096 * 6  # every token of both groups may choose six experts of one card
    assert windows["expert_dispatch"] == received * (5120 * 2 + 4 + 4) + 8 * 8
    assert windows["expert_combine"] == 1024 * 6 * 5120 * 2
    assert windows["logits_all_gather"] == 32 * 6 * 129280 * 4
    assert flash().sections["tables"]["rope"] == 2 * 2 * MILLION * 32 * 4
    assert flash().sections["indexer"]["score_budget"] == 512 << 20


def test_one_card_talks_to_nobody() -> None:
    plan = CapacityPlan(FLASH6, ParallelLayout(), 1000, 1)
    assert set(plan.sections["communication"].values()) == {0}
    experts_only = CapacityPlan(FLASH6, ParallelLayout(1, 2), 1000, 1).sections["communication"]
    assert experts_only["attention_all_gather"] == experts_only["logits_all_gather"] == 0
    assert experts_only["expert_dispatch"] > 0


def test_a_rank_with_few_experts_receives_no_more_than_those() -> None:
    few = CapacityPlan(FLASH6, ParallelLayout(1, 8), 1000, 1, CapacityAssumptions(prefill_tokens=8))
    received = 8 * 8 * 1  # one expert of eight is here, so each of the world's 64 tokens sends one row at most
    assert few.sections["communication"]["expert_dispatch"] == received * (5120 * 2 + 8) + 8 * 8


def test_slabs_pad_the_windows() -> None:
    assert flash(1, prefill_tokens=7).sections["communication"]["attention_all_gather"] == 8 * 5120 * 2


def test_one_row_of_scores_goes_through_a_budget_of_nothing() -> None:
    assert flash(max_logits_bytes=0).sections["indexer"]["score_budget"] == 4 * MILLION


def test_engram_can_be_left_out_and_absent() -> None:
    without = flash(engram=False).sections["weights"]
    tiny = CapacityPlan(TINY, ParallelLayout(), 64, 1).sections["weights"]
    for weights in (without, tiny):
        assert weights["engram_tables"] == weights["engram_projections"] == 0


def test_totals() -> None:
    plan = flash(reserved_bytes=GIB)
    assert plan.total_bytes == sum(nbytes for items in plan.sections.values() for nbytes in items.values())
    assert plan.total_bytes == flash().total_bytes + GIB


@settings(deadline=None, max_examples=40)
@given(
    requests=st.integers(1, 40),
    context=st.integers(1, 4096),
    hbm=st.integers(1, 1 << 24),
    decode=st.integers(1, 7),
    prefill=st.integers(0, 300),
)
def test_what_fits_is_the_largest_that_fits(requests: int, context: int, hbm: int, decode: int, prefill: int) -> None:
    assumed = CapacityAssumptions(decode_tokens=decode, prefill_tokens=prefill, max_logits_bytes=0)
    layout = ParallelLayout(2, 2)
    plan = CapacityPlan(TINY, layout, context, requests, assumed)
    hbm += plan.section_bytes("weights")

    def fits(context: int, requests: int) -> bool:
        return CapacityPlan(TINY, layout, context, requests, assumed).total_bytes <= hbm

    longest, most = plan.largest_context(hbm), plan.most_requests(hbm)
    assert longest.value == 0 or fits(longest.value, requests)
    if longest.value == TINY.max_position_embeddings:
        assert longest.limited_by == "max_position_embeddings"
    else:
        assert longest.limited_by == "hbm"
        assert not fits(longest.value + 1, requests)
    assert most.value == 0 or fits(context, most.value)
    assert not fits(context, most.value + 1)


def test_the_largest_context_on_a_smaller_card() -> None:
    fit = flash(32).largest_context(80 * GIB)
    assert fit.limited_by == "hbm"
    assert flash(32, fit.value).total_bytes <= 80 * GIB < flash(32, fit.value + 1).total_bytes


def test_nothing_fits_where_the_weights_do_not() -> None:
    assert flash().largest_context(GIB).value == 0
    assert flash().most_requests(GIB).value == 0
    assert flash().to_json(GIB)["free"] < 0


def test_int32_rows_limit_requests_on_an_endless_card() -> None:
    fit = flash(1).most_requests(1 << 60)
    # 2^31 rows in blocks of 128, 8192 blocks of ratio 1 for a million tokens
    assert (fit.value, fit.limited_by) == (2**24 // 8192, "int32_rows")


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"context": 0}, "context"),
    ({"context": -5}, "context"),
    ({"context": MILLION + 1}, "context"),
    ({"context": 3.5}, "context"),
    ({"context": True}, "context"),
    ({"requests": 0}, "requests"),
    ({"requests": "32"}, "requests"),
    ({"decode_tokens": 0}, "decode_tokens"),
    ({"prefill_tokens": -1}, "prefill_tokens"),
    ({"max_logits_bytes": -1}, "max_logits_bytes"),
    ({"reserved_bytes": 1.5}, "reserved_bytes"),
]


@pytest.mark.parametrize(("changes", "where"), WRONG)
def test_nonsense_is_named(changes: dict[str, Any], where: str) -> None:
    with pytest.raises(CapacityError) as caught:
        flash(**changes)
    assert caught.value.where == where


def test_layouts_that_do_not_fit_the_model_are_refused() -> None:
    with pytest.raises(LayoutError, match="tp: expected a divisor of num_attention_heads"):
        CapacityPlan(FLASH, ParallelLayout(3), 1, 1)
    with pytest.raises(LayoutError, match="at most"):
        flash(2**24)
    with pytest.raises(CapacityError, match=r"^hbm"):
        flash().largest_context(0)


@pytest.mark.parametrize(
    ("text", "size"),
    [("128GiB", 128 * GIB), ("64GB", 64 * GB), ("512 MiB", 512 << 20), ("1.5GB", 3 * GB // 2), ("1000B", 1000)],
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", [
    "", "0", "128", "1000", "0GB", "-1GB", "GB", "12 apples", "1e3", "nan", "inf", "9" * 400 + "GB", "1GB x", "8GiB/s",
    "١GB",
])  # fmt: skip
def test_sizes_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(CapacityError, match=r"^--hbm: expected a size above 0"):
        parse_bytes(text, "--hbm")


def test_json_has_the_documented_keys_and_no_other() -> None:
    def keys(value: dict[str, Any], prefix: str = "") -> set[str]:
        return {
            found
            for name, item in value.items()
            for found in (keys(item, f"{prefix}{name}.") if isinstance(item, dict) else {prefix + name})
        }

    found = keys(json.loads(json.dumps(flash().to_json())))
    documented = set(re.findall(r"`([a-z_*]+(?:\.[a-z0-9_*]+)*)`", DOCS.read_text(encoding="utf-8")))
    for key in found - {key for key in found if key.endswith(".total")}:
        name = key.rpartition(".")[2]
        assert key in documented or f"fits.*.{name}" in documented, key
    stems = {"layout", "assumptions", "weights", "caches", "communication", "tables", "indexer", "reserve"}
    for key in documented:
        if key.partition(".")[0] in stems and "." in key and "*" not in key:
            assert key in found, key
