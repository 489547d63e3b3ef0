"""Records of several ranks as one: which tensors are rows, heads or whole, and what does not fit together."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from v41_config import SlabError
from v41_goldens.capture import Capture
from v41_model.layer_capture import Held, held_by_ranks, merge_captures, selection_gap


def _captures(**tensors: list[Tensor]) -> list[Capture]:
    count = len(next(iter(tensors.values())))
    return [Capture({key.replace("__", "."): parts[i] for key, parts in tensors.items()}) for i in range(count)]


def test_rows_and_heads_are_joined_and_equal_tensors_kept() -> None:
    merged = merge_captures(
        _captures(
            layer__03__X=[torch.zeros(2, 4), torch.ones(1, 4), torch.zeros(0, 4)],
            layer__03__q=[torch.full((3, 2, 5), float(i)) for i in range(3)],
            layer__03__attn_in=[torch.arange(3.0)] * 3,
        )
    )
    assert merged["layer.03.X"][:, 0].tolist() == [0, 0, 1]
    assert merged["layer.03.q"][0, :, 0].tolist() == [0, 0, 1, 1, 2, 2]
    assert merged["layer.03.attn_in"].tolist() == [0, 1, 2]


def test_ranks_that_disagree_are_refused() -> None:
    with pytest.raises(SlabError, match=r"attn_in: expected equal values on every rank"):
        merge_captures(_captures(layer__03__attn_in=[torch.zeros(2), torch.ones(2)]))
    with pytest.raises(SlabError, match="the same keys on all ranks"):
        merge_captures([Capture({"embed_out": torch.zeros(1)}), Capture({})])


def test_a_tensor_nobody_declared_is_refused() -> None:
    assert held_by_ranks("layer.00.sparse_attn_out") is Held.HEADS
    assert held_by_ranks("final.norm_out") is Held.TOKENS
    with pytest.raises(SlabError, match=r"layer\.00\.mystery"):
        held_by_ranks("layer.00.mystery")


def test_gap_is_the_distance_of_the_runner_up() -> None:
    inf = torch.inf
    scores = torch.tensor([[1.0, 5.0, 3.5], [2.0, 2.0, 2.0], [7.0, -inf, -inf], [-inf, -inf, -inf]])
    assert selection_gap(scores, 1).tolist() == [1.5, 0.0, inf, inf]
    assert selection_gap(scores, 2).tolist() == [2.5, 0.0, inf, inf]
    assert selection_gap(scores, 3).tolist() == [inf] * 4
