"""Sharding to disk: every rank's bytes, what is read for them, what the directory says and what it refuses."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import xxhash
from safetensors.torch import load_file

from v41_config import FLASH, TINY, LayoutError, ModelConfig, ParallelLayout
from v41_loader import (
    DigestAlgorithm,
    Inventory,
    expected_tensors,
    open_checkpoint,
    rank_part,
    rank_tensors,
    read_inventory,
    shard_checkpoint,
    tensor_parts,
    verify_shards,
)
from v41_loader.errors import DigestMismatchError, OutputConflictError, ScaleNanError, ShardingError
from v41_loader.inventory import NOT_COMPARABLE
from v41_loader.layouts import get_layout
from v41_loader.rules import RULES, RULES_VERSION
from v41_loader.sharding import tensor_copy
from v41_loader.sharding.manifest import read_manifest
from v41_loader.sharding.rank_contents import rank_contents

LAYOUTS = [ParallelLayout(tp, dp) for tp, dp in [(1, 1), (2, 1), (4, 1), (1, 2), (4, 2), (2, 4)]]
TP4_DP2 = ParallelLayout(4, 2)


@pytest.fixture(scope="module")
def tiny(tiny_checkpoint: Path) -> Inventory:
    return read_inventory(tiny_checkpoint)


@pytest.fixture(scope="module")
def sharded(tiny: Inventory, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """TINY's shards for TP4, DP2; read only."""
    directory = tmp_path_factory.mktemp("sharded") / "out"
    shard_checkpoint(tiny, directory, TP4_DP2)
    return directory


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and bool((bits(one) == bits(other)).all())


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda at: f"tp{at.tp}-dp{at.dp}")
def test_files_hold_what_ranks_hold(tiny: Inventory, tmp_path: Path, layout: ParallelLayout) -> None:
    """Another reader (the library) finds in each file exactly the rank's tensors, as cut in memory."""
    shard_checkpoint(tiny, tmp_path / "out", layout)
    with open_checkpoint(tiny.directory) as checkpoint:
        for rank in range(layout.world_size):
            found = load_file(tmp_path / "out" / f"rank-{rank:02d}.safetensors")
            expected = rank_tensors(checkpoint, layout, rank)
            assert found.keys() == expected.keys()
            assert all(same_bytes(found[name], tensor) for name, tensor in expected.items())


def test_headers_are_those_of_the_library(sharded: Path, tmp_path: Path) -> None:
    """Offsets contiguous from an aligned start; the library would have written the same file."""
    from safetensors.torch import save_file

    source = sharded / "rank-05.safetensors"
    save_file(load_file(source), tmp_path / "again", metadata={"format": "pt"})
    assert source.read_bytes() == (tmp_path / "again").read_bytes()
    assert (8 + int.from_bytes(source.read_bytes()[:8], "little")) % 8 == 0


def test_the_directory_holds_ranks_config_and_manifest(tiny: Inventory, sharded: Path) -> None:
    ranks = [f"rank-{rank:02d}.safetensors" for rank in range(8)]
    assert sorted(path.name for path in sharded.iterdir()) == ["config.json", "manifest.json", *ranks]
    assert (sharded / "config.json").read_bytes() == (tiny.directory / "config.json").read_bytes()


def test_the_manifest_says_what_everything_was_made_from(tiny: Inventory, sharded: Path) -> None:
    document = json.loads((sharded / "manifest.json").read_text())
    assert document["settings"] == {
        "rules_version": 1, "tp": 4, "dp": 2, "weight_layout": {"name": "canonical", "version": 1},
        "digest": "xxh3-128",
        "config": xxhash.xxh3_128_hexdigest((sharded / "config.json").read_bytes()),
    }  # fmt: skip
    for file, state in document["sources"].items():
        status = (tiny.directory / file).stat()
        assert state == {"nbytes": status.st_size, "modified_ns": status.st_mtime_ns}
    assert set(document["tensors"]) == {name for name, tensor in expected_tensors(TINY).items() if not tensor.skipped}
    with open_checkpoint(tiny.directory) as checkpoint:
        halves = checkpoint.tensor("layers.3.attn.wo_b.weight").chunk(4, dim=1)
        assert document["tensors"]["layers.3.attn.wo_b.weight"] == {
            "source": [xxhash.xxh3_128_hexdigest(bits(half).numpy().tobytes()) for half in halves]
        }
        expert = checkpoint.tensor("layers.3.ffn.experts.7.w2.scale")
        assert document["tensors"]["layers.3.ffn.experts.7.w2.scale"] == {
            "source": [xxhash.xxh3_128_hexdigest(bits(expert).numpy().tobytes())]
        }


def test_sha256_on_request(tiny: Inventory, sharded: Path, tmp_path: Path) -> None:
    shard_checkpoint(tiny, tmp_path / "out", TP4_DP2, ranks=[0], digest=DigestAlgorithm.SHA256)
    manifest = read_manifest(tmp_path / "out")
    norm = load_file(tmp_path / "out" / "rank-00.safetensors")["norm.weight"]
    assert manifest.tensors["norm.weight"].source == (hashlib.sha256(bits(norm).numpy().tobytes()).hexdigest(),)
    name = "rank-00.safetensors"
    assert (tmp_path / "out" / name).read_bytes() == (sharded / name).read_bytes()


def test_the_bytes_do_not_depend_on_threads(tiny: Inventory, sharded: Path, tmp_path: Path) -> None:
    for threads in (1, 5):
        shard_checkpoint(tiny, tmp_path / str(threads), TP4_DP2, threads=threads)
        assert contents(tmp_path / str(threads)) == contents(sharded)


def test_ranks_can_be_added(tiny: Inventory, sharded: Path, tmp_path: Path) -> None:
    """Ranks that are made one after the other, in any order, give the same directory as all at once."""
    out = tmp_path / "out"
    report = shard_checkpoint(tiny, out, TP4_DP2, ranks=[6, 1])
    assert (report.written, report.kept) == ((1, 6), ())
    assert sorted(read_manifest(out).shards) == ["rank-01.safetensors", "rank-06.safetensors"]
    assert read_manifest(out).tensors["embed.weight"].source[0] is None
    report = shard_checkpoint(tiny, out, TP4_DP2, ranks=[0, 1, 2, 3])
    assert (report.written, report.kept) == ((0, 2, 3), (1,))
    shard_checkpoint(tiny, out, TP4_DP2)
    assert contents(out) == contents(sharded)


def test_a_complete_directory_is_left_alone(tiny: Inventory, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shard_checkpoint(tiny, out, TP4_DP2)
    before = {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in out.iterdir()}
    report = shard_checkpoint(tiny, out, TP4_DP2)
    assert (report.written, report.kept) == ((), tuple(range(8)))
    assert {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in out.iterdir()} == before


@pytest.mark.parametrize("damage", ["removed", "cut short", "another header"])
def test_a_rank_file_that_is_not_there_is_made_again(
    tiny: Inventory, sharded: Path, tmp_path: Path, damage: str
) -> None:
    out = tmp_path / "out"
    shard_checkpoint(tiny, out, TP4_DP2)
    path = out / "rank-03.safetensors"
    if damage == "removed":
        path.unlink()
    elif damage == "cut short":
        os.truncate(path, 1000)
    else:
        path.write_bytes(path.read_bytes().replace(b"embed.weight", b"embed.weighs"))
    assert shard_checkpoint(tiny, out, TP4_DP2).written == (3,)
    assert contents(out) == contents(sharded)


def test_progress_adds_up_to_what_is_written(tiny: Inventory, tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    report = shard_checkpoint(tiny, tmp_path / "out", TP4_DP2, progress=lambda *call: calls.append(call))
    (total,) = {total for _, total in calls}
    assert sum(nbytes for nbytes, _ in calls) == total == sum(group.stored_nbytes for group in report.groups)
    payload = sum(path.stat().st_size for path in (tmp_path / "out").glob("rank-*"))
    headers = sum(8 + int.from_bytes(p.read_bytes()[:8], "little") for p in (tmp_path / "out").glob("rank-*"))
    assert total == payload - headers


def test_the_report_lists_classes_and_what_is_skipped(tiny: Inventory, sharded: Path) -> None:
    report = shard_checkpoint(tiny, sharded, TP4_DP2)
    experts = next(group for group in report.groups if group.group.value == "routed experts")
    assert (experts.tensors, experts.scales, experts.nbytes, experts.stored_nbytes) == (960, 480, 4177920, 4177920)
    router = next(group for group in report.groups if group.group.value == "router")
    assert router.stored_nbytes == 8 * router.nbytes
    assert [(total.group.value, total.nbytes) for total in report.skipped] == [("router bias of image tokens", 640)]


class CountedReads:
    """Which bytes of which source files are read, and how often they are opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
        self.ranges: list[tuple[str, int, int]] = []
        self.opened: Counter[str] = Counter()
        preadv, open_ = os.preadv, os.open
        names: dict[int, str] = {}

        def counting_open(path: str | Path, *arguments: int, **keywords: int) -> int:
            fd = open_(path, *arguments, **keywords)
            names.pop(fd, None)
            if Path(path).parent == directory and str(path).endswith(".safetensors"):
                names[fd] = Path(path).name
                self.opened[names[fd]] += 1
            return fd

        def counting_preadv(fd: int, buffers: list[memoryview], offset: int) -> int:
            count = preadv(fd, buffers, offset)
            if fd in names:
                self.ranges.append((names[fd], offset, offset + count))
            return count

        monkeypatch.setattr(os, "open", counting_open)
        monkeypatch.setattr(os, "preadv", counting_preadv)


@pytest.mark.parametrize("ranks", [[5], [0, 1, 2, 3], [1, 2], None], ids=str)
def test_only_bytes_that_a_rank_needs_are_read(
    tiny: Inventory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: list[int] | None
) -> None:
    """Each byte once, in file order, from files that are opened once."""
    reads = CountedReads(monkeypatch, tiny.directory)
    shard_checkpoint(tiny, tmp_path / "out", TP4_DP2, ranks=ranks, threads=1)
    needed = Counter[tuple[str, int]]()
    for name, stored in tiny.tensors.items():
        for number, part in enumerate(tensor_parts(stored.expected, TINY, TP4_DP2)):
            if set(part.ranks) & set(ranks if ranks is not None else range(8)):
                needed[name, number] = stored.entry.nbytes * part.part.shape[part.part.axis or 0] // (
                    stored.expected.shape[part.part.axis or 0])  # fmt: skip
    assert sum(end - begin for _, begin, end in reads.ranges) == sum(needed.values())
    assert reads.ranges == sorted(reads.ranges)
    assert all(one[2] <= two[1] for one, two in zip(reads.ranges, reads.ranges[1:], strict=False) if one[0] == two[0])
    assert set(reads.opened.values()) == {1}


def test_parts_are_what_ranks_hold() -> None:
    for layout in LAYOUTS:
        for tensor in expected_tensors(TINY).values():
            parts = tensor_parts(tensor, TINY, layout)
            held = {rank: part.part for part in parts for rank in part.ranks}
            assert held == {
                rank: part
                for rank in range(layout.world_size)
                if (part := rank_part(tensor, TINY, layout, rank)) is not None
            }


@pytest.mark.parametrize(("other", "message"), [
    ({"layout": ParallelLayout(2, 4)}, r"expected \{'tp': 2, 'dp': 4\}, found \{'dp': 2, 'tp': 4\}$"),
    ({"digest": DigestAlgorithm.SHA256}, r"expected \{'digest': 'sha256'\}, found \{'digest': 'xxh3-128'\}$"),
])  # fmt: skip
def test_shards_of_other_settings_are_not_mixed(
    tiny: Inventory, sharded: Path, other: dict[str, object], message: str
) -> None:
    before = contents(sharded)
    with pytest.raises(OutputConflictError, match=message):
        shard_checkpoint(tiny, sharded, **{"layout": TP4_DP2} | other)  # type: ignore[arg-type]
    assert contents(sharded) == before


def test_shards_of_another_state_of_the_source_are_not_mixed(damaged: Path, tmp_path: Path) -> None:
    """The same names, shapes and sizes, but other weights; the ranks of a directory must belong together."""
    out = tmp_path / "out"
    shard_checkpoint(read_inventory(damaged), out, TP4_DP2, ranks=[0])
    path = damaged / "model-00003-of-00006.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    for ranks in ([0], [1]):
        with pytest.raises(OutputConflictError, match="model-00003") as caught:
            shard_checkpoint(read_inventory(damaged), out, TP4_DP2, ranks=ranks)
        assert caught.value.found == [path.name]


def test_a_change_that_keeps_its_time_is_found_by_digest(damaged: Path, tmp_path: Path) -> None:
    """Whoever copies weights with their times: a replicated tensor differs between ranks."""
    out = tmp_path / "out"
    shard_checkpoint(read_inventory(damaged), out, TP4_DP2, ranks=[0])
    inventory = read_inventory(damaged)
    stored = inventory.tensors["layers.2.ffn.gate.weight"]
    path = damaged / stored.file
    status, data = path.stat(), bytearray(path.read_bytes())
    data[stored.entry.begin] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(DigestMismatchError, match=r"layers\.2\.ffn\.gate\.weight"):
        shard_checkpoint(read_inventory(damaged), out, TP4_DP2, ranks=[1])
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "manifest.json", "rank-00.safetensors"]


@pytest.mark.parametrize("name", ["notes.txt", "rank-00.safetensors", "config.json", "model.safetensors"])
def test_a_directory_with_something_else_is_refused(tiny: Inventory, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(OutputConflictError, match="empty") as caught:
        shard_checkpoint(tiny, tmp_path, TP4_DP2)
    assert caught.value.found == [name]
    assert contents(tmp_path) == {name: b"mine"}


def test_the_checkpoint_itself_is_no_place_for_shards(tiny: Inventory) -> None:
    before = contents(tiny.directory)
    with pytest.raises(OutputConflictError):
        shard_checkpoint(tiny, tiny.directory, TP4_DP2)
    assert contents(tiny.directory) == before


def test_a_rank_file_that_no_manifest_knows_is_not_overwritten(tiny: Inventory, tmp_path: Path) -> None:
    shard_checkpoint(tiny, tmp_path, TP4_DP2, ranks=[0])
    (tmp_path / "rank-01.safetensors").write_text("mine")
    with pytest.raises(OutputConflictError, match=r"rank-01\.safetensors"):
        shard_checkpoint(tiny, tmp_path, TP4_DP2, ranks=[1])
    assert (tmp_path / "rank-01.safetensors").read_text() == "mine"


@pytest.fixture
def another_run(tiny: Inventory, tmp_path: Path) -> Iterator[Path]:
    """A directory that another process shards into."""
    from v41_loader.sharding.output_directory import output_directory

    with output_directory(tmp_path / "out") as output:
        yield output.path


def test_two_runs_do_not_write_to_one_directory(tiny: Inventory, another_run: Path) -> None:
    with pytest.raises(OutputConflictError, match="another run"):
        shard_checkpoint(tiny, another_run, TP4_DP2)
    assert list(another_run.iterdir()) == []


def test_ranks_and_layouts_that_do_not_exist(tiny: Inventory, tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match="rank"):
        shard_checkpoint(tiny, tmp_path / "out", TP4_DP2, ranks=[8])
    with pytest.raises(ShardingError, match="at least one"):
        shard_checkpoint(tiny, tmp_path / "out", TP4_DP2, ranks=[])
    with pytest.raises(LayoutError, match="num_attention_heads"):
        shard_checkpoint(tiny, tmp_path / "out", ParallelLayout(3, 1))
    assert not (tmp_path / "out").exists()


def test_a_nan_scale_is_refused_where_it_stands(damaged: Path, tmp_path: Path) -> None:
    """In a part along each dimension: the coordinates are those of the whole tensor."""
    for name, row, column in (("layers.1.attn.wq_b.scale", 13, 1), ("layers.1.attn.wo_b.scale", 3, 2)):
        inventory = read_inventory(damaged)
        stored = inventory.tensors[name]
        rows, columns = stored.expected.shape
        assert (row < rows, column < columns) == (True, True), stored.expected.shape
        path = damaged / stored.file
        data = bytearray(path.read_bytes())
        data[stored.entry.begin + row * columns + column] = 255
        path.write_bytes(data)
        with pytest.raises(ScaleNanError) as caught:
            shard_checkpoint(read_inventory(damaged), tmp_path / name, TP4_DP2)
        assert caught.value.where == f"{name}[{row}, {column}] in {stored.file}"
        assert not list((tmp_path / name).glob("rank-*"))
        data[stored.entry.begin + row * columns + column] = 127
        path.write_bytes(data)


def test_what_text_inference_leaves_out_is_listed_and_not_read(
    write_headers: Callable[..., Path], tensors_of: Callable[..., dict[str, object]], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A checkpoint with Engram, drafting and vision: the shards hold none of it and say so."""
    assert FLASH.engram
    assert FLASH.vision
    changes = {
        "engram": FLASH.engram.model_copy(update={"layer_ids": (1, 4), "num_embeddings": (96, 100)}),
        "vision": FLASH.vision.model_copy(update={"num_hidden_layers": 2}),
        "image_token_id": 500,
    }
    config = ModelConfig.model_validate({f: getattr(TINY, f) for f in ModelConfig.model_fields} | changes)
    source = write_headers(config, tensors_of(config).values())
    inventory = read_inventory(source, without_engram=True)
    reads = CountedReads(monkeypatch, source)
    report = shard_checkpoint(inventory, tmp_path / "out", ParallelLayout(2, 1))
    monkeypatch.undo()
    assert {total.group.value for total in report.skipped} == {"router bias of image tokens", "Engram", "vision"}
    assert report.skipped == tuple(total for total in inventory.group_totals() if total.skipped)
    left_out = [stored.entry for stored in inventory.tensors.values() if stored.expected.skipped]
    assert not any(begin < e.end and e.begin < end for _, begin, end in reads.ranges for e in left_out)
    assert read_manifest(tmp_path / "out").settings.notice == NOT_COMPARABLE == verify_shards(tmp_path / "out").notice
    assert set(read_manifest(tmp_path / "out").tensors) == set(inventory.tensors) - {e.name for e in left_out}


def test_a_config_that_was_given_is_written_in_the_released_form(damaged: Path, tmp_path: Path) -> None:
    (damaged / "config.json").unlink()
    shard_checkpoint(read_inventory(damaged, config=TINY), tmp_path / "out", TP4_DP2, ranks=[0])
    assert ModelConfig.from_json(tmp_path / "out") == TINY


def test_rules_have_not_changed_under_their_version() -> None:
    """A change of the table that moves bytes between ranks needs another `RULES_VERSION`, and this digest with it."""
    lines = [
        f"{r.pattern} {r.dtype} {r.dims} {r.layers.value} {r.partition.value} {r.axis} {r.granularity}" for r in RULES
    ]
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    assert (RULES_VERSION, digest[:16]) == (1, "dc0e7aba3e594834")


def test_threads_take_neighbours_of_one_file(tiny: Inventory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of tensors are all tensors, in their order; each is of one file, and ends soon after it is long enough."""
    monkeypatch.setattr(tensor_copy, "_RUN_BYTES", 100_000)
    contents = rank_contents(tiny.config, TP4_DP2, range(8), get_layout("canonical"))
    copies = tensor_copy.tensor_copies(tiny, contents)
    runs = list(tensor_copy.neighbours(copies))
    assert tuple(copy for run in runs for copy in run) == copies
    lengths = {len(run) for run in runs}
    assert max(lengths) == 32
    assert len(lengths) > 2
    for run, after in zip(runs, [*runs[1:], []], strict=True):
        assert len({copy.stored.file for copy in run}) == 1
        assert sum(copy.read_bytes for copy in run[:-1]) < 100_000
        ended = len(run) == 32 or sum(copy.read_bytes for copy in run) >= 100_000
        assert ended or not after or after[0].stored.file != run[0].stored.file


def test_a_tensor_longer_than_a_run_is_one_and_no_tensor_is_none(
    tiny: Inventory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_copy, "_RUN_BYTES", 1)
    copies = tensor_copy.tensor_copies(tiny, rank_contents(tiny.config, TP4_DP2, [5], get_layout("canonical")))
    assert list(tensor_copy.neighbours(copies)) == [[copy] for copy in copies]
    assert list(tensor_copy.neighbours(())) == []
