"""Goldens and kernels meet the operator ABI: its operands go in, what it declares comes out."""

from __future__ import annotations

import pytest
from torch import Tensor

from v41_config import TINY, OperatorError, ParallelLayout, find_operator, operators
from v41_config.operator_spec import ConstantSpec
from v41_config.weight_table import WEIGHTS
from v41_goldens.fixtures import FixtureCase, operator_fixture
from v41_goldens.forward_context import DEFAULT_MAX_LOGITS_BYTES
from v41_goldens.operators import golden
from v41_goldens.weights import AttentionWeights
from v41_kernels.registry import OPERATORS as KERNEL_OPERATORS


@pytest.mark.parametrize("name", operators())
def test_the_golden_takes_and_writes_what_the_operator_declares(name: str) -> None:
    """The golden's own results have the declared dtypes and shapes: the destination form copies nothing else."""
    fixture = operator_fixture(name, FixtureCase(tokens=6, requests=2))
    golden(name).run_ranks(fixture.bounds, fixture.arguments)
    fixture.bounds[0].check(fixture.arguments[0])


@pytest.mark.parametrize("name", ["q_proj_rope", "grouped_output"])
def test_the_golden_of_a_rank_takes_its_share(name: str) -> None:
    case = FixtureCase(layout=ParallelLayout(2), tokens=6, requests=2)
    fixture = operator_fixture(name, case)
    golden(name).run_ranks(fixture.bounds, fixture.arguments)
    whole = fixture.spec.bind(TINY, None, **fixture.extents[0])
    with pytest.raises(OperatorError):
        golden(name).run(whole, fixture.arguments[0])


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_the_goldens_read_weights_of_the_declared_form(tp: int) -> None:
    """From the table's names and shapes, for each layer's role and each rank's share."""
    for layer in TINY.layers:
        case = FixtureCase(layout=ParallelLayout(tp), tokens=6, requests=2)
        fixture = operator_fixture(f"decode_attn_{layer.mode.value}", case)
        tensors: dict[str, Tensor] = {
            WEIGHTS[name].checkpoint.format(layer=layer.layer_id): tensor
            for name, tensor in fixture.tensors(0).items()
            if name in WEIGHTS
        }
        weights = AttentionWeights.from_tensors(TINY, layer.layer_id, tensors)
        assert len(weights.attn_sink) == TINY.num_attention_heads // tp


@pytest.mark.parametrize("name", KERNEL_OPERATORS)
def test_a_kernel_has_the_contract_of_its_operator(name: str) -> None:
    assert KERNEL_OPERATORS[name].spec == find_operator(name)


def test_the_score_budget_has_one_default() -> None:
    (budget,) = (
        s for s in find_operator("hierarchical_sparse_indexer_c2a_full").scalars if isinstance(s, ConstantSpec)
    )
    assert budget.value == DEFAULT_MAX_LOGITS_BYTES
