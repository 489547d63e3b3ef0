"""The commands: what they print, what they refuse, and their exit codes."""

from __future__ import annotations

from pathlib import Path

import pytest

from v41_loader.cli import main


def test_synth_writes_the_preset_with_its_published_seed(
    tmp_path: Path, tiny_checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["synth", "--preset", "tiny", "--out", str(tmp_path / "out")]) == 0
    assert "seed 4105: 1289 tensors, 8670256 bytes in 6 files" in capsys.readouterr().out
    for path in tiny_checkpoint.iterdir():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()


def test_synth_takes_another_seed(tmp_path: Path, tiny_checkpoint: Path) -> None:
    assert main(["synth", "--preset", "tiny", "--seed", "1", "--shards", "2", "--out", str(tmp_path / "out")]) == 0
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 2
    name = "config.json"
    assert (tmp_path / "out" / name).read_bytes() == (tiny_checkpoint / name).read_bytes()


def test_synth_refuses_a_full_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").touch()
    assert main(["synth", "--preset", "tiny", "--out", str(tmp_path)]) == 1
    assert "SynthesisError" in capsys.readouterr().err
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
    assert main(["inspect", str(damaged)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("v41-loader: CheckpointNotFoundError: ")
    assert "model-00003-of-00006.safetensors" in error
    assert error.count("\n") == 1


def test_a_command_is_required(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([])
    assert caught.value.code == 2
    assert "COMMAND" in capsys.readouterr().err
