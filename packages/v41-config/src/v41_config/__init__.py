"""v41-config: what every v41 distribution agrees on, without torch."""

from v41_config.batch_lowering import build_forward_metadata
from v41_config.cache_abi import (
    BLOCK_ROWS,
    STATE_CAPACITY,
    CachePool,
    CacheTensor,
    SourceTokens,
    StoredRows,
    blocks_for_tokens,
    blocks_spanned,
    cache_pools,
    compressed_table,
    rows_for_tokens,
    tokens_per_block,
)
from v41_config.cache_layout import AllocatedTensor, CacheLayout
from v41_config.capacity_plan import CapacityAssumptions, CapacityPlan, Fit, parse_bytes
from v41_config.dp_group_metadata import DpGroupMetadata
from v41_config.errors import CapacityError, ConfigError, LayoutError, MetadataError, OperatorError, SlabError, V41Error
from v41_config.forward_metadata import ForwardMetadata
from v41_config.layer_plan import AttentionMode, LayerConfig, RopeProfile
from v41_config.model_config import (
    FP4_CACHE_GROUP,
    MX_GROUP,
    DraftingConfig,
    EngramConfig,
    ModelConfig,
    QuantizationConfig,
    RopeScaling,
    VisionConfig,
)
from v41_config.operator_spec import BoundOperator, ConstantSpec, CountSpec, OperatorSpec, TensorSpec
from v41_config.operator_tables import find_operator, operators
from v41_config.parallel_layout import ParallelLayout
from v41_config.presets import FLASH, FLASH6, PRESETS, TINY, TINY8
from v41_config.token_mapping import PADDING_ID, GatheredRows, LocalRows, TokenMapping

__all__ = [
    "BLOCK_ROWS",
    "FLASH",
    "FLASH6",
    "FP4_CACHE_GROUP",
    "MX_GROUP",
    "PADDING_ID",
    "PRESETS",
    "STATE_CAPACITY",
    "TINY",
    "TINY8",
    "AllocatedTensor",
    "AttentionMode",
    "BoundOperator",
    "CacheLayout",
    "CachePool",
    "CacheTensor",
    "CapacityAssumptions",
    "CapacityError",
    "CapacityPlan",
    "ConfigError",
    "ConstantSpec",
    "CountSpec",
    "DpGroupMetadata",
    "DraftingConfig",
    "EngramConfig",
    "Fit",
    "ForwardMetadata",
    "GatheredRows",
    "LayerConfig",
    "LayoutError",
    "LocalRows",
    "MetadataError",
    "ModelConfig",
    "OperatorError",
    "OperatorSpec",
    "ParallelLayout",
    "QuantizationConfig",
    "RopeProfile",
    "RopeScaling",
    "SlabError",
    "SourceTokens",
    "StoredRows",
    "TensorSpec",
    "TokenMapping",
    "V41Error",
    "VisionConfig",
    "blocks_for_tokens",
    "blocks_spanned",
    "build_forward_metadata",
    "cache_pools",
    "compressed_table",
    "find_operator",
    "operators",
    "parse_bytes",
    "rows_for_tokens",
    "tokens_per_block",
]
