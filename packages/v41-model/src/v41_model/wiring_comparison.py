"""The same run in both wirings: what differs, to the bit."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from v41_model.golden_twin import same_bits

__all__ = ["different_tensors", "verdict"]


def different_tensors(sharded: Mapping[str, Tensor], replicated: Mapping[str, Tensor]) -> list[str]:
    """Names of tensors that one wiring lacks or that differ in dtype, shape or bytes, in the order of ``sharded``."""
    names = [*sharded, *(name for name in replicated if name not in sharded)]
    return [
        name
        for name in names
        if name not in sharded or name not in replicated or not same_bits(sharded[name], replicated[name])
    ]


def verdict(different: list[str], compared: str) -> str:
    """One line on a comparison of ``compared``."""
    if not different:
        return f"both wirings: {compared} equal to the bit"
    return f"the wirings differ in {len(different)} of {compared}, first in {different[0]}"
