"""Time to make synthetic tensors of the released dimensions, against a plain transcription of the recipe.

Both sides make the same tensors in the same process, in turn, and must make the same bytes. The transcription uses
torch and NumPy as anyone would; the package's side is what `synthesize_checkpoint` runs, without the file.

    python bench_synth.py [--threads N] [--repeat N]
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from baselines.reference_recipe import Made, recipes

from v41_config import FLASH6
from v41_loader import ExpectedTensor, expected_tensor, expected_tensors
from v41_loader.synth.row_bands import RowBand, make_band, row_bands

SEED = 51
TENSORS = {
    "I8": ("FP4 expert", "layers.0.ffn.experts.0.w1.weight"),
    "F8_E4M3": ("FP8 linear", "layers.0.attn.wq_a.weight"),
    "BF16": ("BF16 embedding", "embed.weight"),
    "F32": ("FP32 mixes", "layers.0.hc_ffn_fn"),
}
"""One large tensor of each stored format."""


def best(call: Callable[[], object], repeat: int) -> float:
    seconds = []
    for _ in range(repeat):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def make_all(pool: ThreadPoolExecutor, bands: list[RowBand]) -> bytes:
    made = pool.map(make_band, bands, [SEED] * len(bands))
    return b"".join(weight.tobytes() for weight, _ in made)


def elements(tensor: ExpectedTensor) -> int:
    """Logical elements: two in each byte of packed FP4."""
    return math.prod(tensor.shape) * math.prod(tensor.rule.item_extents)


def print_row(kind: str, count: int, plain: float, ours: float) -> None:
    print(f"{kind:<16}{count:>14,}{plain:>10.1f}{ours:>12.1f}{plain / ours:>8.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--repeat", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    plain = dict(recipes(FLASH6, SEED))
    print(f"{arguments.threads} threads, best of {arguments.repeat}; ns per element")
    print(f"{'tensor':<16}{'elements':>14}{'plain':>10}{'v41-loader':>12}{'ratio':>8}")
    with ThreadPoolExecutor(arguments.threads) as pool:
        whole = [0.0, 0.0]
        for dtype, (kind, name) in TENSORS.items():
            tensor = expected_tensor(FLASH6, name)
            quantised = dtype in ("I8", "F8_E4M3")
            transcription = plain[name.removesuffix(".weight") if quantised else name]
            ours = partial(make_all, pool, list(row_bands(tensor)))
            made: Made = transcription()
            if ours() != made[name].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes():
                raise SystemExit(f"{name}: the two sides differ")
            times = [best(call, arguments.repeat) / elements(tensor) * 1e9 for call in (transcription, ours)]
            print_row(kind, elements(tensor), *times)
            of_this_format = sum(elements(t) for t in expected_tensors(FLASH6).values() if t.dtype == dtype)
            whole = [seconds + of_this_format * ns / 1e9 for seconds, ns in zip(whole, times, strict=True)]
    count = sum(elements(t) for t in expected_tensors(FLASH6).values() if t.dtype in TENSORS)
    print_row("FLASH6, so", count, *(seconds / count * 1e9 for seconds in whole))
    print(f"all of FLASH6 at these rates: {whole[0]:.0f} s and {whole[1]:.0f} s")


if __name__ == "__main__":
    main()
