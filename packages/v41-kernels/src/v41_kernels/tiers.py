"""How far a kernel is compiled before its values are taken."""

from __future__ import annotations

from enum import Enum

CHECKED_PASSES = (
    "ExpandFunction",
    "SplitK",
    "L1CopyInReuseMerge",
    "InferDynShape",
    "InferParamIndex",
    "CodegenPreproc",
)
"""The passes after which the interpreter runs the kernel again: those that end a stage of lowering, from the first
one (operations cut into tiles) to the last one before code is generated."""


class Tier(Enum):
    """`GRAPH`: the tensor graph as traced, for many shapes. `PASSES`: all passes up to generated instructions; the
    kernel is interpreted again after each of `CHECKED_PASSES` and must give the tensor graph's values."""

    GRAPH = "graph"
    PASSES = "passes"
