"""Speed of MXFP4 dequantisation and MXFP8 quantisation against torchao and the stacked-nibble form.

An expert's matrix, in the tiles in which it is multiplied, and whole; all sides in turn, the best of N runs. What
they give must agree to the bit.

    python bench_number_formats.py [--repeats 15] [--threads 2]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from v41_config import FLASH
from v41_goldens.number_formats import e2m1_times_e8m0
from v41_goldens.quantisers import quantize_activation
from v41_goldens.quantized_weights import Fp4Weight
from v41_goldens.row_tiles import weight_rows_at_once

sys.path.insert(0, str(Path(__file__).parent))

from baselines.stacked_nibbles import dequantize_stacked
from baselines.torchao_mx import torchao_mx


def best_seconds(sides: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Each side in turn; the first round is not counted."""
    best = dict.fromkeys(sides, float("inf"))
    for repeat in range(repeats + 1):
        for name, run in sides.items():
            start = time.perf_counter()
            run()
            if repeat:
                best[name] = min(best[name], time.perf_counter() - start)
    return best


def report(title: str, best: Mapping[str, float], elements: int, wanted: Mapping[str, float]) -> None:
    ours = best["ours"]
    print(f"\n{title}")
    for name, seconds in best.items():
        against = "" if name == "ours" else f"   ours is {seconds / ours:5.1f} times as fast"
        target = f" (wanted: {wanted[name]:g})" if name in wanted else ""
        print(f"  {name:16}{1e3 * seconds:9.2f} ms {elements / seconds / 1e9:8.2f} G elements/s{against}{target}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    peer, dequantize, quantize = torchao_mx()
    print(f"torch {torch.__version__}, {options.threads} threads, best of {options.repeats}; torchao: {peer}")
    generator = torch.Generator().manual_seed(0)
    n, k = FLASH.moe_intermediate_size, FLASH.hidden_size
    packed = torch.randint(-128, 128, (n, k // 2), dtype=torch.int8, generator=generator)
    scale = torch.randint(116, 124, (n, k // 32), dtype=torch.uint8, generator=generator).view(torch.float8_e8m0fnu)
    weight, tile_rows = Fp4Weight(packed, scale), weight_rows_at_once(k)
    x = torch.randn(4096, k, generator=generator).bfloat16()

    bf16, failed = torch.bfloat16, 0
    expected = weight.dequantize(bf16)
    for name, found in (
        ("stacked nibbles", dequantize_stacked(packed, scale, bf16)),
        ("torchao", dequantize(packed, scale, bf16)),
    ):
        if not torch.equal(found, expected):
            print(f"{name}: another dequantisation", file=sys.stderr)
            failed += 1
    codes, scales = quantize(x)
    ours = quantize_activation(x)
    if not (
        torch.equal(codes.view(torch.uint8), ours.payload.view(torch.uint8))
        and torch.equal(scales.reshape(ours.scale.shape).view(torch.uint8), ours.scale.view(torch.uint8))
    ):
        print("torchao: another quantisation", file=sys.stderr)
        failed += 1

    def in_tiles(form: Callable[[Tensor, Tensor, torch.dtype], Tensor]) -> Callable[[], object]:
        """Each tile is given up before the next one is made, as where tiles are multiplied."""
        parts = list(zip(packed.split(tile_rows), scale.split(tile_rows), strict=True))

        def run() -> None:
            for part, own in parts:
                form(part, own, bf16)

        return run

    def our_tiles() -> None:
        rows = weight.decoder(bf16)
        for start in range(0, n, tile_rows):
            rows(start, start + tile_rows)

    wanted = {"torchao": 10.0, "stacked nibbles": 6.0}
    forms: dict[str, Callable[[Tensor, Tensor, torch.dtype], Tensor]] = {
        "ours": e2m1_times_e8m0,
        "torchao": dequantize,
        "stacked nibbles": dequantize_stacked,
    }
    tiles: dict[str, Callable[[], object]] = {"ours": our_tiles} | {
        name: in_tiles(form) for name, form in forms.items() if name != "ours"
    }
    tiles_best = best_seconds(tiles, options.repeats)
    report(f"MXFP4 [{n}, {k}] to BF16 in tiles of {tile_rows} rows", tiles_best, n * k, wanted)
    whole = best_seconds({name: lambda f=form: f(packed, scale, bf16) for name, form in forms.items()}, options.repeats)  # type: ignore[misc]
    report("MXFP4, the whole matrix at once", whole, n * k, wanted)
    quantisers: dict[str, Callable[[], object]] = {
        "ours": lambda: quantize_activation(x),
        "torchao": lambda: quantize(x),
    }
    report(f"BF16 [4096, {k}] to MXFP8", best_seconds(quantisers, options.repeats), x.numel(), {"torchao": 2.0})
    rows = x[:64].contiguous()
    quantisers = {"ours": lambda: quantize_activation(rows), "torchao": lambda: quantize(rows)}
    report(f"BF16 [64, {k}] to MXFP8", best_seconds(quantisers, options.repeats), rows.numel(), {"torchao": 2.0})
    return failed


if __name__ == "__main__":
    sys.exit(main())
