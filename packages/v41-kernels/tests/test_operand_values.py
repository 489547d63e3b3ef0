"""Integer operands that point nowhere are refused before anything is launched; padding is not looked at."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from v41_config import TINY, OperatorError, find_operator
from v41_config.operator_spec import CountSpec
from v41_kernels.arguments import BoundArguments, bind
from v41_kernels.operand_values import check_operand_values

ROWS, ACTIVE = 6, 5
EXPERT_START = 3
EXTENTS = {"T": ROWS, "B": 2, "G": 3, "R": ROWS, "CAPACITY": 64, "ENTRIES": 61, "PAGES": 2, "WINDOW_BLOCKS": 2,
           "COMPRESSED_BLOCKS": 4, "STATE_BLOCKS": 3}  # fmt: skip


def call(name: str, change: Callable[[dict[str, Tensor]], None] = lambda _: None) -> BoundArguments:
    """A call of zeros, changed."""
    spec = find_operator(name)
    shapes = spec.bind(TINY, None, **{symbol: EXTENTS[symbol] for symbol in spec.given}).tensors
    tensors = {t: torch.zeros(b.shape, dtype=getattr(torch, b.spec.dtype)) for t, b in shapes.items()}
    if "row_expert_ids" in tensors:
        tensors["row_expert_ids"] += EXPERT_START
    change(tensors)
    counts = {s.name: EXPERT_START if s.name == "expert_start" else ACTIVE
              for s in spec.scalars if isinstance(s, CountSpec)}  # fmt: skip
    return bind(spec, {**tensors, **counts})


def put(name: str, value: int, *element: int) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[name][element] = value

    return change


INDEXER = "hierarchical_sparse_indexer_c2a_full"
REFUSED = [
    ("publish_window_kv", "slots", 256, (1,)),
    ("publish_window_kv", "slots", -2, (1,)),
    ("publish_window_kv", "slots", -(1 << 32), (1,)),  # its low half is 0, a slot
    ("publish_window_kv", "slots", 1 << 32, (1,)),
    ("publish_compressed_kv", "slots", 512, (2,)),
    ("publish_index_key", "slots", 512, (2,)),
    (INDEXER, "compressed_block_table", 4, (1, 0)),
    (INDEXER, "compressed_block_table", -2, (1, 0)),
    (INDEXER, "compressed_lens", 257, (0,)),
    (INDEXER, "compressed_lens", -1, (0,)),
    (INDEXER, "token_to_req_indices", 2, (4,)),
    ("candidate_blocks", "compressed_lens", 62, (0,)),
    ("compress_ratio_2", "state_block_table", 3, (0, 0)),
    ("compress_ratio_2", "position_ids", -1, (0,)),
    ("compress_ratio_2", "query_start_loc", 7, (2,)),
    ("compress_ratio_2", "compressor_source_token_indices", ACTIVE, (0,)),
    ("decode_attn_swa", "window_indices", 256, (0, 3)),
    ("decode_attn_swa", "window_slots", 256, (0,)),
    ("decode_attn_c2a_reuse", "topk_rows", 512, (0, 3)),
    ("decode_attn_c1a_full", "compressed_slots", 512, (0,)),
    ("decode_attn_c1a_full", "index_slots", 512, (0,)),
    ("routed_experts", "row_expert_ids", EXPERT_START + TINY.n_routed_experts, (0,)),
    ("routed_experts", "row_expert_ids", EXPERT_START - 1, (1,)),
    ("routed_experts", "row_expert_ids", 0, (2,)),
    ("materialize_rope_rows", "position_ids", 64, (0,)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "operand", "value", "element"), REFUSED)
def test_a_value_that_points_nowhere_is_refused(name: str, operand: str, value: int, element: tuple[int, ...]) -> None:
    with pytest.raises(OperatorError) as error:
        check_operand_values(call(name, put(operand, value, *element)))
    assert error.value.where == f"{name}: {operand}{list(element)}"
    assert error.value.found == value


@pytest.mark.parametrize(
    ("name", "operand", "value", "element"),
    [
        ("publish_window_kv", "slots", 255, (1,)),
        ("publish_window_kv", "slots", -1, (1,)),
        (INDEXER, "compressed_block_table", -1, (1, 0)),
        (INDEXER, "compressed_lens", 256, (0,)),
        ("compress_ratio_2", "state_block_table", -1, (1, 0)),
        ("decode_attn_swa", "window_indices", -1, (0, 3)),
        ("materialize_rope_rows", "position_ids", -7, (0,)),
        ("routed_experts", "row_expert_ids", -7, (0,)),
        ("routed_experts", "row_expert_ids", EXPERT_START, (0,)),
        ("routed_experts", "row_expert_ids", EXPERT_START + TINY.n_routed_experts - 1, (1,)),
        # destinations, and padding
        (INDEXER, "topk_rows", -9999, (0, 0)),
        ("publish_window_kv", "slots", 1 << 40, (ACTIVE,)),
        ("decode_attn_swa", "window_indices", 9999, (ACTIVE, 0)),
    ],
)
def test_values_that_mean_something_are_let_by(name: str, operand: str, value: int, element: tuple[int, ...]) -> None:
    check_operand_values(call(name, put(operand, value, *element)))


def test_starts_have_to_ascend() -> None:
    def swap(tensors: dict[str, Tensor]) -> None:
        tensors["query_start_loc"].copy_(torch.tensor([0, 5, 3]))

    with pytest.raises(OperatorError, match=r"query_start_loc\[1\].*ascending.*\[5, 3\]"):
        check_operand_values(call("compress_ratio_2", swap))
