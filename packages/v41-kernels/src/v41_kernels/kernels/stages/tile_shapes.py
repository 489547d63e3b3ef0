"""Tile widths that the compiler accepts."""

SCALE_PAIR = 64
"""Inputs of an MX product that takes its scales in pairs, of 32 inputs each: their number is a multiple of it."""

_LINE_ELEMENTS = 16
# The last axis of a tile spans whole 32-byte lines; 16 elements do so for BF16 and, of course, for FP32.


def tile_columns(width: int, at_most: int) -> int:
    """Columns of a tile over rows of `width` BF16 or FP32 elements: `width` in whole lines, `at_most` so many."""
    return min(-(-width // _LINE_ELEMENTS) * _LINE_ELEMENTS, at_most)
