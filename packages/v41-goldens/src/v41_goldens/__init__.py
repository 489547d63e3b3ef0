"""DeepSeek-V4.1-Flash: every operator and the whole text model as readable Torch in exact arithmetic.

Reading order: `exact`, `number_formats`, `quantisers`, `linear`, `rms_norm`, `rope`, `hyper_connections`, `qkv`,
`compressor`, `indexer`, `top_k`, `candidate_blocks`, `sparse_attention`, `output_projection`, `gate`, `experts`,
`moe`, then `paged_cache`, `attention_stages`, `modes`, `block`, `model`.
"""

from v41_goldens.block import block
from v41_goldens.capture import Capture
from v41_goldens.forward_context import ForwardContext
from v41_goldens.model import ForwardOutput, forward
from v41_goldens.modes import ATTENTION, ATTENTION_ENTRIES
from v41_goldens.paged_cache import PagedCaches
from v41_goldens.reference_engine import ReferenceEngine
from v41_goldens.rope_rows import RopeRows, rope_tables
from v41_goldens.weights import LayerWeights, ModelWeights

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
