"""Byte layouts against addresses written down element by element, and against their own inverse."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from v41_config import FLASH, TINY, ParallelLayout
from v41_loader import ExpectedTensor, expected_tensor, expected_tensors, tensor_parts
from v41_loader.errors import LayoutGeometryError, ShardingError, UnknownLayoutError
from v41_loader.layouts import LAYOUTS, Transform, get_layout
from v41_loader.layouts.lane_transpose import transpose_lanes
from v41_loader.rules import DTYPE_BYTES

Bytes = npt.NDArray[np.uint8]

FP8 = expected_tensor(FLASH, "layers.0.attn.wq_b.weight")
FP8_SCALE = expected_tensor(FLASH, "layers.0.attn.wq_b.scale")
FP4 = expected_tensor(FLASH, "layers.0.ffn.experts.0.w1.weight")
FP4_SCALE = expected_tensor(FLASH, "layers.0.ffn.experts.0.w1.scale")
DEVICE = get_layout("device")


def random_bytes(seed: int, *shape: int) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def transform_of(tensor: ExpectedTensor, shape: tuple[int, ...]) -> Transform:
    transform = DEVICE.transform(tensor, shape)
    assert transform is not None
    return transform


def streamed(transform: Transform, stored: Bytes) -> bytes:
    """Block after block, as a sharder writes it."""
    step = transform.rows_per_block
    blocks = [transform.apply(stored[row : row + step]) for row in range(0, len(stored), step)]
    return b"".join(block.tobytes() for block in blocks)


def released_nibble(packed: Bytes, n: int, k: int) -> int:
    """Element k of row n: two to a byte, the even one low."""
    byte = int(packed[n, k // 2])
    return byte >> 4 if k % 2 else byte & 15


def device_nibble(data: bytes, n: int, k: int, inner: int) -> int:
    """Tiles of 256 x 256 ordered (N tile, K tile), halves of 128 K rows, rows of 128 bytes, even column low."""
    tile = (n // 256) * (inner // 256) + k // 256
    half = k % 256 // 128
    byte = data[tile * 32768 + half * 16384 + (k % 128) * 128 + n % 256 // 2]
    return byte >> 4 if n % 2 else byte & 15


@pytest.mark.parametrize(("n", "k"), [(32, 64), (96, 192), (64, 320)])
def test_fp8_codes_stand_input_major(n: int, k: int) -> None:
    stored = random_bytes(1, n, k)
    transform = transform_of(FP8, (n, k))
    data = streamed(transform, stored)
    assert (transform.output_dtype, transform.output_shape) == ("F8_E4M3", (k, n))
    assert all(data[i * n + j] == stored[j, i] for i in range(k) for j in range(n))


@pytest.mark.parametrize(("n", "k"), [(256, 256), (512, 256), (256, 768), (512, 512)])
def test_fp4_nibbles_stand_in_tiles(n: int, k: int) -> None:
    stored = random_bytes(2, n, k // 2)
    transform = transform_of(FP4, (n, k // 2))
    data = streamed(transform, stored)
    assert (transform.output_dtype, transform.output_shape) == ("I8", (k, n // 2))
    for row in range(n):
        for column in range(k):
            assert device_nibble(data, row, column, k) == released_nibble(stored, row, column), (row, column)


@pytest.mark.parametrize(("tensor", "tile"), [(FP8_SCALE, 32), (FP4_SCALE, 1)], ids=["FP8", "FP4"])
@pytest.mark.parametrize(("n", "k"), [(32, 64), (96, 192), (64, 320)])
def test_scales_stand_in_mx_order(tensor: ExpectedTensor, tile: int, n: int, k: int) -> None:
    stored = random_bytes(3, n // tile, k // 32)
    transform = transform_of(tensor, stored.shape)
    data = streamed(transform, stored)
    assert (transform.output_dtype, transform.output_shape) == ("F8_E8M0", (k // 32, n))
    assert len(data) == n * k // 32
    for column in range(n):
        for group in range(k // 32):
            nb, c, kp, g = column // 16, column % 16, group // 2, group % 2
            assert data[((nb * (k // 64) + kp) * 16 + c) * 2 + g] == stored[column // tile, group]


def test_written_down_examples() -> None:
    """Three bytes found by hand: each formula in its simplest place."""
    codes = np.zeros((32, 64), np.uint8)
    codes[3, 5] = 7
    assert streamed(transform_of(FP8, (32, 64)), codes).index(7) == 5 * 32 + 3
    packed = np.zeros((512, 256), np.uint8)
    packed[256 + 4, 201] = 0x60  # row 260, K 403, high nibble
    tiled = streamed(transform_of(FP4, (512, 256)), packed)
    assert tiled[3 * 32768 + 128 * 128 + 19 * 128 + 2] == 6  # N tile 1, K tile 1, its second half, even column
    assert np.count_nonzero(np.frombuffer(tiled, np.uint8)) == 1
    scales = np.zeros((32, 4), np.uint8)
    scales[17, 3] = 9
    assert streamed(transform_of(FP4_SCALE, (32, 4)), scales).index(9) == ((1 * 2 + 1) * 16 + 1) * 2 + 1


@settings(max_examples=40, deadline=None)
@given(st.sampled_from([FP8, FP8_SCALE, FP4, FP4_SCALE]), st.integers(1, 5), st.integers(1, 3), st.integers(0, 2**32))
def test_every_transform_can_be_undone(tensor: ExpectedTensor, rows: int, columns: int, seed: int) -> None:
    shape = {FP8: (32 * rows, 64 * columns), FP8_SCALE: (rows, 2 * columns),
             FP4: (256 * rows, 128 * columns), FP4_SCALE: (16 * rows, 2 * columns)}[tensor]  # fmt: skip
    transform = transform_of(tensor, shape)
    stored = random_bytes(seed, *shape)
    for row in range(0, shape[0], transform.rows_per_block):
        block = stored[row : row + transform.rows_per_block]
        made = transform.apply(block)
        for data in (made, made.reshape(-1)):
            released = transform.inverse(data)
            assert released is not None
            assert np.array_equal(released, block)
    nbytes = math.prod(transform.output_shape) * DTYPE_BYTES[transform.output_dtype]
    assert len(streamed(transform, stored)) == nbytes


@settings(max_examples=30, deadline=None)
@given(st.sampled_from([4, 8]), st.integers(1, 20), st.integers(1, 6), st.integers(0, 2**32))
def test_lanes_are_transposed_at_any_size(bits: int, groups: int, words: int, seed: int) -> None:
    matrix = random_bytes(seed, groups * 64 // bits, words * 8)
    out = np.empty((words * 64 // bits, groups * 8), np.uint8)
    transpose_lanes(matrix, bits, out)

    def lanes(array: Bytes) -> Bytes:
        return array if bits == 8 else np.stack([array & 15, array >> 4], axis=-1).reshape(len(array), -1)

    assert np.array_equal(lanes(out), lanes(matrix).T)


def test_large_matrices_are_transposed_in_blocks() -> None:
    """More rows and columns than one block has, and smaller blocks at the edges."""
    matrix = random_bytes(4, 1544, 2568)
    out = np.empty((2568, 1544), np.uint8)
    transpose_lanes(matrix, 8, out)
    assert np.array_equal(out, matrix.T)


def test_a_scale_that_differs_inside_a_tile_is_refused() -> None:
    """The released form has one scale for these columns: nothing was expanded to such bytes."""
    transform = transform_of(FP8_SCALE, (2, 4))
    made = transform.apply(random_bytes(5, 2, 4))
    made.reshape(-1)[7] ^= 1
    assert transform.inverse(made) is None


def test_blocks_cover_what_the_output_needs() -> None:
    """Only FP8 asks for the whole tensor; the others stay below 1 MiB at released size."""
    for tensor in (FP4, FP4_SCALE, FP8_SCALE):
        transform = transform_of(tensor, tensor.shape)
        assert transform.rows_per_block * tensor.shape[1] <= 1 << 20
    assert transform_of(FP8, FP8.shape).rows_per_block == FP8.shape[0]


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_every_part_of_the_release_fits(tp: int) -> None:
    """What changes is exactly the quantised weights of text inference and their scales."""
    changed, layout = 0, ParallelLayout(tp, 8 // tp)
    for tensor in expected_tensors(FLASH).values():
        if tensor.expert not in (None, 0):
            continue
        for part in tensor_parts(tensor, FLASH, layout):
            transform = DEVICE.transform(tensor, part.part.shape)
            assert (transform is not None) == (tensor.dtype in ("F8_E4M3", "I8", "F8_E8M0"))
            changed += transform is not None
            assert get_layout("canonical").transform(tensor, part.part.shape) is None
    linears, cut_linears, index_linears, expert_matrices = 8, 3, 8, 3
    assert changed == 2 * (40 * (linears + expert_matrices + cut_linears * (tp - 1)) + index_linears)


@pytest.mark.parametrize(("tensor", "shape", "found"), [
    (FP8, (48, 64), "N=48, K=64"), (FP8, (32, 32), "N=32, K=32"), (FP4, (128, 128), "N=128, K=256"),
    (FP4, (256, 64), "N=256, K=128"), (FP4_SCALE, (24, 2), "N=24, K=64"), (FP4_SCALE, (16, 3), "N=16, K=96"),
    (FP8_SCALE, (1, 1), "N=32, K=32"),
])  # fmt: skip
def test_a_size_the_layout_has_no_place_for(tensor: ExpectedTensor, shape: tuple[int, int], found: str) -> None:
    with pytest.raises(LayoutGeometryError, match=tensor.name) as caught:
        DEVICE.transform(tensor, shape)
    assert caught.value.found == found


def test_the_toy_preset_does_not_fit() -> None:
    tensor = next(t for t in expected_tensors(TINY).values() if t.dtype == "I8")
    with pytest.raises(LayoutGeometryError):
        DEVICE.transform(tensor, tensor.shape)


def test_layouts_are_found_by_name() -> None:
    assert [layout.name for layout in LAYOUTS] == ["canonical", "device"]
    assert all(get_layout(layout.name) is layout for layout in LAYOUTS)
    with pytest.raises(UnknownLayoutError, match="canonical, device"):
        get_layout("Device")
    assert issubclass(UnknownLayoutError, ShardingError)


def test_transforms_of_equal_parts_are_equal() -> None:
    """A sharder may take one rank's transform for all."""
    assert transform_of(FP8, (32, 64)) == transform_of(FP8, (32, 64))
    assert dataclasses.is_dataclass(transform_of(FP4, (256, 128)))
