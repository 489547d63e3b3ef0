"""Weights out of either kind of directory: the same ranks, and one error where the shards are another layout's."""

from __future__ import annotations

from pathlib import Path

import pytest

from v41_config import LayoutError, ParallelLayout
from v41_loader import Checkpoint, ShardingError, open_weights, shard_checkpoint
from v41_model.checkpoint_weights import load_rank_model
from v41_model.cli import main
from v41_model.generation import generate
from v41_model.session import ModelSession

LAYOUT = ParallelLayout(2, 2)
PROMPTS = [[0, 17, 42], [0, 99], [5]]


@pytest.fixture(scope="module")
def shards(tiny_checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("shards") / "tp2-dp2"
    shard_checkpoint(tiny_checkpoint.inventory, directory, LAYOUT)
    return directory


def test_shards_give_the_tokens_of_their_checkpoint(tiny_checkpoint: Checkpoint, shards: Path) -> None:
    with open_weights(shards) as opened:
        from_shards = ModelSession.open(opened, LAYOUT)
    assert generate(from_shards, PROMPTS, 3) == generate(ModelSession.open(tiny_checkpoint, LAYOUT), PROMPTS, 3)


def test_shards_of_another_layout_are_refused(shards: Path) -> None:
    with open_weights(shards) as opened, pytest.raises(ShardingError, match="as asked for"):
        load_rank_model(opened, ParallelLayout(4, 1), 0)


def test_a_layout_that_does_not_divide_is_refused_before_anything_is_read(tiny_checkpoint: Checkpoint) -> None:
    with pytest.raises(LayoutError, match="tp"):
        load_rank_model(tiny_checkpoint, ParallelLayout(3, 1), 0)


def test_the_command_takes_either(
    tiny_directory: Path, shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    requests = tmp_path / "requests.json"
    requests.write_text(f'{{"requests": {PROMPTS}}}')
    printed = []
    for directory in (tiny_directory, shards):
        options = ["--requests", str(requests), "--tp", "2", "--dp", "2", "--max-new-tokens", "2", "--threads", "1"]
        assert main(["generate", "--checkpoint", str(directory), *options]) == 0
        printed.append([line for line in capsys.readouterr().out.splitlines() if "done" in line])
    assert printed[0] == printed[1]
    assert len(printed[0]) == len(PROMPTS)
    assert main(["generate", "--checkpoint", str(shards), "--requests", str(requests), "--max-new-tokens", "1"]) == 2
    assert "as asked for" in capsys.readouterr().err
