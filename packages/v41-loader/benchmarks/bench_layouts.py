"""Speed of the device layout's transforms on one thread, against nibble-wise repacking and against memcpy.

All sides run in turn in one process over more bytes than the caches hold, and must give the same bytes. Seconds are
those that the thread computed, so that other work on the machine counts less.

    python bench_layouts.py [--megabytes N] [--repeat N]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from v41_config import FLASH
from v41_loader import expected_tensor
from v41_loader.layouts import Transform, get_layout

Bytes = npt.NDArray[np.uint8]

TENSORS = {
    "FP4 expert w1": "layers.0.ffn.experts.0.w1.weight",
    "FP4 expert w2": "layers.0.ffn.experts.0.w2.weight",
    "FP8 wq_b": "layers.0.attn.wq_b.weight",
    "FP8 wo_b": "layers.0.attn.wo_b.weight",
    "scales of FP4 w1": "layers.0.ffn.experts.0.w1.scale",
    "scales of FP8 wq_b": "layers.0.attn.wq_b.scale",
}


def repack_nibbles(packed: Bytes) -> Bytes:
    """The plain way for FP4: one nibble in a byte, transposed, packed again, cut into tiles."""
    n, k = packed.shape[0], 2 * packed.shape[1]
    nibbles = np.empty((n, k), np.uint8)
    nibbles[:, 0::2], nibbles[:, 1::2] = packed & 15, packed >> 4
    columns = np.ascontiguousarray(nibbles.T)
    pairs = columns[:, 0::2] | columns[:, 1::2] << 4
    return np.ascontiguousarray(pairs.reshape(k, n // 256, 128).transpose(1, 0, 2))


def transpose_bytes(codes: Bytes) -> Bytes:
    """The plain way for FP8."""
    return np.ascontiguousarray(codes.T)


PLAIN: dict[str, Callable[[Bytes], Bytes]] = {"I8": repack_nibbles, "F8_E4M3": transpose_bytes}


def transformed(transform: Transform, tensors: Bytes) -> None:
    for tensor in tensors:
        for row in range(0, len(tensor), transform.rows_per_block):
            transform.apply(tensor[row : row + transform.rows_per_block])


def seconds(call: Callable[[], object]) -> float:
    start = time.thread_time()
    call()
    return time.thread_time() - start


def measure(label: str, name: str, megabytes: int, repeat: int) -> None:
    tensor = expected_tensor(FLASH, name)
    transform = get_layout("device").transform(tensor, tensor.shape)
    assert transform is not None
    copies = max(1, megabytes * 10**6 // tensor.nbytes)
    tensors = np.random.default_rng(0).integers(0, 256, (copies, *tensor.shape), np.uint8)
    target = np.zeros_like(tensors)
    sides: dict[str, Callable[[], object]] = {
        "memcpy": lambda: np.copyto(target, tensors),
        "v41-loader": lambda: transformed(transform, tensors),
    }
    if plain := PLAIN.get(tensor.dtype):
        sides["plain"] = lambda: [plain(one) for one in tensors]
        step = transform.rows_per_block
        made = [transform.apply(tensors[0][row : row + step]).tobytes() for row in range(0, len(tensors[0]), step)]
        if b"".join(made) != plain(tensors[0]).tobytes():
            raise SystemExit(f"{name}: the two sides differ")
    times = {side: min(seconds(call) for _ in range(repeat)) for side, call in sides.items()}
    speed = {side: tensors.nbytes / elapsed / 1e9 for side, elapsed in times.items()}
    against = f"{speed['v41-loader'] / speed['plain']:.1f}" if "plain" in speed else ""
    print(f"{label:<20}{speed['memcpy']:>8.1f}{speed.get('plain', float('nan')):>8.2f}{speed['v41-loader']:>12.2f}"
          f"{speed['v41-loader'] / speed['memcpy']:>12.3f}{against:>10}")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=256, help="of the released form; default: %(default)s")
    parser.add_argument("--repeat", type=int, default=5)
    arguments = parser.parse_args()
    print("GB/s of released bytes, one thread")
    print(f"{'':<20}{'memcpy':>8}{'plain':>8}{'v41-loader':>12}{'of memcpy':>12}{'of plain':>10}")
    for label, name in TENSORS.items():
        measure(label, name, arguments.megabytes, arguments.repeat)


if __name__ == "__main__":
    main()
