"""Times `build_forward_metadata` against a per-request lowering, and measures what it allocates.

For each batch: the best and the median of N runs, the comparison's best with and without its checks, and how many
times faster the lowering is. Both must agree in every field, or the benchmark fails. Peak memory is `tracemalloc`'s
over one call, its inputs not counted, for steps of growing size.

usage: lower_batches.py [--repeats N] [--scale 1]     --scale divides contexts and tokens, for a quick look
"""

from __future__ import annotations

import argparse
import dataclasses
import platform
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from v41_config import BLOCK_ROWS, FLASH, ForwardMetadata, SourceTokens, blocks_for_tokens, build_forward_metadata

sys.path.insert(0, str(Path(__file__).parent))

from baselines.per_request_lowering import lower_per_request

Array = npt.NDArray[Any]
Arguments = dict[str, Any]


def batch(stored: Sequence[int], rows: Sequence[int], seed: int = 0) -> Arguments:
    """A FLASH batch: INT32 tables of shuffled blocks, as an engine that freed the pages behind its windows has them."""
    kv_seq_lens, query_lens = np.array(stored), np.array(rows)
    new_lens = kv_seq_lens + query_lens
    random = np.random.default_rng(seed)

    def table(ratio: int) -> Array:
        pages = max(1, *(blocks_for_tokens(SourceTokens(int(n)), ratio) for n in new_lens))
        blocks = random.permutation(len(stored) * pages).astype(np.int32).reshape(len(stored), pages)
        return np.where(np.arange(pages) * BLOCK_ROWS < (new_lens // ratio)[:, None], blocks, np.int32(-1))

    window = table(1)
    behind = (np.arange(window.shape[1]) + 1) * BLOCK_ROWS <= (kv_seq_lens - FLASH.sliding_window + 1)[:, None]
    state = random.permutation(len(stored)).astype(np.int32)[:, None]
    return {
        "config": FLASH,
        "query_start_loc": np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32),
        "kv_seq_lens": kv_seq_lens.astype(np.int32),
        "window_block_table": np.where(behind, np.int32(-1), window),
        "compressed_block_tables": {ratio: table(ratio) for ratio in (1, 2)},
        "state_block_tables": dict.fromkeys((2, 8, 14), state),
    }


def ragged(total: int, parts: int, seed: int = 0) -> list[int]:
    """`total` cut at random into `parts` positive lengths."""
    cuts = np.sort(np.random.default_rng(seed).choice(np.arange(1, total), parts - 1, replace=False))
    return [int(part) for part in np.diff(np.concatenate([[0], cuts, [total]]))]


def batches(scale: int) -> dict[str, tuple[Arguments, float | None]]:
    """Name: the batch, and the milliseconds it may take."""
    limit = FLASH.max_position_embeddings // scale
    tokens = max(64, 4096 // scale)
    contexts = np.linspace(limit // 64, limit - 6, 32).astype(int).tolist()
    return {
        "decode 32 x 6 at 1M": (batch([limit - 6] * 32, [6] * 32), 1.0),
        "decode 32 x 6, 16K to 1M": (batch(contexts, [6] * 32), 1.0),
        "decode 32 x 1 at 4K": (batch([max(256, 4096 // scale)] * 32, [1] * 32), None),
        "prefill 4096 in 32": (batch([0] * 32, ragged(tokens, 32)), 5.0),
        "prefill 4096 in 1": (batch([0], [tokens]), None),
        "chunk 4096 in 1 behind 512K": (batch([limit // 2], [tokens]), None),
        "mixed 31 x 6 at 64K + 3910": (batch([limit // 16] * 31 + [0], [6] * 31 + [max(1, tokens - 186)]), None),
    }


def fields(metadata: ForwardMetadata[Array]) -> dict[str, Array]:
    """Every array by name, `name[source]` where there are several."""
    found: dict[str, Array] = {}
    for field in dataclasses.fields(metadata):
        value = getattr(metadata, field.name)
        if isinstance(value, dict):
            found.update({f"{field.name}[{source}]": array for source, array in value.items()})
        else:
            found[field.name] = value
    return found


def differing_fields(ours: ForwardMetadata[Array], other: ForwardMetadata[Array]) -> list[str]:
    """Names of the fields whose dtype, shape or values differ."""
    a, b = fields(ours), fields(other)
    return sorted(a.keys() ^ b.keys()) + [
        name for name in a.keys() & b.keys() if a[name].dtype != b[name].dtype or not np.array_equal(a[name], b[name])
    ]


def milliseconds(call: Callable[[], object], repeats: int) -> list[float]:
    """`repeats` single calls, after one that is not counted."""
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - start))
    return times


def peak_bytes(call: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def compare_speed(scale: int, repeats: int) -> list[str]:
    """Print the table; the names of batches in which the two lowerings disagree."""
    wrong = []
    print(f"{'batch':29}{'T':>6}{'best ms':>9}{'median':>8}{'may take':>10}   per request, ms: {'checked':>8}{'not':>8}"
          f"   times faster: {'checked':>8}{'not':>7}")  # fmt: skip
    for name, (arguments, target) in batches(scale).items():
        different = differing_fields(build_forward_metadata(**arguments), lower_per_request(**arguments))
        wrong += [f"{name}: {', '.join(different)}"] if different else []
        ours = milliseconds(partial(build_forward_metadata, **arguments), repeats)
        others = [
            min(milliseconds(partial(lower_per_request, **arguments, checks=checks), max(2, repeats // 6)))
            for checks in (True, False)
        ]
        best = min(ours)
        print(f"{name:29}{arguments['query_start_loc'][-1]:6}{best:9.3f}{statistics.median(ours):8.3f}"
              f"{'' if target is None else f'< {target:.0f}':>10}{others[0]:28.1f}{others[1]:8.1f}"
              f"{others[0] / best:25.1f}{others[1] / best:7.1f}", flush=True)  # fmt: skip
    return wrong


def measure_memory(scale: int) -> None:
    print(f"\n{'prefill in 32 requests: T':29}{'peak MB':>9}{'bytes / (T x window)':>22}")
    for tokens in (1024, 2048, 4096, 8192, 16384):
        size = max(64, tokens // scale)
        arguments = batch([0] * 32, ragged(size, 32))
        build_forward_metadata(**arguments)  # imports and caches of the first call are not the step's
        peak = peak_bytes(partial(build_forward_metadata, **arguments))
        print(f"{size:29}{peak / 1e6:9.2f}{peak / (size * FLASH.sliding_window):22.2f}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=300)
    parser.add_argument("--scale", type=int, default=1)
    options = parser.parse_args()
    print(f"Python {platform.python_version()}, NumPy {np.__version__}, {platform.machine()}; {options.repeats} runs")
    wrong = compare_speed(options.scale, options.repeats)
    measure_memory(options.scale)
    for line in wrong:
        print(f"differs: {line}", file=sys.stderr)
    return len(wrong)


if __name__ == "__main__":
    sys.exit(main())
