"""A rank holds its heads, groups, vocabulary and experts and needs nothing else: the rest may be NaN."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from v41_config import TINY, ParallelLayout
from v41_goldens.paged_cache import PagedCaches
from v41_loader import Checkpoint, rank_part, shard_tensor
from v41_model.generation import Request, admit, advance
from v41_model.layer_capture import merge_captures
from v41_model.local_world import LocalWorld
from v41_model.rank_forward import RankModel
from v41_model.session import ModelSession

LAYOUT = ParallelLayout(tp=4, dp=2)
NAN_BYTE = 0xFF
"""All bits set is NaN in BF16, FP32, E4M3 and E8M0; FP4 has none, but its scales do."""


def _rank_tensors(checkpoint: Checkpoint, rank: int) -> dict[str, Tensor]:
    """A rank's tensors, cut out of whole ones in which everything that is not the rank's is NaN."""
    tensors = {}
    for name in checkpoint.names:
        part = rank_part(checkpoint.inventory.tensors[name].expected, TINY, LAYOUT, rank)
        if part is None:
            continue
        whole = checkpoint.tensor(name)
        if part.axis is not None:
            own = whole.narrow(part.axis, part.start, part.stop - part.start).clone()
            whole.view(torch.uint8).fill_(NAN_BYTE)
            whole.narrow(part.axis, part.start, part.stop - part.start).copy_(own)
        tensors[name] = shard_tensor(name, whole, TINY, LAYOUT, rank)
    return tensors


def _poison(caches: PagedCaches) -> None:
    for rows in (*caches.window.values(), *caches.compressed.values(), *caches.index_key.values()):
        rows.payload.view(torch.uint8).fill_(NAN_BYTE)
        rows.scale.view(torch.uint8).fill_(NAN_BYTE)
    for state in caches.state.values():
        state.fill_(torch.nan)


def _run(session: ModelSession, poison: bool) -> list[Mapping[str, Tensor]]:
    requests = [Request(tuple(range(3, 3 + n)), 2) for n in (9, 4, 18)]
    groups = admit(session, requests)
    if poison:
        for caches in session.caches.values():
            _poison(caches)
    return [merge_captures(step.output.captures) for _ in range(2) for step in advance(session, groups, capture=True)]


def test_everything_else_may_be_nan(tiny_checkpoint: Checkpoint) -> None:
    """Weights outside the rank's part and every byte of fresh caches, in prefill and decode."""
    world = LocalWorld(LAYOUT)
    ranks = [
        RankModel.from_tensors(TINY, LAYOUT, rank, _rank_tensors(tiny_checkpoint, rank)) for rank in world.local_ranks
    ]
    poisoned = _run(ModelSession(ranks, world), poison=True)
    clean = _run(ModelSession.open(tiny_checkpoint, LAYOUT), poison=False)
    for ours, expected in zip(poisoned, clean, strict=True):
        different = [k for k, t in ours.items() if not torch.equal(t.nan_to_num(), expected[k].nan_to_num())]
        # the ring slots that no token has written hold the poison, and nothing reads them
        assert [k for k in different if not k.endswith("compressor_state")] == []
        assert not any(bool(ours[k].isnan().any()) for k in ours if not k.endswith("compressor_state"))


def test_poison_inside_the_part_is_seen(tiny_checkpoint: Checkpoint) -> None:
    """The check above can fail: one NaN scale of one rank's own head reaches the logits."""
    world = LocalWorld(LAYOUT)
    tensors = [_rank_tensors(tiny_checkpoint, rank) for rank in world.local_ranks]
    tensors[5]["layers.4.attn.wq_b.scale"].view(torch.uint8)[0, 0] = NAN_BYTE
    ranks = [RankModel.from_tensors(TINY, LAYOUT, rank, part) for rank, part in enumerate(tensors)]
    session = ModelSession(ranks, world)
    with pytest.raises(Exception, match="NaN"):
        _run(session, poison=False)


def test_a_rank_keeps_no_view_of_anything_larger(tiny_checkpoint: Checkpoint) -> None:
    session = ModelSession.open(tiny_checkpoint, LAYOUT)
    for rank, model in session._ranks.items():
        weights, layer = model.weights, model.weights.layers[2]
        assert weights.embed.shape[0] == weights.head.shape[0] == TINY.vocab_size // 4
        assert layer.attention.attn_sink.shape[0] == TINY.num_attention_heads // 4
        assert layer.attention.wq_b.shape[0] == TINY.num_attention_heads // 4 * TINY.head_dim
        assert layer.attention.wo_b.shape[1] == TINY.o_groups // 4 * TINY.o_lora_rank
        assert sorted(layer.moe.experts) == list(LAYOUT.expert_range(TINY, rank))
        held = [weights.embed, weights.head, layer.attention.attn_sink, layer.attention.wq_b.codes]
        held += [layer.attention.wo_b.codes, layer.attention.wo_b.scale, layer.attention.wo_a.scale]
        held += [e.w1.scale for e in layer.moe.experts.values()]
        assert [t.untyped_storage().nbytes() for t in held] == [t.nbytes for t in held]


def test_padding_rows_are_zero_wherever_they_travel(tiny_checkpoint: Checkpoint) -> None:
    """What the collectives carry for rows without a token: zeros, in every layer, also where whole slabs are empty."""
    session = ModelSession.open(tiny_checkpoint, LAYOUT)
    seen = []
    for communicator in session.world.communicators:
        for name in ("all_gather_tokens", "reduce_scatter_tokens"):
            original = getattr(communicator, name)

            def observed(tensor, site, original=original, name=name):  # type: ignore[no-untyped-def]
                result = original(tensor, site)
                whole = result if name == "all_gather_tokens" else tensor
                seen.append((str(site), len(whole), whole[5:]))
                return result

            setattr(communicator, name, observed)
    advance(session, admit(session, [Request((4, 5, 6, 7, 8), 1)]))
    assert {rows for _, rows, _ in seen} == {8}
    # the embedding's partials hold -0 where a rank has nothing to add, which no sum can tell from zero
    assert not any(bool(padding.any()) for _, _, padding in seen)
    assert len(seen) == 4 * (1 + 2 * TINY.num_hidden_layers + 1), "the idle DP group skips its TP collectives"


def test_an_idle_group_takes_part_in_every_ep_collective(tiny_checkpoint: Checkpoint) -> None:
    session = ModelSession.open(tiny_checkpoint, LAYOUT)
    advance(session, admit(session, [Request((4, 5, 6, 7, 8), 1)]))
    sequences = [
        [entry for entry in c.log.sequence() if entry[1].step.startswith("expert")] for c in session.world.communicators
    ]
    assert sequences == [sequences[0]] * 8
    assert len(sequences[0]) == 3 * TINY.num_hidden_layers
    assert len(session.world.communicators[4].log.records) == 3 * TINY.num_hidden_layers
