"""The router: the experts of each token by biased score, and their weights (model.md section 14.1)."""
# mypy: disable-error-code="valid-type, no-untyped-def"

from collections.abc import Callable
from typing import Any

import pypto

from v41_kernels.kernels.stages.compensated import compensated_sum
from v41_kernels.kernels.stages.functions import softplus
from v41_kernels.kernels.stages.linear import product
from v41_kernels.kernels.stages.rows import column_indices, row_tile, vector_row

ROW_TILE = 8
COLUMN_TILE = 512
# Why: a row of 384 scores is one tile, so that a maximum over it is one reduction; 8 rows of it are 12 KB.
TAKEN = -3.0e38
WEIGHT_SUM_EPS = 1e-20


def best_expert(left: Any, scores: Any, ids: Any, E: int) -> tuple[Any, Any, Any]:
    """Lowest id with the largest of `left`, its unbiased score, and `left` without it."""
    best = pypto.amax(left, -1, keepdim=True)
    candidates = pypto.where(pypto.eq(left, best), ids, float(E))
    chosen = pypto.amin(candidates, -1, keepdim=True)
    hit = pypto.eq(candidates, chosen)
    score = pypto.sum(pypto.where(hit, scores, 0.0), -1, keepdim=True)
    return chosen, score, pypto.where(hit, TAKEN, left)


def make_entry(*, D: int, E: int, TOPK: int, routed_scaling_factor: float) -> Callable[..., None]:
    """The entry for `E` experts of which a token takes `TOPK`."""

    def gate(
        x: pypto.Tensor([pypto.DYNAMIC, D], pypto.DT_BF16),
        gate_weight: pypto.Tensor([E, D], pypto.DT_BF16),
        gate_bias: pypto.Tensor([E], pypto.DT_FP32),
        num_tokens: pypto.Tensor([1], pypto.DT_INT32),
        expert_ids: pypto.Tensor([pypto.DYNAMIC, TOPK], pypto.DT_INT32),
        route_weights: pypto.Tensor([pypto.DYNAMIC, TOPK], pypto.DT_FP32),
        biased_scores: pypto.Tensor([pypto.DYNAMIC, E], pypto.DT_FP32),
    ):
        active = num_tokens[0]
        for tile in pypto.loop((active + ROW_TILE - 1) // ROW_TILE, name="TILES", idx_name="tile"):
            first = tile * ROW_TILE
            rows = pypto.min(active - first, ROW_TILE)
            ids = column_indices(E)
            pypto.set_vec_tile_shapes(ROW_TILE, COLUMN_TILE)
            logits = product(row_tile(x, ROW_TILE, first, rows, D), gate_weight)
            scores = pypto.sqrt(softplus(logits))
            biased = scores + vector_row(gate_bias, E)
            pypto.assemble(pypto.clone(biased), [first, 0], biased_scores)
            left = biased
            chosen_scores = []
            for k in range(TOPK):
                chosen, score, left = best_expert(left, scores, ids, E)
                pypto.assemble(pypto.cast(chosen, pypto.DT_INT32), [first, k], expert_ids)
                chosen_scores.append(score)
            total = compensated_sum(chosen_scores) + WEIGHT_SUM_EPS
            for k in range(TOPK):
                pypto.assemble(chosen_scores[k] / total * routed_scaling_factor, [first, k], route_weights)

    return gate
