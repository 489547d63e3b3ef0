"""MoE over the EP group: equal to the golden for any routing, exact sizes, no rank left out of a collective."""

from __future__ import annotations

import dataclasses
import inspect

import pytest
import torch
from torch import Tensor

import v41_model.expert_parallel as expert_parallel_module
from v41_config import TINY, LayoutError, ParallelLayout
from v41_goldens.experts import routed_experts, shared_expert
from v41_goldens.gate import GateOutput, gate
from v41_goldens.moe import combine
from v41_goldens.weights import ModelWeights, MoeWeights
from v41_model.collective_log import CollectiveKind, Site
from v41_model.communicator import Communicator
from v41_model.errors import RankError
from v41_model.expert_parallel import ExpertParallelOutput, dispatch, expert_owners, expert_parallel_moe
from v41_model.local_world import LocalWorld
from v41_model.operators import Operators

EP8 = ParallelLayout(tp=4, dp=2)
K = TINY.num_experts_per_tok


@pytest.fixture(scope="module")
def moe_weights(tiny_weights: ModelWeights) -> MoeWeights:
    return tiny_weights.layers[3].moe


def _of_rank(weights: MoeWeights, rank: int) -> MoeWeights:
    """What a rank holds: the whole router and shared expert, its own experts."""
    own = EP8.expert_range(TINY, rank)
    return dataclasses.replace(weights, experts={e: w for e, w in weights.experts.items() if e in own})


def _rows(counts: list[int]) -> list[Tensor]:
    """Different rows on every rank."""
    generator = torch.Generator().manual_seed(sum(counts))
    return [torch.randn((n, TINY.hidden_size), generator=generator).bfloat16() for n in counts]


def _run(
    weights: MoeWeights, rows: list[Tensor], operators: Operators | None = None, world: LocalWorld | None = None
) -> list[ExpertParallelOutput]:
    def program(comm: Communicator) -> ExpertParallelOutput:
        owners = expert_owners(TINY, EP8)
        ops = operators or Operators()
        return expert_parallel_moe(rows[comm.rank], _of_rank(weights, comm.rank), owners, TINY, comm, ops, layer=3)

    return (world or LocalWorld(EP8)).run(program)


def _golden(weights: MoeWeights, x: Tensor, routes: GateOutput) -> Tensor:
    repeated = x.repeat_interleave(K, dim=0)
    outputs = routed_experts(repeated, routes.ids.flatten(), routes.weights.flatten(), weights.experts, TINY)
    return combine(outputs.unflatten(0, (-1, K)), routes.ids, shared_expert(x, weights.shared, TINY))


def _always(ids: list[int]) -> Operators:
    """A gate that sends every token to the same experts, in this order, with different weights."""

    def fixed(x: Tensor, *_: object) -> GateOutput:
        n = x.shape[0]
        chosen = torch.tensor(ids, dtype=torch.int32).expand(n, K).contiguous()
        weights = torch.arange(1, n * K + 1, dtype=torch.float32).reshape(n, K) / (n * K)
        return GateOutput(chosen, weights, torch.zeros(n, TINY.n_routed_experts))

    return Operators().replace(gate=fixed)


@pytest.mark.parametrize("counts", [[2] * 8, [5, 0, 1, 0, 3, 2, 0, 7], [0] * 7 + [1], [0] * 8], ids=str)
def test_every_rank_gets_its_own_rows_back(moe_weights: MoeWeights, counts: list[int]) -> None:
    rows = _rows(counts)
    for x, result in zip(rows, _run(moe_weights, rows), strict=True):
        routes = gate(x, moe_weights.gate, moe_weights.gate_bias, TINY)
        assert torch.equal(result.routes.ids, routes.ids)
        assert result.out.shape == x.shape
        assert torch.equal(result.out, _golden(moe_weights, x, routes))


def test_all_tokens_to_the_experts_of_two_ranks(moe_weights: MoeWeights) -> None:
    """Nothing is sized by the average: two ranks receive everything, six receive nothing."""
    rows = _rows([3, 1, 0, 4, 2, 2, 1, 3])
    operators = _always([1, 14, 0, 15])
    results = _run(moe_weights, rows, operators)
    assert [r.received_rows for r in results] == [32, 0, 0, 0, 0, 0, 0, 32]
    for x, result in zip(rows, results, strict=True):
        assert torch.equal(result.out, _golden(moe_weights, x, result.routes))


def test_all_tokens_to_one_expert(moe_weights: MoeWeights) -> None:
    rows = _rows([3, 1, 0, 4, 2, 2, 1, 3])
    results = _run(moe_weights, rows, _always([6, 6, 6, 6]))
    assert [r.received_rows for r in results] == [0, 0, 0, 64, 0, 0, 0, 0]
    for x, result in zip(rows, results, strict=True):
        assert torch.equal(result.out, _golden(moe_weights, x, result.routes))


def test_dispatched_rows_are_tokens_times_experts_per_token(moe_weights: MoeWeights) -> None:
    world = LocalWorld(EP8)
    results = _run(moe_weights, _rows([2] * 8), world=world)
    assert sum(r.received_rows for r in results) == 16 * K
    sent = [c.log.of(CollectiveKind.ROW_ALL_TO_ALL, "expert dispatch")[0] for c in world.communicators]
    assert [r.sent[0] for r in sent] == [(2 * K, TINY.hidden_size)] * 8
    row_bytes = 2 * TINY.hidden_size + 4 + 4  # BF16 row, FP32 route weight, INT32 expert id
    assert [r.bytes_sent for r in sent] == [2 * K * row_bytes] * 8
    assert [r.bytes_received for r in sent] == [r.received_rows * row_bytes for r in results]


def test_collectives_are_the_same_on_all_ranks_whatever_they_hold(moe_weights: MoeWeights) -> None:
    world = LocalWorld(EP8)
    _run(moe_weights, _rows([5, 0, 1, 0, 3, 2, 0, 7]), world=world)
    expected = [
        (CollectiveKind.COUNTS_EXCHANGE, Site("expert counts", 3)),
        (CollectiveKind.ROW_ALL_TO_ALL, Site("expert dispatch", 3)),
        (CollectiveKind.ROW_ALL_TO_ALL, Site("expert combine", 3)),
    ]
    assert [c.log.sequence() for c in world.communicators] == [expected] * 8


def test_a_token_does_not_see_other_ranks_tokens(moe_weights: MoeWeights) -> None:
    """A sum over ranks that hold different tokens would show here, the shared expert's too."""
    rows = _rows([2] * 8)
    before = _run(moe_weights, rows)
    rows[5] = rows[5] + 1
    after = _run(moe_weights, rows)
    for rank in range(8):
        assert torch.equal(before[rank].out, after[rank].out) is (rank != 5)
        assert torch.equal(before[rank].shared, after[rank].shared) is (rank != 5)


def test_the_route_weight_is_applied_by_the_owner_before_the_bf16_cast(moe_weights: MoeWeights) -> None:
    """Weighting the returned rows instead is close, and different: the comparison can tell."""
    rows = _rows([4] * 8)
    results = _run(moe_weights, rows)
    x, routes = rows[0], results[0].routes
    unweighted = routed_experts(
        x.repeat_interleave(K, dim=0), routes.ids.flatten(), torch.ones(4 * K), moe_weights.experts, TINY
    ).unflatten(0, (-1, K))
    late = (unweighted.float() * routes.weights.unsqueeze(-1)).bfloat16()
    wrong = combine(late, routes.ids, shared_expert(x, moe_weights.shared, TINY))
    assert torch.allclose(wrong.float(), results[0].out.float(), rtol=0.1, atol=0.1)
    assert not torch.equal(wrong, results[0].out)


def test_no_attention_parallelism_in_any_signature() -> None:
    functions = [f for _, f in inspect.getmembers(expert_parallel_module, inspect.isfunction)]
    fields = [f.name for c in (expert_parallel_module.Dispatched, ExpertParallelOutput) for f in dataclasses.fields(c)]
    names = {p for f in functions for p in inspect.signature(f).parameters} | set(fields)
    assert {"x", "weights", "communicator"} <= names
    assert not [n for n in names if "tp" in n.split("_") or "token_owner" in n]


def test_an_unknown_expert_is_refused_before_anything_is_sent(moe_weights: MoeWeights) -> None:
    world = LocalWorld(EP8)
    with pytest.raises(RankError, match="expert id 16") as caught:
        _run(moe_weights, _rows([1] * 8), _always([0, 1, 2, 16]), world)
    assert isinstance(caught.value.__cause__, LayoutError)
    assert not any(c.log.records for c in world.communicators)


def test_dispatch_of_no_row_keeps_the_width() -> None:
    def program(comm: Communicator) -> tuple[int, ...]:
        routes = GateOutput(torch.zeros(0, K, dtype=torch.int32), torch.zeros(0, K), torch.zeros(0, 16))
        none = torch.zeros(0, TINY.hidden_size, dtype=torch.bfloat16)
        return tuple(dispatch(none, routes, expert_owners(TINY, EP8), comm).rows.shape)

    assert LocalWorld(EP8).run(program) == [(0, TINY.hidden_size)] * 8


def test_owners_cover_every_expert() -> None:
    assert expert_owners(TINY, EP8).tolist() == [e // 2 for e in range(16)]
    assert expert_owners(TINY, ParallelLayout(1, 1)).tolist() == [0] * 16
