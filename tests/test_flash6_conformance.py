"""FLASH's real dimensions against the released reference: one layer by default, all six in `make conform`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from v41_config import FLASH6, AttentionMode
from v41_goldens import Capture, LayerWeights, ReferenceEngine, block
from v41_goldens.capture import layer_key
from v41_loader import open_checkpoint
from v41_loader.cli import SYNTH_SEEDS
from v41_loader.synth import synthesize_checkpoint, synthesize_tensor, synthesized_tensors
from v41_model.checkpoint_weights import streamed_weights
from v41_model.conform import conformance_reports, not_compared, stage_reports
from v41_model.replay import replay_inputs
from v41_model.vectors_file import VectorsFile, read_vectors


@pytest.fixture(scope="module")
def file(vectors: Path) -> VectorsFile:
    return read_vectors(vectors / "flash6" / "prefill_006.safetensors", FLASH6)


def test_c1a_full_layer(file: VectorsFile) -> None:
    """The layer that compresses, scores, makes candidate blocks and selects, from its stored input."""
    layer = FLASH6.layer_config(3)
    assert layer.mode is AttentionMode.C1A_FULL
    names = [name for name in synthesized_tensors(FLASH6) if name.startswith("layers.3.")]
    weights = LayerWeights.from_tensors(
        FLASH6, 3, {name: synthesize_tensor(FLASH6, SYNTH_SEEDS["flash6"], name) for name in names}
    )
    engine, capture = ReferenceEngine(FLASH6, None, max_tokens=file.rows), Capture()
    context = engine.context([0], [file.rows], capture, replay_inputs(file, FLASH6))
    with torch.inference_mode():
        block(context, layer, weights, file.tensors["layer.02.X"], file.tensors["layer.02.pre_mix"])
    own = {key: value for key, value in file.tensors.items() if key.startswith(layer_key(3, ""))}
    reports = stage_reports("layer-local", capture.tensors, VectorsFile(file.tokens, [], own))
    assert [report for report in reports if not report.passed] == []
    assert {report.key for report in reports} == set(own) - {"layer.03.window_ring"}


@pytest.mark.conform
def test_all_layers(file: VectorsFile, tmp_path: Path) -> None:
    synthesize_checkpoint(FLASH6, SYNTH_SEEDS["flash6"], tmp_path / "flash6")
    with open_checkpoint(tmp_path / "flash6") as checkpoint:
        reports = conformance_reports(FLASH6, streamed_weights(checkpoint), file)
    assert [report for report in reports if not report.passed] == []
    assert not_compared(reports, file) == []
    stages = [report.stage for report in reports if report.key.endswith((".X", "logits"))]
    assert stages.count("layer-local") == stages.count("end-to-end") == FLASH6.num_hidden_layers + 1
