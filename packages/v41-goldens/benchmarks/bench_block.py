"""Speed of one block at the released model's dimensions: exact, fast, and a plain transcription in FP32.

C2A Full, one prompt, eight experts. All sides run in turn, in one process, on the same packed weights; the best of N
runs counts. Beside each stands its distance from the exact one, for the record: fast arithmetic is judged sublayer by
sublayer, from the same inputs (tests/test_fast_arithmetic.py), since a block adds up what its choices of experts do.

    python bench_block.py [--tokens 64] [--repeats 7] [--threads 2]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from v41_config import FLASH6, AttentionMode
from v41_goldens import ReferenceEngine, block, rope_tables
from v41_goldens.fast_weights import fast_layer
from v41_goldens.fixtures.random_layer import random_layer
from v41_goldens.rope import materialize_rope_rows

sys.path.insert(0, str(Path(__file__).parent))

from baselines.plain_fp32_block import plain_block

Streams = tuple[Tensor, Tensor]


def sides(tokens: int) -> dict[str, Callable[[], Streams]]:
    """The block of each arithmetic, on the same weights and streams."""
    layer = next(layer for layer in FLASH6.layers if layer.mode is AttentionMode.C2A_FULL)
    weights = random_layer(FLASH6, layer.layer_id)
    generator = torch.Generator().manual_seed(0)
    x_hc = torch.randn(tokens, FLASH6.hc_mult, FLASH6.hidden_size, generator=generator).bfloat16()
    pre_mix = torch.rand(tokens, FLASH6.hc_mult, generator=generator)
    rope = materialize_rope_rows(*rope_tables(FLASH6, tokens)["compressed"], torch.arange(tokens), tokens)

    def golden(fast: bool) -> Callable[[], Streams]:
        engine = ReferenceEngine(FLASH6, None, 1, tokens, fast=fast)
        own = fast_layer(weights) if fast else weights

        def run() -> Streams:
            engine.release(0)
            return block(engine.context([0], [tokens]), layer, own, x_hc, pre_mix)

        return run

    return {
        "exact": golden(fast=False),
        "fast": golden(fast=True),
        "plain FP32": lambda: plain_block(FLASH6, weights, x_hc, pre_mix, rope),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"torch {torch.__version__}, {options.threads} threads, {options.tokens} tokens, best of {options.repeats}")
    runs = sides(options.tokens)
    best = dict.fromkeys(runs, float("inf"))
    outputs: dict[str, Streams] = {}
    with torch.inference_mode():
        for repeat in range(options.repeats + 1):  # the first is not counted
            for name, run in runs.items():
                start = time.perf_counter()
                outputs[name] = run()
                if repeat:
                    best[name] = min(best[name], time.perf_counter() - start)
    exact = outputs["exact"][0].double()
    for name, seconds in best.items():
        distance = float((outputs[name][0].double() - exact).norm() / exact.norm())
        print(f"{name:12}{seconds:9.3f} s   relative L2 distance from exact {distance:.4f}")
    print(f"fast is {best['plain FP32'] / best['fast']:.2f} times as fast as plain FP32 (wanted: 3)")
    print(f"exact takes {best['exact'] / best['fast']:.2f} times as long as fast (allowed: 12)")


if __name__ == "__main__":
    main()
