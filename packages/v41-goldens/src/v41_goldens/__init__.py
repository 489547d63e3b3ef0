"""DeepSeek-V4.1-Flash: every operator and the whole text model as readable Torch in exact arithmetic.

Reading order: `exact`, `number_formats`, `quantisers`, `linear`, `rms_norm`, `rope`, `hyper_connections`, `qkv`,
`compressor`, `indexer`, `top_k`, `candidate_blocks`, `sparse_attention`, `output_projection`, `gate`, `experts`,
`moe`, then `paged_cache`, `attention_stages`, `modes`, `block`, `model`; `operators` is the table of all of them by the
names of the ABI, `judges` compare with them.

The names below are imported, and torch with them, when they are first used.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from v41_goldens.block import block
    from v41_goldens.capture import Capture
    from v41_goldens.forward_context import ForwardContext
    from v41_goldens.model import ForwardOutput, forward
    from v41_goldens.modes import ATTENTION, ATTENTION_ENTRIES
    from v41_goldens.paged_cache import PagedCaches
    from v41_goldens.reference_engine import ReferenceEngine
    from v41_goldens.rope_rows import RopeRows, rope_tables
    from v41_goldens.weights import LayerWeights, ModelWeights

_MODULE_OF = {
    "ATTENTION": "modes",
    "ATTENTION_ENTRIES": "modes",
    "Capture": "capture",
    "ForwardContext": "forward_context",
    "ForwardOutput": "model",
    "LayerWeights": "weights",
    "ModelWeights": "weights",
    "PagedCaches": "paged_cache",
    "ReferenceEngine": "reference_engine",
    "RopeRows": "rope_rows",
    "block": "block",
    "forward": "model",
    "rope_tables": "rope_rows",
}

__all__ = [
    "ATTENTION",
    "ATTENTION_ENTRIES",
    "Capture",
    "ForwardContext",
    "ForwardOutput",
    "LayerWeights",
    "ModelWeights",
    "PagedCaches",
    "ReferenceEngine",
    "RopeRows",
    "block",
    "forward",
    "rope_tables",
]


class _LazyPackage(ModuleType):
    """Imports a public name at its first use, so that the pytest plugin does not cost every test run torch's import."""

    def __getattr__(self, name: str) -> object:
        if name not in _MODULE_OF:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        value: object = getattr(import_module(f"{self.__name__}.{_MODULE_OF[name]}"), name)
        super().__setattr__(name, value)
        return value

    def __setattr__(self, name: str, value: object) -> None:
        """Importing a submodule binds it here; `block` stays the function of its module."""
        if not (name in _MODULE_OF and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _LazyPackage
