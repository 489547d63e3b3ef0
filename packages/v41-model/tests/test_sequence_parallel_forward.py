"""Every layout against the single-process golden with the same output partials: all tensors of all layers, bitwise.

Prefill, chunked prefill and decode of ragged requests over unequal DP groups, with token counts that do not divide by
TP, are smaller than TP, or are zero for a whole group.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from v41_config import TINY, ParallelLayout
from v41_goldens.weights import ModelWeights
from v41_loader import Checkpoint
from v41_model.generation import Request, admit, advance
from v41_model.golden_twin import GoldenTwin
from v41_model.operators import Operators
from v41_model.session import ModelSession

LAYOUTS = [(1, 1), (2, 2), (4, 1), (4, 2)]

CASES = {
    "ragged, T not divisible": [13, 1, 21, 6, 2],
    "one request, other groups empty": [9],
    "T smaller than TP": [1, 2],
    "single tokens": [1, 1, 1],
}


def _requests(lengths: list[int], new_tokens: int) -> list[Request]:
    random = np.random.default_rng(sum(lengths))
    return [Request((0, *random.integers(3, TINY.vocab_size, n - 1).tolist()), new_tokens) for n in lengths]


@pytest.fixture(scope="module", params=LAYOUTS, ids=lambda layout: f"tp{layout[0]}-dp{layout[1]}")
def session(request: pytest.FixtureRequest, tiny_checkpoint: Checkpoint) -> ModelSession:
    return ModelSession.open(tiny_checkpoint, ParallelLayout(*request.param))


@pytest.mark.parametrize("lengths", CASES.values(), ids=CASES.keys())
def test_prefill_and_decode_equal_the_golden(
    session: ModelSession, tiny_weights: ModelWeights, lengths: list[int]
) -> None:
    requests = _requests(lengths, new_tokens=2)
    groups = admit(session, requests)
    twin = GoldenTwin(TINY, session.layout, tiny_weights, requests)
    while any(group.running for group in groups):
        assert twin.step(advance(session, groups, capture=True)) == []
    assert all(len(r.generated) == 2 for r in requests)


def test_chunked_prefill_mixed_with_decode_equals_the_golden(session: ModelSession, tiny_weights: ModelWeights) -> None:
    """Seven rows a step: long prompts in odd chunks, while short requests of the same group already decode."""
    requests = _requests([2, 17, 4, 11], new_tokens=2)
    groups = admit(session, requests)
    twin = GoldenTwin(TINY, session.layout, tiny_weights, requests)
    while any(group.running for group in groups):
        assert twin.step(advance(session, groups, max_rows=7, capture=True)) == []


def test_a_wrong_tensor_is_named(tiny_checkpoint: Checkpoint, tiny_weights: ModelWeights) -> None:
    """The comparison itself: one last bit of one operator on one rank shows, from its layer on."""
    calls = 0
    golden = Operators()

    def one_bit_off(y: torch.Tensor, x_hc: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        out = golden.mhc_post(y, x_hc, post, comb)
        if calls == 2 * (2 * 3) + 1:  # two ranks, two calls a layer: attention half of layer 3 on the first rank
            out.view(torch.int16)[0, 0, 0] ^= 1
        return out

    session = ModelSession.open(tiny_checkpoint, ParallelLayout(2, 1), operators=golden.replace(mhc_post=one_bit_off))
    requests = _requests([4], new_tokens=1)
    groups = admit(session, requests)
    differences = GoldenTwin(TINY, session.layout, tiny_weights, requests).step(advance(session, groups, capture=True))
    assert differences[0].startswith("layer.03.hc_ffn")
    assert not any(name.startswith(("layer.00", "layer.01", "layer.02")) for name in differences)


def test_another_tp_grouping_is_another_sum(tiny_checkpoint: Checkpoint, tiny_weights: ModelWeights) -> None:
    """The output partials' grouping belongs to the contract: the FP32 sums of TP4 are not those of TP1 everywhere."""
    requests = _requests([21, 33], new_tokens=1)
    session = ModelSession.open(tiny_checkpoint, ParallelLayout(4, 1))
    sums: list[torch.Tensor] = []
    original = session.world.communicators[0].reduce_scatter_tokens

    def observed(partial: torch.Tensor, site: object) -> torch.Tensor:
        sums.append(original(partial, site))  # type: ignore[arg-type]
        return sums[-1]

    session.world.communicators[0].reduce_scatter_tokens = observed  # type: ignore[method-assign]
    advance(session, admit(session, requests))
    assert len(sums) == TINY.num_hidden_layers + 1, "the embedding and each attention"
    assert all(s.dtype == torch.float32 for s in sums)
    assert any(not torch.equal(s, s.bfloat16().float()) for s in sums), "nothing was rounded before the sum"
