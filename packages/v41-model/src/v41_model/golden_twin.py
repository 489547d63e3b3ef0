"""The same steps in one process: what a sharded run is compared with, to the bit (model.md section 18).

The golden adds its FP32 output partials in as many parts as the layout has TP ranks; everything else is the plain
model. It runs all DP groups' requests as one batch, with pages of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from v41_config import ModelConfig, ParallelLayout
from v41_goldens.capture import Capture
from v41_goldens.greedy import greedy_tokens
from v41_goldens.reference_engine import ReferenceEngine
from v41_goldens.weights import ModelWeights
from v41_model.generation import GroupStep, Request
from v41_model.layer_capture import COMPRESSOR_STATE, merge_captures

__all__ = ["GoldenTwin", "same_bits"]

_WIDTH_OF_THE_BATCH = ("index_score", "candidate_mask", "candidate_block_score", COMPRESSOR_STATE, "logits")
"""Captured tensors whose columns depend on the batch; selections and logits are compared instead."""


class GoldenTwin:
    """Follows a sharded run of ``requests`` step by step. ``weights`` are the whole model's."""

    def __init__(
        self, config: ModelConfig, layout: ParallelLayout, weights: ModelWeights, requests: Sequence[Request]
    ) -> None:
        longest = max(len(r.prompt) + r.max_new_tokens for r in requests)
        self._engine = ReferenceEngine(config, weights, len(requests), longest, parts=layout.tp)
        self._number = {id(request): number for number, request in enumerate(requests)}

    def step(self, steps: Sequence[GroupStep]) -> list[str]:
        """Run what the DP groups have just run (with capture); the names of tensors that are not bitwise equal.

        Compared are the tokens chosen, the logits and, layer by layer in the order of computation, every captured
        tensor with a row per token or published entry: residual streams, pre-mixes, routes, selections, cache rows.
        """
        batch = [(self._number[id(r)], r.tokens_before(n)) for step in steps for r, n in step.planned]
        golden = Capture()
        output = self._engine.step(batch, golden)
        differences = [name for name, ours, theirs in self._pairs(steps, golden) if not same_bits(ours, theirs)]
        last = torch.tensor([len(tokens) for _, tokens in batch]).cumsum(0) - 1
        if not same_bits(torch.cat([step.output.last_logits for step in steps]), output.logits[last]):
            differences.append("logits")
        planned = [request for step in steps for request, _ in step.planned]
        chosen = dict(zip(map(id, planned), greedy_tokens(output.logits[last]).tolist(), strict=True))
        if any(chosen[id(request)] != token for step in steps for request, token in step.new_tokens):
            differences.append("tokens")
        return differences

    @staticmethod
    def _pairs(steps: Sequence[GroupStep], golden: Capture) -> Iterator[tuple[str, Tensor, Tensor]]:
        merged = [merge_captures(step.output.captures) for step in steps if step.planned]
        for name, theirs in golden.tensors.items():
            if not name.endswith(_WIDTH_OF_THE_BATCH):
                yield name, torch.cat([tensors[name] for tensors in merged]), theirs


def same_bits(ours: Tensor, theirs: Tensor) -> bool:
    """Equal in dtype, shape and bytes, so that -0 and 0 differ."""
    if ours.dtype != theirs.dtype or ours.shape != theirs.shape:
        return False
    return torch.equal(ours.contiguous().view(torch.uint8), theirs.contiguous().view(torch.uint8))
