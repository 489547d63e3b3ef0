"""The quantisers of activations and caches on groups `[M, g]`, one group a row (model.md sections 2.4 to 2.7).

Groups come from `groups_of`. A group that holds an infinity or a NaN becomes NaN as a whole.
"""

from typing import Any

import pypto

from v41_kernels.kernels.stages.number_formats import (
    as_byte,
    decode_e4m3_code,
    encode_e2m1,
    encode_e4m3,
    pack_nibbles,
    round_to_e4m3,
    sign_bit,
)
from v41_kernels.kernels.stages.powers_of_two import ceil_log2, wide_power_of_two

MX_GROUP = 32
FP4_GROUP = 16
GROUP_TILE = 128
# Why 128 groups: a tile of 128 x 32 FP32 is 16 KB, and a quantiser keeps about ten of them.
_FP8_FLOOR = 1e-4
_INDEX_FLOOR = 6.0 * 2.0**-126
_COMPRESSED_FLOOR = 6.0 * 2.0**-9
_RECIPROCAL_448 = 0.0022321429569274187  # FP32(1 / 448)
_RECIPROCAL_6 = 0.1666666716337204  # FP32(1 / 6)
_NAN_CODE = 255.0


def groups_of(tile: Any, R: int, rows: Any, width: int, group: int) -> Any:
    """`[R, width]` as `[R * width / group, group]`, with tiles set for it."""
    per_row = width // group
    pypto.set_vec_tile_shapes(min(R * per_row, GROUP_TILE), group)
    return pypto.reshape(tile, [R * per_row, group], valid_shape=[rows * per_row, group])


def largest(groups: Any) -> Any:
    """The largest magnitude of each group, `[M, 1]`."""
    return pypto.amax(pypto.abs(groups), -1, keepdim=True)


def activation_exponent(groups: Any) -> Any:
    """Exponent `[M, 1]` of an FP8 group's scale."""
    return ceil_log2(pypto.maximum(largest(groups), _FP8_FLOOR) * _RECIPROCAL_448)


def scaled_down(groups: Any, exponent: Any, limit: float) -> Any:
    """`groups / 2^exponent`, clamped."""
    return pypto.maximum(pypto.minimum(groups * wide_power_of_two(exponent * (-1.0)), limit), -limit)


def quantised_activation(groups: Any) -> Any:
    """BF16 of FP32 groups: FP8 and back, exactly what the quantised product is taken of."""
    exponent = activation_exponent(groups)
    rounded = round_to_e4m3(scaled_down(groups, exponent, 448.0))
    return pypto.cast(rounded * wide_power_of_two(exponent), pypto.DT_BF16)


def scale_byte(exponent: Any) -> Any:
    """E8M0 byte of a group's exponent; NaN, and that of an infinity, is code 255."""
    code = exponent + 127.0
    return as_byte(pypto.where(pypto.le(code, 254.0), code, _NAN_CODE))


def window_bytes(groups: Any) -> tuple[Any, Any]:
    """INT8 E4M3 codes `[M, 32]` and E8M0 scales `[M, 1]` of FP32 groups."""
    exponent = activation_exponent(groups)
    magnitude = pypto.abs(scaled_down(groups, exponent, 448.0))
    code = encode_e4m3(magnitude)
    code = pypto.where(pypto.le(code, 126.0), code + sign_bit(groups) * 128.0, 127.0)
    return as_byte(code), scale_byte(exponent)


def index_exponent(groups: Any) -> Any:
    """Exponent `[M, 1]` of an index group's scale."""
    return ceil_log2(pypto.maximum(largest(groups), _INDEX_FLOOR) * _RECIPROCAL_6)


def index_bytes(groups: Any) -> tuple[Any, Any]:
    """INT8 packed E2M1 `[M, 16]` and E8M0 scales `[M, 1]` of FP32 groups."""
    exponent = index_exponent(groups)
    code = encode_e2m1(pypto.abs(scaled_down(groups, exponent, 6.0)))
    return pack_nibbles(finite_code(code, groups)), scale_byte(exponent)


def quantised_index(groups: Any) -> Any:
    """BF16 of FP32 groups: FP4 and back."""
    exponent = index_exponent(groups)
    scaled = scaled_down(groups, exponent, 6.0)
    code = encode_e2m1(pypto.abs(scaled))
    magnitude = code * 0.5 + pypto.relu(code - 4.0) * 0.5 + pypto.relu(code - 6.0)
    value = magnitude * (sign_bit(groups) * (-2.0) + 1.0)
    return pypto.cast(value * wide_power_of_two(exponent), pypto.DT_BF16)


def finite_code(code: Any, groups: Any) -> Any:
    """Nibbles of magnitudes' codes with the signs of `groups`; zero for NaN, which the scale tells."""
    return pypto.where(pypto.le(code, 7.0), code + sign_bit(groups) * 8.0, 0.0)


def compressed_bytes(groups: Any) -> tuple[Any, Any]:
    """INT8 packed E2M1 `[M, 8]` and E4M3 scales `[M, 1]` of FP32 groups of 16."""
    quotient = pypto.maximum(largest(groups), _COMPRESSED_FLOOR) / 6.0
    finite = pypto.le(quotient, 1e38)
    scale = pypto.where(finite, encode_e4m3(pypto.minimum(quotient, 448.0)), 127.0)
    divisor = pypto.where(finite, decode_e4m3_code(scale), float("nan"))
    code = encode_e2m1(pypto.minimum(pypto.abs(groups) / divisor, 6.0))
    return pack_nibbles(finite_code(code, groups)), as_byte(scale)
