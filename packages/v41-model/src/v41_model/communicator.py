"""What rank code may ask of the other ranks. Written against these protocols, it runs in any world.

A *world* provides one communicator per rank. Every call names its :class:`~v41_model.collective_log.Site`; all
members of the group must make the same call from the same site, with the same shapes where the collective has fixed
shapes. Results are copies: nothing a rank receives shares memory with another rank. Every call is entered in ``log``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from v41_config import ParallelLayout
from v41_model.collective_log import CollectiveLog, Site

__all__ = ["Communicator", "ExpertCommunicator", "TokenCommunicator", "sum_in_rank_order"]


class TokenCommunicator(Protocol):
    """Collectives inside a rank's TP group (the ranks of one DP group), along the token dimension."""

    def all_gather_tokens(self, rows: Tensor, site: Site) -> Tensor:
        """Concatenate the members' slabs in rank order: ``[T_local, ...]`` -> ``[tp * T_local, ...]``, any dtype."""
        ...

    def reduce_scatter_tokens(self, partial: Tensor, site: Site) -> Tensor:
        """Sum FP32 partials ``[tp * T_local, ...]`` in rank order and keep this rank's slab ``[T_local, ...]``.

        The sum is FP32, one addition per member in ascending rank; nothing is rounded further (model.md section 18).
        """
        ...

    def all_reduce(self, partial: Tensor, site: Site) -> Tensor:
        """Sum equal-shaped FP32 partials in rank order; every member receives the sum."""
        ...

    def gather_logits(self, logits: Tensor, site: Site) -> Tensor:
        """Concatenate vocabulary shards in rank order: FP32 ``[R, V / tp]`` -> ``[R, V]`` on every member."""
        ...


class ExpertCommunicator(Protocol):
    """Collectives over the EP group, which is the whole world. No rank may skip one, whatever its row count."""

    @property
    def ep_size(self) -> int:
        """Number of ranks that own experts."""
        ...

    def exchange_counts(self, send_counts: Tensor, site: Site) -> Tensor:
        """INT64 ``[ep]`` rows this rank will send to each rank -> INT64 ``[ep]`` rows each rank will send here."""
        ...

    def exchange_rows(
        self, columns: Sequence[Tensor], send_counts: Tensor, receive_counts: Tensor, site: Site
    ) -> tuple[Tensor, ...]:
        """Send rows grouped by destination rank, receive rows grouped by source rank, in exact sizes.

        ``columns`` are tensors ``[sum(send_counts), ...]`` of any dtypes whose rows belong together and travel
        together (a BF16 row with its FP32 route weight and INT32 expert id). Returns the same columns with
        ``sum(receive_counts)`` rows. The counts must come from :meth:`exchange_counts`.
        """
        ...


class Communicator(TokenCommunicator, ExpertCommunicator, Protocol):
    """Everything a rank needs: both groups, its place in the layout, and the log of its collectives."""

    @property
    def rank(self) -> int:
        """This rank, ``0 <= rank < layout.world_size``; also its EP rank."""
        ...

    @property
    def layout(self) -> ParallelLayout:
        """TP and DP sizes shared by all ranks."""
        ...

    @property
    def log(self) -> CollectiveLog:
        """This rank's account of calls and bytes."""
        ...


def sum_in_rank_order(partials: Sequence[Tensor]) -> Tensor:
    """FP32 sum ``((p0 + p1) + p2) + ...``: the one order every world uses (model.md section 18).

    A backend's own reduction may add in another order, which changes last bits; worlds therefore move the partials
    and add them here.
    """
    result = partials[0].clone()
    for partial in partials[1:]:
        result += partial
    return result
