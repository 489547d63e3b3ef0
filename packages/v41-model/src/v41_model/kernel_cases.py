"""Operands on which a kernel is compared with its golden, and the judges of the comparison.

There are two kinds of case. Fixtures are the goldens' own: ragged batches with history, caches full of NaN beside
their live rows. Hard cases make what a fixture has no reason to make: ties, magnitudes far apart, holes, NaN in rows
that must not be read. Every destination is filled with a sentinel first, so that a row that was written without leave,
or not written at all, shows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from v41_config import BLOCK_ROWS, BoundOperator, ModelConfig, ParallelLayout, find_operator
from v41_config.dimensions import symbols_of
from v41_config.operator_spec import BoundTensor, CountSpec
from v41_goldens.fixtures import FixtureCase, linear_shape, operator_fixture
from v41_goldens.judges import ROW_BOUNDS, RowBounds, judge_equal_bits, judge_row_bounds
from v41_goldens.judges.verdict import Verdict
from v41_goldens.operators import Ranks, golden
from v41_goldens.rope import precompute_rope_tables

__all__ = ["HARD_CASES", "KernelCase", "fixture_case", "hard_case", "judge", "judged_config", "layout_of"]

SENTINEL = -7.0
SENTINEL_BYTE = 0x5A

EXACT = frozenset(
    {
        *("materialize_rope_rows", "embed", "input_pack", "greedy", "rms_norm", "mhc_pre", "mhc_post", "hc_head"),
        *("combine", "publish_window_kv", "publish_compressed_kv", "publish_index_key", "candidate_blocks"),
    }
)
"""Operators whose kernel leaves no choice of arithmetic: every bit is the golden's."""

BF16_BOUNDS = RowBounds(rms_floor=1e-30, rms_ratio=2.0**-9, peak_floor=1e-30, peak_ratio=2.0**-5)
"""One BF16 unit of single elements, where an FP32 sum fell on the other side of a rounding boundary."""

FP32_BOUNDS = RowBounds(rms_floor=1e-30, rms_ratio=2e-6, peak_floor=1e-30, peak_ratio=1e-5)
"""FP32 sums in another order, and functions that are an ulp off."""


@dataclass(frozen=True)
class KernelCase:
    """One call: its arguments by the contract's names (destinations included), and what they must hold afterwards.

    `active` counts the rows of the batch that are in use.
    """

    bound: BoundOperator
    arguments: dict[str, Any]
    expected: dict[str, Tensor]
    active: int

    @property
    def operator(self) -> str:
        """The operator's name."""
        return self.bound.spec.name


_LARGE_HEADS = 1 << 24
"""Weights of a query projection of which the interpreter, which keeps whatever it has decoded, is given an eighth."""

_SHARE = 8
"""Ranks among which FLASH's heads are divided."""


def layout_of(name: str, config: ModelConfig) -> ParallelLayout:
    """One rank, but two for experts, whose ids do not begin at the last rank's, and eight for FLASH's heads."""
    divided = _divided(name) if golden(name).ranks is Ranks.ONE else set()
    if "E_local" in divided:
        return ParallelLayout(dp=2)
    return ParallelLayout(tp=_SHARE) if divided and _has_large_heads(config) else ParallelLayout()


def judged_config(name: str, config: ModelConfig) -> ModelConfig:
    """The model, but for what is too much of FLASH for one launch and has no rank's share in the contract.

    A half layer joins its group's other ranks, so it is judged with an eighth of the heads. Experts are judged with as
    many of them as memory takes, two for each rank, and one for each token.
    """
    divided = _divided(name)
    if not _has_large_heads(config) or not divided:
        return config
    if "E_local" in divided:
        return _changed(config, n_routed_experts=2 * layout_of(name, config).world_size, num_experts_per_tok=1)
    if golden(name).ranks is Ranks.ONE:
        return config
    heads, groups = config.num_attention_heads // _SHARE, config.o_groups // _SHARE
    return _changed(config, num_attention_heads=heads, o_groups=groups)


def _divided(name: str) -> set[str]:
    """What the low-bit weights of an operator are a rank's share of: `H_local`, `O_GROUPS_local`, `E_local`."""
    weights = (tensor for tensor in find_operator(name).tensors if tensor.dtype in ("float8_e4m3fn", "int8"))
    symbols = {symbol for weight in weights for dim in weight.dims for symbol in symbols_of(dim)}
    return {symbol for symbol in symbols if symbol.endswith("_local")}


def _has_large_heads(config: ModelConfig) -> bool:
    return config.num_attention_heads * config.head_dim * config.q_lora_rank > _LARGE_HEADS


def _changed(config: ModelConfig, **changes: int) -> ModelConfig:
    fields = {name: getattr(config, name) for name in ModelConfig.model_fields}
    return ModelConfig.model_validate({**fields, **changes})


def fixture_case(name: str, fixture: FixtureCase) -> KernelCase:
    """The goldens' fixture of an operator for the layout's last rank, and the golden's answer to it."""
    made = operator_fixture(name, fixture)
    return _case(made.bounds[-1], dict(made.arguments[-1]))


def hard_case(
    name: str, config: ModelConfig, rows: int, active: int, seed: int = 0, **extents_instead: int
) -> KernelCase:
    """A call of `rows` rows of which `active` are in use, for an operator of `HARD_CASES`.

    `extents_instead` are sizes of the call other than those that cases usually have, such as `ENTRIES=9001`.
    """
    spec = find_operator(name)
    rows = active if name == "compress_ratio_2" else rows  # its groups are counted apart from its rows
    generator = torch.Generator().manual_seed(hash((rows, active, seed, config.hidden_size)) % 2**31)
    extents = _extents(config, rows) | {"ATTENDED": config.sliding_window + config.index_topk}
    if name.startswith("hierarchical_"):
        extents["ENTRIES"] = extents["PAGES"] * BLOCK_ROWS
    extents |= extents_instead
    bound = spec.bind(config, layout_of(name, config), **{symbol: extents[symbol] for symbol in spec.given})
    tensors = {t: _tensor(tensor, generator) for t, tensor in bound.tensors.items()}
    tensors.update(HARD_CASES[name](tensors, config, generator))
    extents |= {"G": len(tensors["latent"])} if name == "compress_ratio_2" else {}
    bound = spec.bind(config, layout_of(name, config), **{symbol: extents[symbol] for symbol in spec.given})
    counts = {s.name: active for s in spec.scalars if isinstance(s, CountSpec)}
    if "vocab_start" in counts:
        counts["vocab_start"] = 100
    if "expert_start" in counts:
        counts["expert_start"] = bound.layout.expert_range(config, bound.layout.world_size - 1).start
    return _case(bound, {**tensors, **counts})


def _case(bound: BoundOperator, arguments: dict[str, Any]) -> KernelCase:
    arguments = {**bound.constants, **arguments}
    expected = {name: arguments[name].clone() for name in bound.spec.destinations}
    golden(bound.spec.name).run(bound, {**arguments, **expected}, bound.layout.world_size - 1)
    counts = [s for s in bound.spec.scalars if isinstance(s, CountSpec) and not s.required]
    active = arguments.get(counts[0].name, bound.dims[counts[0].limit]) if counts else bound.dims["G"]
    return KernelCase(bound, arguments, expected, active)


def _extents(config: ModelConfig, rows: int) -> dict[str, int]:
    n, k = linear_shape(config)
    return {"T": rows, "B": 2, "G": rows, "R": rows, "LOGIT_ROWS": rows, "CAPACITY": 64, "ENTRIES": 61, "PAGES": 2,
            "WINDOW_BLOCKS": 2, "COMPRESSED_BLOCKS": 4, "STATE_BLOCKS": 3, "N": n, "K": k}  # fmt: skip


def judge(case: KernelCase) -> dict[str, Verdict]:
    """A verdict for every destination after the kernel ran: its active rows, and that all else is untouched."""
    return {name: _judge(case, name, expected) for name, expected in case.expected.items()}


def _judge(case: KernelCase, name: str, expected: Tensor) -> Verdict:
    actual = case.arguments[name]
    bits = judge_equal_bits(actual, expected)
    if bits.accepted or case.operator in EXACT or not expected.is_floating_point() or expected.element_size() == 1:
        return bits
    if case.bound.tensors[name].spec.direction == "inout":
        return _judge_pool(case, actual.flatten(0, -2), expected.flatten(0, -2))
    padding = judge_equal_bits(actual[case.active :], expected[case.active :])
    if not padding.accepted:
        return padding
    return judge_row_bounds(actual, expected, min(case.active, len(expected)), _bounds(case, expected.dtype))


def _judge_pool(case: KernelCase, actual: Tensor, expected: Tensor) -> Verdict:
    """Rows of a pool: those that hold numbers within bounds, all others untouched."""
    live = expected.isfinite().all(-1)
    others = judge_equal_bits(actual[~live], expected[~live])
    return (
        judge_row_bounds(actual[live], expected[live], None, _bounds(case, expected.dtype))
        if others.accepted
        else others
    )


def _bounds(case: KernelCase, dtype: torch.dtype) -> RowBounds:
    if case.operator.startswith(("prefill_", "decode_")):
        return ROW_BOUNDS
    return BF16_BOUNDS if dtype == torch.bfloat16 else FP32_BOUNDS


def _tensor(tensor: BoundTensor, generator: torch.Generator) -> Tensor:
    """Values that suit the dtype: rows of four magnitudes for BF16, weights of ordinary size, any bytes for codes."""
    shape, dtype = tensor.shape, getattr(torch, tensor.spec.dtype)
    if tensor.spec.direction == "out":
        return _filled(shape, dtype)
    if dtype == torch.float8_e8m0fnu:
        return torch.randint(117, 124, shape, generator=generator, dtype=torch.uint8).view(dtype)
    if dtype == torch.float8_e4m3fn:
        return torch.randn(shape, generator=generator).to(dtype)
    if dtype in (torch.int8, torch.uint8):
        return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8).view(dtype)
    if dtype == torch.bool:
        return torch.rand(shape, generator=generator) < 0.7
    if dtype in (torch.int32, torch.int64):
        return torch.zeros(shape, dtype=dtype)
    values = torch.randn(shape, generator=generator)
    first = tensor.spec.dims[0]
    if dtype == torch.bfloat16 and len(shape) > 1 and first in ("T", "T_local", "G", "R", "LOGIT_ROWS"):
        sizes = torch.tensor([1.0, 1e-4, 300.0, 0.0])[torch.arange(shape[0]) % 4]
        values *= sizes.view(-1, *[1] * (len(shape) - 1))
    return values.to(dtype)


def _filled(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    if dtype.itemsize == 1 or dtype == torch.bool:
        return torch.full(shape, SENTINEL_BYTE & 1 if dtype == torch.bool else SENTINEL_BYTE, dtype=torch.uint8).view(
            dtype
        )
    return torch.full(shape, SENTINEL, dtype=torch.float32).to(dtype)


Special = Callable[[dict[str, Tensor], ModelConfig, torch.Generator], dict[str, Tensor]]


def _positions(t: dict[str, Tensor], config: ModelConfig, generator: torch.Generator) -> dict[str, Tensor]:
    cos, sin = precompute_rope_tables(config, "compressed", len(t["freqs_cos"]))
    positions = torch.randint(0, len(cos), t["position_ids"].shape, generator=generator, dtype=torch.int32)
    positions[::3] = -1
    return {"freqs_cos": cos, "freqs_sin": sin, "position_ids": positions}


def _tokens(t: dict[str, Tensor], config: ModelConfig, generator: torch.Generator) -> dict[str, Tensor]:
    ids = torch.randint(0, config.vocab_size, t["token_ids"].shape, generator=generator, dtype=torch.int32)
    ids[::2] %= 200
    return {"token_ids": ids}


def _mix_weights(t: dict[str, Tensor], config: ModelConfig, generator: torch.Generator) -> dict[str, Tensor]:
    return {"fn": t["fn"] * t["fn"].shape[1] ** -0.5, "scale": torch.tensor([0.7, 0.9, 2.5])}


def _expand(t: dict[str, Tensor], config: ModelConfig, generator: torch.Generator) -> dict[str, Tensor]:
    """Positive coefficients, and streams that nearly cancel in every fourth row."""
    t["x_hc"][3::4, 1] = -t["x_hc"][3::4, 0] * 1.01
    return {"comb": t["comb"].abs() / 3, "post": t["post"].abs()}


def _ties(t: dict[str, Tensor], config: ModelConfig, generator: torch.Generator) -> dict[str, Tensor]:
    t["logits"][:, 5::7] = t["logits"].amax(-1, keepdim=True)
    t["logits"][3::4] = -0.0
    return {}


def _routes(t: dict[str, Tensor], config: ModelConfig, generator: torch.Generator) -> dict[str, Tensor]:
    """Every row's experts in random order; some are inactive, and those rows hold NaN."""
    count = t["expert_ids"].shape
    order = torch.rand(count[0], config.n_routed_experts, generator=generator).argsort(-1)
    ids = order[:, : count[1]].to(torch.int32)
    ids[torch.rand(count, generator=generator) < 0.2] = -1
    t["expert_rows"][ids < 0] = torch.nan
    return {"expert_ids": ids}


def _gate_ties(t: dict[str, Tensor], config: ModelConfig, generator: torch.Generator) -> dict[str, Tensor]:
    """Half of the experts are twins, so that scores are equal to the bit."""
    weight = t["gate_weight"] * t["gate_weight"].shape[1] ** -0.5
    weight[1::4] = weight[::4]
    bias = t["gate_bias"] * 0.1
    bias[1::4] = bias[::4]
    return {"gate_weight": weight, "gate_bias": bias}


def _slots(t: dict[str, Tensor], config: ModelConfig, generator: torch.Generator) -> dict[str, Tensor]:
    """Distinct rows of the pool in random order, a third of them -1."""
    count = len(t["slots"])
    slots = torch.randperm(256, generator=generator)[:count]
    slots[::3] = -1
    return {"slots": slots}


def _pairs(t: dict[str, Tensor], config: ModelConfig, generator: torch.Generator) -> dict[str, Tensor]:
    """Two requests; the first one goes on from an odd position, so that its first token closes a remembered pair."""
    count = len(t["x"])
    split = count // 2 + 1 if count else 0
    positions = torch.cat([torch.arange(split) + 5, torch.arange(count - split)]).to(torch.int32)
    return {
        "query_start_loc": torch.tensor([0, split, count], dtype=torch.int32),
        "position_ids": positions,
        "token_to_req_indices": (torch.arange(count) >= split).to(torch.int32),
        "state_block_table": torch.tensor([[2], [0]], dtype=torch.int32),
        "compressor_source_token_indices": (positions % 2 == 1).nonzero().flatten().to(torch.int32),
        "latent": t["latent"][: int((positions % 2 == 1).sum())],
    }


def _scores(t: dict[str, Tensor], config: ModelConfig, generator: torch.Generator) -> dict[str, Tensor]:
    """Scores on a coarse grid, so that blocks tie; entries a token does not see are -inf, and some see none."""
    count, entries = t["scores"].shape
    scores = torch.randint(-8, 8, (count, entries), generator=generator).float() * 0.25
    lens = torch.randint(0, entries + 1, (count,), generator=generator, dtype=torch.int32)
    lens[::4] = 0
    scores[torch.arange(entries) >= lens.unsqueeze(-1)] = -torch.inf
    return {"scores": scores.bfloat16(), "compressed_lens": lens}


def _pages_of_keys(t: dict[str, Tensor], config: ModelConfig, generator: torch.Generator) -> dict[str, Tensor]:
    """Scores on a coarse grid, so that entries tie; some tokens see nothing, some every entry; unseen keys are NaN."""
    table, rows = t["compressed_block_table"], len(t["index_q"])
    capacity = table.shape[1] * BLOCK_ROWS
    blocks = torch.randperm(len(t["index_key"]), generator=generator)[: table.numel()]
    table = blocks.view(table.shape).to(torch.int32)
    lens = torch.randint(0, capacity + 1, (rows,), generator=generator, dtype=torch.int32)
    lens[::4], lens[1::4] = 0, capacity
    request = (torch.arange(rows) >= rows // 2).to(torch.int32)
    position = torch.arange(capacity)
    row = table[request.long()][:, position // BLOCK_ROWS].long() * BLOCK_ROWS + position % BLOCK_ROWS
    unseen = torch.ones(len(t["index_key"]) * BLOCK_ROWS, dtype=torch.bool)
    unseen[row[position < lens.unsqueeze(-1)]] = False
    scale = torch.full(t["index_key_scale"].shape, 126, dtype=torch.uint8)
    scale.view(-1, scale.shape[-1])[unseen] = 255
    return {
        "index_q": (torch.randint(-2, 3, t["index_q"].shape, generator=generator) * 0.5).bfloat16(),
        "index_weights": (torch.randint(-1, 2, t["index_weights"].shape, generator=generator) * 0.25).bfloat16(),
        "index_key_scale": scale.view(torch.float8_e8m0fnu),
        "compressed_block_table": table,
        "compressed_lens": lens,
        "token_to_req_indices": request,
    }


def _lists(t: dict[str, Tensor], config: ModelConfig, generator: torch.Generator) -> dict[str, Tensor]:
    """Lists with holes, one of them empty; entries that do not count are NaN."""
    t["valid"][1::4] = False
    t["kv"][~t["valid"]] = torch.nan
    return {"attn_sink": torch.randn(t["attn_sink"].shape, generator=generator)}


def _expert_rows(t: dict[str, Tensor], config: ModelConfig, generator: torch.Generator) -> dict[str, Tensor]:
    """The upper half of the model's experts; every fifth row has none."""
    experts = config.n_routed_experts
    ids = torch.randint(experts // 2, experts, t["row_expert_ids"].shape, generator=generator, dtype=torch.int32)
    ids[::5] = -1
    return {"row_expert_ids": ids, "row_route_weights": torch.rand(ids.shape, generator=generator)}


def _as_they_are(t: dict[str, Tensor], config: ModelConfig, generator: torch.Generator) -> dict[str, Tensor]:
    """Rows of four magnitudes, one of them zero, are hard enough."""
    del t, config, generator
    return {}


HARD_CASES: Mapping[str, Special] = {
    **dict.fromkeys(
        (
            *("input_pack", "rms_norm", "mhc_pre", "hc_head", "quantized_linear", "quantized_linear_fp4"),
            *("quantized_linear_fp32", "bf16_linear", "fp32_linear", "lm_head", "q_proj_qr", "q_proj_rope"),
            *("kv_proj_rope", "qkv_proj_rope", "compress_ratio_1", "index_keys", "index_queries", "grouped_output"),
            *("o_proj", "shared_expert"),
        ),
        _as_they_are,
    ),
    "materialize_rope_rows": _positions,
    "embed": _tokens,
    "mhc_mixes": _mix_weights,
    "mhc_post": _expand,
    "greedy": _ties,
    "combine": _routes,
    "gate": _gate_ties,
    "publish_window_kv": _slots,
    "publish_compressed_kv": _slots,
    "publish_index_key": _slots,
    "compress_ratio_2": _pairs,
    "candidate_blocks": _scores,
    "hierarchical_sparse_indexer_c2a_full": _pages_of_keys,
    "hierarchical_sparse_indexer_c1a_full": _pages_of_keys,
    "hierarchical_sparse_indexer_c1a_reindex": _pages_of_keys,
    "sparse_attention": _lists,
    "routed_experts": _expert_rows,
}
"""Operators that have hard cases, and what makes them hard."""
