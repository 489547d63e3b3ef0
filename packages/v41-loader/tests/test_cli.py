"""The commands: what they print, what they refuse, and their exit codes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from v41_loader.cli import main


def test_synth_writes_the_preset_with_its_published_seed(
    tmp_path: Path, tiny_checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["synth", "--preset", "tiny", "--out", str(tmp_path / "out")]) == 0
    assert "seed 4105: 1,289 tensors, 8,670,256 bytes in 6 files" in capsys.readouterr().out
    for path in tiny_checkpoint.iterdir():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()


def test_synth_takes_another_seed(tmp_path: Path, tiny_checkpoint: Path) -> None:
    assert main(["synth", "--preset", "tiny", "--seed", "1", "--shards", "2", "--out", str(tmp_path / "out")]) == 0
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 2
    name = "config.json"
    assert (tmp_path / "out" / name).read_bytes() == (tiny_checkpoint / name).read_bytes()


def test_more_shards_than_there_is_to_spread_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for shards, said in ((12, ""), (13, "12 files instead of 13: no more have a tensor of their own\n")):
        out = tmp_path / str(shards)
        assert main(["synth", "--preset", "tiny", "--shards", str(shards), "--out", str(out)]) == 0
        first, _, rest = capsys.readouterr().out.partition("\n")
        assert "in 12 files" in first
        assert rest == said
        assert len(list(out.glob("*.safetensors"))) == 12


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stopped_synth_leaves_nothing(tmp_path: Path, number: int, code: int) -> None:
    """In the middle of writing: no traceback, no partial directory, the exit code of the signal."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background of a script start without it
    command = [sys.executable, "-m", "v41_loader", "synth", "--preset", "flash6", "--out", str(tmp_path / "out")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob(".out.*.partial/*.safetensors")):
            assert run.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        run.send_signal(number)
        out, err = run.communicate(timeout=60)
    assert (run.returncode, out, err) == (code, "", "")
    assert list(tmp_path.iterdir()) == []


def test_synth_refuses_a_full_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").touch()
    assert main(["synth", "--preset", "tiny", "--out", str(tmp_path)]) == 2
    assert "expected an empty or new directory, found ['mine']" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_inspect_prints_one_line_per_class(tiny_checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(tiny_checkpoint)]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["routed", "experts", "960", "4,177,920"] in rows
    assert ["router", "bias", "of", "image", "tokens", "10", "640", "skipped"] in rows
    assert ["text", "inference", "1,279", "8,669,616"] in rows
    assert ["all", "1,289", "8,670,256"] in rows


def test_inspect_names_the_fault(damaged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (damaged / "model-00003-of-00006.safetensors").unlink()
    assert main(["inspect", str(damaged)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("v41-loader: model-00003-of-00006.safetensors in ")
    assert error.count("\n") == 1


def test_a_command_is_required(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([])
    assert caught.value.code == 2
    assert "COMMAND" in capsys.readouterr().err


def as_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    """What a command prints with `--json`: a document and nothing else."""
    assert main([*arguments, "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return json.loads(out)


def test_every_report_for_programs(tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The numbers of one command are those of the others."""
    made = as_json(capsys, "synth", "--preset", "tiny", "--out", str(tmp_path / "made"))
    assert (made["seed"], made["tensors"], made["bytes"], len(made["files"])) == (4105, 1289, 8_670_256, 6)
    headers = as_json(capsys, "synth", "--preset", "tiny", "--headers-only", "--out", str(tmp_path / "headers"))
    assert (headers["tensors"], headers["bytes"]) == (1289, 8_670_256)

    found = as_json(capsys, "inspect", str(tiny_checkpoint))
    assert (found["tensors"], found["bytes"], found["files"], found["notice"]) == (1289, 8_670_256, 6, None)
    assert sum(group["bytes"] for group in found["classes"]) == 8_670_256
    assert {"class": "router bias of image tokens", "tensors": 10, "bytes": 640, "skipped": True} in found["classes"]
    read = {group["class"]: group["bytes"] for group in found["classes"] if not group["skipped"]}

    options = ["--checkpoint", str(tiny_checkpoint), "--tp", "4", "--dp", "2"]
    plan = as_json(capsys, "plan", *options)
    assert plan["read_bytes"] == sum(read.values())
    out = tmp_path / "shards"
    first = as_json(capsys, "shard", *options, "--ranks", "2", "--out", str(out))
    assert (first["written"], first["kept"]) == ([2], [])
    report = as_json(capsys, "shard", *options, "--out", str(out))
    assert (report["written"], report["kept"]) == ([0, 1, 3, 4, 5, 6, 7], [2])
    assert report["files"] == {path.name: path.stat().st_size for path in out.glob("rank-*")}
    assert {group["class"]: group["source_bytes"] for group in report["classes"]} == read
    assert sum(group["rank_file_bytes"] for group in report["classes"]) == plan["written_bytes"]

    proof = as_json(capsys, "verify", str(out), "--source", str(tiny_checkpoint))
    assert (proof["ranks"], proof["union"], proof["source"]) == (list(range(8)), True, str(tiny_checkpoint))
    assert proof["classes"] == report["classes"]
    assert proof["skipped"] == report["skipped"] == plan["skipped"]
    assert as_json(capsys, "verify", str(out), "--ranks", "1")["union"] is False
