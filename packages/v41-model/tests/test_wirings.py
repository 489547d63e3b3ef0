"""Both wirings on the same inputs: commands that compare them, and a comparison that finds what differs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from v41_config import TINY, GatheredRows, LocalRows, ParallelLayout, TokenMapping
from v41_loader import Checkpoint
from v41_model.cli import main
from v41_model.collective_log import Site
from v41_model.communicator import Communicator
from v41_model.local_world import LocalWorld
from v41_model.session import ModelSession
from v41_model.wiring import ReplicatedBoundary, Wiring
from v41_model.wiring_comparison import different_tensors, verdict

HERE = Site("here")


@pytest.fixture
def options(tiny_directory: Path, tmp_path: Path) -> list[str]:
    requests = tmp_path / "requests.json"
    requests.write_text('{"requests": [[0, 17, 42, 7, 8], [0, 99], [5]]}')
    run = ["--checkpoint", str(tiny_directory), "--requests", str(requests), "--tp", "2", "--dp", "2"]
    return [*run, "--threads", "1", "--wiring", "both"]


def _forward(options: list[str], tmp_path: Path) -> int:
    return main(["forward", *options, "--capture", "layers", "--decode", "1", "--out", str(tmp_path / "out")])


def test_both_wirings_write_the_same_tensors(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _forward(options, tmp_path) == 0
    assert capsys.readouterr().out.rstrip().endswith("tensors equal to the bit")


def test_both_wirings_give_the_same_tokens(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", *options, "--max-new-tokens", "2"]) == 0
    assert capsys.readouterr().out.rstrip().endswith("the tokens of 3 requests equal to the bit")


def test_a_wiring_that_differs_is_an_answer_of_no(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of the replicated sum that come back in another order."""
    original = ReplicatedBoundary.reduce

    def turned(self: ReplicatedBoundary, partial: Tensor, site: Site) -> LocalRows[Tensor]:
        return original(self, partial.flip(0), site)

    monkeypatch.setattr(ReplicatedBoundary, "reduce", turned)
    assert _forward(options, tmp_path) == 1
    printed = capsys.readouterr().out.rstrip().splitlines()[-1]
    assert printed.startswith("the wirings differ in ")
    assert "first in request." in printed


def test_sessions_of_both_wirings_share_their_weights(tiny_checkpoint: Checkpoint) -> None:
    session = ModelSession.open(tiny_checkpoint, ParallelLayout(2, 1))
    other = session.rewired(Wiring.REPLICATED)
    assert [m.wiring for m in other._ranks.values()] == [Wiring.REPLICATED] * 2
    assert [m.wiring for m in session._ranks.values()] == [Wiring.SHARDED] * 2
    assert all(other._ranks[rank].weights is model.weights for rank, model in session._ranks.items())
    assert (other.world, other.operators, other.limits) == (session.world, session.operators, session.limits)


@pytest.mark.parametrize("wiring", Wiring)
@pytest.mark.parametrize(("capacity", "active"), [(8, 8), (8, 5), (3, 1), (9, 7)])
def test_a_boundary_goes_out_and_comes_back(wiring: Wiring, capacity: int, active: int) -> None:
    """Packed rows held, gathered, cut to own slabs and rejoined are the packed rows; padding is zero throughout."""
    layout = ParallelLayout(4, 1)
    mapping = TokenMapping(layout, 0, capacity, active)
    packed = torch.randn(active, TINY.hidden_size, generator=torch.Generator().manual_seed(active)).bfloat16()

    def program(comm: Communicator) -> tuple[LocalRows[Tensor], GatheredRows[Tensor], LocalRows[Tensor]]:
        boundary = wiring.boundary(mapping, comm.rank, comm)
        held = boundary.hold(packed)
        return boundary.own(held), boundary.gather(held, HERE), boundary.rejoin(boundary.own(held), HERE)

    results = LocalWorld(layout).run(program)
    assert torch.equal(mapping.merge([own for own, _, _ in results]), packed)
    for _, gathered, rejoined in results:
        assert torch.equal(gathered.tokens, packed)
        assert not gathered.tensor[active:].any()
        assert not rejoined.tensor[len(rejoined.tokens) :].any()
        if wiring is Wiring.REPLICATED:
            assert torch.equal(rejoined.tokens, packed)


def test_the_comparison_names_what_differs_in_order() -> None:
    one = {"a": torch.zeros(2), "b": torch.zeros(2), "c": torch.zeros(2)}
    other = {"a": torch.zeros(2), "b": -torch.zeros(2), "d": torch.zeros(2)}
    assert different_tensors(one, dict(one)) == []
    assert different_tensors(one, other) == ["b", "c", "d"], "-0 is not 0; a tensor that one side lacks differs"
    assert verdict([], "3 tensors") == "both wirings: 3 tensors equal to the bit"
    assert verdict(["b", "c"], "3 tensors") == "the wirings differ in 2 of 3 tensors, first in b"
