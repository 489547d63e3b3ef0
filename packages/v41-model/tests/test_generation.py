"""The loop around a session: spreading, chunks, stop ids, pages, and the same tokens in any company."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from v41_config import ParallelLayout
from v41_goldens.weights import ModelWeights
from v41_loader import Checkpoint
from v41_model.cache_budget import CacheBudget
from v41_model.errors import PoolError, RequestError, SessionError
from v41_model.generation import Request, RequestGroup, admit, advance, generate, stream
from v41_model.session import ModelSession

PROMPTS = [[0, 9, 8, 7, 6], [5], [0, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]]


@pytest.fixture(scope="module")
def session(tiny_checkpoint: Checkpoint) -> ModelSession:
    return ModelSession.open(tiny_checkpoint, ParallelLayout(2, 2))


def test_tokens_do_not_depend_on_company_or_chunks(session: ModelSession) -> None:
    together = generate(session, PROMPTS, 3)
    assert together == [generate(session, [prompt], 3)[0] for prompt in PROMPTS]
    assert together == generate(session, PROMPTS, 3, max_step_rows=4)
    assert all(len(tokens) == 3 for tokens in together)


def test_tokens_are_reported_as_they_come(session: ModelSession) -> None:
    reported: list[tuple[int, int]] = []
    generated = generate(session, PROMPTS, 2, on_token=lambda index, token: reported.append((index, token)))
    assert [index for index, _ in reported] == [0, 1, 2, 0, 1, 2]
    for index, tokens in enumerate(generated):
        assert [token for i, token in reported if i == index] == tokens


def test_a_stop_id_ends_only_its_request(session: ModelSession) -> None:
    free = generate(session, PROMPTS[:2], 3)
    stopped = generate(session, PROMPTS[:2], 3, stop_ids={free[0][0]})
    assert stopped[0] == free[0][:1]
    assert stopped[1] == free[1]


def test_bad_requests_are_refused_before_anything_runs(session: ModelSession) -> None:
    for prompts, pattern in (
        ([[3], []], r"requests\[1\]: .*at least one token"),
        ([[3, 512]], r"requests\[0\]\[1\]: .*found 512"),
        ([[-1]], r"requests\[0\]\[0\]"),
        ([[3] * 4090], "at most max_position_embeddings = 4096"),
        ([[3, 4.0]], r"requests\[0\]\[1\]: .*found 4.0"),
        ([[True]], r"requests\[0\]\[0\]: .*found True"),
        ([[np.bool_(True)]], r"requests\[0\]\[0\]"),
        ([["3"]], r"requests\[0\]\[0\]"),
        ([np.array([3.0])], r"requests\[0\]\[0\]"),
        ([np.array([[3]])], r"requests\[0\]\[0\]"),
        ([3], r"requests\[0\]: expected a sequence of token ids"),
        (["34"], r"requests\[0\]: expected a sequence of token ids"),
    ):
        with pytest.raises(RequestError, match=pattern):
            generate(session, prompts, 8)  # type: ignore[arg-type]
    for options in ({"max_new_tokens": 0}, {"max_new_tokens": 2.0}, {"max_step_rows": 0}, {"max_step_rows": True}):
        with pytest.raises(RequestError, match=next(iter(options))):
            generate(session, [[3]], **{"max_new_tokens": 1, **options})  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=r"stop_ids\[0\]"):
        generate(session, [[3]], 1, stop_ids=[512])


def test_ids_of_numpy_and_torch_are_integers_too(session: ModelSession) -> None:
    expected = generate(session, [PROMPTS[0]], 2)
    for prompt in (np.array(PROMPTS[0]), torch.tensor(PROMPTS[0]), [np.uint8(i) for i in PROMPTS[0]]):
        assert generate(session, [prompt], np.int32(2)) == expected  # type: ignore[list-item]


@pytest.fixture(scope="module")
def single(tiny_checkpoint: Checkpoint) -> ModelSession:
    return ModelSession.open(tiny_checkpoint, ParallelLayout(1, 1))


def _group(session: ModelSession, *lengths: int, new_tokens: int = 2) -> RequestGroup:
    (group,) = admit(session, [Request(tuple(range(n)), new_tokens) for n in lengths])
    return group


def test_a_plan_fills_the_rows_in_order(single: ModelSession) -> None:
    group = _group(single, 5, 3, 9)
    planned = group.plan(10)
    assert [count for _, count in planned] == [5, 3, 2]
    batch = group.batch(planned)
    assert batch.token_ids.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 0, 1]
    assert batch.query_start_loc.tolist() == [0, 5, 8, 10]
    new = group.commit(planned, [40, 41, 42])
    assert [token for _, token in new] == [40, 41], "the third prompt is not complete: its logits are not a choice"
    following = group.batch(group.plan(5))
    assert following.token_ids.tolist() == [40, 41, 2, 3, 4]
    assert following.kv_seq_lens.tolist() == [5, 3, 2]


def test_decoding_requests_go_before_prompts(single: ModelSession) -> None:
    """A long prompt that was there first does not hold up a request that has its own behind it."""
    group = _group(single, 9, 3)
    group.commit([(group.running[1], 3)], [40])
    assert [(len(r.prompt), count) for r, count in group.plan(4)] == [(9, 3), (3, 1)]


def test_finished_requests_return_their_pages(single: ModelSession) -> None:
    group = _group(single, 5, 300, new_tokens=1)
    free = dict(group.allocator.free_blocks)
    planned = group.plan(400)
    group.batch(planned)
    assert group.allocator.free_blocks != free
    group.commit(planned, [1, 2])
    assert group.running == []
    states = {"c2a_state": 2}
    assert group.allocator.free_blocks == {**free, **states}
    assert len(group.batch(group.plan(400)).token_ids) == 0, "an idle group still has a batch"


def test_window_pages_behind_the_window_are_lent_again(tiny_checkpoint: Checkpoint, tiny_weights: ModelWeights) -> None:
    """A request that runs past a page and its window gives the first page back, and goes on as if it had not."""
    session = ModelSession.open(tiny_checkpoint, ParallelLayout(1, 1))
    prompt = np.random.default_rng(5).integers(3, 512, 143).tolist()
    requests = [Request(tuple(prompt), 3)]
    (group,) = admit(session, requests)
    free = [group.allocator.free_blocks["window"]]
    while group.running:
        advance(session, [group])
        free.append(group.allocator.free_blocks["window"])
    assert free == [2, 1, 1, 2], "two pages after the prefill, one of them behind the window at once"
    assert requests[0].generated == generate(session, [prompt], 3, max_step_rows=16)[0]


SMALL = CacheBudget({"window": 2, "c2a_cmp_kv": 2, "c1a_cmp_kv": 2, "c2a_state": 2}, 256)
"""Room for two short requests, or for one of up to 256 tokens."""


def test_requests_wait_for_a_full_pool_and_lose_nothing(single: ModelSession) -> None:
    prompts = [[3, 4, 5], [6], list(range(3, 150)), [7, 8], [9]]
    expected = [generate(single, [prompt], 3)[0] for prompt in prompts]
    assert generate(single, prompts, 3, budget=SMALL) == expected


def test_a_request_that_never_fits_is_refused_at_once(single: ModelSession) -> None:
    with pytest.raises(PoolError, match=r"pool c1a_cmp_kv: expected .* the pool's 2 blocks, found .* needs 3"):
        generate(single, [[3], [3] * 256], 3, budget=CacheBudget(SMALL.blocks, 512))
    with pytest.raises(PoolError, match=r"at most max_tokens = 256"):
        generate(single, [[3] * 255], 3, budget=SMALL)


def test_a_cancelled_request_makes_room(single: ModelSession) -> None:
    first, second, third = (Request((3, 4), 5) for _ in range(3))
    (group,) = admit(single, [first, second, third], SMALL)
    assert (group.running, list(group.waiting)) == ([first, second], [third])
    advance(single, [group])
    group.cancel(second)
    assert group.running == [first]
    advance(single, [group])
    assert group.running == [first, third]
    assert (len(first.generated), len(second.generated), len(third.generated)) == (2, 1, 1)
    group.cancel(first)
    while group.has_work:
        advance(single, [group])
    group.cancel(third)
    assert (first.cancelled, second.cancelled, third.cancelled) == (True, True, False), "the third one had ended"
    assert third.generated == generate(single, [[3, 4]], 5)[0]


def test_a_stream_gives_tokens_one_by_one(single: ModelSession) -> None:
    generated = generate(single, PROMPTS, 2)
    seen: list[list[int]] = [[] for _ in PROMPTS]
    for new in stream(single, PROMPTS, 2):
        seen[new.request].append(new.token)
        assert new.last == (len(seen[new.request]) == 2)
    assert seen == generated
    with pytest.raises(RequestError):
        stream(single, [[512]], 1)  # before the first token is asked for


def test_a_group_needs_caches(tiny_checkpoint: Checkpoint) -> None:
    with pytest.raises(SessionError, match="a call of allocate first"):
        RequestGroup(ModelSession.open(tiny_checkpoint, ParallelLayout(1, 1)), 0)
