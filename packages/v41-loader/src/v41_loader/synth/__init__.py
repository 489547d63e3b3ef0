"""Deterministic synthetic checkpoints in the released on-disk format.

Every tensor is a pure function of config, seed and name, so any tensor can be made alone, in any order, on any
platform; a checkpoint's bytes depend on nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from v41_loader.synth.checkpoint_writer import (
    DEFAULT_SHARDS,
    SynthesisReport,
    synthesize_checkpoint,
    synthesized_tensors,
)
from v41_loader.synth.headers_only import synthesize_headers

if TYPE_CHECKING:
    from v41_loader.synth.tensors import synthesize_tensor

__all__ = [
    "DEFAULT_SHARDS",
    "SynthesisReport",
    "synthesize_checkpoint",
    "synthesize_headers",
    "synthesize_tensor",
    "synthesized_tensors",
]


def __getattr__(name: str) -> Any:
    if name == "synthesize_tensor":  # the only one that needs torch
        from v41_loader.synth.tensors import synthesize_tensor

        return synthesize_tensor
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
