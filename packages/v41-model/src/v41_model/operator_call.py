"""How an entry of the operators table is called through the ABI: operands out of its arguments, results back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from v41_config import OperatorError, OperatorSpec, find_operator
from v41_goldens.paged_cache import RowCache
from v41_goldens.quantized_weights import Fp4Weight, Fp8Weight
from v41_goldens.weights import CompressorWeights, IndexKeyWeights

__all__ = [
    "Arguments",
    "OperatorCalls",
    "compressor_weights",
    "index_key_weights",
    "packed_weight",
    "pool",
    "rope_rows",
]

Arguments = dict[str, Any]


def _always(*_: object) -> bool:
    return True


def _in_order(_given: tuple[Any, ...], result: Any) -> tuple[Tensor, ...]:
    if result is None:
        return ()
    return (result,) if isinstance(result, Tensor) else tuple(result)


def _in_its_form(_given: tuple[Any, ...], result: Any, values: Sequence[Tensor]) -> Any:
    """Nothing, a tensor, or a tuple of the golden's type."""
    if result is None:
        return None
    if isinstance(result, Tensor):
        return values[0]
    return result._make(values) if hasattr(result, "_make") else tuple(values)


@dataclass(frozen=True)
class OperatorCalls:
    """One operator of the ABI behind an entry of the table, or behind a function that is none.

    ``operator`` is the ABI's name, ``entry`` the table's or the function's. ``arguments``, with the golden's signature,
    gives operands and counts; constants are the model's. ``applies`` says whether a call is this operator's, where
    several stand behind one entry. ``outputs(arguments, result)`` are the contract's ``out`` tensors in their order of
    what the golden gave, and ``restored(arguments, result, tensors)`` is the golden's result with other tensors in
    their place. ``composed`` marks those that are made of other exchangeable operators; ``joins`` names the group
    (``"TP"``, ``"EP"``) whose ranks meet inside of one, which a provider can only do for a group of one rank.
    """

    operator: str
    entry: str
    arguments: Callable[..., Arguments]
    applies: Callable[..., bool] = _always
    outputs: Callable[[tuple[Any, ...], Any], tuple[Tensor, ...]] = _in_order
    restored: Callable[[tuple[Any, ...], Any, Sequence[Tensor]], Any] = _in_its_form
    composed: bool = False
    joins: str = ""

    @property
    def spec(self) -> OperatorSpec:
        """The operator's contract."""
        return find_operator(self.operator)

    def named_outputs(self, given: tuple[Any, ...], result: Any) -> dict[str, Tensor]:
        """What a golden gave, by the names of the contract's ``out`` tensors."""
        names = [tensor.name for tensor in self.spec.tensors if tensor.direction == "out"]
        values = self.outputs(given, result)
        if len(names) != len(values):
            raise OperatorError(self.operator, f"{len(values)} results", f"those of the contract: {', '.join(names)}")
        return dict(zip(names, values, strict=True))


def packed_weight(name: str, weight: Fp8Weight | Fp4Weight) -> Arguments:
    """Codes and scales of a weight under the contract's names."""
    codes = weight.codes if isinstance(weight, Fp8Weight) else weight.packed
    return {name: codes, f"{name}_scale": weight.scale}


def rope_rows(cos: Tensor, sin: Tensor, prefix: str = "") -> Arguments:
    """RoPE rows under the contract's names."""
    return {f"{prefix}rope_cos": cos, f"{prefix}rope_sin": sin}


def pool(name: str, cache: RowCache) -> Arguments:
    """A paged cache under the contract's names."""
    return {name: cache.payload, f"{name}_scale": cache.scale}


def compressor_weights(weights: CompressorWeights) -> Arguments:
    """A compressor's weights under the contract's names; that of ratio 1 has no gate."""
    gate = {} if weights.wgate is None else {"compressor_wgate": weights.wgate}
    return {"compressor_wkv": weights.wkv, "compressor_norm": weights.norm, **gate}


def index_key_weights(weights: IndexKeyWeights) -> Arguments:
    """An index key's weights under the contract's names."""
    return {"index_wk": weights.wk, "index_k_norm": weights.k_norm}
