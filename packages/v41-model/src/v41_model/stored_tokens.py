"""How many tokens of each request the caches of a DP group hold: lengths that count only after a step succeeded.

A request is told apart by its compressor state block, the one thing that stays with it for its whole life. The
compressor's ring remembers the last :data:`v41_config.STATE_CAPACITY` tokens it was given (model.md section 9), so a
request may go back over rejected drafts, but not to an odd position whose predecessor the ring has lost.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from v41_config import STATE_CAPACITY, ModelConfig
from v41_model.errors import RequestError
from v41_model.step_batch import StepBatch

__all__ = ["StoredTokens"]

_Ints = npt.NDArray[Any]
NO_POSITION = -1


class StoredTokens:
    """The requests of one DP group, by KV source with a state ring and by state block; ``blocks`` there are."""

    def __init__(self, config: ModelConfig, blocks: int) -> None:
        sources = [i for i in config.kv_source_layer_ids if config.compress_ratios[i] > 1]
        self._lengths = {source: np.zeros(blocks, dtype=np.int64) for source in sources}
        self._ring = {source: np.full((blocks, STATE_CAPACITY), NO_POSITION, dtype=np.int64) for source in sources}
        self.blocks = blocks

    def check(self, where: str, batch: StepBatch) -> None:
        """Compare what a batch says is stored with what is.

        Errors: :class:`RequestError` naming the request: more tokens than were stored, a new request in a block that
        was not reset, or a start whose predecessor is gone.
        """
        for source, request, block, stored, _ in self._live(batch):
            length = self._lengths[source][block]
            remembered = self._ring[source][block, (stored - 1) % STATE_CAPACITY] == stored - 1
            for wrong, expected in (
                (stored > length, "at most the {} that steps have stored in state block {}"),
                ((stored == 0) & (length > 0), "its {} tokens, or reset_request for state block {} before a new one"),
                (
                    (stored % 2 == 1) & ~remembered,
                    "a start whose predecessor the ring remembers, of {} in state block {}",
                ),
            ):
                if wrong.any():
                    first = int(wrong.argmax())
                    told = f"{int(stored[first])} tokens stored before the step"
                    raise RequestError(
                        f"{where}, request {int(request[first])}",
                        told,
                        expected.format(int(length[first]), int(block[first])),
                    )

    def commit(self, batch: StepBatch) -> None:
        """Take over the lengths after a step that succeeded."""
        for source, _, block, stored, rows in self._live(batch):
            end = stored + rows
            self._lengths[source][block] = end
            for back in range(1, STATE_CAPACITY + 1):
                position = end - back
                mine = position >= stored
                self._ring[source][block[mine], position[mine] % STATE_CAPACITY] = position[mine]

    def reset(self, block: int, stored: int) -> None:
        """Forget a block's request; ``stored`` tokens of the next one are in the caches already."""
        positions = np.arange(max(0, stored - STATE_CAPACITY), stored)
        for source in self._lengths:
            self._lengths[source][block] = stored
            self._ring[source][block] = NO_POSITION
            self._ring[source][block, positions % STATE_CAPACITY] = positions

    def length(self, block: int) -> int:
        """Tokens stored of the request in a state block; 0 in a model without state rings."""
        return max((int(lengths[block]) for lengths in self._lengths.values()), default=0)

    def _live(self, batch: StepBatch) -> Iterator[tuple[int, _Ints, _Ints, _Ints, _Ints]]:
        """Per source: batch rows, state blocks, stored lengths and new rows of requests that run and have a state."""
        rows = np.diff(batch.query_start_loc)
        for source in self._lengths:
            block = np.asarray(batch.state_block_tables[source])[:, 0]
            (request,) = np.nonzero((block >= 0) & (rows > 0))
            yield source, request, block[request], np.asarray(batch.kv_seq_lens)[request], rows[request]
