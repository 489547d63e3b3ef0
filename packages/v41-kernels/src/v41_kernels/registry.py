"""The operators that have a working kernel, by name. What is not listed here has none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from v41_config import OperatorError, OperatorSpec, find_operator
from v41_config.similar_names import did_you_mean
from v41_kernels.arguments import BoundArguments
from v41_kernels.compositions import COMPOSITIONS, Composition
from v41_kernels.errors import NoValuesError
from v41_kernels.launched_stages import LAUNCHED_STAGES
from v41_kernels.operand_values import check_operand_values
from v41_kernels.variants import NOT_VERIFIED, VARIANTS


def no_sizes(bound: BoundArguments) -> dict[str, int]:
    """No sizes beyond the contract's symbols."""
    del bound
    return {}


class PassTolerance(NamedTuple):
    """What an element may differ by: `absolute + relative * its size`; the absolute part is for terms that cancel."""

    relative: float
    absolute: float


EXACTLY = PassTolerance(0.0, 0.0)


@dataclass(frozen=True)
class KernelOperator:
    """An operator's contract, and the module whose `make_entry(**static_dims, **constants)` gives its jit entry.

    An operator that is several launches has a composition instead of a module.

    `check` looks at values that the contract limits. `pass_tolerance` is how far a destination may move when a
    compiler pass cuts the kernel into tiles: not at all unless a reduction is summed in another order then. `names` are
    the contract's names for parameters and sizes that the kernel calls otherwise, and `sizes` gives those that no
    symbol of the contract stands for.
    """

    spec: OperatorSpec
    kernel: str = ""
    check: Callable[[BoundArguments], None] = check_operand_values
    pass_tolerance: PassTolerance = EXACTLY
    names: Mapping[str, str] = field(default_factory=dict)
    sizes: Callable[[BoundArguments], dict[str, int]] = no_sizes
    composition: Composition | None = None


_BF16_ULP = PassTolerance(2.0**-7, 2.0**-16)
"""What a BF16 result may move when the terms of a sum are added tile by tile."""

_FP32_SUM = PassTolerance(2.0**-18, 2.0**-16)
"""The same for an FP32 result."""


def _kernel(
    name: str,
    tolerance: PassTolerance = EXACTLY,
    *,
    kernel: str | None = None,
    sizes: Callable[[BoundArguments], dict[str, int]] = no_sizes,
    **names: str,
) -> KernelOperator:
    """The operator `name` of the contract; `names` are its names for the parameters and sizes of `kernel`."""
    module = f"v41_kernels.kernels.{kernel or name}"
    spec = LAUNCHED_STAGES[name] if name in LAUNCHED_STAGES else find_operator(name)
    return KernelOperator(spec, module, pass_tolerance=tolerance, names=names, sizes=sizes)


def _partial_inputs(bound: BoundArguments) -> dict[str, int]:
    return {"K": bound.tensors["u"].shape[1]}


def _output_groups(bound: BoundArguments) -> dict[str, int]:
    outputs, group_width = bound.tensors["wo_a"].shape
    return {"OUTPUTS": outputs, "GROUP_WIDTH": group_width}


_ROW_STAGES = (
    _kernel("materialize_rope_rows"),
    _kernel("embed"),
    _kernel("input_pack"),
    _kernel("rms_norm", _BF16_ULP),
    _kernel("mhc_mixes", _FP32_SUM),
    _kernel("mhc_pre"),
    _kernel("mhc_post"),
    _kernel("hc_head", kernel="mhc_pre"),
    _kernel("greedy"),
)

_LINEARS = (
    _kernel("quantized_linear", _BF16_ULP),
    _kernel("quantized_linear_fp4", _BF16_ULP),
    _kernel("quantized_linear_fp32", _FP32_SUM),
    _kernel("bf16_linear", _BF16_ULP),
    _kernel("fp32_linear", _FP32_SUM),
    _kernel(
        "lm_head", _FP32_SUM, kernel="fp32_linear",
        x="normed", w="head_weight", out="logits", num_tokens="num_rows", N="V_local", K="D",
    ),
)  # fmt: skip

_PROJECTIONS = (
    _kernel("q_proj_qr", _BF16_ULP),
    _kernel("q_proj_rope", _BF16_ULP),
    _kernel("kv_proj_rope", _BF16_ULP),
    _kernel("compress_ratio_1", _BF16_ULP),
    _kernel("index_keys", _BF16_ULP),
    _kernel("compress_ratio_2", _BF16_ULP),
    _kernel("index_queries", _BF16_ULP),
    _kernel("publish_window_kv"),
    _kernel("publish_compressed_kv"),
    _kernel("publish_index_key"),
    _kernel("candidate_blocks"),
    *(_kernel(f"hierarchical_sparse_indexer_{mode}") for mode in ("c2a_full", "c1a_full", "c1a_reindex")),
    _kernel("sparse_attention", _BF16_ULP),
    _kernel("grouped_output", _BF16_ULP, sizes=_output_groups),
    _kernel(
        "o_proj", _FP32_SUM, kernel="quantized_linear_fp32", sizes=_partial_inputs,
        x="u", w="wo_b", w_scale="wo_b_scale", out="output_partial", N="D",
    ),
)  # fmt: skip

_EXPERTS = (
    _kernel("gate", _FP32_SUM),
    _kernel("shared_expert", _BF16_ULP),
    _kernel("routed_experts", _BF16_ULP),
    _kernel("combine"),
)

_LAUNCHED = (
    _kernel("window_attention", _BF16_ULP),
    _kernel("selected_attention", _BF16_ULP),
    _kernel("compress_pairs", _BF16_ULP),
    _kernel("rotate_rows"),
    _kernel("output_rounding"),
    _kernel("routed_rows"),
    _kernel("quantized_activations"),
)

STAGES: Mapping[str, KernelOperator] = MappingProxyType({stage.spec.name: stage for stage in _LAUNCHED})
"""Kernels that compositions and variants launch and the operator ABI has no name for."""

_COMPOSED = tuple(
    KernelOperator(find_operator(name), composition=composition) for name, composition in COMPOSITIONS.items()
)

OPERATORS: Mapping[str, KernelOperator] = MappingProxyType(
    {operator.spec.name: operator for operator in (*_ROW_STAGES, *_LINEARS, *_PROJECTIONS, *_EXPERTS, *_COMPOSED)}
)
"""Every operator whose kernel compiles, runs and equals its golden."""


def find_kernel(name: str, operators: Mapping[str, KernelOperator] = OPERATORS) -> KernelOperator:
    """The operator of that name, with its kernel. Errors: `OperatorError`; `NoValuesError` for a variant's name."""
    if name not in operators:
        if name in VARIANTS:
            expected = f"{VARIANTS[name].operator!r}, whose values are judged; `VariantCompiler` compiles variants"
            raise NoValuesError(name, f"a variant that is {NOT_VERIFIED}", expected)
        raise OperatorError("operator", name, f"one that `v41-kernels list` names{did_you_mean(name, operators)}")
    return operators[name]
