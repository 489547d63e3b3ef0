"""Random numbers keyed by seed and name: any stretch of a stream can be made alone.

The streams are Philox-4x64 counters, so the words from `start` on need no word before it. Values are made with
integer and IEEE double arithmetic in a fixed order; that order is part of the recipe (the last bit depends on it).
"""

from __future__ import annotations

import zlib

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]
Doubles = npt.NDArray[np.float64]

_WORDS_PER_COUNTER = 4
_LANE_MASK = np.uint64(0x0000_FFFF_0000_FFFF)
_LANE_MAX = 65535
_LANE_SUM_STD = (4 * ((_LANE_MAX + 1) ** 2 - 1) / 12) ** 0.5
"""Standard deviation of a sum of four independent 16-bit uniforms."""


class WordStream:
    """The uint64 words of the stream `(seed, name)` from word `start` on."""

    def __init__(self, seed: int, name: str, start: int = 0) -> None:
        key = np.array([seed, zlib.crc32(name.encode())], dtype=np.uint64)
        counter, skipped = divmod(start, _WORDS_PER_COUNTER)
        self._generator = np.random.Generator(np.random.Philox(key=key, counter=counter))
        self.take(skipped)

    def take(self, count: int) -> Words:
        """The next `count` words."""
        # Unlike BitGenerator.random_raw, integers() releases the GIL; over the full range it returns the raw words.
        return self._generator.integers(0, 2**64 - 1, endpoint=True, size=count, dtype=np.uint64)


def normal(words: Words) -> Doubles:
    """Nearly normal values: the four 16-bit lanes of each word summed, centred, scaled. Overwrites `words`."""
    odd_lanes = words >> np.uint64(16)
    odd_lanes &= _LANE_MASK
    words &= _LANE_MASK
    words += odd_lanes
    words += words >> np.uint64(32)
    # The low half of each word is the sum; on a little-endian machine it comes first.
    values: Doubles = words.view(np.int32)[::2].astype(np.float64)
    values -= 2 * _LANE_MAX
    values /= _LANE_SUM_STD
    return values


def uniform(words: Words, low: float, high: float) -> Doubles:
    """Values in [low, high) from the upper 24 bits of each word."""
    fractions: Doubles = (words >> np.uint64(40)).astype(np.float64) / 2.0**24
    return low + (high - low) * fractions


def spread(words: Words) -> Doubles:
    """Factors 8/11, 9/11, ... 15/11 that give rows and columns different sizes, so that block scales differ."""
    elevenths: Doubles = 8 + (words & np.uint64(7)).astype(np.float64)
    return elevenths / 11.0
