"""`v41-model conform`: find the first layer where somebody's dump differs from the golden."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from torch import Tensor

from v41_config import ModelConfig
from v41_goldens.weights import ModelWeights
from v41_model.atomic_file import atomic_file
from v41_model.replay import replay
from v41_model.tensor_report import Stage, TensorReport, compare
from v41_model.vectors_file import VectorsFile

PASSED, FAILED, NOTHING_TO_REPLAY = 0, 1, 2
"""Exit codes."""

_LAYER_ORDER = (
    "attn_in", "qr", "q", "window_kv", "compressed_latent", "index_k", "compressed_kv", "index_score",
    "candidate_block_score", "candidate_mask", "topk", "sparse_attn_out", "attn_out", "moe_in",
)  # fmt: skip
"""Order in which a layer computes what it stores; names not here come after these, alphabetically."""


def conformance_reports(
    config: ModelConfig, weights: ModelWeights, file: VectorsFile, max_relative_l2: float = 0.0
) -> list[TensorReport]:
    """Layer-local reports in the order of computation, then end-to-end ones."""
    stages: tuple[Stage, Stage] = ("layer-local", "end-to-end")
    return [
        report
        for stage in stages
        for report in stage_reports(
            stage, replay(config, weights, file, layer_local=stage == "layer-local"), file, max_relative_l2
        )
    ]


def stage_reports(
    stage: Stage, computed: dict[str, Tensor], file: VectorsFile, max_relative_l2: float = 0.0
) -> list[TensorReport]:
    """What was computed against what the file holds, in the order of computation."""
    return list(_compared(stage, computed, file, max_relative_l2))


def _compared(
    stage: Stage, computed: dict[str, Tensor], file: VectorsFile, max_relative_l2: float
) -> Iterator[TensorReport]:
    for key in sorted(file.tensors, key=_computation_order):
        stored = file.tensors[key]
        if key == "tokens":
            continue
        if (
            key.endswith(("compressor_kv_state", "compressor_score_state"))
            and key not in computed
            and _has(computed, key)
        ):
            yield TensorReport(stage, key, 0, 0, None, 0.0, True, "no pair is open")
            continue
        if key not in computed:
            continue
        ours = computed[key]
        if key.endswith(".topk"):  # a stored list may be narrower than index_topk where fewer entries exist
            ours, dropped = ours[:, : stored.shape[1]], ours[:, stored.shape[1] :]
            if bool((dropped >= 0).any()):
                yield TensorReport(stage, key, stored.numel(), stored.numel(), None, float("inf"), False,
                                   f"{stored.shape[1]} entries stored, more are visible")  # fmt: skip
                continue
        elif key.endswith(("compressor_kv_state", "compressor_score_state")):
            stored = stored[: ours.shape[0]]  # behind the open token stands whatever an earlier pair left
        yield compare(stage, key, ours, stored, max_relative_l2)


def _has(computed: dict[str, Tensor], key: str) -> bool:
    """Whether the layer of a compressor state compresses at all: a closed pair leaves no state to compare."""
    return key.rpartition(".")[0] + ".compressed_kv" in computed


def steps_of(file: VectorsFile) -> int:
    """Forwards that both stages take together."""
    return 2 * (1 + len(file.decode_tokens))


def not_compared(reports: list[TensorReport], file: VectorsFile) -> list[str]:
    """Keys of the file that the replay has no counterpart for."""
    return sorted(set(file.tensors) - {report.key for report in reports} - {"tokens"})


def _computation_order(key: str) -> tuple[int, int, str]:
    if key == "embed_out":
        return -1, 0, key
    if not key.startswith("layer."):
        return 1 << 20, 0, key
    _, layer, name = key.split(".", 2)
    place = _LAYER_ORDER.index(name) if name in _LAYER_ORDER else len(_LAYER_ORDER) + _late(name)
    return int(layer), place, name


def _late(name: str) -> int:
    """MoE's own tensors before the layer's outputs, caches at the end."""
    if name.startswith("hc_attn"):
        return -len(_LAYER_ORDER) - 1  # computed before attn_in, from the streams alone
    return {"moe_out": 2, "X": 3, "pre_mix": 3}.get(name, 4 if name.endswith(("_ring", "_state")) else 1)


def format_table(reports: Iterable[TensorReport]) -> str:
    """One line per tensor: stage, layer, tensor, elements, mismatches, max ulp, relative L2, verdict."""
    rows = [("stage", "layer", "tensor", "elements", "mismatches", "max ulp", "relative L2", "verdict")]
    for r in reports:
        layer, name = r.key.split(".", 2)[1:] if r.key.startswith("layer.") else ("-", r.key)
        ulp = "-" if r.max_ulp is None else str(r.max_ulp)
        verdict = ("ok" if r.passed else "DIFFERS") + (f": {r.note}" if r.note else "")
        rows.append((r.stage, layer, name, str(r.elements), str(r.mismatches), ulp, f"{r.relative_l2:.3g}", verdict))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    return "\n".join("  ".join([*(c.ljust(w) for c, w in zip(row, widths, strict=False)), row[-1]]) for row in rows)


def summary(reports: list[TensorReport], skipped: int = 0) -> str:
    """One line: all within the rule, or the first tensor that differs, layer-local before end to end."""
    failed = [r for r in reports if not r.passed]
    rest = f"; {skipped} tensors of the file NOT compared" if skipped else ""
    if not reports:
        return f"NOTHING COMPARED{rest}"
    if not failed:
        return f"PASS: {len(reports)} comparisons, {sum(r.elements for r in reports)} elements{rest}"
    first = failed[0]
    where = f"{first.stage} {first.key} ({first.mismatches} of {first.elements} elements)"
    return f"FAIL: {len(failed)} of {len(reports)} comparisons; first: {where}{rest}"


def exit_code(reports: list[TensorReport]) -> int:
    """PASSED if every comparison passed, FAILED if one did not, NOTHING_TO_REPLAY if there was none."""
    if not reports:
        return NOTHING_TO_REPLAY
    return PASSED if all(report.passed for report in reports) else FAILED


def write_json(path: Path, reports: list[TensorReport], skipped: list[str]) -> None:
    """The table as JSON: `{"passed": ..., "reports": [...], "not_compared": [...]}`; written whole or not at all.

    A relative distance that is no finite number is null.
    """
    body = {
        "passed": exit_code(reports) == PASSED,
        "reports": [report.to_json() for report in reports],
        "not_compared": skipped,
    }
    with atomic_file(path) as partial:
        partial.write_text(json.dumps(body, indent=1, allow_nan=False))
