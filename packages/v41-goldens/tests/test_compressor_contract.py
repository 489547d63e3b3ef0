"""The compressor's state contract in the destination form: packed rows, padding, a ring that belongs to a request."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from v41_config import STATE_CAPACITY, TINY, ForwardMetadata, build_forward_metadata
from v41_goldens.compressor import CompressorRows, compress_ratio_2
from v41_goldens.errors import OperandError
from v41_goldens.fixtures.random_tensors import RandomTensors, sentinel
from v41_goldens.judges import assert_equal_bits, unequal_bits
from v41_goldens.operators import golden
from v41_goldens.weights import CompressorWeights

SOURCE, BLOCKS, PADDING = 2, 6, 5
GOLDEN = golden("compress_ratio_2")
POISON = math.nan


def weights() -> dict[str, Tensor]:
    bound = GOLDEN.spec.bind(TINY, T=1, B=1, G=1, STATE_BLOCKS=1)
    names = ("compressor_wkv", "compressor_wgate", "compressor_norm")
    return {name: RandomTensors(3).operand(bound.tensors[name].spec, bound.shapes[name]) for name in names}


WEIGHTS = weights()


def tokens_of(request: int, count: int) -> Tensor:
    return RandomTensors(request).normal("tokens", (count, TINY.hidden_size)).bfloat16()


def metadata_of(stored: Sequence[int], new: Sequence[int], blocks: Sequence[int]) -> ForwardMetadata[Tensor]:
    pages = np.arange(len(stored)).reshape(-1, 1)
    return build_forward_metadata(
        TINY, np.concatenate([[0], np.cumsum(new, dtype=np.int64)]), np.asarray(stored, dtype=np.int64), pages,
        {1: pages, 2: pages}, dict.fromkeys((2, 4), np.asarray(blocks, dtype=np.int64).reshape(-1, 1)),
    ).to_torch()  # fmt: skip


class Calls:
    """Requests with a state block each, in calls with `PADDING` rows of garbage behind the packed ones."""

    def __init__(self, blocks: Sequence[int]) -> None:
        self.state = torch.full((BLOCKS, STATE_CAPACITY, 2 * TINY.head_dim), POISON)
        self.blocks, self.stored = list(blocks), [0] * len(blocks)
        self.latents: list[list[Tensor]] = [[] for _ in blocks]

    def call(self, batch: Sequence[tuple[int, Tensor]], num_tokens: int | None = None) -> Tensor:
        """The latents as the operator leaves them; the rows `[G]` that nothing closes keep the sentinel."""
        ids, new = [request for request, _ in batch], [len(rows) for _, rows in batch]
        meta = metadata_of([self.stored[i] for i in ids], new, [self.blocks[i] for i in ids])
        total = sum(new)

        def padded(values: Tensor, filler: float) -> Tensor:
            return torch.cat([values, torch.full((PADDING, *values.shape[1:]), filler, dtype=values.dtype)])

        closing = meta.compressor_source_token_indices[SOURCE]
        bound = GOLDEN.spec.bind(TINY, T=total + PADDING, B=len(batch), G=len(closing), STATE_BLOCKS=BLOCKS)
        latent = sentinel((len(closing), TINY.head_dim), torch.bfloat16)
        GOLDEN.run(bound, {
            **WEIGHTS,
            "x": padded(torch.cat([rows for _, rows in batch]), POISON),
            "query_start_loc": meta.query_start_loc,
            "position_ids": padded(meta.position_ids, 1 << 30),
            "token_to_req_indices": padded(meta.token_to_req_indices, 1 << 30),
            "state_block_table": meta.state_block_tables[SOURCE],
            "state_cache": self.state,
            "compressor_source_token_indices": closing,
            "latent": latent,
            "num_tokens": total if num_tokens is None else num_tokens,
        })  # fmt: skip
        if num_tokens is None:
            starts = meta.compressor_output_start_loc[SOURCE].tolist()
            for row, request in enumerate(ids):
                self.latents[request].append(latent[starts[row] : starts[row + 1]])
                self.stored[request] += new[row]
        return latent

    def check(self, request: int, tokens: Tensor) -> None:
        alone = Calls([0])
        alone.call([(0, tokens)])
        expected = alone.latents[0][0]
        assert len(expected) == len(tokens) // 2
        assert_equal_bits(torch.cat(self.latents[request]), expected, f"request {request}")


def test_two_calls_of_everything_at_once() -> None:
    """Reordering, a block that changes hands, a chunk longer than the ring, inactive requests and trailing padding."""
    a, b, c, d = (tokens_of(request, 30) for request in range(4))
    calls = Calls([4, 1, 3, 4])  # d takes over a's block
    calls.call([(0, a[:3]), (1, b[:0]), (2, c[:9])])
    assert calls.state[[0, 1, 2, 5]].isnan().all(), "blocks of nobody, and of a request without rows"
    calls.call([(2, c[9:10]), (3, d[:1]), (1, b[:13])])
    calls.call([(3, d[1:6]), (1, b[13:14]), (2, c[10:10])])
    calls.call([(1, b[14:15]), (2, c[10:15]), (3, d[6:7])])
    for request, tokens in ((1, b), (2, c), (3, d)):
        calls.check(request, tokens[: calls.stored[request]])
    assert calls.stored == [3, 15, 15, 7]
    assert calls.state[[0, 2, 5]].isnan().all()


@pytest.mark.parametrize("length", range(1, 14))
def test_every_cut_in_two_is_one_shot(length: int) -> None:
    tokens = tokens_of(7, 13)
    calls = Calls([5])
    calls.call([(0, tokens[:length])])
    calls.call([(0, tokens[length:])])
    calls.check(0, tokens)


def test_every_order_of_batch_rows() -> None:
    tokens = [tokens_of(request, 12) for request in range(3)]
    calls = Calls([3, 0, 2])
    for step, order in enumerate(itertools.permutations(range(3))):
        calls.call([(request, tokens[request][2 * step : 2 * step + 2]) for request in order])
    for request in range(3):
        calls.check(request, tokens[request])


def test_no_tokens_in_a_positive_extent() -> None:
    """Neither projection (the rows are NaN), nor state (of a block that does not exist), nor output is touched."""
    calls = Calls([2])
    calls.call([(0, tokens_of(1, 3))])
    before = calls.state.clone()
    calls.blocks = [1000]
    latent = calls.call([(0, torch.full((4, TINY.hidden_size), POISON).bfloat16())], num_tokens=0)
    assert_equal_bits(calls.state, before, "state")
    assert_equal_bits(latent, sentinel(tuple(latent.shape), latent.dtype), "latent")


def test_resuming_at_an_odd_position_needs_the_predecessors_row() -> None:
    """What a prefix cache has to bring back: with the row the latent is right; compressed KV alone is not enough."""
    tokens = tokens_of(5, 8)
    first = Calls([1])
    first.call([(0, tokens[:5])])
    restored = Calls([4])
    restored.stored = [5]
    restored.state[4, 4 % STATE_CAPACITY] = first.state[1, 4 % STATE_CAPACITY]
    restored.call([(0, tokens[5:])])
    first.call([(0, tokens[5:])])
    assert_equal_bits(restored.latents[0][0], first.latents[0][1], "resumed")

    zeroed = Calls([4])
    zeroed.stored = [5]
    zeroed.state[4] = 0
    zeroed.call([(0, tokens[5:])])
    differs = unequal_bits(zeroed.latents[0][0], first.latents[0][1]).any(dim=1).tolist()
    assert differs == [True, False], (
        "a state of zeros is silently wrong in the pair that was open, as the contract says"
    )
    poisoned = Calls([4])
    poisoned.stored = [5]
    poisoned.call([(0, tokens[5:])])
    assert poisoned.latents[0][0].isnan().all(dim=1).tolist() == [True, False]


@pytest.mark.parametrize("committed", [0, 3, 4, 6])
def test_resuming_where_the_committed_tokens_do_not_end_is_refused(committed: int) -> None:
    """The caller's lengths show that the ring holds another token's row at that place."""
    rows = CompressorRows.of(metadata_of([5, 2], [3, 1], [0, 1]), SOURCE)
    state = torch.zeros(2, STATE_CAPACITY, 2 * TINY.head_dim)
    found = CompressorWeights(WEIGHTS["compressor_wkv"], WEIGHTS["compressor_norm"], WEIGHTS["compressor_wgate"])
    compress_ratio_2(tokens_of(1, 4), found, rows, state.clone(), TINY)
    stale = dataclasses.replace(rows, committed=torch.tensor([committed, 2]))
    with pytest.raises(OperandError, match=r"position of request\[0\]: expected the position behind .* found 5"):
        compress_ratio_2(tokens_of(1, 4), found, stale, state, TINY)
    assert not state.any(), "nothing is written"


def test_a_pair_without_a_state_block_is_refused() -> None:
    rows = CompressorRows.of(metadata_of([1], [1], [0]), SOURCE)
    found = CompressorWeights(WEIGHTS["compressor_wkv"], WEIGHTS["compressor_norm"], WEIGHTS["compressor_wgate"])
    state = torch.ones(1, STATE_CAPACITY, 2 * TINY.head_dim)
    lost = dataclasses.replace(rows, state_block=torch.tensor([-1]))
    with pytest.raises(OperandError, match=r"state_block of closing\[0\]: .* found -1"):
        compress_ratio_2(tokens_of(1, 1), found, lost, state, TINY)


def test_negative_positions_store_nothing() -> None:
    rows = CompressorRows.of(metadata_of([0], [3], [0]), SOURCE)
    found = CompressorWeights(WEIGHTS["compressor_wkv"], WEIGHTS["compressor_norm"], WEIGHTS["compressor_wgate"])
    hidden = dataclasses.replace(
        rows, position=torch.full((3,), -1), closing=torch.empty(0, dtype=torch.int64), committed=None
    )
    state = torch.full((1, STATE_CAPACITY, 2 * TINY.head_dim), POISON)
    assert compress_ratio_2(tokens_of(1, 3), found, hidden, state, TINY).shape == (0, TINY.head_dim)
    assert state.isnan().all()
