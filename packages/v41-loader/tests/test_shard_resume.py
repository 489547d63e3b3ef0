"""Runs that are killed: whatever the moment, nothing looks finished, and the next run ends with the same bytes."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from v41_config import ParallelLayout
from v41_loader import (
    DigestAlgorithm,
    Inventory,
    read_inventory,
    shard_checkpoint,
    synthesize_checkpoint,
    verify_shards,
)
from v41_loader.errors import ManifestError, OutputConflictError
from v41_loader.sharding.output_directory import JOURNAL_FILE, PARTIAL_DIRECTORY

TP2_DP2 = ParallelLayout(2, 2)

TRIALS = """
import json, os, signal, sys
from v41_config import ParallelLayout
from v41_loader import read_inventory, shard_checkpoint, verify_shards
from v41_loader.errors import ManifestError

CALLS = ("pwrite", "write", "ftruncate", "posix_fallocate", "replace", "fsync", "mkdir", "unlink", "rmdir")
source, weight_layout = sys.argv[1:]
inventory = read_inventory(source)
report = os.write

def shard(out, point, writer):
    '''In a child: shard, and die at the point-th call that changes something: after it, half-way through, or before.'''
    made = 0
    def deadly(name, call):
        def wrapper(*arguments, **keywords):
            nonlocal made
            made += 1
            if made == point:
                if point % 3 == 0:
                    call(*arguments, **keywords)
                elif point % 3 == 1 and name == "pwrite":
                    fd, data, offset = arguments
                    call(fd, data[: len(data) // 2], offset)
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **keywords)
        return wrapper
    for name in CALLS:
        setattr(os, name, deadly(name, getattr(os, name)))
    shard_checkpoint(inventory, out, ParallelLayout(2, 2), weight_layout=weight_layout, threads=2)
    report(writer, str(made).encode())

def looks_finished(out):
    try:
        verify_shards(out)
    except ManifestError:
        return False
    return True

def run(out, point):
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            shard(out, point, writer)
        finally:
            os._exit(0)
    os.close(writer)
    made = int(os.read(reader, 100) or 0)
    os.close(reader)
    killed = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    return {"killed": killed, "made": made, "finished": looks_finished(out)}

print(json.dumps([[run(out, point) for point in points] for out, points in json.load(sys.stdin)]))
"""


def run_trials(source: Path, weight_layout: str, trials: list[tuple[Path, list[int]]]) -> list[list[dict[str, int]]]:
    """Shard into each directory once per point, to be killed there (0: not at all). For each run: whether it was
    killed, the calls it made, and whether the directory then passes for finished."""
    found = subprocess.run(
        [sys.executable, "-c", TRIALS, str(source), weight_layout],
        input=json.dumps([(str(out), points) for out, points in trials]),
        check=True, stdout=subprocess.PIPE, text=True, timeout=300,
    )  # fmt: skip
    return json.loads(found.stdout)  # type: ignore[no-any-return]


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def source(small_source: Inventory) -> Path:
    return small_source.directory


@pytest.mark.parametrize(
    ("weight_layout", "kills", "every"),
    [
        ("canonical", 5, 2),
        ("device", 3, 9),
        pytest.param("canonical", 60, 1, marks=pytest.mark.slow),
        pytest.param("device", 60, 1, marks=pytest.mark.slow),
    ],
)
def test_a_killed_run_goes_on_and_ends_the_same(
    source: Path, tmp_path: Path, weight_layout: str, kills: int, every: int
) -> None:
    """Killed at random system calls, then again, and at the last ones (each or every so many), where names change."""
    ((reference,),) = run_trials(source, weight_layout, [(tmp_path / "reference", [0])])
    assert reference["finished"]
    calls, tail = reference["made"], 26
    expected = contents(tmp_path / "reference")
    assert set(expected) == {"config.json", "manifest.json", *(f"rank-{rank:02d}.safetensors" for rank in range(4))}
    chance = random.Random(1)
    points = [[chance.randrange(1, calls - tail), chance.randrange(1, calls // 4), 0] for _ in range(kills)]
    points += [[point, 0] for point in range(calls - tail, calls + 1, every)]
    outs = [tmp_path / str(number) for number in range(len(points))]
    results = run_trials(source, weight_layout, list(zip(outs, points, strict=True)))
    for out, runs in zip(outs, results, strict=True):
        assert runs[0]["killed"]
        assert not runs[-1]["killed"]
        assert contents(out) == expected
        # Verified as finished means: the manifest had just appeared, and only clearing away was left.
        assert not runs[0]["finished"] or set(expected) <= set(contents(out))
    assert [runs[0]["finished"] for runs in results].count(True) < 10
    assert sum(runs[0]["finished"] for runs in results[:kills]) == 0


def test_what_was_done_is_not_done_again(source: Path, tmp_path: Path) -> None:
    (((reference,),), ((first, second),)) = (
        run_trials(source, "canonical", [(tmp_path / "reference", [0])]),
        run_trials(source, "canonical", [(tmp_path / "out", [600, 0])]),
    )
    assert first["killed"]
    assert second["made"] < reference["made"] - 400


@pytest.mark.parametrize("weight_layout", ["canonical", "device"])
def test_the_command_can_be_killed_at_any_time(source: Path, tmp_path: Path, weight_layout: str) -> None:
    out = tmp_path / "out"
    options = ["--checkpoint", str(source), "--tp", "2", "--dp", "2", "--layout", weight_layout, "--out", str(out)]
    code = "import sys; from v41_loader.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "shard", *options]
    chance = random.Random(2)
    journal = out / PARTIAL_DIRECTORY / JOURNAL_FILE
    for _ in range(2):
        before = journal.stat().st_size if journal.exists() else 0
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while process.poll() is None and (not journal.exists() or journal.stat().st_size <= before):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        time.sleep(chance.uniform(0, 0.02))
        process.send_signal(signal.SIGKILL)
        assert process.wait(timeout=60) == -signal.SIGKILL
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    shard_checkpoint(read_inventory(source), tmp_path / "reference", TP2_DP2, weight_layout=weight_layout)
    assert contents(out) == contents(tmp_path / "reference")


@pytest.fixture(scope="module")
def half_done(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a run leaves that was killed half-way; read only."""
    out = tmp_path_factory.mktemp("half") / "out"
    ((run,),) = run_trials(source, "canonical", [(out, [800])])
    assert run["killed"]
    return out


@pytest.fixture
def interrupted(half_done: Path, tmp_path: Path) -> Path:
    """A copy of it that a test may damage."""
    return Path(shutil.copytree(half_done, tmp_path / "out"))


@pytest.mark.parametrize(("change", "found"), [
    ({"layout": ParallelLayout(4, 1)}, "'tp': 2"),
    ({"digest": DigestAlgorithm.SHA256}, "xxh3-128"),
    ({"weight_layout": "device"}, "canonical"),
    ({"ranks": [0, 1]}, r"\[0, 1, 2, 3\]"),
])  # fmt: skip
def test_an_interrupted_run_is_not_mixed_with_another(
    source: Path, interrupted: Path, change: dict[str, object], found: str
) -> None:
    """It is named, and stays for whoever wants to finish it."""
    before = contents(interrupted)
    with pytest.raises(OutputConflictError, match=rf"interrupted run.*{found}"):
        shard_checkpoint(read_inventory(source), interrupted, **{"layout": TP2_DP2} | change)  # type: ignore[arg-type]
    assert contents(interrupted) == before


def damage_rank_file(partial: Path) -> None:
    """A loss of power leaves zeros where the journal says that tensors stand."""
    path = partial / "rank-02.safetensors"
    data = bytearray(path.read_bytes())
    data[5000:] = bytes(len(data) - 5000)
    path.write_bytes(data)


def cut_rank_file(partial: Path) -> None:
    with (partial / "rank-02.safetensors").open("r+b") as file:
        file.truncate(5000)


def remove_rank_file(partial: Path) -> None:
    (partial / "rank-02.safetensors").unlink()


def tear_journal(partial: Path) -> None:
    """The last line was cut short."""
    path = partial / JOURNAL_FILE
    path.write_bytes(path.read_bytes()[:-7])


def damage_journal(partial: Path) -> None:
    """A line in the middle is no record."""
    path = partial / JOURNAL_FILE
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:20], b"\0" * 40 + b"\n", *lines[21:]]))


def empty_journal(partial: Path) -> None:
    (partial / JOURNAL_FILE).write_bytes(b"")


def lie_in_journal(partial: Path) -> None:
    """A tensor has another number of parts, another is none of this model's."""
    path = partial / JOURNAL_FILE
    lines = path.read_text().splitlines()
    record = json.loads(lines[5])
    record["digests"]["source"] = record["digests"]["source"] * 3
    stranger = json.loads(lines[6]) | {"tensor": "nothing"}
    path.write_text("\n".join([*lines[:5], json.dumps(record), json.dumps(stranger), *lines[7:], ""]))


@pytest.mark.parametrize("damage", [
    damage_rank_file, cut_rank_file, remove_rank_file, tear_journal, damage_journal, empty_journal, lie_in_journal,
])  # fmt: skip
def test_partial_files_are_not_trusted(source: Path, interrupted: Path, tmp_path: Path, damage: object) -> None:
    """What an interrupted run left is only kept where its bytes are those that it recorded."""
    assert callable(damage)
    damage(interrupted / PARTIAL_DIRECTORY)
    inventory = read_inventory(source)
    shard_checkpoint(inventory, interrupted, TP2_DP2)
    shard_checkpoint(inventory, tmp_path / "reference", TP2_DP2)
    assert contents(interrupted) == contents(tmp_path / "reference")


def test_an_interrupted_run_starts_anew_when_its_source_has_changed(small_source: Inventory, tmp_path: Path) -> None:
    """Half of the old weights and half of the new would pass every digest."""
    source, out = tmp_path / "checkpoint", tmp_path / "out"
    synthesize_checkpoint(small_source.config, 1, source, shards=3)
    run_trials(source, "canonical", [(out, [600])])
    for path in source.iterdir():
        path.unlink()
    source.rmdir()
    synthesize_checkpoint(small_source.config, 2, source, shards=3)
    inventory = read_inventory(source)
    shard_checkpoint(inventory, out, TP2_DP2)
    assert verify_shards(out, inventory).source == source


def test_a_link_in_place_of_partial_files_is_not_followed(source: Path, tmp_path: Path) -> None:
    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    out.mkdir()
    elsewhere.mkdir()
    (out / PARTIAL_DIRECTORY).symlink_to(elsewhere)
    with pytest.raises(OutputConflictError, match="link"):
        shard_checkpoint(read_inventory(source), out, TP2_DP2)
    assert list(elsewhere.iterdir()) == []


def test_an_unfinished_directory_does_not_verify(interrupted: Path) -> None:
    with pytest.raises(ManifestError, match=r"no manifest\.json"):
        verify_shards(interrupted)


@pytest.mark.parametrize("damage", ["gone", "cut off", "another", "a link"])
def test_a_finished_directory_gets_its_config_back(source: Path, tmp_path: Path, damage: str) -> None:
    """Rank files that are kept are of no use without it."""
    inventory, out = read_inventory(source), tmp_path / "out"
    shard_checkpoint(inventory, out, ParallelLayout(2, 2))
    config = out / "config.json"
    expected = config.read_bytes()
    config.unlink()
    if damage == "a link":
        config.symlink_to(tmp_path / "nowhere")
    elif damage != "gone":
        config.write_bytes(expected[:100] if damage == "cut off" else expected.replace(b"1", b"2"))
    report = shard_checkpoint(inventory, out, ParallelLayout(2, 2))
    assert report.written == ()
    assert config.read_bytes() == expected
    assert not config.is_symlink()
    assert not (out / PARTIAL_DIRECTORY).exists()
    verify_shards(out)
