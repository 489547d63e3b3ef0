"""A session's contract: what it refuses, and that a failed step poisons it while a bad batch does not."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from v41_config import TINY, TINY8, CapacityPlan, LayoutError, MetadataError, ParallelLayout, SlabError, cache_pools
from v41_goldens.forward_context import ForwardContext
from v41_goldens.rope_rows import RopeRows, rope_tables
from v41_loader import Checkpoint
from v41_model.cache_budget import CacheBudget
from v41_model.errors import RankError, RequestError, SessionError
from v41_model.expert_parallel import expert_owners
from v41_model.generation import Request, admit, advance
from v41_model.layer_capture import merge_captures
from v41_model.local_world import LocalWorld
from v41_model.operators import Operators
from v41_model.rank_layer import RankStep
from v41_model.session import ModelSession
from v41_model.step_batch import StepBatch
from v41_model.step_limits import StepLimits

TP2 = ParallelLayout(2, 1)
BLOCKS = {pool.block_table: 1 for pool in cache_pools(TINY)}


@pytest.fixture
def session(tiny_checkpoint: Checkpoint) -> ModelSession:
    session = ModelSession.open(tiny_checkpoint, TP2)
    session.allocate(CacheBudget(BLOCKS, 64))
    return session


def _batch(ids: list[int], stored: int = 0) -> StepBatch:
    table = np.zeros((1, 1), dtype=np.int32)
    return StepBatch(
        token_ids=np.array(ids, dtype=np.int32),
        query_start_loc=np.array([0, len(ids)]),
        kv_seq_lens=np.array([stored]),
        window_block_table=table,
        compressed_block_tables={1: table, 2: table},
        state_block_tables={2: table, 4: table},
    )


def test_a_step_gives_last_or_all_logits(session: ModelSession) -> None:
    (last,) = session.step([_batch([3, 4, 5])])
    session.reset_request(0, 0)
    (every,) = session.step([_batch([3, 4, 5])], all_logits=True)
    assert last.logits.shape == (1, TINY.vocab_size)
    assert every.logits.shape == (3, TINY.vocab_size)
    assert torch.equal(last.logits, every.logits[2:])
    assert torch.equal(last.last_logits, every.last_logits)
    assert last.captures == ()


@pytest.mark.parametrize("capacity", [3, 4, 5, 11])
def test_reserved_rows_change_nothing(session: ModelSession, capacity: int) -> None:
    """Larger slabs move tokens to other ranks and leave some with padding only."""
    (compact,) = session.step([_batch([3, 4, 5])], all_logits=True, capture=True)
    session.reset_request(0, 0)
    (reserved,) = session.step([_batch([3, 4, 5])], capacity=capacity, all_logits=True, capture=True)
    assert torch.equal(compact.logits, reserved.logits)
    assert torch.equal(*(merge_captures(o.captures)["layer.09.X"] for o in (compact, reserved)))
    rows = [len(c.tensors["embed_out"]) for c in reserved.captures]
    assert rows == [min(3, -(-capacity // 2)), 3 - min(3, -(-capacity // 2))]


def test_idle_groups_have_no_logits(session: ModelSession) -> None:
    (output,) = session.step([StepBatch.idle(TINY)])
    assert output.logits.shape == (0, TINY.vocab_size)
    assert output.last_logits.shape == (0, TINY.vocab_size)


def test_a_bad_batch_poisons_nothing(session: ModelSession) -> None:
    with pytest.raises(RequestError, match=r"token id of row 1: .*found 512"):
        session.step([_batch([3, 512])])
    with pytest.raises(RequestError):
        session.step([_batch([-1])])
    with pytest.raises(MetadataError):
        session.step([dataclasses.replace(_batch([3]), compressed_block_tables={})])
    with pytest.raises(MetadataError, match="query_start_loc"):
        session.step([dataclasses.replace(_batch([3]), kv_seq_lens=np.array([0, 0]))])
    with pytest.raises(MetadataError, match="kv_seq_lens"):
        session.step([dataclasses.replace(_batch([3]), kv_seq_lens=np.array([0.0]))])
    foreign = np.full((1, 1), 1, dtype=np.int32)
    with pytest.raises(MetadataError, match="window"):
        session.step([dataclasses.replace(_batch([3]), window_block_table=foreign)])
    with pytest.raises(SessionError, match="2 batches"):
        session.step([_batch([3]), _batch([4])])
    with pytest.raises(LayoutError, match="capacity"):
        session.step([_batch([3, 4])], capacity=1)
    with pytest.raises(RequestError, match="2 token ids"):
        dataclasses.replace(_batch([3, 4]), query_start_loc=np.array([0, 1]))
    session.step([_batch([3])])


def test_a_failed_step_poisons_the_session(tiny_checkpoint: Checkpoint) -> None:
    calls = 0

    def failing(*arguments: object) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 9:
            raise ZeroDivisionError("in the fifth layer")
        return Operators().combine(*arguments)  # type: ignore[arg-type]

    session = ModelSession.open(tiny_checkpoint, TP2, operators=Operators().replace(combine=failing))
    requests = [Request((3, 4, 5), 2)]
    groups = admit(session, requests)
    with pytest.raises(RankError, match="ZeroDivisionError: in the fifth layer"):
        advance(session, groups)
    assert (requests[0].stored, requests[0].generated) == (0, []), "lengths are committed after success only"
    with pytest.raises(SessionError, match=r"in the fifth layer"):
        advance(session, groups)
    session.allocate(CacheBudget(BLOCKS, 64))
    session.step([_batch([3])])


def test_positions_of_another_batch_do_not_meet_gathered_rows(session: ModelSession) -> None:
    """Equal counts are not enough: attention's context must be made from the very batch whose rows are gathered."""
    _, group = _batch([3, 4]).lower(TINY, TP2, 0)
    _, other = _batch([3, 4]).lower(TINY, TP2, 0)
    context = ForwardContext(TINY, other.metadata, session.caches[0], RopeRows(rope_tables(TINY, 8)))
    owners = expert_owners(TINY, TP2)
    with pytest.raises(SlabError, match="metadata of another batch"):
        RankStep(TINY, group, context, owners, session.world.communicators[0], session.operators)


def test_sessions_without_caches_or_closed(tiny_checkpoint: Checkpoint) -> None:
    session = ModelSession.open(tiny_checkpoint, TP2)
    with pytest.raises(SessionError, match="a call of allocate first"):
        session.step([_batch([3])])
    session.close()
    for use in (lambda: session.step([_batch([3])]), lambda: session.allocate(CacheBudget(BLOCKS, 64))):
        with pytest.raises(SessionError, match="closed"):
            use()


def test_layouts_that_do_not_divide_are_refused_before_loading(tiny_checkpoint: Checkpoint) -> None:
    for layout in (ParallelLayout(8, 1), ParallelLayout(1, 32), ParallelLayout(3, 1)):
        with pytest.raises(LayoutError):
            ModelSession.open(tiny_checkpoint, layout)


def test_every_rank_of_the_world_needs_a_model(tiny_checkpoint: Checkpoint) -> None:
    session = ModelSession.open(tiny_checkpoint, TP2)
    ranks = list(session._ranks.values())
    with pytest.raises(SessionError, match="one model for each of ranks"):
        ModelSession(ranks[:1], LocalWorld(TP2))


def test_requests_past_the_allocated_length_are_refused_before_the_step(session: ModelSession) -> None:
    """RoPE tables end where `allocate` said; nothing wraps around, and nothing is poisoned."""
    session.reset_request(0, 0, stored=64)
    with pytest.raises(RequestError, match=r"DP group 0, request 0: expected at most the 64 .*found 65 tokens"):
        session.step([_batch([3], stored=64)])
    session.reset_request(0, 0, stored=63)
    session.step([_batch([3], stored=63)])


@pytest.mark.parametrize(
    ("blocks", "max_tokens", "pattern"),
    [
        ({"window": 1}, 64, "a count for each of window, c2a_cmp_kv"),
        ({**BLOCKS, "gold": 1}, 64, "gold"),
        ({**BLOCKS, "window": 0}, 64, r"blocks\[window\]: expected an integer from 1"),
        ({**BLOCKS, "window": 1.0}, 64, r"blocks\[window\]"),
        ({**BLOCKS, "window": True}, 64, r"blocks\[window\]"),
        ({**BLOCKS, "window": 1 << 30}, 64, r"blocks\[window\]"),
        (BLOCKS, 0, "1 <= max_tokens"),
        (BLOCKS, TINY.max_position_embeddings + 1, "1 <= max_tokens"),
        (BLOCKS, 2.5, "1 <= max_tokens"),
    ],
)
def test_a_refused_allocation_leaves_what_there_was(
    session: ModelSession, blocks: dict[str, int], max_tokens: int, pattern: str
) -> None:
    before = session.caches
    with pytest.raises(SessionError, match=pattern):
        session.allocate(CacheBudget(blocks, max_tokens))
    assert session.caches is before
    session.step([_batch([3])])


def test_numpy_counts_are_counts(session: ModelSession) -> None:
    session.allocate(CacheBudget({table: np.int64(count) for table, count in BLOCKS.items()}, np.int64(64)))
    assert session.budget == CacheBudget(BLOCKS, 64)


def test_an_allocation_that_fails_half_way_changes_nothing(
    session: ModelSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (session.caches, session.budget)
    monkeypatch.setattr("v41_model.session.PagedCaches.allocate", lambda *_: (_ for _ in ()).throw(MemoryError()))
    with pytest.raises(MemoryError):
        session.allocate(CacheBudget(BLOCKS, 32))
    assert (session.caches, session.budget) == before
    session.step([_batch([3])])


def test_a_capacity_plan_is_a_budget(session: ModelSession) -> None:
    """Caches have the bytes that the plan counts for a card."""
    plan = CapacityPlan(TINY, ParallelLayout(2, 1), context=700, requests=3)
    session.allocate(plan)
    assert session.budget is not None
    assert session.budget.max_tokens == 700
    caches = session.caches[0]
    rows = (*caches.window.values(), *caches.compressed.values(), *caches.index_key.values())
    held = sum(r.payload.nbytes + r.scale.nbytes for r in rows) + sum(s.nbytes for s in caches.state.values())
    assert held == plan.section_bytes("caches")
    for other in (CapacityPlan(TINY, ParallelLayout(4, 1), 700, 3), CapacityPlan(TINY8, ParallelLayout(2, 1), 700, 3)):
        with pytest.raises(SessionError, match="of this model, found"):
            session.allocate(other)


class TestStoredTokens:
    """The session knows what it has stored, and a batch that says otherwise runs nowhere."""

    def test_lengths_count_after_a_step_that_succeeded(self, session: ModelSession) -> None:
        session.step([_batch([3, 4, 5])])
        assert session.stored_tokens(0, 0) == 3
        with pytest.raises(RequestError, match=r"request 0: expected at most the 3 .*found 4 tokens stored"):
            session.step([_batch([6], stored=4)])
        session.step([_batch([6], stored=3)])
        assert session.stored_tokens(0, 0) == 4

    def test_a_failed_step_stores_nothing(self, tiny_checkpoint: Checkpoint) -> None:
        def failing(*_: object) -> Tensor:
            raise ZeroDivisionError

        session = ModelSession.open(tiny_checkpoint, TP2, operators=Operators().replace(combine=failing))
        session.allocate(CacheBudget(BLOCKS, 64))
        with pytest.raises(RankError):
            session.step([_batch([3, 4, 5])])
        assert session.stored_tokens(0, 0) == 0

    def test_a_new_request_needs_a_reset(self, session: ModelSession) -> None:
        (first,) = session.step([_batch([3, 4, 5])])
        with pytest.raises(RequestError, match="reset_request for state block 0"):
            session.step([_batch([3, 4, 5])])
        session.reset_request(0, 0)
        (again,) = session.step([_batch([3, 4, 5])])
        assert torch.equal(first.logits, again.logits)

    def test_rejected_drafts_are_run_over(self, session: ModelSession) -> None:
        """Six rows, three accepted: the next step begins behind those, and its logits are those of a straight run."""
        session.step([_batch([3, 4, 5])])
        session.step([_batch([6, 7, 8, 9, 10, 11], stored=3)])
        (rolled,) = session.step([_batch([12], stored=6)])
        session.reset_request(0, 0)
        (straight,) = session.step([_batch([3, 4, 5, 6, 7, 8, 12])])
        assert torch.equal(rolled.logits, straight.logits)
        assert session.stored_tokens(0, 0) == 7

    @pytest.mark.parametrize(("start", "remembered"), [(4, True), (5, False), (6, True), (7, True), (9, True)])
    def test_a_start_whose_predecessor_is_gone(self, session: ModelSession, start: int, remembered: bool) -> None:
        """The ring has tokens 5 to 8 of nine: an odd start needs the token before it, an even one needs none."""
        session.step([_batch([3, 4, 5])])
        session.step([_batch([6, 7, 8, 9, 10, 11], stored=3)])
        if remembered:
            (rolled,) = session.step([_batch([12], stored=start)])
            session.reset_request(0, 0)
            (straight,) = session.step([_batch([*range(3, 3 + start), 12])])
            assert torch.equal(rolled.logits, straight.logits)
        else:
            with pytest.raises(RequestError, match="predecessor"):
                session.step([_batch([12], stored=start)])

    def test_a_slot_written_twice_holds_the_later_token(self, session: ModelSession) -> None:
        """Back by two and one row on: position 7 went, with its slot, to position 11 of the drafts."""
        session.step([_batch(list(range(3, 15)))])
        session.step([_batch([3], stored=10)])
        session.step([_batch([4], stored=8)])
        with pytest.raises(RequestError, match="predecessor"):
            session.step([_batch([5], stored=7)])

    def test_caches_that_somebody_else_has_filled(self, session: ModelSession) -> None:
        session.step([_batch([3, 4, 5])])
        session.reset_request(0, 0, stored=3)
        (moved,) = session.step([_batch([6], stored=3)])
        session.reset_request(0, 0)
        (straight,) = session.step([_batch([3, 4, 5, 6])])
        assert torch.equal(moved.logits, straight.logits)

    def test_what_cannot_be_reset(self, session: ModelSession) -> None:
        for arguments, pattern in (((1, 0), "dp_rank"), ((0, 1), "state_block"), ((0, 0, 65), "stored"),
                                   ((0, -1), "state_block"), ((0, True), "state_block")):  # fmt: skip
            with pytest.raises(SessionError, match=pattern):
                session.reset_request(*arguments)


class TestLimits:
    def test_sequences(self, tiny_checkpoint: Checkpoint) -> None:
        session = ModelSession.open(tiny_checkpoint, TP2, limits=StepLimits(sequences=1))
        session.allocate(CacheBudget(dict.fromkeys(BLOCKS, 2), 64))
        table = np.array([[0], [1]], dtype=np.int32)
        two = StepBatch(
            token_ids=np.array([3, 4], dtype=np.int32),
            query_start_loc=np.array([0, 1, 2]),
            kv_seq_lens=np.array([0, 0]),
            window_block_table=table,
            compressed_block_tables={1: table, 2: table},
            state_block_tables={2: table, 4: table},
        )
        with pytest.raises(RequestError, match=r"DP group 0: expected at most 1, found 2 sequences"):
            session.step([two])
        session.step([_batch([3])])

    def test_prefill_rows_leave_room_for_decodes(self, tiny_checkpoint: Checkpoint) -> None:
        session = ModelSession.open(tiny_checkpoint, TP2, limits=StepLimits(prefill_rows=4))
        session.allocate(CacheBudget(BLOCKS, 64))
        with pytest.raises(RequestError, match="found 5 prefill rows"):
            session.step([_batch([3, 4, 5, 6, 7])])
        session.step([_batch([3, 4, 5, 6])])
        session.step([_batch([3, 4, 5, 6, 7, 8], stored=4)])
        with pytest.raises(RequestError, match="found 7 prefill rows"):
            session.step([_batch([3, 4, 5, 6, 7, 8, 9], stored=10)])

    def test_a_full_decode_step(self, tiny_checkpoint: Checkpoint) -> None:
        """32 sequences with a target row and five drafts each: 192 rows whose logits are those of each one alone."""
        session = ModelSession.open(tiny_checkpoint, TP2)
        session.allocate(CacheBudget(dict.fromkeys(BLOCKS, 32), 64))

        def rows(requests: range, stored: int, count: int) -> StepBatch:
            table = np.array(requests, dtype=np.int32).reshape(-1, 1)
            return StepBatch(
                token_ids=np.concatenate([3 + request + np.arange(stored, stored + count) for request in requests]),
                query_start_loc=count * np.arange(len(requests) + 1),
                kv_seq_lens=np.full(len(requests), stored),
                window_block_table=table,
                compressed_block_tables={1: table, 2: table},
                state_block_tables={2: table, 4: table},
            )

        everyone = range(session.limits.sequences)
        session.step([rows(everyone, 0, 3)])
        (together,) = session.step([rows(everyone, 3, 6)], all_logits=True)
        assert len(together.logits) == session.limits.decode_rows == 192
        for request in (0, 13, 31):
            session.reset_request(0, request)
            (alone,) = session.step([rows(range(request, request + 1), 0, 9)], all_logits=True)
            assert torch.equal(alone.logits[3:], together.logits[6 * request : 6 * request + 6])

    def test_the_contracts_numbers(self) -> None:
        limits = StepLimits()
        assert (limits.sequences, limits.prefill_rows, limits.decode_rows) == (32, 4096, 192)
        for name in ("sequences", "prefill_rows", "decode_rows_per_request"):
            for number in (0, 10**9):
                with pytest.raises(RequestError, match=name):
                    StepLimits(**{name: number})


@pytest.mark.parametrize(
    ("change", "pattern"),
    [
        ({"token_ids": np.array([3.0])}, "token_ids: expected a NumPy array of integers"),
        ({"token_ids": np.array([True])}, "token_ids"),
        ({"token_ids": np.array([[3]])}, "token_ids"),
        ({"token_ids": [3]}, "token_ids"),
        ({"query_start_loc": np.array([[0, 1]])}, "query_start_loc"),
        ({"query_start_loc": np.array([0.0, 1.0])}, "query_start_loc"),
        ({"query_start_loc": np.zeros(0, dtype=np.int32)}, "query_start_loc"),
    ],
)
def test_batches_of_another_form_are_refused(change: dict[str, Any], pattern: str) -> None:
    with pytest.raises(RequestError, match=pattern):
        dataclasses.replace(_batch([3]), **change)
