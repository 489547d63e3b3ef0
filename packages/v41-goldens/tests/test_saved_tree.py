"""A saved tree is of one operator, preset and wiring; whatever differs or leads elsewhere is refused with a reason."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from v41_config import FLASH6, TINY, V41Error
from v41_goldens import saved_tree
from v41_goldens.errors import TreeError
from v41_goldens.fixtures import FixtureCase, operator_fixture
from v41_goldens.saved_tree import INPUTS, MANIFEST, OUTPUTS, Wiring, load_tree, save_tree

NAME = "publish_window_kv"


def save(directory: Path, name: str = NAME, wiring: Wiring = "replicated") -> Path:
    fixture = operator_fixture(name, FixtureCase(tokens=5, requests=2))
    outputs = [{n: fixture.tensors(0)[n] for n in fixture.spec.destinations}]
    return save_tree(
        directory, "tiny", wiring, fixture.spec, fixture.case.layout, fixture.extents, fixture.arguments, outputs
    )


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("trees") / "out"
    save(directory)
    return directory


@pytest.fixture
def changed(tree: Path, tmp_path: Path) -> Path:
    """A copy to spoil: the wiring's directory."""
    shutil.copytree(tree, tmp_path / "copy")
    return tmp_path / "copy" / "replicated"


def load(place: Path, name: str = NAME) -> saved_tree.SavedTree:
    return load_tree(place.parent, name, "tiny", TINY, "replicated")


def test_what_was_saved_comes_back(tree: Path) -> None:
    fixture, found = operator_fixture(NAME, FixtureCase(tokens=5, requests=2)), load(tree / "replicated")
    assert found.bounds == fixture.bounds
    assert found.extents == fixture.extents
    for name, value in fixture.arguments[0].items():
        again = found.arguments[0][name]
        if isinstance(value, torch.Tensor):
            assert isinstance(again, torch.Tensor)
            assert torch.equal(again.view(torch.uint8), value.view(torch.uint8)), name
        else:
            assert again == value
    assert found.outputs[0].keys() == {"window_kv", "window_kv_scale"}
    assert sorted(p.name for p in (tree / "replicated").iterdir()) == [INPUTS, MANIFEST, OUTPUTS]


def test_the_same_case_gives_the_same_bytes(tree: Path, tmp_path: Path) -> None:
    again = save(tmp_path)
    for name in (INPUTS, OUTPUTS, MANIFEST):
        assert (again / name).read_bytes() == (tree / "replicated" / name).read_bytes(), name


def edit(**changes: Any) -> Callable[[Path], None]:
    def apply(place: Path) -> None:
        manifest = json.loads((place / MANIFEST).read_text())
        (place / MANIFEST).write_text(json.dumps(manifest | changes))

    return apply


def flip(name: str, at: int) -> Callable[[Path], None]:
    def apply(place: Path) -> None:
        content = bytearray((place / name).read_bytes())
        content[at] ^= 1
        (place / name).write_bytes(content)

    return apply


def replace(name: str, content: bytes) -> Callable[[Path], None]:
    return lambda place: void((place / name).write_bytes(content))


def void(_: object) -> None:
    """For a lambda that is to return nothing."""


def append(name: str, count: int) -> Callable[[Path], None]:
    return lambda place: void((place / name).write_bytes((place / name).read_bytes() + bytes(count)))


def link(name: str) -> Callable[[Path], None]:
    def apply(place: Path) -> None:
        (place / name).rename(place.parent / "elsewhere")
        (place / name).symlink_to(place.parent / "elsewhere")

    return apply


def twice(key: str) -> Callable[[Path], None]:
    """The first entry of that key stands there twice, with the same value."""

    def apply(place: Path) -> None:
        text = (place / MANIFEST).read_text()
        (place / MANIFEST).write_text(re.sub(rf'("{key}": [^,\n]+)', r"\1, \1", text, count=1))

    return apply


def pipe(name: str) -> Callable[[Path], None]:
    def apply(place: Path) -> None:
        (place / name).unlink()
        os.mkfifo(place / name)

    return apply


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (flip(INPUTS, -1), r"inputs.safetensors: SHA-256: expected [0-9a-f]{64}, as the manifest has it, found '"),
        (flip(INPUTS, 9), "inputs.safetensors: SHA-256: expected"),
        (flip(OUTPUTS, -1), "outputs.safetensors: SHA-256: expected"),
        (append(OUTPUTS, 1), r"outputs.safetensors: expected \d+ bytes, of which \d+ are tensors"),
        (replace(INPUTS, b""), r"inputs.safetensors: .* found 0 bytes"),
        (edit(format_version=2), "manifest.json: format_version: expected 1, found 2"),
        (edit(operator="publish_index_key"), "operator: expected 'publish_window_kv', found 'publish_index_key'"),
        (edit(preset="flash"), "preset: expected 'tiny', found 'flash'"),
        (edit(wiring="sharded"), "wiring: expected 'replicated', found 'sharded'"),
        (edit(wiring="neither"), "wiring: expected"),
        (edit(tp=2), "extents: expected 2 ranks, found 1"),
        (edit(tp=1 << 40), "tp: expected"),
        (edit(counts=[]), "counts: expected 1 ranks, found 0"),
        (edit(counts=[{"num_tokens": 6}]), "num_tokens: expected an integer from 0 to T = 5, found 6"),
        (edit(counts=[{"hc_sinkhorn_iters": 1 << 60}]), "counts: expected counts among num_tokens"),
        (edit(counts=[{"num_tokens": 0.5}]), "counts.0.num_tokens: expected"),
        (edit(extents=[{"T": -1, "WINDOW_BLOCKS": 1}]), "T: expected"),
        (edit(extents=[{"T": 5, "WINDOW_BLOCKS": 1 << 50}]), "of which"),
        (edit(extents=[{"WINDOW_BLOCKS": 1}]), "sizes of T"),
        (edit(inputs={"bytes": 3, "sha256": "0" * 64}), "expected 3 bytes"),
        (edit(inputs={"bytes": 3, "sha256": "../../etc"}), "inputs.sha256: expected"),
        (edit(more=1), "manifest.json: more: expected no such field, found 1"),
        (replace(MANIFEST, b"{"), "manifest.json"),
        (replace(MANIFEST, b"\xff\xfe"), "manifest.json"),
        (replace(MANIFEST, b"[" * 100_000), "manifest.json"),
        (replace(MANIFEST, bytes(2 << 20)), "at most 1048576 bytes"),
        (replace(MANIFEST, b"1" * 5000), "manifest.json: expected JSON in UTF-8"),
        (twice("tp"), "manifest.json: tp: expected it once, found the key twice"),
        (twice("sha256"), "manifest.json: sha256: expected it once, found the key twice"),
        (edit(tp=True), "tp: expected a valid integer, found True"),
        (edit(tp=1.0), "tp: expected"),
        (edit(inputs={"bytes": 3, "sha256": "0" * 64, "sha512": "0" * 128}), "inputs.sha512: expected"),
        (pipe(MANIFEST), "manifest.json: expected a file of a saved tree"),
        (pipe(OUTPUTS), "outputs.safetensors: expected a file of a saved tree"),
        (lambda place: (place / OUTPUTS).unlink(), "outputs.safetensors: expected a file of a saved tree"),
        (lambda place: (place / MANIFEST).unlink(), "manifest.json: expected a file of a saved tree"),
        (link(INPUTS), "inputs.safetensors: expected a file of the tree itself, found a symbolic link"),
        (link(MANIFEST), "manifest.json: .*a symbolic link"),
    ],
)
def test_a_tree_that_was_changed_is_refused(changed: Path, spoil: Callable[[Path], None], message: str) -> None:
    load(changed)
    spoil(changed)
    with pytest.raises(V41Error, match=message):
        load(changed)


def with_digest(place: Path) -> None:
    """Make the manifest agree with a file that was written anew."""
    described = saved_tree._described(place / INPUTS)
    edit(inputs=described.model_dump())(place)


def test_files_that_the_manifest_vouches_for_are_held_to_the_contract(changed: Path) -> None:
    tensors = load_file(changed / INPUTS)
    wrong = {
        "a tensor for each operand": {("rank0.slot" if k == "rank0.slots" else k): v for k, v in tensors.items()},
        "rank0.slots: expected int64": tensors | {"rank0.slots": tensors["rank0.slots"].view(torch.float64)},
        "rank0.kv: expected bfloat16": tensors | {"rank0.kv": tensors["rank0.kv"].T.contiguous()},
    }
    for message, content in wrong.items():
        save_file(content, changed / INPUTS)
        with_digest(changed)
        with pytest.raises(TreeError, match=message):
            load(changed)
    (changed / INPUTS).write_bytes(b"\xff" * (changed / INPUTS).stat().st_size)
    with_digest(changed)
    with pytest.raises(TreeError, match="a safetensors file"):
        load(changed)


def test_a_tree_of_another_kind_is_refused(tree: Path, tmp_path: Path) -> None:
    with pytest.raises(TreeError, match=r"sharded.manifest.json: expected a file of a saved tree"):
        load_tree(tree, NAME, "tiny", TINY, "sharded")
    shutil.copytree(tree / "replicated", tmp_path / "sharded")
    with pytest.raises(TreeError, match="wiring: expected 'sharded', found 'replicated'"):
        load_tree(tmp_path, NAME, "tiny", TINY, "sharded")
    with pytest.raises(TreeError, match="preset: expected 'flash6', found 'tiny'"):
        load_tree(tree, NAME, "flash6", FLASH6, "replicated")
    (tmp_path / "replicated").symlink_to(tree / "replicated")
    with pytest.raises(TreeError, match="a symbolic link"):
        load_tree(tmp_path, NAME, "tiny", TINY, "replicated")


def test_nothing_is_overwritten_and_nothing_half_written_stays(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(TreeError, match="expected a new directory"):
        save(tree)
    assert len(list(tree.iterdir())) == 1

    def fail(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(saved_tree, "save_file", fail)
    with pytest.raises(TreeError, match="no space left"):
        save(tmp_path / "new")
    assert list((tmp_path / "new").iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(TreeError, match="can be written"):
        save(tmp_path / "file")
