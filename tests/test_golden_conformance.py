"""The golden against every vectors file of TINY: layer-local, selections, and end to end, to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from v41_config import TINY
from v41_goldens import ModelWeights
from v41_model.conform import conformance_reports, not_compared, stage_reports
from v41_model.replay import replay
from v41_model.tensor_report import TensorReport
from v41_model.vectors_file import read_vectors

OPEN_PAIRS = {"layer.02.compressor_kv_state", "layer.04.compressor_score_state"}


def _differences(reports: list[TensorReport]) -> list[TensorReport]:
    return [report for report in reports if not report.passed]


@pytest.mark.parametrize("tokens", [1, 2, 17, 33, 64, 97])
def test_prefill_end_to_end(vectors: Path, tiny_weights: ModelWeights, tokens: int) -> None:
    file = read_vectors(vectors / f"prefill_{tokens:03d}.safetensors", TINY)
    computed = replay(TINY, tiny_weights, file, layer_local=False)
    reports = stage_reports("end-to-end", computed, file)
    assert _differences(reports) == []
    assert not_compared(reports, file) == []
    compared = {report.key for report in reports}
    assert {"embed_out", "final.norm_out", "logits", "logits_last", "layer.09.router_ids"} <= compared


@pytest.mark.parametrize("name", ["prefill_097", "decode_097_ownkeys"])
def test_layer_local_and_end_to_end(vectors: Path, tiny_weights: ModelWeights, name: str) -> None:
    file = read_vectors(vectors / f"{name}.safetensors", TINY)
    reports = conformance_reports(TINY, tiny_weights, file)
    assert _differences(reports) == []
    assert not_compared(reports, file) == []
    local = {report.key for report in reports if report.stage == "layer-local"}
    for layer in range(TINY.num_hidden_layers):
        assert {f"layer.{layer:02d}.{part}" for part in ("attn_in", "attn_out", "moe_in", "moe_out", "X")} <= local
    prefix = "final_state." if file.decode_tokens else ""
    assert {prefix + key for key in OPEN_PAIRS} <= local
    selections = {f"layer.{layer:02d}.topk" for layer in TINY.index_source_layer_ids} | {"layer.06.candidate_mask"}
    assert selections <= local
