"""Candidate blocks: the coarse level of the two-level indexer (model.md section 11)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from v41_config import ModelConfig
from v41_goldens.top_k import top_k_mask


class CandidateBlocks(NamedTuple):
    """`kept` bool and `score` BF16 `[..., blocks]`: +inf for the pinned block, -inf where nothing is visible."""

    kept: Tensor
    score: Tensor


def candidate_blocks(scores: Tensor, visible: Tensor, config: ModelConfig) -> CandidateBlocks:
    """Keep the best blocks of each query.

    `scores` BF16 `[..., entries]` with -inf on invisible entries, `visible` INT `[...]` entries visible. A block's
    score is its best entry; the block of the newest visible entry is always kept; ties keep the lower block.
    """
    size = config.candidate_block_size
    padded = torch.nn.functional.pad(scores, (0, -scores.shape[-1] % size), value=-torch.inf)
    score = padded.unflatten(-1, (-1, size)).amax(-1)
    block = torch.arange(score.shape[-1], device=scores.device)
    newest = (visible.unsqueeze(-1) - 1) // size  # -1 // size is -1: nothing is pinned where nothing is visible
    score = torch.where(block == newest, torch.inf, score)
    return CandidateBlocks(top_k_mask(score, config.candidate_topk_blocks) & (score > -torch.inf), score)


def entries_of_blocks(kept: Tensor, entries: int, config: ModelConfig) -> Tensor:
    """The mask of single entries: bool `[..., blocks]` -> bool `[..., entries]`."""
    return kept.repeat_interleave(config.candidate_block_size, dim=-1)[..., :entries]
