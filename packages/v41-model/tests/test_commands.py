"""The commands as a user runs them: tokens on stdout, files whole or absent, bad input in one line and exit code 2."""

from __future__ import annotations

import argparse
import json
import os
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from v41_config import FLASH, TINY, ModelConfig, ParallelLayout
from v41_goldens.capture import Capture
from v41_goldens.hyper_connections import mhc_pre
from v41_goldens.reference_engine import ReferenceEngine
from v41_goldens.rms_norm import rms_norm
from v41_goldens.weights import ModelWeights
from v41_loader import Checkpoint, expected_tensors
from v41_loader.inventory import NOT_COMPARABLE
from v41_loader.torch_dtypes import TORCH_DTYPES
from v41_model.atomic_file import atomic_file, require_writable
from v41_model.cli import main
from v41_model.errors import OutputError, RequestError
from v41_model.local_world import LocalWorld
from v41_model.request_file import read_request_file
from v41_model.world_options import add_world_options, opened_world

PROMPTS = [[0, 9, 8, 7, 6], [5], [0, 3, 4]]


@pytest.fixture
def requests_file(tmp_path: Path) -> Path:
    path = tmp_path / "requests.json"
    path.write_text(json.dumps({"requests": PROMPTS}))
    return path


@pytest.fixture(scope="module")
def engram_directory(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Checkpoint) -> Path:
    """TINY with an Engram of zeros, which text inference here leaves out."""
    assert FLASH.engram is not None
    engram = FLASH.engram.model_copy(update={"layer_ids": (1, 4), "num_embeddings": (96, 100)})
    config = ModelConfig.model_validate({**dict(TINY), "engram": engram})
    directory = tmp_path_factory.mktemp("checkpoints") / "engram"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config.to_released_json()))
    tensors = {}
    for name, expected in expected_tensors(config).items():
        known = name in tiny_checkpoint.inventory.tensors
        zeros = torch.zeros(expected.shape).to(TORCH_DTYPES[expected.dtype])
        tensors[name] = tiny_checkpoint.tensor(name) if known else zeros
    save_file(tensors, directory / "model.safetensors")
    return directory


def test_generate_prints_the_goldens_tokens_as_they_come(
    tiny_directory: Path, tiny_weights: ModelWeights, requests_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--checkpoint", str(tiny_directory), "--requests", str(requests_file), "--max-new-tokens", "2"]
    golden = [ReferenceEngine(TINY, tiny_weights).generate(0, prompt, 2) for prompt in PROMPTS]
    lines = [f"request {i}: {golden[i][step]}" for step in range(2) for i in range(3)]
    lines += [f"request {i} done: {a} {b}" for i, (a, b) in enumerate(golden)]
    for layout in (["--tp", "4", "--dp", "2"], ["--tp", "2", "--threads", "1"], []):
        assert main(["generate", *options, *layout]) == 0
        assert capsys.readouterr().out.splitlines() == lines


def test_generate_stops_at_eos_only_if_asked(
    tiny_directory: Path, requests_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--checkpoint", str(tiny_directory), "--requests", str(requests_file), "--max-new-tokens", "2"]
    monkeypatch.setattr("v41_model.sampling.greedy_tokens", lambda logits: torch.full((len(logits),), 1))
    main(["generate", *options])
    assert capsys.readouterr().out.endswith("request 2 done: 1 1\n")
    main(["generate", *options, "--stop-at-eos"])
    assert capsys.readouterr().out.endswith("request 2 done: 1\n")


def test_sampling_follows_its_seed(
    tiny_directory: Path, requests_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--checkpoint", str(tiny_directory), "--requests", str(requests_file), "--max-new-tokens", "3"]
    outputs = []
    for more in (
        ["--seed", "5"],
        ["--seed", "5", "--sequences", "1", "--dp", "2"],
        ["--seed", "6"],
        ["--top-p", "1e-9"],
    ):
        assert main(["generate", *options, "--no-stream", "--temperature", "1.5", *more]) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1], "company and layout change nothing"
    assert len(set(outputs)) == 3
    assert main(["generate", *options, "--no-stream"]) == 0
    assert capsys.readouterr().out == outputs[3], "the likeliest token alone is greedy"
    wrong = {"--temperature": "-1", "--top-p": "0", "--seed": "-1", "--sequences": "0", "--stop-id": "512"}
    for option, value in wrong.items():
        assert main(["generate", *options, option, value]) == 2
        assert option.strip("-").replace("-", "_") in capsys.readouterr().err


@pytest.mark.parametrize("option", [["--backend", "gloo"], ["--timeout", "60"]])
def test_options_of_torchrun_are_refused_without_it(
    option: list[str], tiny_directory: Path, requests_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--checkpoint", str(tiny_directory), "--requests", str(requests_file), "--max-new-tokens", "2"]
    for command in (["generate", *options], ["traffic", "--tp", "2"]):
        assert main([*command, *option]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"v41-model: {option[0]}: expected torchrun")


@pytest.mark.parametrize(
    ("options", "expected"),
    [([], ("gloo", 600.0)), (["--backend", "nccl", "--timeout", "0"], ("nccl", 0.0))],
)
def test_options_of_torchrun_reach_its_world(
    options: list[str], expected: tuple[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A timeout of 0 too, which the world then refuses."""
    given = []

    def world(layout: ParallelLayout, backend: str, *, timeout: float) -> nullcontext[LocalWorld]:
        given.append((backend, timeout))
        return nullcontext(LocalWorld(layout))

    monkeypatch.setattr("v41_model.world_options.distributed.is_torchelastic_launched", lambda: True)
    monkeypatch.setattr("v41_model.world_options.TorchDistributedWorld", world)
    parser = argparse.ArgumentParser()
    add_world_options(parser)
    with opened_world(parser.parse_args(options), ParallelLayout()):
        assert given == [expected]


def test_the_speed_is_told_at_the_end(
    tiny_directory: Path, requests_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--checkpoint", str(tiny_directory), "--requests", str(requests_file), "--max-new-tokens", "2"]
    assert main(["generate", *options]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"v41-model: 6 tokens in \d+\.\d\d s, \d+\.\d tokens/s, prompts of 9 tokens included", line)


def test_swapped_operators_are_reported(
    tiny_directory: Path,
    requests_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Provider:
        factor = 1.0

        def names(self) -> list[str]:
            return ["rms_norm"]

        def run(self, name: str, arguments: dict[str, Any], /) -> None:
            exact = rms_norm(arguments["x"], arguments["weight"], arguments["eps"])
            arguments["out"].copy_(exact * self.factor)

    monkeypatch.setattr("v41_model.swap.find_provider", lambda name: Provider())
    shared = ["--checkpoint", str(tiny_directory), "--requests", str(requests_file), "--swap", "rms_norm=mine"]
    assert main(["generate", *shared, "--max-new-tokens", "2"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "swap: every bit is the golden's"
    forward = ["forward", *shared, "--out", str(tmp_path / "out"), "--tp", "2", "--decode", "1", "--compare-logits"]
    assert main([*forward, "--dp", "2", "--wiring", "both"]) == 0
    assert re.fullmatch(
        r"logits beside the goldens': accepted; 12 positions: cosine 1\.0+ minimum, 1\.0+ median; "
        "the best token is the golden's at 12",
        capsys.readouterr().out.splitlines()[-1],
    )
    Provider.factor = 1.5
    assert main(forward) == 1
    lines = capsys.readouterr().out.splitlines()
    assert re.match(r"logits beside the goldens': \d+ positions with a cosine below 0.98, first at ", lines[-1])
    assert any("swap: first difference: layer 0 rms_norm out (call 1, rank 0" in line for line in lines)
    assert main([word for word in forward if word not in ("--swap", "rms_norm=mine")]) == 2
    assert "--compare-logits: expected operators of a provider" in capsys.readouterr().err
    assert main(["generate", *shared, "--max-new-tokens", "2", "--swap", "rms_norm=other"]) == 2
    assert "rms_norm twice" in capsys.readouterr().err
    assert main(["generate", *shared, "--max-new-tokens", "2", "--tp", "2", "--swap", "moe=mine"]) == 2
    assert "swap moe: expected one" in capsys.readouterr().err


def test_operators_that_nothing_called_are_named(
    tiny_directory: Path, requests_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of another phase, beside one that is called."""

    class Provider:
        def names(self) -> list[str]:
            return ["mhc_pre", "decode_swa_sharded"]

        def run(self, name: str, arguments: dict[str, Any], /) -> None:
            arguments["out"].copy_(mhc_pre(arguments["x_hc"], arguments["pre_mix"]))

    monkeypatch.setattr("v41_model.swap.find_provider", lambda name: Provider())
    options = ["--checkpoint", str(tiny_directory), "--requests", str(requests_file), "--max-new-tokens", "1"]
    assert main(["generate", *options, "--swap", "mhc_pre,decode_swa_sharded=mine"]) == 0
    first, calls, verdict = [line for line in capsys.readouterr().out.splitlines() if line.startswith("swap: ")]
    assert first == "swap: not called (part of a larger one, or of another phase or wiring): decode_swa_sharded"
    assert calls.startswith("swap: mhc_pre out: ")
    assert verdict == "swap: every bit is the golden's"
    assert main(["generate", *options, "--swap", "decode_swa_sharded=mine"]) == 1, "nothing was judged"


def _forward(directory: Path, requests: Path, out: Path, *options: str) -> dict[str, Tensor]:
    arguments = ["--checkpoint", str(directory), "--requests", str(requests), "--out", str(out), *options]
    assert main(["forward", *arguments]) == 0
    return load_file(out)


def test_forward_writes_the_goldens_logits(
    tiny_directory: Path, tiny_weights: ModelWeights, requests_file: Path, tmp_path: Path
) -> None:
    tensors = _forward(tiny_directory, requests_file, tmp_path / "out", "--tp", "4", "--dp", "2", "--decode", "2")
    parts = ("tokens", "logits", "decode_tokens", "decode_logits")
    assert set(tensors) == {f"request.{i}.{part}" for i in range(3) for part in parts}
    for i, prompt in enumerate(PROMPTS):
        engine = ReferenceEngine(TINY, tiny_weights)
        logits = [engine.step([(0, prompt)]).logits]
        fed = [int(logits[0][-1].argmax())]
        logits.append(engine.step([(0, fed)]).logits)
        fed.append(int(logits[1][-1].argmax()))
        logits.append(engine.step([(0, fed[1:])]).logits)
        assert tensors[f"request.{i}.tokens"].tolist() == prompt
        assert tensors[f"request.{i}.tokens"].dtype == tensors[f"request.{i}.decode_tokens"].dtype == torch.int32
        assert torch.equal(tensors[f"request.{i}.logits"], logits[0])
        assert tensors[f"request.{i}.decode_tokens"].tolist() == fed
        assert torch.equal(tensors[f"request.{i}.decode_logits"], torch.cat(logits[1:]))


def test_forward_without_decode_has_no_decode_keys(tiny_directory: Path, requests_file: Path, tmp_path: Path) -> None:
    tensors = _forward(tiny_directory, requests_file, tmp_path / "out")
    assert set(tensors) == {f"request.{i}.{part}" for i in range(3) for part in ("tokens", "logits")}


def test_forward_layers_are_the_goldens_in_packed_order(
    tiny_directory: Path, tiny_weights: ModelWeights, requests_file: Path, tmp_path: Path
) -> None:
    tensors = _forward(tiny_directory, requests_file, tmp_path / "out", "--tp", "4", "--capture", "layers")
    golden = Capture()
    ReferenceEngine(TINY, tiny_weights).step([(0, PROMPTS[0])], golden)
    own = {k.removeprefix("request.0."): t for k, t in tensors.items() if k.startswith("request.0.")}
    assert set(golden.tensors) <= set(own)
    for key in ("layer.02.q", "layer.05.X", "layer.02.compressed_kv", "layer.07.router_ids", "final.norm_out"):
        assert torch.equal(own[key], golden.tensors[key]), key
    assert own["layer.02.topk"].tolist() == [[-1, -1], [0, -1], [0, -1], [0, 1], [0, 1]], "logical entries"


def test_one_line_and_exit_code_2(
    tiny_directory: Path, requests_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.safetensors"
    good = {"--checkpoint": str(tiny_directory), "--requests": str(requests_file), "--out": str(out)}
    bad = tmp_path / "bad.json"
    bad.write_text('{"requests": [[3, 600]]}')
    for change, pattern in (
        ({"--requests": str(bad)}, "requests[0][1]: expected 0 <= token id < vocab_size = 512, found 600"),
        ({"--requests": str(tmp_path / "none.json")}, "none.json"),
        ({"--checkpoint": str(tmp_path / "none")}, "none"),
        ({"--tp": "3"}, "tp: expected a divisor of num_attention_heads = 8, found 3"),
        ({"--threads": "0"}, "--threads: expected 1 to 1024"),
        ({"--threads": "1025"}, "--threads: expected 1 to 1024"),
        ({"--dp": "0"}, "dp: expected a size of at least 1"),
        ({"--decode": "-1"}, "decode: expected at least 0"),
        ({"--out": str(tmp_path)}, "the name of a file"),
        ({"--out": str(tmp_path / "no" / "out")}, "no directory"),
    ):
        arguments = [word for pair in {**good, **change}.items() for word in pair]
        assert main(["forward", *arguments]) == 2
        error = capsys.readouterr().err
        assert pattern in error
        assert error.count("\n") == 1
    assert not out.exists()


def test_a_failure_while_writing_leaves_the_old_file(
    tiny_directory: Path, requests_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.safetensors"
    out.write_bytes(b"before")

    def fails_half_way(tensors: object, path: Path, metadata: object) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("v41_model.forward_file.save_file", fails_half_way)
    arguments = ["--checkpoint", str(tiny_directory), "--requests", str(requests_file), "--out", str(out)]
    assert main(["forward", *arguments]) == 2
    assert out.read_bytes() == b"before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.safetensors", "requests.json"]


def test_atomic_file_refuses_directories(tmp_path: Path) -> None:
    with pytest.raises(OutputError), atomic_file(tmp_path / "missing" / "file"):
        pass
    with pytest.raises(OutputError):
        require_writable(tmp_path)

    def fail_half_way() -> None:
        with atomic_file(tmp_path / "file") as temporary:
            temporary.write_text("half")
            raise KeyError

    with pytest.raises(KeyError):
        fail_half_way()
    assert list(tmp_path.iterdir()) == []


def test_engram_needs_the_option_and_is_never_silent(
    engram_directory: Path, requests_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--checkpoint", str(engram_directory), "--requests", str(requests_file)]
    out = tmp_path / "out"
    assert main(["forward", *options, "--out", str(out)]) == 2
    assert "--without-engram" in capsys.readouterr().err
    assert not out.exists()
    assert main(["forward", *options, "--out", str(out), "--without-engram"]) == 0
    assert NOT_COMPARABLE in capsys.readouterr().err
    with safe_open(out, "pt") as file:
        assert file.metadata()["notice"] == NOT_COMPARABLE
    assert main(["generate", *options, "--max-new-tokens", "1", "--without-engram"]) == 0
    assert NOT_COMPARABLE in capsys.readouterr().out


def test_files_without_engram_carry_no_notice(tiny_directory: Path, requests_file: Path, tmp_path: Path) -> None:
    _forward(tiny_directory, requests_file, tmp_path / "out", "--tp", "2", "--dp", "2")
    with safe_open(tmp_path / "out", "pt") as file:
        assert file.metadata() == {"layout": "tp=2 dp=2", "capture": "logits"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", r"requests\.json: expected JSON in UTF-8, found Expecting value"),
        ("\xff", r"requests\.json: expected JSON in UTF-8"),
        ('\xef\xbb\xbf{"requests": [[1]]}', r"requests\.json: expected JSON in UTF-8"),
        ("\0".join('{"requests": [[1]]}') + "\0", r"requests\.json: expected JSON in UTF-8"),
        ("[" * 100000, r"requests\.json: expected JSON in UTF-8"),
        ("[[1]]", r'requests\.json: expected {"requests": \[\[token ids\] or "text", \.\.\.\]}, found \[\[1\]\]'),
        ('{"requests": []}', r"requests\.json requests: expected at least one entry"),
        ('{"requests": [[1], []]}', r"requests\[1\]: expected at least one entry"),
        ('{"requests": [1]}', r"requests\[0\]: expected a list of token ids, or text, found 1"),
        ('{"requests": [""]}', r"requests\[0\]: expected at least one entry"),
        ('{"requests": [[1, true]]}', r"requests\[0\]\[1\]: expected a token id, an integer, found True"),
        ('{"requests": [[1.0]]}', r"requests\[0\]\[0\]: expected a token id, an integer, found 1.0"),
        ('{"requests": [["1"]]}', r"requests\[0\]\[0\]: expected a token id"),
        ('{"requests": [[1]], "temperature": 1}', r"temperature: expected no key but requests"),
        ('{"prompts": [[1]]}', r"requests: expected {"),
        ('{"requests": [[1]], "requests": [[2]]}', r"requests\.json requests: expected it once, found the key twice"),
    ],
)
def test_request_files_are_checked(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "requests.json"
    path.write_text(content, encoding="latin-1")
    with pytest.raises(RequestError, match=message) as caught:
        read_request_file(path)
    assert len(str(caught.value)) < 400
    assert "pydantic" not in str(caught.value)


def test_what_is_no_request_file_is_not_read(tmp_path: Path) -> None:
    """From /dev/zero one could read for ever, and a pipe waits for somebody to write."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero"), tmp_path):
        with pytest.raises(RequestError, match="expected a regular file"):
            read_request_file(path)


def test_every_command_is_reachable(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in ("generate", "forward", "conform"))
