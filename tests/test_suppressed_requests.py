"""A request without a compressor state block reads nothing that nobody published, whatever the memory holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from v41_config import TINY, ForwardMetadata, SourceTokens, blocks_for_tokens, build_forward_metadata, cache_pools
from v41_goldens import ModelWeights
from v41_goldens.forward_context import ForwardContext
from v41_goldens.model import forward
from v41_goldens.paged_cache import PagedCaches
from v41_goldens.rope_rows import RopeRows, rope_tables

CAPACITY = 64
ROWS = [20, 3, 1]
"""Rows of each request in each step: a prefill, then two decodes, the second one from an odd position."""

Change = Callable[[ForwardMetadata[Tensor]], ForwardMetadata[Tensor]]


def run(
    weights: ModelWeights,
    requests: Sequence[int],
    disabled: Sequence[int],
    fill_byte: int = 0xFF,
    change: Change | None = None,
) -> list[Tensor]:
    """Step `requests` together, those of `disabled` without a state block: logits `[rows, V]` of each request.

    All cache memory holds `fill_byte` before; 0xFF is NaN in every payload and scale.
    """
    blocks = {
        p.block_table: 8 * (blocks_for_tokens(SourceTokens(CAPACITY), p.compress_ratio) if p.is_paged else 1)
        for p in cache_pools(TINY)
    }
    caches, rope = PagedCaches.allocate(TINY, blocks, fill_byte=fill_byte), rope_tables(TINY, CAPACITY)
    table = np.array([[request] for request in requests])
    state = np.where(np.isin(table, disabled), -1, table)
    stored, parts = 0, []
    for rows in ROWS:
        metadata = build_forward_metadata(
            TINY, np.arange(len(requests) + 1) * rows, [stored] * len(requests), table, {1: table, 2: table},
            {2: state, 4: state}, pool_blocks=blocks,
        ).to_torch()  # fmt: skip
        tokens = torch.cat([torch.arange(stored, stored + rows) * 7 + 31 * request for request in requests])
        context = ForwardContext(TINY, metadata if change is None else change(metadata), caches, RopeRows(rope))
        parts.append(forward(context, weights, tokens).logits.unflatten(0, (len(requests), rows)))
        stored += rows
    return list(torch.cat(parts, dim=1))


@pytest.fixture(scope="module")
def mixed(tiny_weights: ModelWeights) -> list[Tensor]:
    return run(tiny_weights, [3, 5], disabled=[3])


@pytest.mark.parametrize("fill_byte", [0x00, 0x4D])
def test_what_the_memory_held_makes_no_difference(
    fill_byte: int, mixed: list[Tensor], tiny_weights: ModelWeights
) -> None:
    other = run(tiny_weights, [3, 5], disabled=[3], fill_byte=fill_byte)
    assert all(torch.equal(a, b) for a, b in zip(mixed, other, strict=True))
    assert mixed[0].isfinite().all()


def test_its_neighbour_does_not_notice(mixed: list[Tensor], tiny_weights: ModelWeights) -> None:
    (alone,) = run(tiny_weights, [5], disabled=[])
    assert torch.equal(mixed[1], alone)


def test_it_does_compute_something_else(mixed: list[Tensor], tiny_weights: ModelWeights) -> None:
    """Position 0 closes no pair, and sees none either way; later ones miss what they would have seen."""
    (enabled,) = run(tiny_weights, [3], disabled=[])
    assert torch.equal(mixed[0][0], enabled[0])
    assert not torch.equal(mixed[0][-1], enabled[-1])


def test_rows_counted_as_visible_would_be_read(mixed: list[Tensor], tiny_weights: ModelWeights) -> None:
    """The check itself: with the lengths of a request that compresses, the logits show what the memory held."""

    def as_if_published(metadata: ForwardMetadata[Tensor]) -> ForwardMetadata[Tensor]:
        visible = ((metadata.position_ids + 1) // 2).int()
        lens = {source: visible if source in (2, 4) else of for source, of in metadata.compressed_lens.items()}
        return dataclasses.replace(metadata, compressed_lens=lens)

    (read,) = run(tiny_weights, [3], disabled=[3], fill_byte=0x4D, change=as_if_published)
    assert torch.equal(read[0], mixed[0][0])
    assert not torch.equal(read, mixed[0])
