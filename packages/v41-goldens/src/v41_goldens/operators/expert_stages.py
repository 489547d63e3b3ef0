"""Router, experts and their exchange as calls."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from v41_goldens.errors import OperandError
from v41_goldens.experts import routed_experts, shared_expert
from v41_goldens.gate import gate
from v41_goldens.moe import combine, moe
from v41_goldens.operators.call import Call, Results
from v41_goldens.operators.golden import Golden, Ranks, each_rank, joint
from v41_goldens.rank_simulator import RankSimulator


def _gate(c: Call) -> Results:
    routes = gate(c["x"], c["gate_weight"], c["gate_bias"], c.config)
    return dict(zip(("expert_ids", "route_weights", "biased_scores"), routes, strict=True))


def _simulator(calls: Sequence[Call]) -> RankSimulator:
    return RankSimulator(calls[0].config, calls[0].bound.layout)


def _dispatch(calls: Sequence[Call]) -> list[Results]:
    operands = ([call[name] for call in calls] for name in ("x", "expert_ids", "route_weights"))
    results = []
    for call, sent in zip(calls, _simulator(calls).dispatch(*operands), strict=True):
        if len(sent.rows) > call.bound.dims["R"]:
            raise OperandError(f"dispatch rows of rank {call.rank}", call.bound.dims["R"],
                               f"room for the {len(sent.rows)} rows received")  # fmt: skip
        results.append({
            "rows": sent.rows, "row_expert_ids": sent.expert_ids, "row_route_weights": sent.route_weights,
            "assignment_order": sent.assignment_order, "send_counts": sent.send_counts,
            "receive_counts": sent.receive_counts,
        })  # fmt: skip
    return results


def _routed_experts(c: Call) -> Results:
    experts = c.experts(int(c.scalars["expert_start"]))
    return {"out": routed_experts(c["rows"], c["row_expert_ids"], c["row_route_weights"], experts, c.config)}


def _shared_expert(c: Call) -> Results:
    return {"out": shared_expert(c["x"], c.shared_expert(), c.config)}


def _return_to_source(calls: Sequence[Call]) -> list[Results]:
    counts = {name: torch.stack([call[f"{name}_counts"] for call in calls]) for name in ("send", "receive")}
    for call, sent, received in zip(calls, counts["send"], counts["receive"], strict=True):
        order, where = call["assignment_order"], f"return_to_source {{}} of rank {call.rank}"
        for name, given, room in (("send_counts", sent, len(order)), ("receive_counts", received, len(call["out"]))):
            if int(given.min()) < 0 or int(given.max()) > room or int(given.sum()) > room:
                raise OperandError(where.format(name), given.tolist(), f"counts of at most {room} rows")
        if not torch.equal(order.sort().values, torch.arange(int(sent.sum()), device=order.device)):
            expected = f"each number below {int(sent.sum())}, the rows sent, once"
            raise OperandError(where.format("assignment_order"), order.tolist(), expected)
    if not torch.equal(counts["send"], counts["receive"].T):
        expected = f"{counts['send'].T.tolist()}, what each rank was sent"
        raise OperandError("return_to_source receive_counts", counts["receive"].tolist(), expected)
    received = [call["out"][: int(call["receive_counts"].sum())] for call in calls]
    orders, sent_counts = ([call[name] for call in calls] for name in ("assignment_order", "send_counts"))
    restored = _simulator(calls).return_to_source(received, orders, sent_counts)
    k = calls[0].config.num_experts_per_tok
    return [{"expert_rows": rows.unflatten(0, (-1, k))} for rows in restored]


def _combine(c: Call) -> Results:
    return {"out": combine(c["expert_rows"], c["expert_ids"], c["shared"])}


def _moe(calls: Sequence[Call]) -> list[Results]:
    """As ranks do it: every row travels to the owners of its experts and back."""
    simulator, config = _simulator(calls), calls[0].config
    routes = [gate(call["x"], call["gate_weight"], call["gate_bias"], config) for call in calls]
    sent = simulator.dispatch([call["x"] for call in calls], [r.ids for r in routes], [r.weights for r in routes])
    outputs = [
        routed_experts(part.rows, part.expert_ids, part.route_weights, call.experts(), config)
        for part, call in zip(sent, calls, strict=True)
    ]
    returned = simulator.return_to_source(
        outputs, [part.assignment_order for part in sent], [part.send_counts for part in sent]
    )
    return [
        {"out": combine(rows.unflatten(0, (-1, config.num_experts_per_tok)), route.ids,
                        shared_expert(call["x"], call.shared_expert(), config))}
        for rows, route, call in zip(returned, routes, calls, strict=True)
    ]  # fmt: skip


EXPERT_STAGES: tuple[Golden, ...] = (
    each_rank("gate", gate, _gate),
    joint("dispatch", RankSimulator.dispatch, Ranks.WORLD, _dispatch),
    each_rank("routed_experts", routed_experts, _routed_experts),
    each_rank("shared_expert", shared_expert, _shared_expert),
    joint("return_to_source", RankSimulator.return_to_source, Ranks.WORLD, _return_to_source),
    each_rank("combine", combine, _combine),
    joint("moe", moe, Ranks.WORLD, _moe),
)
"""In the order of the ABI."""
