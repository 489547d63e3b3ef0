"""TorchDistributedWorld over gloo, in processes of their own: LocalWorld's bits, and no hang whatever a rank does."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from v41_config import LayoutError, ParallelLayout
from v41_model.errors import RankError, WorldError
from v41_model.golden_twin import same_bits
from v41_model.local_world import LocalWorld
from v41_model.torch_distributed_world import TorchDistributedWorld

SCRIPT = Path(__file__).with_name("rank_processes.py")
JOBS = ("collectives:2:2", "axes:2:2", "raising:2:2", "killed:2:2", "killed_store:2:1", "late:2:1", "mismatch:2:1",
        "finished:2:1", "wrong_counts:2:1", "strange_result:2:1", "failing_outside:2:1")  # fmt: skip
LIMIT = 30.0
"""Seconds after which every rank must have stopped."""


def start(directory: Path, *jobs: str, limit: float = 120) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, SCRIPT, directory, *jobs], env=environment, timeout=limit, check=True)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the ranks of every job left."""
    directory = tmp_path_factory.mktemp("ranks")
    start(directory, *JOBS)
    return directory


def _programs() -> ModuleType:
    spec = importlib.util.spec_from_file_location("rank_processes", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _result(directory: Path, rank: int) -> Any:
    return torch.load(directory / f"rank-{rank}.pt", weights_only=True)


def _errors(directory: Path) -> dict[int, str]:
    """The error of every rank that ended with one, each within the limit."""
    errors = {}
    for path in directory.glob("rank-*.txt"):
        seconds, _, text = path.read_text().partition("\n")
        assert float(seconds) < LIMIT
        errors[int(path.stem.removeprefix("rank-"))] = text
    return errors


def _codes(directory: Path) -> list[int]:
    return [int(code) for code in (directory / "codes.txt").read_text().split()]


def same(ours: Any, theirs: Any) -> bool:
    """Equal in structure and bits."""
    if isinstance(ours, Tensor):
        return isinstance(theirs, Tensor) and same_bits(ours, theirs)
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(same(ours[key], theirs[key]) for key in ours)
    if isinstance(ours, list | tuple):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    return bool(ours == theirs)


def test_every_collective_gives_the_bits_and_the_log_of_local_world(runs: Path) -> None:
    """Every rank has the results of all ranks: sums in rank order, any dtype, empty and uneven exchanges."""
    expected = LocalWorld(ParallelLayout(2, 2)).run(_programs().every_collective)
    for rank in range(4):
        assert same(_result(runs / "collectives", rank), expected)
    assert _codes(runs / "collectives") == [0, 0, 0, 0]
    assert not same(expected, [expected[1], *expected[1:]]), "the comparison can tell ranks apart"


def test_the_device_mesh_has_the_axes_of_the_layout(runs: Path) -> None:
    for rank in range(4):
        places = [rank // 2, rank % 2, rank]
        assert _result(runs / "axes", rank) == [["dp", "tp", "ep"], places, [2, 2, 4]]


def test_one_rank_alone_in_this_process(tmp_path: Path) -> None:
    """Collectives outside a run and nested runs are refused; after a failure the world is over, and says why."""
    where: dict[str, Any] = {"init_method": (tmp_path / "rendezvous").as_uri(), "rank": 0, "world_size": 1}
    programs = _programs()
    with TorchDistributedWorld(ParallelLayout(), **where) as world:
        assert same(world.run(programs.every_collective), LocalWorld(1).run(programs.every_collective))
        with pytest.raises(WorldError, match="outside of run"):
            world.communicators[0].all_reduce(torch.zeros(1), programs.HERE)
        with pytest.raises(WorldError, match="only one in this process"):
            TorchDistributedWorld(ParallelLayout(), **where)
        with pytest.raises(RankError, match="one run at a time"):
            world.run(lambda _: world.run(lambda _: None))
        with pytest.raises(RankError, match="one run at a time"):
            world.run(lambda _: None)
    assert not torch.distributed.is_initialized()


def test_a_raising_rank_stops_the_others_with_its_error(runs: Path) -> None:
    """Also those that wait in a collective of another group."""
    errors = _errors(runs / "raising")
    assert sorted(errors) == [0, 1, 2, 3]
    assert all("rank 1:" in text and "ValueError: no such expert" in text for text in errors.values())


def test_a_killed_rank_stops_the_others_with_its_number(runs: Path) -> None:
    errors = _errors(runs / "killed")
    assert sorted(errors) == [0, 2, 3]
    assert all(text.startswith("RankError: rank 1:") and "process has ended" in text for text in errors.values())
    assert _codes(runs / "killed") == [0, -signal.SIGKILL, 0, 0]


def test_the_rank_that_keeps_the_store_may_be_killed_too(runs: Path) -> None:
    errors = _errors(runs / "killed_store")
    assert sorted(errors) == [1]
    assert errors[1].startswith("RankError: rank 0:")


def test_a_rank_that_is_late_ends_the_wait_after_the_timeout(runs: Path) -> None:
    errors = _errors(runs / "late")
    assert "no answer within 2.0 s; rank 0 waits in all_reduce of [2] float32 at here (layer 3)" in errors[0]
    assert "rank 0:" in errors[1], "the late rank learns that the others have given up"


@pytest.mark.parametrize(
    ("job", "pattern"),
    [
        ("mismatch", "found rank 1 in token_all_gather of [2] float32 at here (layer 3) with ranks 0..1"),
        ("finished", "found rank 1 in the end of its program"),
    ],
)
def test_ranks_in_different_calls_are_named(runs: Path, job: str, pattern: str) -> None:
    errors = _errors(runs / job)
    assert pattern in errors[0]
    assert "rank 0 in all_reduce" in errors[1]


def test_counts_that_disagree_stop_every_rank(runs: Path) -> None:
    errors = _errors(runs / "wrong_counts")
    assert "expected the counts (2, 2), found (1, 1)" in errors[1]
    assert "rank 1:" in errors[0]


def test_a_result_that_no_other_process_can_read_is_refused(runs: Path) -> None:
    errors = _errors(runs / "strange_result")
    assert all("found 'ParallelLayout'" in text for text in errors.values())
    assert len(errors) == 2


def test_an_error_between_two_runs_is_told_to_the_others(runs: Path) -> None:
    errors = _errors(runs / "failing_outside")
    assert errors[1].startswith("V41Error: checkpoint")
    assert "rank 1:" in errors[0]
    assert "checkpoint" in errors[0]


@pytest.mark.parametrize("layout", [(2, 2), pytest.param((4, 2), marks=pytest.mark.slow)], ids=str)
def test_the_whole_model_gives_the_tokens_and_bits_of_local_world(
    tmp_path: Path, tiny_directory: Path, layout: tuple[int, int]
) -> None:
    """Prefill and decode of ragged requests: every captured tensor of every layer, logits, tokens, on every rank."""
    tp, dp = layout
    start(tmp_path, f"model:{tp}:{dp}:{tiny_directory}")
    expected = _programs().model(LocalWorld(ParallelLayout(tp, dp)), str(tiny_directory))
    assert len(expected["steps"]) == 6
    for rank in range(tp * dp):
        assert same(_result(tmp_path / "model", rank), expected)
    assert len(expected["steps"][0][0][0]) > 100, "the layers were captured"


@pytest.mark.slow
def test_torchrun_gives_the_tokens_of_one_process(tmp_path: Path, tiny_directory: Path) -> None:
    """Eight processes of one thread each, by the command; and rank 0 alone prints."""
    requests = tmp_path / "requests.json"
    requests.write_text('{"requests": [[0, 17, 42, 9, 8], [0, 99], [0, 3, 4, 5, 6, 7, 8, 9, 10], [0]]}')
    options = ["generate", "--checkpoint", str(tiny_directory), "--requests", str(requests), "--threads", "1"]
    options += ["--tp", "4", "--dp", "2", "--max-new-tokens", "5"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "8"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    outputs = [
        subprocess.run([*command, "-m", "v41_model", *options, *more], env=environment, text=True, check=True,
                       stdout=subprocess.PIPE, timeout=300).stdout
        for command, more in ((torchrun, ["--backend", "gloo", "--timeout", "200"]), ([sys.executable], []))
    ]  # fmt: skip
    done = [[line for line in output.splitlines() if "done" in line] for output in outputs]
    assert done[0] == done[1]
    assert len(done[0]) == 4


@pytest.mark.parametrize(
    ("arguments", "pattern"),
    [
        ({"backend": "carrier-pigeon"}, "backend of this machine, found 'carrier-pigeon'"),
        ({"backend": "hccl"}, "backend of this machine, found 'hccl'"),
        ({"timeout": 0}, "timeout: expected 0 < seconds <= 1800"),
        ({"silence": 1e9}, "silence: expected 0 < seconds"),
    ],
)
def test_a_world_that_cannot_be_is_one_error(arguments: dict[str, Any], pattern: str, tmp_path: Path) -> None:
    where: dict[str, Any] = {"init_method": (tmp_path / "rendezvous").as_uri(), "rank": 0, "world_size": 1}
    with pytest.raises(WorldError, match=pattern):
        TorchDistributedWorld(ParallelLayout(), **where, **arguments)
    assert not torch.distributed.is_initialized()


def test_another_number_of_processes_than_ranks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match="one for each of tp"):
        TorchDistributedWorld(
            ParallelLayout(2, 2), init_method=(tmp_path / "rendezvous").as_uri(), rank=0, world_size=1
        )


def test_a_process_outside_torchrun_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(WorldError, match="as torchrun tells"):
        TorchDistributedWorld(ParallelLayout())
