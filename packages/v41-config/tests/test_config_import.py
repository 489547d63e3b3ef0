"""What importing `v41_config` costs: a scheduler plans and lowers batches without torch."""

from __future__ import annotations

import json
import subprocess
import sys

LOWER_A_BATCH = """
import json, sys
before = set(sys.modules)
import v41_config
v41_config.build_forward_metadata(
    v41_config.TINY, [0, 1], [5], [[0]], {1: [[0]], 2: [[0]]}, {2: [[0]], 4: [[0]]}
)
v41_config.ParallelLayout(4, 2).check(v41_config.FLASH)
print(json.dumps(sorted({name.partition(".")[0] for name in set(sys.modules) - before})))
"""

DECLARED = {"v41_config", "numpy", "pydantic"}
HEAVY = {"torch", "pypto", "safetensors", "scipy", "pandas", "matplotlib", "transformers"}
SIBLINGS = {"v41_loader", "v41_goldens", "v41_kernels", "v41_model"}


def test_import_and_use_load_neither_torch_nor_a_sibling() -> None:
    run = subprocess.run([sys.executable, "-c", LOWER_A_BATCH], capture_output=True, text=True, check=True)
    loaded = set(json.loads(run.stdout))
    assert loaded >= DECLARED
    assert loaded.isdisjoint(HEAVY | SIBLINGS)
