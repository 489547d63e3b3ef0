"""Operators of several launches: all or nothing, padding untouched, one rank only; and the provider around them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from v41_config import TINY, OperatorError, find_operator
from v41_kernels import OPERATORS, Executor
from v41_kernels.bench_operands import bench_operands, bind_for_bench
from v41_kernels.compositions import COMPOSITIONS, Call
from v41_kernels.errors import KernelExecutionError
from v41_kernels.provider import KernelProvider, npu_provider
from v41_kernels.registry import STAGES

SENTINEL = -7.0


def operands(name: str, rows: int) -> dict[str, Any]:
    return bench_operands(bind_for_bench(name, TINY, rows))


def test_a_composition_is_its_stages(executor: Executor) -> None:
    arguments = operands("qkv_proj_rope", 3)
    run = executor.run("qkv_proj_rope", **arguments)
    assert [launch.operator for launch in run.launches] == ["q_proj_qr", "q_proj_rope", "kv_proj_rope"]
    alone = {name: arguments[name] for name in ("x", "wq_a", "wq_a_scale", "q_norm", "eps")}
    qr = torch.empty_like(arguments["qr"])
    executor.run("q_proj_qr", **alone, qr=qr)
    assert torch.equal(qr, arguments["qr"])


def test_rows_behind_the_active_ones_stay(executor: Executor) -> None:
    arguments = operands("qkv_proj_rope", 4)
    for name in ("qr", "q", "kv"):
        arguments[name].fill_(SENTINEL)
    arguments["x"][3:] = torch.nan
    executor.run("qkv_proj_rope", **arguments, num_tokens=3)
    for name in ("qr", "q", "kv"):
        assert torch.equal(arguments[name][3:], torch.full_like(arguments[name][3:], SENTINEL))
        assert not (arguments[name][:3] == SENTINEL).all()


def test_one_element_of_any_stride_is_taken(executor: Executor) -> None:
    """`expand` leaves a stride of 0, which a tensor of one element may have and still be contiguous."""
    arguments = operands("materialize_rope_rows", 1)
    executor.run("materialize_rope_rows", **arguments)
    wanted = arguments["rope_cos"].clone()
    arguments["rope_cos"].fill_(SENTINEL)
    arguments["position_ids"] = torch.zeros((), dtype=torch.int32).expand(1)
    assert arguments["position_ids"].stride() == (0,)
    executor.run("materialize_rope_rows", **arguments)
    assert torch.equal(arguments["rope_cos"], wanted)


def test_without_a_row_nothing_is_launched(executor: Executor) -> None:
    arguments = operands("prefill_attn_swa", 2)
    before = arguments["window_kv"].view(torch.uint8).clone()
    assert executor.run("prefill_attn_swa", **arguments, num_tokens=0).launches == ()
    assert torch.equal(arguments["window_kv"].view(torch.uint8), before)


def test_a_launch_that_fails_leaves_every_destination_as_it_was(
    executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first launches of the attention have published window rows by then, into a copy."""
    arguments = operands("prefill_attn_swa", 2)
    before = {name: arguments[name].view(torch.uint8).clone() for name in ("window_kv", "output_partial")}
    ask: Callable[..., dict[str, Any]] = Executor._ask

    def fail_late(self: Executor, operator: Any, *rest: Any) -> dict[str, Any]:
        if operator.spec.name == "grouped_output":
            raise KernelExecutionError("kernel grouped_output", "a fault", "none")
        return ask(self, operator, *rest)

    monkeypatch.setattr(Executor, "_ask", fail_late)
    with pytest.raises(KernelExecutionError, match="grouped_output"):
        executor.run("prefill_attn_swa", **arguments)
    assert all(torch.equal(arguments[name].view(torch.uint8), bytes_) for name, bytes_ in before.items())


def test_a_rank_s_share_is_refused(executor: Executor) -> None:
    """The transports between ranks are no kernels."""
    arguments = operands("prefill_swa_sharded", 4)
    spec = find_operator("prefill_swa_sharded")
    for tensor in spec.tensors:
        if tensor.dims[0] == "T_local":
            arguments[tensor.name] = arguments[tensor.name][:2].contiguous()
    with pytest.raises(OperatorError, match="T_local"):
        executor.run("prefill_swa_sharded", **arguments)


def test_a_rank_s_experts_are_refused_where_all_have_to_be_there(executor: Executor) -> None:
    arguments = operands("moe", 2)
    for name in ("w1", "w3", "w2"):
        for part in (name, f"{name}_scale"):
            arguments[part] = arguments[part][:8].contiguous()
    with pytest.raises(OperatorError, match=r"E_local.*E = 16, a group of one rank.*8"):
        executor.run("moe", **arguments)


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_compositions_launch_kernels_with_their_contracts(name: str) -> None:
    """Dry: every launch names a kernel and hands it exactly the tensors of its contract, in their shapes."""
    bound = bind_for_bench(name, TINY, 3)
    arguments = bench_operands(bound)
    launched = []

    def launch(stage: str, **given: object) -> None:
        spec = {**STAGES, **OPERATORS}[stage].spec
        spec.check(given)
        launched.append(stage)

    tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
    COMPOSITIONS[name](Call(launch, tensors, {n: float(v) for n, v in bound.constants.items()}))
    assert launched


def test_the_provider_runs_by_name_contract_and_bound_contract() -> None:
    provider = KernelProvider(timeout=300.0)
    assert set(provider.names()) == set(OPERATORS)
    bound = bind_for_bench("rms_norm", TINY, 3)
    results = []
    for operator in ("rms_norm", bound.spec, bound):
        arguments = bench_operands(bound)
        arguments["out"].fill_(SENTINEL)  # type: ignore[attr-defined]
        provider.run(operator, arguments)
        results.append(arguments["out"])
    provider.close()
    assert all(isinstance(result, Tensor) and not (result == SENTINEL).any() for result in results)
    assert all(torch.equal(result, results[0]) for result in results[1:])  # type: ignore[arg-type]


def test_the_provider_is_found_by_its_entry_point() -> None:
    from importlib.metadata import entry_points

    points = {p.name: p for p in entry_points(group="v41.operator_providers") if p.value.startswith("v41_kernels")}
    assert points["pypto"].load() is KernelProvider
    assert points["pypto-npu"].load() is npu_provider
