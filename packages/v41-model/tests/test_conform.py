"""`conform` finds and names every kind of difference, and refuses files that do not hold what they promise."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from v41_config import TINY
from v41_goldens import Capture, ModelWeights, ReferenceEngine
from v41_model.cli import main
from v41_model.conform import conformance_reports, exit_code, format_table, not_compared, stage_reports, summary
from v41_model.errors import VectorsError
from v41_model.replay import replay
from v41_model.tensor_report import compare
from v41_model.vectors_file import VectorsFile, read_vectors, replay_keys

TOKENS = [0, 17, 250, 99, 4, 311, 17, 8, 500, 42, 77, 3, 128, 9, 260, 31, 5, 402, 66]
"""19 tokens: an odd count leaves a pair open, and layer 2's and 6's later tokens see a full selection."""


@pytest.fixture(scope="module")
def dump(tiny_weights: ModelWeights) -> dict[str, Tensor]:
    """A full-capture file, as another engine would write it."""
    engine, capture = ReferenceEngine(TINY, tiny_weights, max_tokens=len(TOKENS)), Capture()
    engine.step([(0, TOKENS)], capture)
    tensors = {"tokens": torch.tensor(TOKENS, dtype=torch.int32)} | capture.tensors | engine.state_of(0)
    for key in [k for k in tensors if k.endswith("candidate_mask")]:
        tensors[key] = tensors[key].to(torch.uint8)
    return {key: value.contiguous() for key, value in tensors.items()}


def _changed(value: Tensor) -> Tensor:
    """The last bit of one element in the middle, or another selected entry, flag or id."""
    changed = value.clone()
    flat = changed.view(-1)
    at = flat.numel() // 2
    if value.dtype == torch.uint8:
        flat[at] ^= 1
    elif not value.is_floating_point():
        flat[at] = flat[at] - 1 if int(flat[at]) > 0 else flat[at] + 1
    else:
        bits = flat.view({2: torch.int16, 4: torch.int32}[value.element_size()])
        bits[at] ^= 1
    return changed


KINDS = (
    "embed_out", "final.collapsed", "final.norm_out", "logits", "X", "pre_mix", "attn_in", "attn_out", "moe_in",
    "moe_out", "shared_out", "hc_attn_pre", "hc_attn_post", "hc_attn_comb", "hc_ffn_pre", "hc_ffn_post",
    "hc_ffn_comb", "qr", "q", "window_kv", "window_ring", "sparse_attn_out", "compressed_latent", "compressed_kv",
    "index_k", "index_score", "topk", "candidate_mask", "candidate_block_score", "compressor_kv_state",
    "compressor_score_state", "router_ids", "router_weights", "router_score_plus_bias",
)  # fmt: skip


def test_the_dump_has_every_kind(dump: dict[str, Tensor]) -> None:
    assert {key.split(".", 2)[2] if key.startswith("layer.") else key for key in dump} - {"tokens"} == set(KINDS)


def test_a_correct_dump_passes(dump: dict[str, Tensor], tiny_weights: ModelWeights, tmp_path: Path) -> None:
    save_file(dump, tmp_path / "dump.safetensors")
    file = read_vectors(tmp_path / "dump.safetensors", TINY)
    reports = conformance_reports(TINY, tiny_weights, file)
    assert exit_code(reports) == 0
    assert not_compared(reports, file) == []
    assert "PASS" in summary(reports)


@pytest.mark.parametrize("kind", KINDS)
def test_one_changed_element_is_found_and_named(dump: dict[str, Tensor], tiny_weights: ModelWeights, kind: str) -> None:
    key = next(
        k for k in sorted(dump, reverse=True) if k == kind or (k.endswith("." + kind) and k.startswith("layer."))
    )
    wrong = VectorsFile(TOKENS, [], {**dump, key: _changed(dump[key])})
    reports = stage_reports("layer-local", replay(TINY, tiny_weights, wrong, layer_local=True), wrong)
    failed = [report for report in reports if not report.passed]
    assert failed[0].key == key
    assert failed[0].mismatches == 1
    assert failed[0].max_ulp in (1, None)
    assert exit_code(reports) == 1
    if key not in replay_keys(TINY):
        assert len(failed) == 1  # nothing else starts from it
    layer = key.split(".")[1] if key.startswith("layer.") else "-"
    line = next(line for line in format_table(reports).splitlines() if "DIFFERS" in line)
    assert line.split()[1:3] == [layer, kind]


def test_a_later_layer_starts_from_stored_inputs(dump: dict[str, Tensor], tiny_weights: ModelWeights) -> None:
    """A difference in one layer's result stays there and in the layer that starts from it."""
    wrong = VectorsFile(TOKENS, [], {**dump, "layer.03.X": _changed(dump["layer.03.X"])})
    local = stage_reports("layer-local", replay(TINY, tiny_weights, wrong, layer_local=True), wrong)
    assert {r.key.split(".")[1] for r in local if not r.passed} <= {"03", "04"}
    whole = stage_reports("end-to-end", replay(TINY, tiny_weights, wrong, layer_local=False), wrong)
    assert [r.key for r in whole if not r.passed] == ["layer.03.X"]


def test_a_decode_file(dump: dict[str, Tensor], tiny_weights: ModelWeights) -> None:
    engine = ReferenceEngine(TINY, tiny_weights, max_tokens=len(TOKENS) + 3)
    engine.step([(0, TOKENS)])
    steps = []
    for token in (5, 6, 7):
        capture = Capture()
        engine.step([(0, [token])], capture)
        steps.append(capture.tensors)
    keys = [f"layer.{i:02d}.{name}" for i in (2, 6) for name in ("X", "attn_in", "attn_out", "topk")] + ["logits"]
    tensors = {key: torch.cat([step[key] for step in steps]) for key in keys}
    tensors |= {f"final_state.{key}": value for key, value in engine.state_of(0).items()}
    file = VectorsFile(TOKENS, [5, 6, 7], tensors)
    assert exit_code(conformance_reports(TINY, tiny_weights, file)) == 0
    for key in ("layer.06.attn_out", "final_state.layer.04.compressed_kv", "logits"):
        wrong = VectorsFile(TOKENS, [5, 6, 7], {**tensors, key: _changed(tensors[key])})
        reports = conformance_reports(TINY, tiny_weights, wrong)
        assert next(r.key for r in reports if not r.passed) == key


def test_inputs_of_layers_that_have_none_are_not_injected(
    dump: dict[str, Tensor], tiny_weights: ModelWeights, tmp_path: Path
) -> None:
    """Layer 3 selects nothing and makes no candidates: what a file has under those names is listed, not used."""
    extra = {"layer.03.topk": torch.tensor(0.5), "layer.03.candidate_mask": torch.zeros(3), "layer.77.X": torch.ones(1)}
    save_file({**dump, **extra}, tmp_path / "dump.safetensors")
    file = read_vectors(tmp_path / "dump.safetensors", TINY)
    reports = stage_reports("layer-local", replay(TINY, tiny_weights, file, layer_local=True), file)
    assert exit_code(reports) == 0
    assert not_compared(reports, file) == sorted(extra)


@pytest.mark.parametrize("decode", [False, True])
def test_a_nan_that_reaches_the_logits_is_a_difference(
    dump: dict[str, Tensor], tiny_weights: ModelWeights, decode: bool
) -> None:
    """No token can be chosen then, which must not end the comparison."""
    normed = dump["final.norm_out"][:1].clone() if decode else dump["final.norm_out"].clone()
    normed[-1, 0] = torch.nan
    tensors = {"final.norm_out": normed, "next_token": torch.tensor([1])}
    file = VectorsFile(TOKENS, [5] if decode else [], tensors)
    computed = replay(TINY, tiny_weights, file, layer_local=True)
    assert "next_token" not in computed
    assert ("decode_tokens" in computed) == decode, "the prompt's logits are computed here"
    reports = conformance_reports(TINY, tiny_weights, file)
    assert next(r.key for r in reports if not r.passed) == "final.norm_out"


def test_nothing_compared_is_no_pass() -> None:
    assert summary([]) == "NOTHING COMPARED"
    assert "1 tensors of the file NOT compared" in summary([], 1)


class TestCompare:
    def test_ulp_counts_numbers_in_between(self) -> None:
        a = torch.tensor([1.0, -1.0, 0.0])
        b = torch.tensor([1.0, -1.0 - 2**-23 * 3, 0.0])
        report = compare("layer-local", "x", a, b)
        assert (report.mismatches, report.max_ulp, report.passed) == (1, 3, False)

    def test_signed_zero_differs(self) -> None:
        assert not compare("layer-local", "x", torch.tensor([0.0]), torch.tensor([-0.0])).passed

    def test_nan_equals_nan_only(self) -> None:
        nan = torch.tensor([torch.nan, 1.0])
        assert compare("layer-local", "x", nan, nan.clone()).passed
        report = compare("layer-local", "x", nan, torch.tensor([2.0, 1.0]), max_relative_l2=0.9)
        assert (report.passed, report.max_ulp) == (False, None)

    def test_infinity_against_a_number_is_never_within_a_bound(self) -> None:
        wrong = torch.tensor([torch.inf, 1.0])
        assert not compare("layer-local", "x", wrong, torch.tensor([2.0, 1.0]), max_relative_l2=0.9).passed

    def test_a_bound_accepts_floats_within_it(self) -> None:
        a, b = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.001])
        assert compare("layer-local", "x", a, b, max_relative_l2=1e-2).passed
        assert not compare("layer-local", "x", a, b, max_relative_l2=1e-5).passed

    def test_a_bound_never_accepts_integers(self) -> None:
        assert not compare("layer-local", "x", torch.tensor([1, 2]), torch.tensor([1, 3]), max_relative_l2=0.9).passed

    @pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64, torch.bfloat16, torch.complex64])
    def test_floats_never_pass_for_integers(self, dtype: torch.dtype) -> None:
        ids = torch.tensor([1, 2], dtype=torch.int32)
        for stored in (ids.to(dtype), ids.to(dtype) + 0.5):
            report = compare("layer-local", "router_ids", ids, stored, max_relative_l2=0.9)
            assert (report.mismatches, report.passed) == (2, False)
            assert "computed int64 [2]" in report.note

    @pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
    def test_other_floats_are_not_converted(self, dtype: torch.dtype) -> None:
        assert not compare("layer-local", "x", torch.ones(2), torch.ones(2, dtype=dtype), max_relative_l2=0.9).passed

    def test_masks_and_integers_of_any_width_compare_by_value(self) -> None:
        mask = torch.tensor([True, False])
        for dtype in (torch.uint8, torch.int16, torch.int64):
            assert compare("layer-local", "x", mask, mask.to(dtype)).passed
            assert compare("layer-local", "x", mask, 1 - mask.to(dtype)).mismatches == 2

    def test_json_has_no_infinities(self) -> None:
        nan = torch.tensor([torch.nan, 1.0])
        for report in (compare("layer-local", "x", nan, torch.ones(2)), compare("layer-local", "x", nan, nan[:1])):
            assert json.loads(json.dumps(report.to_json(), allow_nan=False))["relative_l2"] is None

    def test_shape_and_dtype(self) -> None:
        report = compare("layer-local", "x", torch.zeros(2), torch.zeros(3))
        assert not report.passed
        assert "float32 [2]" in report.note
        assert not compare("layer-local", "x", torch.zeros(2), torch.zeros(2).bfloat16()).passed


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"tokens": torch.zeros(0, dtype=torch.int32)}, "tokens"),
        ({"tokens": torch.full((19,), 512, dtype=torch.int32)}, "tokens"),
        ({"tokens": torch.full((19,), -1, dtype=torch.int32)}, "tokens"),
        ({"tokens": torch.zeros(19)}, "tokens"),
        ({"tokens": torch.zeros(19, 1, dtype=torch.int32)}, "tokens"),
        ({"layer.04.X": torch.zeros(19, 4, 255).bfloat16()}, "layer.04.X"),
        ({"layer.04.X": torch.zeros(19, 4, 256)}, "layer.04.X"),
        ({"layer.04.attn_in": torch.zeros(18, 256).bfloat16()}, "layer.04.attn_in"),
        ({"layer.04.topk": torch.full((19, 8), 9, dtype=torch.int32)}, "layer.04.topk"),
        ({"layer.04.topk": torch.full((19, 8), -2, dtype=torch.int32)}, "layer.04.topk"),
        ({"layer.04.topk": torch.full((19, 17), -1, dtype=torch.int32)}, "layer.04.topk"),
        ({"layer.06.candidate_mask": torch.zeros(19, 20, dtype=torch.uint8)}, "layer.06.candidate_mask"),
        ({"decode_tokens": torch.full((3,), 600, dtype=torch.int32)}, "decode_tokens"),
        ({"tokens": torch.zeros(1 << 22, dtype=torch.uint8)}, "tokens"),
        ({"layer.foo": torch.zeros(1)}, "keys"),
        ({"layer.foo.X": torch.zeros(1)}, "keys"),
        ({"layer.0.X": torch.zeros(1)}, "keys"),
        ({"layer.04.": torch.zeros(1)}, "keys"),
        ({"final_state.foo": torch.zeros(1)}, "keys"),
        ({"layer.04.compressor_kv_state": torch.tensor(1.0)}, "layer.04.compressor_kv_state"),
        ({"final_state.layer.04.compressor_score_state": torch.tensor(1.0)}, "final_state.layer.04.compressor_score"),
    ],
)
def test_bad_files_are_refused(dump: dict[str, Tensor], tmp_path: Path, change: dict[str, Tensor], named: str) -> None:
    save_file({**dump, **change}, tmp_path / "bad.safetensors")
    with pytest.raises(VectorsError) as error:
        read_vectors(tmp_path / "bad.safetensors", TINY)
    assert error.value.where.startswith(named)


def test_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "text.safetensors").write_text("not tensors")
    for path in (tmp_path / "text.safetensors", tmp_path / "missing.safetensors", tmp_path):
        with pytest.raises(VectorsError):
            read_vectors(path, TINY)


class TestCommand:
    def test_verdicts_and_exit_codes(
        self, dump: dict[str, Tensor], tiny_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        vectors, out = tmp_path / "dump.safetensors", tmp_path / "report.json"
        arguments = ["conform", "--checkpoint", str(tiny_directory), "--vectors", str(vectors), "--json", str(out)]
        save_file(dump, vectors)
        assert main([*arguments, "--differing"]) == 0
        (verdict,) = capsys.readouterr().out.splitlines()
        assert verdict.startswith("PASS")
        assert main(arguments) == 0
        assert sum(line.endswith(" ok") for line in capsys.readouterr().out.splitlines()) > 400
        assert json.loads(out.read_text())["passed"] is True

        save_file({**dump, "layer.05.moe_out": _changed(dump["layer.05.moe_out"])}, vectors)
        assert main([*arguments, "--differing"]) == 1
        *table, verdict = capsys.readouterr().out.splitlines()
        assert "first: layer-local layer.05.moe_out (1 of" in verdict
        assert len(table) < 12
        assert all("DIFFERS" in line for line in table[1:])
        body = json.loads(out.read_text())
        assert body["passed"] is False
        first = next(report for report in body["reports"] if not report["passed"])
        assert (first["key"], first["mismatches"], first["max_ulp"]) == ("layer.05.moe_out", 1, 1)

        save_file({key: dump[key] for key in ("tokens", "logits", "layer.02.topk")}, vectors)
        out.unlink()
        assert main(arguments) == 2
        assert "nothing to replay" in capsys.readouterr().err
        assert not out.exists()

    def test_a_request_of_forward_is_replayed(
        self, tiny_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """With decode steps behind it, of several, to the bit; a changed element is found; a file needs a choice."""
        requests, vectors = tmp_path / "requests.json", tmp_path / "out.safetensors"
        requests.write_text('{"requests": [[0, 17, 42], [0, 99]]}')
        written = ["--requests", str(requests), "--tp", "2", "--decode", "3", "--capture", "layers"]
        assert main(["forward", "--checkpoint", str(tiny_directory), *written, "--out", str(vectors)]) == 0
        arguments = ["conform", "--checkpoint", str(tiny_directory), "--vectors", str(vectors), "--differing"]
        for request in ("0", "1"):
            capsys.readouterr()
            assert main([*arguments, "--request", request, "--max-relative-l2", "0.01"]) == 0
            assert capsys.readouterr().out.splitlines()[-1].startswith("PASS")
        for choice, said in (([], "chosen with --request"), (["--request", "2"], "one of the file's requests, [0, 1]")):
            assert main([*arguments, *choice]) == 2
            assert said in capsys.readouterr().err
        tensors = load_file(vectors)
        tensors["request.1.layer.05.moe_out"] = -tensors["request.1.layer.05.moe_out"]
        save_file(tensors, vectors)
        assert main([*arguments, "--request", "1", "--max-relative-l2", "0.01"]) == 1
        assert "first: layer-local layer.05.moe_out" in capsys.readouterr().out

    def test_unknown_tensors_are_listed(
        self, dump: dict[str, Tensor], tiny_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        save_file({**dump, "layer.01.mystery": torch.zeros(1)}, tmp_path / "dump.safetensors")
        vectors = str(tmp_path / "dump.safetensors")
        assert main(["conform", "--checkpoint", str(tiny_directory), "--vectors", vectors]) == 0
        out = capsys.readouterr().out
        assert "not compared: layer.01.mystery" in out
        assert "1 tensors of the file NOT compared" in out.splitlines()[-1]

    def test_a_file_of_layers_the_model_has_not(
        self, dump: dict[str, Tensor], tiny_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        save_file({"tokens": dump["tokens"], "layer.77.X": dump["layer.07.X"]}, tmp_path / "dump.safetensors")
        vectors = str(tmp_path / "dump.safetensors")
        assert main(["conform", "--checkpoint", str(tiny_directory), "--vectors", vectors]) == 2
        assert "nothing to replay" in capsys.readouterr().err

    def test_a_full_disk_is_one_error(self, dump: dict[str, Tensor], tiny_directory: Path, tmp_path: Path) -> None:
        vectors = tmp_path / "dump.safetensors"
        save_file({key: dump[key] for key in ("tokens", "layer.09.X", "logits")}, vectors)
        command = [sys.executable, "-m", "v41_model", "conform"]
        with open("/dev/full", "w") as full:
            done = subprocess.run(
                [*command, "--checkpoint", str(tiny_directory), "--vectors", str(vectors)],
                stdout=full, stderr=subprocess.PIPE, text=True, check=False,
            )  # fmt: skip
        errors = [line for line in done.stderr.splitlines() if "replay:" not in line]
        assert done.returncode == 2
        assert len(errors) == 1, done.stderr
        assert "standard output" in errors[0]

    def test_a_bad_bound(self, tiny_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
        options = ["--vectors", "none.safetensors", "--max-relative-l2", "1.5"]
        assert main(["conform", "--checkpoint", str(tiny_directory), *options]) == 2
        assert "--max-relative-l2" in capsys.readouterr().err


def test_a_pipe_is_no_vectors_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(VectorsError, match="expected a regular file"):
        read_vectors(tmp_path / "pipe", TINY)


def test_a_name_that_no_file_can_have(tmp_path: Path) -> None:
    with pytest.raises(VectorsError, match="expected a readable safetensors file, found"):
        read_vectors(tmp_path / ("x" * 300), TINY)
