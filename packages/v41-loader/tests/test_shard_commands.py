"""The commands `shard` and `verify`: what they print, what they refuse, and their exit codes."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from v41_config import ParallelLayout
from v41_loader import DigestAlgorithm, read_inventory, shard_checkpoint
from v41_loader.cli import main
from v41_loader.sharding.command_options import parse_ranks, ranks_text
from v41_loader.sharding.manifest import PartDigests
from v41_loader.sharding.output_directory import PARTIAL_DIRECTORY
from v41_loader.sharding.tensor_copy import TensorCopy

RANKS = [f"rank-{rank:02d}.safetensors" for rank in range(8)]


def shard(checkpoint: Path, tp: int, dp: int) -> list[str]:
    return ["shard", "--checkpoint", str(checkpoint), "--tp", str(tp), "--dp", str(dp)]


def rows(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_shard_then_verify(tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "out")
    assert main([*shard(tiny_checkpoint, 4, 2), "--out", out]) == 0
    printed = rows(capsys.readouterr().out)
    assert ["routed", "experts", "960", "4,177,920", "4,177,920"] in printed
    assert ["router", "bias", "of", "image", "tokens", "10", "640", "skipped"] in printed
    assert ["rank-07.safetensors:", "4,048,248", "bytes"] in printed
    assert names(tmp_path / "out") == ["config.json", "manifest.json", *RANKS]

    assert main(["verify", out, "--source", str(tiny_checkpoint)]) == 0
    printed = rows(capsys.readouterr().out)
    experts = next(row for row in printed if row[:2] == ["routed", "experts"])
    assert " ".join(experts[5:]) == "digests and source, union, finite, 480 scales paired: ok"
    assert " ".join(printed[-1]).startswith("ranks 0, 1, 2, 3, 4, 5, 6, 7: together the whole source")


def test_the_same_as_the_function(tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With every option; ranks are added afterwards."""
    command = [*shard(tiny_checkpoint, 2, 2), "--digest", "sha256", "--layout", "canonical",
               "--threads", "2", "--out", str(tmp_path / "out")]  # fmt: skip
    assert main([*command, "--ranks", "1,3"]) == 0
    assert main([*command, "--ranks", "0-3"]) == 0
    assert "rank-03.safetensors: 4,918,896 bytes, kept" in capsys.readouterr().out
    inventory, layout = read_inventory(tiny_checkpoint), ParallelLayout(2, 2)
    shard_checkpoint(inventory, tmp_path / "same", layout, digest=DigestAlgorithm.SHA256)
    for name in names(tmp_path / "same"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "same" / name).read_bytes()


def test_a_bar_shows_bytes_per_second_and_the_time_left(
    tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main([*shard(tiny_checkpoint, 1, 1), "--out", str(tmp_path / "file")]) == 0
    assert capsys.readouterr().err == ""  # no terminal, no bar
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main([*shard(tiny_checkpoint, 1, 1), "--out", str(tmp_path / "out")]) == 0
    last = capsys.readouterr().err.replace("\r", "\n").strip().splitlines()[-1]
    assert "shard: 100%" in last
    assert "8.67M/8.67M [00:0" in last
    assert "B/s]" in last


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stopped_run_is_silent_and_goes_on(
    tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    number: int, code: int,
) -> None:  # fmt: skip
    """Stopped half-way: no traceback, nothing that looks finished; the same command ends the work."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background of a script start without it
    command = [*shard(tiny_checkpoint, 2, 2), "--threads", "1", "--out", str(tmp_path / "out")]
    copies: list[str] = []
    copy = TensorCopy.copy

    def stopped(self: TensorCopy, *arguments: Any) -> PartDigests:
        copies.append(self.stored.expected.name)
        if len(copies) == 500:
            os.kill(os.getpid(), number)
            time.sleep(0.2)
        return copy(self, *arguments)

    monkeypatch.setattr(TensorCopy, "copy", stopped)
    assert main(command) == code
    assert capsys.readouterr() == ("", "")
    assert names(tmp_path / "out") == [PARTIAL_DIRECTORY]
    done = len(copies)
    assert main(command) == 0
    assert 500 <= done < len(copies) <= 1279 + 50  # what was under way is copied again, not what was done
    assert main(["verify", str(tmp_path / "out"), "--source", str(tiny_checkpoint)]) == 0


def test_verify_of_some_ranks_says_so(
    tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shard_checkpoint(read_inventory(tiny_checkpoint), tmp_path, ParallelLayout(4, 2), ranks=[5])
    assert main(["verify", str(tmp_path), "--ranks", "5"]) == 0
    out = capsys.readouterr().out
    assert "ranks 5: the union was not looked at" in out
    assert "union, " not in out
    assert main(["verify", str(tmp_path)]) == 2
    assert "expected rank 0, unless the ranks to verify are named (--ranks), found ranks [5]" in capsys.readouterr().err


def test_one_line_for_what_is_wrong(tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main([*shard(tiny_checkpoint, 4, 2), "--ranks", "0", "--out", str(out)]) == 0
    path = out / RANKS[0]
    path.write_bytes(path.read_bytes()[:-1] + b"\x55")
    capsys.readouterr()
    for command, error in (
        (["verify", str(out), "--ranks", "0"], "as manifest.json states"),
        (["verify", str(tmp_path / "nowhere")], "no manifest.json"),
        (["inspect", str(out)], "found manifest.json of shards, which open_shards and v41-loader verify take"),
        ([*shard(tmp_path / "nowhere", 1, 1), "--out", str(out)], "expected a checkpoint directory"),
        ([*shard(tiny_checkpoint, 1, 1), "--out", str(out)], f"shards in {out}: "),
        ([*shard(tiny_checkpoint, 3, 1), "--out", str(out)], "tp: expected a divisor of num_attention_heads"),
        ([*shard(tiny_checkpoint, 4, 2), "--threads", "0", "--out", str(tmp_path / "t")], "threads: expected"),
        ([*shard(tiny_checkpoint, 4, 2), "--threads", "1" * 20, "--out", str(tmp_path / "t")], "threads: expected"),
        ([*shard(tiny_checkpoint, 4, 2), "--allowed-root", "nowhere", "--out", str(tmp_path / "t")],
         "allowed root nowhere: expected a directory"),
        ([*shard(tiny_checkpoint, 4, 2), "--layout", "device", "--out", str(tmp_path / "d")],
         "for the device layout"),
    ):  # fmt: skip
        assert main(command) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("v41-loader: ")
        assert error in line
    assert not {"d", "t"} & set(names(tmp_path))


def test_notice_of_an_engram_checkpoint(
    tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every output made without Engram says so."""
    out = tmp_path / "out"
    assert main([*shard(tiny_checkpoint, 1, 1), "--out", str(out)]) == 0
    assert "not comparable" not in capsys.readouterr().out
    manifest = json.loads((out / "manifest.json").read_text())
    manifest["settings"]["notice"] = "not comparable with the released model"
    (out / "manifest.json").write_text(json.dumps(manifest))
    assert main(["verify", str(out)]) == 0
    assert "Engram left out: not comparable with the released model" in capsys.readouterr().out


@pytest.mark.parametrize(("text", "ranks"), [
    ("0", (0,)), ("0,4-7", (0, 4, 5, 6, 7)), ("3-3", (3,)), ("2,1", (2, 1)),
])  # fmt: skip
def test_ranks_are_lists_and_ranges(text: str, ranks: tuple[int, ...]) -> None:
    assert parse_ranks(text) == ranks


@pytest.mark.parametrize("ranks", [(0,), (0, 4, 5, 6, 7), (0, 1, 3, 5, 6), range(96)])
def test_ranks_are_written_as_they_are_read(ranks: Sequence[int]) -> None:
    assert parse_ranks(ranks_text(ranks)) == tuple(ranks)
    assert ranks_text(range(96)) == "0-95"


@pytest.mark.parametrize("text", ["", "a", "1-", "-1", "3-1", "1,,2", "1-2-3", "0-99999", "\u0661", "0,3-1", "3-1,0"])
def test_other_ranks_are_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["verify", "nowhere", "--ranks", text])
    assert caught.value.code == 2
    assert "argument --ranks: expected ranks and ascending ranges, such as 0,4-7, found" in capsys.readouterr().err
