"""What a session asks of a world: its ranks, their communicators, and one call that runs a program on all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from v41_config import ParallelLayout
from v41_model.communicator import Communicator

__all__ = ["World"]

P = ParamSpec("P")
R = TypeVar("R")


class World(Protocol):
    """All ranks of a layout, some of them in this process. See :mod:`v41_model.local_world` and
    :mod:`v41_model.torch_distributed_world`."""

    @property
    def layout(self) -> ParallelLayout:
        """TP and DP sizes."""
        ...

    @property
    def local_ranks(self) -> range:
        """The ranks that live in this process."""
        ...

    @property
    def communicators(self) -> Sequence[Communicator]:
        """Those of ``local_ranks``, in their order; with their logs they live as long as the world."""
        ...

    @property
    def current_rank(self) -> int | None:
        """The rank that is running in this process, None outside of a run: for observers that its ranks share."""
        ...

    def run(
        self, rank_program: Callable[Concatenate[Communicator, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> list[R]:
        """Run ``rank_program(communicator, *args, **kwargs)`` on every rank, in torch's inference mode.

        Every process calls it with the same program. Returns the results of all ranks in rank order, in every
        process; where ranks live in several processes, results are tensors, numbers, text, None and containers of
        them.

        Errors: :class:`RankError` (with the rank) when a program raises; the other ranks are stopped where they wait.
        :class:`WorldError` when ranks meet with different collectives, or wait for ranks that will not arrive.
        """
        ...
