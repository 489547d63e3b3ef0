"""Mutated indices and headers, a fixed number from fixed seeds: each is read as what it then says, or refused.

Mutations are those that a fuzzer finds first: bytes flipped, runs removed, repeated or exchanged, and numbers replaced
by the values at which readers break. The check must end in one typed error or in success, soon, in bounded memory.
"""

from __future__ import annotations

import random
import re
import signal
import tracemalloc
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from v41_config import TINY, ModelConfig
from v41_config.errors import V41Error
from v41_loader import CheckpointError, Inventory, open_checkpoint, read_inventory, synthesize_checkpoint
from v41_loader.index import INDEX_FILE

SMALL = ModelConfig.model_validate(
    {f: getattr(TINY, f) for f in ModelConfig.model_fields} | {"n_routed_experts": 2, "num_experts_per_tok": 1}
)
SHARD = "model-00003-of-00006.safetensors"
ROUNDS, SEEDS = 60, [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3))]
TROUBLE = [b"0", b"-1", b"4294967296", b"9223372036854775807", b"18446744073709551616", b"1e999", b"0.5", b"null",
           b"true", b'""', b"[]", b"{}", b"NaN", b"9" * 5000]  # fmt: skip
Mutate = Callable[[bytearray, random.Random], None]


def flip(data: bytearray, rng: random.Random) -> None:
    for _ in range(rng.randint(1, 8)):
        data[rng.randrange(len(data))] = rng.randrange(256)


def drop(data: bytearray, rng: random.Random) -> None:
    start = rng.randrange(len(data))
    del data[start : start + rng.randint(1, 300)]


def repeat(data: bytearray, rng: random.Random) -> None:
    start = rng.randrange(len(data))
    data[start:start] = data[start : start + rng.randint(1, 300)] * rng.randint(1, 3)


def exchange(data: bytearray, rng: random.Random) -> None:
    left, right, count = rng.randrange(len(data)), rng.randrange(len(data)), rng.randint(1, 40)
    one, other = data[left : left + count], data[right : right + count]
    data[left : left + count], data[right : right + count] = other, one


def replace_number(data: bytearray, rng: random.Random) -> None:
    number = rng.choice(list(re.finditer(rb"\d+", bytes(data))))
    data[number.start() : number.end()] = rng.choice(TROUBLE)


def cut(data: bytearray, rng: random.Random) -> None:
    del data[rng.randrange(len(data)) :]


MUTATIONS: list[Mutate] = [flip, drop, repeat, exchange, replace_number, cut]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("small") / "checkpoint"
    synthesize_checkpoint(SMALL, 1, directory)
    return directory


@pytest.fixture
def guarded() -> Iterator[None]:
    """Fails where a check hangs, or takes more memory than the documents that it may read warrant."""

    def stop(*_: object) -> None:
        raise TimeoutError("the check hangs")

    previous = signal.signal(signal.SIGALRM, stop)
    signal.alarm(240)
    tracemalloc.start()
    yield
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    signal.alarm(0)
    signal.signal(signal.SIGALRM, previous)
    assert peak < 32 << 20


def checked(directory: Path) -> Inventory | None:
    """The inventory if the check accepts it; None for one error of ours. Anything else is a failure."""
    try:
        return read_inventory(directory)
    except CheckpointError as error:
        refusals = [error]
    assert all(error.where and len(str(error)) < 1 << 16 for error in refusals)
    return None


@pytest.mark.usefixtures("guarded")
@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda mutation: mutation.__name__)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_mutated_index(small: Path, seed: int, mutate: Mutate) -> None:
    path, rng = small / INDEX_FILE, random.Random(f"index {seed}")
    intact = path.read_bytes()
    good = read_inventory(small)
    try:
        for _ in range(ROUNDS):
            data = bytearray(intact)
            mutate(data, rng)
            path.write_bytes(data)
            found = checked(small)
            # Metadata may go or change its name, and white space; the map cannot without notice.
            assert found is None or found.tensors == good.tensors
    finally:
        path.write_bytes(intact)


@pytest.mark.usefixtures("guarded")
@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda mutation: mutation.__name__)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_mutated_header(small: Path, seed: int, mutate: Mutate) -> None:
    """The header alone is damaged; its length is put right again in half of the rounds, to get past the first check."""
    path, rng = small / SHARD, random.Random(f"header {seed}")
    intact = path.read_bytes()
    length = int.from_bytes(intact[:8], "little")
    header, payload = intact[8 : 8 + length], intact[8 + length :]
    try:
        for number in range(ROUNDS):
            data = bytearray(header)
            mutate(data, rng)
            stated = len(data) if number % 2 else length
            path.write_bytes(stated.to_bytes(8, "little") + data + payload)
            found = checked(small)
            if found is not None:
                spans = sorted((t.entry.begin, t.entry.end) for t in found.tensors.values() if t.file == SHARD)
                assert all(left[1] == right[0] for left, right in pairwise(spans))
                assert spans[-1][1] == path.stat().st_size
    finally:
        path.write_bytes(intact)


@pytest.mark.usefixtures("guarded")
@pytest.mark.parametrize("seed", SEEDS)
def test_a_mutated_length(small: Path, seed: int) -> None:
    """The eight bytes before the header: any number."""
    path, rng = small / SHARD, random.Random(f"length {seed}")
    intact = path.read_bytes()
    try:
        for _ in range(ROUNDS):
            length = rng.randrange(2 ** rng.randint(1, 64))
            with path.open("r+b") as file:
                file.write(length.to_bytes(8, "little"))
            assert checked(small) is None or length.to_bytes(8, "little") == intact[:8]
    finally:
        path.write_bytes(intact)


def test_mutations_are_not_all_refused_by_the_same_check(small: Path) -> None:
    """The fuzz run reaches the checks behind the parser: of the index's errors at least these kinds occur."""
    path, rng, kinds = small / SHARD, random.Random("kinds"), set()
    intact = path.read_bytes()
    length = int.from_bytes(intact[:8], "little")
    try:
        for _ in range(400):
            data = bytearray(intact[8 : 8 + length])
            rng.choice(MUTATIONS)(data, rng)
            path.write_bytes(len(data).to_bytes(8, "little") + data + intact[8 + length :])
            try:
                open_checkpoint(small)
            except V41Error as error:
                kinds.add(type(error).__name__)
    finally:
        path.write_bytes(intact)
    assert {"MalformedJsonError", "HeaderSchemaError", "TensorOffsetsError", "DuplicateKeyError"} <= kinds
    assert kinds & {"IndexCoverageError", "UnknownTensorError"}
