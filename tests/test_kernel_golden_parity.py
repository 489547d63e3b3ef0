"""Every kernel is executed and judged against the golden of its name, and the judges refuse wrong answers.

Default run: the tensor graph, on the goldens' fixtures and on hard cases. `make kernels` runs the rest: values after
all compiler passes, the twins of entries, and FLASH's dimensions with few rows.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from v41_config import TINY, CountSpec, ModelConfig, OperatorError, ParallelLayout, find_operator
from v41_goldens.fixtures import FixtureCase, operator_fixture
from v41_goldens.judges import judge_equal_bits
from v41_goldens.operators import golden
from v41_kernels import CHECKED_PASSES, OPERATORS, Executor, Tier
from v41_model.kernel_cases import EXACT, HARD_CASES, KernelCase, fixture_case, hard_case, judge
from v41_model.kernel_verification import named_cases

COMPOSED = [name for name, operator in OPERATORS.items() if operator.composition is not None]
SINGLE = [name for name in OPERATORS if name not in COMPOSED]
TWINS = [
    name
    for name in COMPOSED
    if name.endswith("_sharded") or (name.startswith("decode_") and not name.startswith("decode_attn_"))
]
"""Half layers whose composition another name runs in the default tests."""

FLASH_GRAPH = (
    *("materialize_rope_rows", "embed", "input_pack", "rms_norm", "mhc_mixes", "mhc_pre", "mhc_post", "combine"),
    *("publish_window_kv", "publish_compressed_kv", "publish_index_key", "compress_ratio_1", "index_keys", "gate"),
)
"""Operators that FLASH's dimensions cost little in the default run."""

FLASH_PASSES = (
    *("materialize_rope_rows", "embed", "input_pack", "rms_norm", "mhc_pre", "mhc_post", "hc_head", "combine", "gate"),
    *("publish_window_kv", "publish_compressed_kv", "publish_index_key", "candidate_blocks", "index_keys", "greedy"),
    *("hierarchical_sparse_indexer_c2a_full", "hierarchical_sparse_indexer_c1a_full"),
    *("hierarchical_sparse_indexer_c1a_reindex", "kv_proj_rope"),
)
"""Operators whose values after all passes FLASH's dimensions make no longer than a few seconds."""


ROW_BY_ROW = (
    *("routed_experts", "sparse_attention", "hierarchical_sparse_indexer_c2a_full"),
    *("hierarchical_sparse_indexer_c1a_full", "hierarchical_sparse_indexer_c1a_reindex"),
)
"""Kernels that walk rows one by one, for which the last case, of whole tiles of rows, is nothing of its own."""


@pytest.fixture(scope="module")
def executor() -> Iterator[Executor]:
    if not sys.platform.startswith("linux"):
        pytest.skip("pypto has wheels for Linux only: no kernel was compared")
    with Executor(timeout=900.0) as shared:
        yield shared


def run_and_judge(executor: Executor, case: KernelCase, tier: Tier = Tier.GRAPH) -> None:
    # A batch may have rows and write none, such as a single one whose slot is -1: no kernel is left to be checked then.
    writes = not all(judge_equal_bits(case.arguments[name], expected) for name, expected in case.expected.items())
    run = executor.run(case.operator, tier, **case.arguments)
    for name, verdict in judge(case).items():
        verdict.require(f"{case.operator}: {name}")
    if tier is Tier.PASSES and writes:
        judged = {check.pass_name for check in run.checks if check.compared}
        assert judged == set(CHECKED_PASSES)


def cases_of(name: str, preset: str = "tiny") -> list[KernelCase]:
    return [make() for _, make in named_cases(name, preset)]


@pytest.mark.parametrize("name", [name for name in OPERATORS if name not in TWINS])
def test_the_tensor_graph_is_like_the_golden(executor: Executor, name: str) -> None:
    for case in cases_of(name):
        run_and_judge(executor, case)


@pytest.mark.parametrize("name", FLASH_GRAPH)
def test_flash_widths(executor: Executor, name: str) -> None:
    for case in cases_of(name, "flash" if name == "gate" else "flash6"):  # FLASH6 has few experts
        run_and_judge(executor, case)


@pytest.mark.kernels
@pytest.mark.parametrize("name", TWINS)
def test_a_twin_is_like_its_golden(executor: Executor, name: str) -> None:
    for case in cases_of(name):
        run_and_judge(executor, case)


@pytest.mark.kernels
@pytest.mark.parametrize("name", [name for name in OPERATORS if name not in TWINS])
def test_the_values_after_all_passes_are_like_the_golden(executor: Executor, name: str) -> None:
    cases = cases_of(name)
    for case in cases[:1] if name in COMPOSED else cases[:-1] if name in ROW_BY_ROW else cases:
        run_and_judge(executor, case, Tier.PASSES)


@pytest.mark.kernels
@pytest.mark.parametrize("name", [name for name in OPERATORS if name not in FLASH_GRAPH and name not in TWINS])
def test_wide_flash_operators(executor: Executor, name: str) -> None:
    for case in cases_of(name, "flash6"):
        run_and_judge(executor, case)


@pytest.mark.parametrize("tier", [Tier.GRAPH, pytest.param(Tier.PASSES, marks=pytest.mark.kernels)])
@pytest.mark.parametrize("inputs", [1024, 1056, 2304])
def test_fp4_inputs_in_several_chunks(executor: Executor, inputs: int, tier: Tier) -> None:
    run_and_judge(executor, hard_case("quantized_linear_fp4", TINY, 3, 2, K=inputs), tier)


def test_one_expert_for_each_token(executor: Executor) -> None:
    fields = {name: getattr(TINY, name) for name in ModelConfig.model_fields}
    config = ModelConfig.model_validate({**fields, "num_experts_per_tok": 1})
    run_and_judge(executor, fixture_case("moe", FixtureCase(config, tokens=6, active_tokens=5, requests=2)))


def test_experts_take_what_dispatch_wrote(executor: Executor) -> None:
    """Ids as a transport wrote them, on a rank whose experts are not the model's first."""
    case = FixtureCase(TINY, ParallelLayout(tp=2, dp=2), tokens=6, active_tokens=5, requests=2)
    sent = operator_fixture("dispatch", case)
    golden("dispatch").run_ranks(sent.bounds, sent.arguments)
    rank = 2
    held = case.layout.expert_range(TINY, rank)
    received = int(sent.tensors(rank)["receive_counts"].sum())
    weights = operator_fixture("routed_experts", case).tensors(rank)
    operands = {name: weights[name] for name in weights if name.startswith("w")}
    operands |= {name: sent.tensors(rank)[name] for name in ("rows", "row_expert_ids", "row_route_weights")}
    operands["out"] = torch.full_like(operands["rows"], -7.0)
    bound = find_operator("routed_experts").bind(TINY, case.layout, R=len(operands["rows"]))
    call = KernelCase(bound, {**operands, "num_rows": received, "expert_start": held.start}, {}, received)
    call.expected["out"] = operands["out"].clone()
    golden("routed_experts").run(bound, {**call.arguments, **call.expected}, rank)
    assert received
    run_and_judge(executor, call)
    with pytest.raises(OperatorError, match=r"row_expert_ids.*an expert from 0 to 3"):
        executor.run("routed_experts", **{**call.arguments, "expert_start": 0})


@pytest.mark.kernels
@pytest.mark.parametrize("name", FLASH_PASSES)
def test_values_after_all_passes_at_flash_widths(executor: Executor, name: str) -> None:
    run_and_judge(executor, cases_of(name, "flash6")[0], Tier.PASSES)


@pytest.mark.kernels
@pytest.mark.parametrize("name", [name for name in SINGLE if name not in FLASH_PASSES])
def test_flash_widths_go_through_all_passes(executor: Executor, name: str) -> None:
    """Without rows, which takes no longer than the compiler does: what does not fit a chip is seen there."""
    spec = OPERATORS[name].spec
    groups = {tensor.name for tensor in spec.tensors if tensor.dims[0] == "G"}
    made = cases_of(name, "flash6")[0].arguments
    arguments = {name: value[:0] if name in groups else value for name, value in made.items()}
    (count,) = (s.name for s in spec.scalars if isinstance(s, CountSpec) and s.name in ("num_tokens", "num_rows"))
    before = {destination: arguments[destination].clone() for destination in spec.destinations}
    executor.run(name, Tier.PASSES, **{**arguments, count: 0})
    assert all(judge_equal_bits(arguments[destination], bytes_) for destination, bytes_ in before.items())


# ------------------------------------------------------------------------------------------- what the judges refuse


@functools.cache
def ragged_case(name: str) -> KernelCase:
    """Thirteen rows, eleven of them in use."""
    return named_cases(name, "tiny")[4 if name in HARD_CASES else 0][1]()


def answered(name: str) -> KernelCase:
    """A case whose destinations hold the golden's answer."""
    case = copy.deepcopy(ragged_case(name))
    for destination, expected in case.expected.items():
        case.arguments[destination].copy_(expected)
    return case


def refused(case: KernelCase) -> bool:
    return not all(verdict.accepted for verdict in judge(case).values())


@pytest.mark.parametrize("name", OPERATORS)
def test_the_golden_is_accepted_and_a_touched_padding_row_refused(name: str) -> None:
    case = answered(name)
    assert not refused(case)
    for destination in case.expected:
        tensor = case.arguments[destination]
        if case.bound.tensors[destination].spec.direction == "out" and len(tensor) > case.active:
            changed = answered(name)
            flip(changed.arguments[destination][-1])
            assert refused(changed), destination


def flip(tensor: Tensor) -> None:
    """Change one bit of the first byte."""
    tensor.reshape(-1)[:1].view(torch.uint8)[:1].bitwise_xor_(1)


@pytest.mark.parametrize("name", sorted(EXACT))
def test_one_bit_is_refused_where_every_bit_counts(name: str) -> None:
    for destination in answered(name).expected:
        case = answered(name)
        flip(case.arguments[destination])
        assert refused(case), destination


def scaled(tensor: Tensor) -> Tensor:
    return tensor * 1.1


def shifted(tensor: Tensor) -> Tensor:
    return tensor.roll(1, -1)


def row_lost(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor)


@pytest.mark.parametrize("wrong", [scaled, shifted, row_lost])
@pytest.mark.parametrize("name", [name for name in OPERATORS if name not in EXACT])
def test_a_wrong_row_is_refused(name: str, wrong: Callable[[Tensor], Tensor]) -> None:
    """One row of one floating destination is wrong; integers and bytes are compared to the bit anyway."""
    for destination, expected in answered(name).expected.items():
        case = answered(name)
        if case.bound.tensors[destination].spec.direction != "out" or not case.active:
            continue
        row = case.arguments[destination][0]
        if expected.is_floating_point() and row.float().abs().sum() > 0 and not torch.equal(wrong(row), row):
            row.copy_(wrong(row))
            assert refused(case), destination


def test_a_case_says_what_share_of_the_model_it_has() -> None:
    labels = {name: named_cases(name, "flash6")[0][0] for name in ("rms_norm", "decode_attn_swa", "decode_swa", "moe")}
    assert labels == {
        "rms_norm": "fixture 2/3 flash6",
        "decode_attn_swa": "fixture 2/3 flash6, rank 7 of 8",
        "decode_swa": "fixture 2/3 flash6, 8 heads",
        "moe": "fixture 1/2 flash6, 2 experts",
    }
    assert named_cases("routed_experts", "flash6")[1][0] == "hard 2/3 flash6, 4 experts, rank 1 of 2"


def test_every_operator_is_compared() -> None:
    def composition(name: str) -> str:
        return name.removesuffix("_sharded").removeprefix("decode_").removeprefix("prefill_")

    default = {name for name in OPERATORS if name not in TWINS}
    assert default | set(TWINS) == set(OPERATORS)
    assert {composition(name) for name in TWINS} <= {composition(name) for name in default}
