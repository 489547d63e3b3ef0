"""Element types of operands, by the names that NumPy (with ml_dtypes) and torch share."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from v41_config.cache_abi import DTYPE_BYTES

DataType = Literal[
    "bfloat16", "float32", "float8_e4m3fn", "float8_e8m0fnu", "int8", "uint8", "int32", "int64", "bool"
]  # fmt: skip
"""`int8` and `uint8` hold two packed E2M1 codes a byte: weights as the checkpoint stores them, and caches."""

DATA_TYPE_BYTES: Mapping[str, int] = MappingProxyType(
    {**DTYPE_BYTES, "bfloat16": 2, "int8": 1, "int32": 4, "int64": 8, "bool": 1}
)
"""Bytes of one stored item: the cache ABI's types and the other operands'."""


def data_type_name(dtype: object) -> str:
    """The name of a NumPy or torch dtype, as `DataType` spells it; other types keep their own spelling."""
    return str(dtype).removeprefix("torch.")
