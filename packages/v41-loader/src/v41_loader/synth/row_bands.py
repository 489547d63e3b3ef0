"""Makes horizontal bands of synthetic tensors: the unit that threads share out and files are written in.

A band is computed in blocks that stay in the cache, so that the passes over an element never reach main memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from v41_config.model_config import MX_GROUP
from v41_loader.expected_tensors import ExpectedTensor
from v41_loader.synth.block_formats import bf16_bits, fp4_groups, fp8_tiles
from v41_loader.synth.random_streams import WordStream, normal, spread, uniform
from v41_loader.synth.recipe import Matrix, MixBase, Normal, Uniform, distribution_of, stream_name

BLOCK_ELEMENTS = 1 << 15
"""Elements per cache block: a handful of float64 temporaries of this size fit a 1 MiB second-level cache."""

BAND_ELEMENTS = 1 << 20
"""Elements per band: large enough to hide a job's fixed cost, small enough to balance threads."""

StoredBytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class RowBand:
    """Rows `[start, stop)` of the logical tensor (of a 1-D tensor: its elements)."""

    tensor: ExpectedTensor
    start: int
    stop: int


def row_bands(tensor: ExpectedTensor) -> Iterator[RowBand]:
    """Cut a tensor into bands of whole 32-row tiles."""
    rows, width = _extent(tensor)
    step = max(MX_GROUP, BAND_ELEMENTS // width // MX_GROUP * MX_GROUP)
    for start in range(0, rows, step):
        yield RowBand(tensor, start, min(start + step, rows))


def make_band(band: RowBand, seed: int) -> tuple[StoredBytes, StoredBytes | None]:
    """The stored bytes of a band, flat, and those of its scale where it has one."""
    tensor = band.tensor
    name, distribution = stream_name(tensor), distribution_of(tensor)
    _, width = _extent(tensor)
    count = (band.stop - band.start) * width
    match distribution:
        case Matrix(gain):
            return _quantised_band(band, seed, name, gain)
        case Uniform(low, high):
            words = WordStream(seed, name, band.start * width).take(count)
            return _stored(uniform(words, low, high).astype(np.float32), tensor.dtype), None
        case MixBase():
            return _stored(_mix_base(seed, name, count, distribution), tensor.dtype), None
        case Normal():
            std = distribution.scaled_std(tensor.shape[-1])
            stream = WordStream(seed, name, band.start * width)
            out = np.empty(count, np.float32)
            for at in range(0, count, BLOCK_ELEMENTS):
                block = out[at : at + BLOCK_ELEMENTS]
                values = normal(stream.take(block.size))
                values *= std
                values += distribution.mean
                block[:] = values
            return _stored(out, tensor.dtype), None
        case _:
            raise AssertionError(distribution)


def _extent(tensor: ExpectedTensor) -> tuple[int, int]:
    """Logical rows and elements per row; a 1-D tensor is a column."""
    rows, *rest = (n * extent for n, extent in zip(tensor.shape, tensor.rule.item_extents, strict=True))
    return rows, rest[0] if rest else 1


def _stored(values: npt.NDArray[np.float32], dtype: str) -> StoredBytes:
    return (bf16_bits(values) if dtype == "BF16" else values).reshape(-1).view(np.uint8)


def _mix_base(seed: int, name: str, count: int, how: MixBase) -> npt.NDArray[np.float32]:
    """`count` = 2 HC + HC^2: HC pre terms, HC post terms, the HC x HC mix."""
    lanes = round((count + 1) ** 0.5) - 1
    base = normal(WordStream(seed, name).take(count)) * how.std
    order = np.argsort(WordStream(seed, name + "#perm").take(lanes), kind="stable")
    base[2 * lanes :] += how.permutation * np.eye(lanes)[order].reshape(-1)
    return base.astype(np.float32)


def _quantised_band(band: RowBand, seed: int, name: str, gain: float) -> tuple[StoredBytes, StoredBytes]:
    _, width = _extent(band.tensor)
    count = band.stop - band.start
    words = WordStream(seed, name, band.start * width)
    columns = spread(WordStream(seed, name + "#cols").take(width))
    rows = spread(WordStream(seed, name + "#rows", band.start).take(count))[:, None]
    std = gain / width**0.5
    rows_per_block = max(1, BLOCK_ELEMENTS // width)
    # A scale spans 32 rows of FP8, but stays inside one row of FP4.
    quantise, rows_per_step = (fp4_groups, rows_per_block) if band.tensor.dtype == "I8" else (fp8_tiles, MX_GROUP)
    buffer = np.empty((rows_per_step, width), np.float32)
    codes: list[StoredBytes] = []
    scales: list[StoredBytes] = []
    for step in range(0, count, rows_per_step):
        values = buffer[: count - step]
        for at in range(0, len(values), rows_per_block):
            block = values[at : at + rows_per_block]
            # The order of these products is the recipe's.
            w = normal(words.take(block.size)).reshape(block.shape)
            w *= std
            w *= rows[step + at : step + at + len(block)]
            w *= columns
            block[:] = w
        for made, parts in zip(quantise(values), (codes, scales), strict=True):
            parts.append(made.reshape(-1))
    return np.concatenate(codes), np.concatenate(scales)
