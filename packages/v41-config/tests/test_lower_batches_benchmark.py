"""The benchmark runs, its comparison is a comparison, and what a step allocates grows with tokens x window."""

from __future__ import annotations

import dataclasses
import importlib.util
import subprocess
import sys
import tracemalloc
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from v41_config import FLASH, build_forward_metadata

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "lower_batches.py"


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("lower_batches", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_runs_and_prints_a_line_for_every_batch() -> None:
    run = subprocess.run(
        [sys.executable, SCRIPT, "--scale", "256", "--repeats", "2"], capture_output=True, text=True, check=False
    )
    assert (run.returncode, run.stderr) == (0, "")
    assert "decode 32 x 6 at 1M" in run.stdout
    assert "prefill 4096 in 32" in run.stdout
    assert "bytes / (T x window)" in run.stdout


def test_both_lowerings_agree_and_a_changed_element_is_found(benchmark: ModuleType) -> None:
    arguments = benchmark.batch([0, 300, 129], [200, 1, 6])
    ours, other = build_forward_metadata(**arguments), benchmark.lower_per_request(**arguments)
    assert benchmark.differing_fields(ours, other) == []
    window_indices = other.window_indices.copy()
    window_indices[3, 7] += 1
    changed = dataclasses.replace(other, window_indices=window_indices)
    assert benchmark.differing_fields(ours, changed) == ["window_indices"]
    wide = dataclasses.replace(other, compressed_lens={s: a.astype(np.int64) for s, a in other.compressed_lens.items()})
    assert set(benchmark.differing_fields(ours, wide)) == {f"compressed_lens[{s}]" for s in (2, 8, 14, 20)}


def test_the_comparison_suppresses_what_the_lowering_does(benchmark: ModuleType) -> None:
    arguments = benchmark.batch([0, 301, 129], [20, 1, 6])
    disabled = np.array([[0], [-1], [2]], dtype=np.int32)
    arguments["state_block_tables"] = {**arguments["state_block_tables"], 8: disabled}
    ours = build_forward_metadata(**arguments)
    assert benchmark.differing_fields(ours, benchmark.lower_per_request(**arguments)) == []
    assert (ours.compressed_slots[8] < 0).sum() > (ours.compressed_slots[2] < 0).sum()


def test_memory_is_linear_in_tokens_times_window(benchmark: ModuleType) -> None:
    peaks = []
    for tokens in (1024, 2048, 4096):
        arguments = benchmark.batch([0] * 32, [tokens // 32] * 32)
        build_forward_metadata(**arguments)
        tracemalloc.start()
        build_forward_metadata(**arguments)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert peaks[-1] < 8 * tokens * FLASH.sliding_window  # four of them are window_indices
    assert peaks[2] - peaks[1] < 2.1 * (peaks[1] - peaks[0])
