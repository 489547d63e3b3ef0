"""Kernels of the attention side against numbers of the released reference, and on what ordinary cases never reach.

Ordinary cases are in test_kernel_golden_parity.py. Here: selections over several tiles of entries, lists of any length,
groups that hold no number, sinks without end, requests without a state, a prompt cut into steps.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from v41_config import BLOCK_ROWS, FLASH, STATE_CAPACITY, TINY, ModelConfig, find_operator
from v41_goldens.judges import JudgementError, assert_equal_bits, assert_row_bounds
from v41_goldens.operators import golden
from v41_goldens.paged_cache import RowCache
from v41_goldens.quantisers import (
    dequantize_compressed_kv,
    dequantize_window_kv,
    quantize_compressed_kv,
    quantize_window_kv,
)
from v41_goldens.sparse_attention import sparse_attention
from v41_kernels import CHECKED_PASSES, OPERATORS, Executor, Tier
from v41_kernels.registry import STAGES
from v41_model.kernel_cases import BF16_BOUNDS, KernelCase, hard_case, judge

TIERS = pytest.mark.parametrize("tier", [Tier.GRAPH, pytest.param(Tier.PASSES, marks=pytest.mark.kernels)])
UNTOUCHED = 0x5A
PUBLICATIONS = {
    "publish_window_kv": ("kv", "window_kv", "act_fp8_g32.codes", "act_fp8_g32.scale_e8m0"),
    "publish_compressed_kv": (
        "kv", "compressed_kv", "compressed_kv_fp4_g16.packed", "compressed_kv_fp4_g16.scale_e4m3",
    ),
    "publish_index_key": ("keys", "index_key", "index_fp4_g32.packed", "index_fp4_g32.scale_e8m0"),
}  # fmt: skip
"""Operator: its rows, its cache, and the reference's payload and scales."""


@pytest.fixture(scope="module")
def executor() -> Iterator[Executor]:
    if not sys.platform.startswith("linux"):
        pytest.skip("pypto has wheels for Linux only: no kernel was compared")
    with Executor(timeout=300.0, operators={**OPERATORS, **STAGES}) as shared:
        yield shared


def run(executor: Executor, tier: Tier, name: str, arguments: dict[str, Tensor]) -> None:
    result = executor.run(name, tier, **arguments)
    judged = {check.pass_name for check in result.checks if check.compared}
    assert judged == (set(CHECKED_PASSES) if tier is Tier.PASSES else set())


def require(case: KernelCase) -> None:
    for name, verdict in judge(case).items():
        verdict.require(f"{case.operator}: {name}")


# ----------------------------------------------------------------------------------------------------- publication


def publication(name: str, rows: Tensor, slots: Tensor) -> dict[str, Tensor]:
    """Operands of a publication into one block, every byte of which is a sentinel."""
    source, cache, _, _ = PUBLICATIONS[name]
    width = "INDEX_DIM" if source == "keys" else "HEAD_DIM"
    arguments = {source: rows, "slots": slots}
    sizes = {width: rows.shape[1], "MX": 32, "FP4_GROUP": 16, "WINDOW_BLOCKS": 1, "COMPRESSED_BLOCKS": 1,
             "BLOCK_ROWS": 128}  # fmt: skip
    spec = find_operator(name)
    for tensor in spec.tensors:
        if tensor.name.startswith(cache):
            shape = [spec.size(tensor, dim, sizes) for dim in tensor.dims]
            filled = torch.full(shape, UNTOUCHED, dtype=torch.uint8)
            arguments[tensor.name] = filled.view(getattr(torch, tensor.dtype))
    return arguments


def stored(arguments: dict[str, Tensor], cache: str) -> tuple[Tensor, Tensor]:
    """Bytes of payload and scales, a row for each slot."""
    payload, scale = (arguments[name].view(torch.uint8).flatten(0, 2) for name in (cache, f"{cache}_scale"))
    return payload, scale


@TIERS
@pytest.mark.parametrize("name", PUBLICATIONS)
def test_published_bytes_are_the_reference_s(executor: Executor, vectors: Path, name: str, tier: Tier) -> None:
    """89 rows: zeros of both signs, ties of every code, subnormals, saturation; every fifth has no slot."""
    v = load_file(vectors / "ops_quantisers.safetensors")
    slots = torch.randperm(128, generator=torch.Generator().manual_seed(1))[: len(v["input"])]
    slots[::5] = -1
    arguments = publication(name, v["input"], slots)
    run(executor, tier, name, arguments)
    live = slots >= 0
    empty = torch.ones(128, dtype=torch.bool)
    empty[slots[live]] = False
    _, cache, payload_key, scale_key = PUBLICATIONS[name]
    for bytes_of, key in zip(stored(arguments, cache), (payload_key, scale_key), strict=True):
        assert_equal_bits(bytes_of[slots[live]], v[key][live], key)
        assert (bytes_of[empty] == UNTOUCHED).all()
        with pytest.raises(JudgementError):
            assert_equal_bits(bytes_of[slots[live]].roll(1, 0), v[key][live], key)


@pytest.mark.parametrize("name", PUBLICATIONS)
def test_a_group_without_numbers_is_published_like_the_golden_s(executor: Executor, name: str) -> None:
    rows = torch.randn(8, 64, generator=torch.Generator().manual_seed(2))
    rows[1, 40] = -torch.inf
    rows[2] = torch.inf
    rows[3] *= 1e-38
    rows[4] = 3e38
    rows[5] = -0.0
    rows = rows.bfloat16()
    rows.view(torch.int16)[0, 3] = rows.view(torch.int16)[6, 1::2] = 0x7FC0  # NaN without a sign, which means nothing
    slots = torch.tensor([5, 0, 127, 64, 1, 2, 3, -1])
    found, expected = (publication(name, rows, slots) for _ in range(2))
    executor.run(name, **found)
    sizes = {symbol: {"T": 8, "G": 8}.get(symbol, 1) for symbol in find_operator(name).given}
    golden(name).run(find_operator(name).bind(TINY, None, **sizes), expected)
    cache = PUBLICATIONS[name][1]
    for one, other in zip(stored(found, cache), stored(expected, cache), strict=True):
        assert_equal_bits(one, other, name)


# ------------------------------------------------------------------------------------------------------- selection


@pytest.mark.parametrize("top", [1, 2, 4, 8])
def test_candidate_blocks_are_the_reference_s(executor: Executor, vectors: Path, top: int) -> None:
    v = load_file(vectors / "ops_candidate_blocks.safetensors")
    rows, entries = v["score"].shape
    arguments = {"scores": v["score"], "compressed_lens": v["visible"].int()}
    found = {
        "kept_blocks": torch.zeros(rows, -(-entries // 8), dtype=torch.bool),
        "block_scores": torch.zeros(rows, -(-entries // 8), dtype=torch.bfloat16),
    }
    executor.run("candidate_blocks", **arguments, **found, candidate_topk_blocks=top, candidate_block_size=8)
    mask = found["kept_blocks"].repeat_interleave(8, dim=-1)[:, :entries]
    assert torch.equal(mask, v[f"mask_top{top}"])
    if top == 4:
        assert not torch.equal(mask, v["mask_top4_torch_topk"])  # so ties are decided


@TIERS
def test_blocks_of_several_tiles(executor: Executor, tier: Tier) -> None:
    """1,029 blocks, the last of three entries; a tile has 1,024."""
    case = hard_case("candidate_blocks", TINY, 3, 2, ENTRIES=8227)
    run(executor, tier, case.operator, case.arguments)
    require(case)


@pytest.mark.parametrize("mode", ["c2a_full", "c1a_full", "c1a_reindex"])
def test_entries_of_several_tiles(executor: Executor, mode: str) -> None:
    """1,280 entries in ten pages; a tile has 1,024. Padding rows name a request and a length that are not there."""
    name = f"hierarchical_sparse_indexer_{mode}"
    case = hard_case(name, TINY, 6, 4, PAGES=10, COMPRESSED_BLOCKS=21, ENTRIES=1280)
    case.arguments["token_to_req_indices"][4:] = 99
    case.arguments["compressed_lens"][4:] = 10**6
    case.arguments["index_q"][4:] = torch.nan
    executor.run(name, **case.arguments)
    require(case)
    assert (case.arguments["topk_rows"][:4] >= 0).any()


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("candidate_blocks", {"ENTRIES": 0}),
        ("candidate_blocks", {"ENTRIES": 1}),
        ("candidate_blocks", {"ENTRIES": 9}),
        ("hierarchical_sparse_indexer_c2a_full", {"PAGES": 0}),
        ("hierarchical_sparse_indexer_c1a_full", {"PAGES": 0, "ENTRIES": 0}),
        ("hierarchical_sparse_indexer_c1a_reindex", {"PAGES": 0, "ENTRIES": 0}),
        ("sparse_attention", {"ATTENDED": 0}),
    ],
)
def test_next_to_nothing_to_select_from(executor: Executor, name: str, sizes: dict[str, int]) -> None:
    case = hard_case(name, TINY, 3, 2, 0, **sizes)
    executor.run(name, **case.arguments)
    require(case)


@pytest.mark.parametrize("wrong", ["another order of ties", "a row of another page", "one entry lost"])
def test_a_wrong_selection_is_refused(wrong: str) -> None:
    case = hard_case("hierarchical_sparse_indexer_c2a_full", TINY, 6, 4)
    rows = case.arguments["topk_rows"]
    rows.copy_(case.expected["topk_rows"])
    require(case)
    if wrong == "another order of ties":
        rows[1, :2] = rows[1, :2].flip(0)
    elif wrong == "a row of another page":
        rows[1, 0] += 128
    else:
        rows[1, -1] = -1
    with pytest.raises(JudgementError):
        require(case)


# ------------------------------------------------------------------------------------------------------- attention


def attend(executor: Executor, tier: Tier, q: Tensor, kv: Tensor, valid: Tensor, sink: Tensor) -> Tensor:
    o = torch.full_like(q, torch.nan)
    run(executor, tier, "sparse_attention", {"q": q, "kv": kv, "valid": valid, "attn_sink": sink, "o": o})
    return o


@TIERS
def test_attention_is_the_reference_s(executor: Executor, vectors: Path, tier: Tier) -> None:
    v = load_file(vectors / "ops_sparse_attention.safetensors")
    kv, valid = v["kv"][v["indices"].clamp(min=0).long()], v["indices"] >= 0
    kv[~valid] = torch.nan
    assert_equal_bits(attend(executor, tier, v["q"], kv, valid, v["sink"]), v["out"], "o")
    with pytest.raises(JudgementError):
        assert_equal_bits(attend(executor, Tier.GRAPH, v["q"], kv, valid, v["sink"] + 0.05), v["out"], "o")


@pytest.mark.parametrize("entries", [1, 16, 63, 64, 65, 130])
def test_lists_of_any_length(executor: Executor, entries: int) -> None:
    """An empty list, one whose first chunks are empty, sinks of both infinities; bits as the golden's."""
    generator = torch.Generator().manual_seed(entries)
    q, kv = (torch.randn(shape, generator=generator).bfloat16() for shape in ((4, 8, 64), (4, entries, 64)))
    valid = torch.rand(4, entries, generator=generator) < 0.6
    valid[1] = False
    valid[2, :-1], valid[2, -1] = False, True
    kv[~valid] = torch.inf
    sink = torch.randn(8, generator=generator)
    sink[0], sink[1] = -torch.inf, torch.inf
    found = attend(executor, Tier.GRAPH, q, kv, valid, sink)
    assert_equal_bits(found, sparse_attention(q, kv, valid, sink, 64**-0.5), "o")
    assert not found[1].any()


# ---------------------------------------------------------------------------------------------------- paged attention


def pool(blocks: int, width: int, kind: str, named: Tensor, generator: torch.Generator) -> tuple[RowCache, Tensor]:
    """A pool whose rows hold NaN but those `named`, and the named rows decoded, zeros for -1."""
    quantize, decode = {
        "window": (quantize_window_kv, dequantize_window_kv),
        "compressed": (quantize_compressed_kv, dequantize_compressed_kv),
    }[kind]
    rows = quantize(torch.randn(blocks * BLOCK_ROWS, width, generator=generator).bfloat16())
    payload, scale = (part.view(torch.uint8).clone() for part in rows)
    unnamed = torch.ones(blocks * BLOCK_ROWS, dtype=torch.bool)
    unnamed[named[named >= 0].long()] = False
    payload[unnamed], scale[unnamed] = 0xFF, 0xFF
    shape = (blocks, BLOCK_ROWS, 1, -1)
    cache = RowCache(payload.view(rows.payload.dtype).view(shape), scale.view(rows.scale.dtype).view(shape), decode)
    return cache, cache.read(named)


def row_numbers(tokens: int, count: int, blocks: int, generator: torch.Generator) -> Tensor:
    """Rows in any order with holes; the second token has none."""
    rows = torch.randint(0, blocks * BLOCK_ROWS, (tokens, count), generator=generator, dtype=torch.int32)
    rows[torch.rand(tokens, count, generator=generator) < 0.3] = -1
    rows[1:2] = -1
    return rows


def judge_paged_attention(
    executor: Executor, config: ModelConfig, heads: int, tokens: int, selects: bool, tier: Tier = Tier.GRAPH
) -> None:
    """Padding rows name rows that no pool has."""
    generator = torch.Generator().manual_seed(heads)
    width = config.head_dim
    windows = row_numbers(tokens, config.sliding_window, 3, generator)
    window, kv = pool(3, width, "window", windows, generator)
    numbers = {"window_indices": windows}
    caches = {"window_kv": window.payload, "window_kv_scale": window.scale}
    if selects:
        selection = row_numbers(tokens, config.index_topk, 4, generator)
        compressed, selected = pool(4, width, "compressed", selection, generator)
        kv = torch.cat([kv, selected], dim=1)
        numbers["topk_rows"] = selection
        caches |= {"compressed_kv": compressed.payload, "compressed_kv_scale": compressed.scale}
    valid = torch.cat(list(numbers.values()), dim=1) >= 0
    q = torch.randn(tokens, heads, width, generator=generator).bfloat16()
    sink = torch.randn(heads, generator=generator)
    expected = sparse_attention(q, kv, valid, sink, width**-0.5)
    o = torch.full((tokens + 1, heads, width), -7.0, dtype=torch.bfloat16)
    beyond = {name: torch.cat([rows, torch.full_like(rows[:1], 10**6)]) for name, rows in numbers.items()}
    executor.run(
        "selected_attention" if selects else "window_attention",
        tier,
        q=torch.cat([q, torch.full_like(q[:1], torch.nan)]),
        **caches,
        **beyond,
        attn_sink=sink,
        num_tokens=tokens,
        o=o,
    )
    assert_row_bounds(o[:tokens], expected, "o", bounds=BF16_BOUNDS)
    assert (o[tokens:] == -7.0).all()
    with pytest.raises(JudgementError):
        assert_row_bounds(o[:tokens].roll(1, 0), expected, "o", bounds=BF16_BOUNDS)


@pytest.mark.parametrize("selects", [False, True], ids=["window", "window and selection"])
def test_attention_over_pages(executor: Executor, selects: bool) -> None:
    judge_paged_attention(executor, TINY, TINY.num_attention_heads, 4, selects)


@pytest.mark.kernels
@pytest.mark.parametrize("selects", [False, True], ids=["window", "window and selection"])
def test_attention_over_pages_with_flash_rows(executor: Executor, selects: bool) -> None:
    """A rank's heads at TP 8, rows of 512 channels, lists of 128 and 640 entries."""
    judge_paged_attention(executor, FLASH, 8, 2, selects)


@pytest.mark.kernels
@pytest.mark.parametrize("selects", [False, True], ids=["window", "window and selection"])
def test_attention_over_pages_with_flash_rows_after_all_passes(executor: Executor, selects: bool) -> None:
    """A chunk of each list: the loops over chunks make the same graph for more of them."""
    config = FLASH.model_copy(update={"sliding_window": 64, "index_topk": 64})
    judge_paged_attention(executor, config, 8, 2, selects, Tier.PASSES)


# ------------------------------------------------------------------------------------------------------ compressor


class Compressor:
    """Calls of the ratio-2 compressor for one request; blocks of other requests hold NaN."""

    def __init__(self, executor: Executor, v: dict[str, Tensor], block: int = 1) -> None:
        self.executor, self.block = executor, block
        self.weights = {f"compressor_{name}": v[name] for name in ("wkv", "wgate", "norm")}
        self.x = v["x"]
        self.state = torch.full((3, STATE_CAPACITY, 2 * TINY.head_dim), torch.nan)

    def __call__(self, start: int, stop: int, tier: Tier = Tier.GRAPH) -> Tensor:
        position = torch.arange(start, stop, dtype=torch.int32)
        closing = (position % 2 == 1).nonzero().flatten().int()
        latent = torch.full((len(closing), TINY.head_dim), torch.nan, dtype=torch.bfloat16)
        arguments = {
            "x": self.x[start:stop].contiguous(),
            "query_start_loc": torch.tensor([0, stop - start], dtype=torch.int32),
            "position_ids": position,
            "token_to_req_indices": torch.zeros_like(position),
            "state_block_table": torch.tensor([[self.block]], dtype=torch.int32),
            "state_cache": self.state,
            "compressor_source_token_indices": closing,
            "latent": latent,
        }
        run(self.executor, tier, "compress_ratio_2", {**self.weights, **arguments})
        return latent


@pytest.fixture
def compressor_vectors(vectors: Path) -> dict[str, Tensor]:
    return load_file(vectors / "ops_compressor.safetensors")


@TIERS
def test_a_prompt_is_compressed_like_the_reference_s(
    executor: Executor, compressor_vectors: dict[str, Tensor], tier: Tier
) -> None:
    v = compressor_vectors
    compress = Compressor(executor, v)
    found = compress(0, 12, tier)
    assert_equal_bits(found, v["prefill12.latent"], "latent")
    assert compress.state[[0, 2]].isnan().all()
    with pytest.raises(JudgementError):
        assert_equal_bits(found.roll(1, 0), v["prefill12.latent"], "latent")


def test_a_prompt_in_steps_is_compressed_like_the_reference_s(
    executor: Executor, compressor_vectors: dict[str, Tensor]
) -> None:
    """Five tokens at once, then one by one: pairs whose even token is in the ring."""
    v = compressor_vectors
    compress = Compressor(executor, v)
    assert_equal_bits(compress(0, 5), v["prefill5.latent"], "latent")
    for position in range(5, 12):
        latent = compress(position, position + 1)
        assert len(latent) == int(v[f"decode{position:02d}.emits"])
        if len(latent):
            assert_equal_bits(latent, v[f"decode{position:02d}.latent"], f"latent at {position}")
    assert compress.state[[0, 2]].isnan().all()


def test_a_request_without_a_state_block_leaves_no_state(
    executor: Executor, compressor_vectors: dict[str, Tensor]
) -> None:
    compress = Compressor(executor, compressor_vectors, block=-1)
    compress(0, 1)
    assert compress.state.isnan().all()
