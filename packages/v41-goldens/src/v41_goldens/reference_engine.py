"""A single-process engine: requests with pages of their own, stepped in any batches (model.md sections 16 and 17).

It is the reference that other engines are compared with, and lets a test place pages as it likes: physical blocks
are handed out in a shuffled order where `shuffle_seed` is given, and free memory can be poisoned with NaN.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from v41_config import (
    BLOCK_ROWS,
    STATE_CAPACITY,
    ModelConfig,
    SourceTokens,
    blocks_for_tokens,
    build_forward_metadata,
    cache_pools,
)
from v41_goldens.attention_stages import AttentionStages
from v41_goldens.capture import Capture, layer_key
from v41_goldens.errors import OperandError
from v41_goldens.fast_attention import FAST_STAGES
from v41_goldens.fast_weights import fast_model
from v41_goldens.forward_context import DEFAULT_MAX_LOGITS_BYTES, ForwardContext
from v41_goldens.greedy import greedy_tokens
from v41_goldens.model import ForwardOutput, check_tokens, forward
from v41_goldens.paged_cache import PagedCaches
from v41_goldens.rope_rows import RopeRows, rope_tables
from v41_goldens.weights import ModelWeights


class ReferenceEngine:
    """Up to `max_requests` requests of up to `max_tokens` tokens each; request ids are 0 to `max_requests - 1`.

    `parts` is the number of tensor-parallel shares in which output partials are added (see `o_proj`). With `fast` the
    quantised matrices, attention and index scores are computed in fast arithmetic (`fast_weights`, `fast_attention`):
    batch-invariant as well, but no reference.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights | None,
        max_requests: int = 1,
        max_tokens: int = 128,
        *,
        parts: int = 1,
        shuffle_seed: int | None = None,
        fill_byte: int = 0,
        max_logits_bytes: int = DEFAULT_MAX_LOGITS_BYTES,
        fast: bool = False,
    ) -> None:
        self.config, self.parts = config, parts
        self.weights = fast_model(weights) if fast and weights is not None else weights
        self.stages = FAST_STAGES if fast else AttentionStages()
        self.max_logits_bytes = max_logits_bytes
        self.max_tokens = max_tokens
        self.lengths = np.zeros(max_requests, dtype=np.int64)
        self._tables = _block_tables(config, max_requests, SourceTokens(max_tokens), shuffle_seed)
        blocks = {name: int(table.max(initial=-1)) + 1 for name, table in self._tables.items()}
        self.caches = PagedCaches.allocate(config, blocks, fill_byte=fill_byte)
        self._ratios = {config.compress_ratios[i] for i in config.kv_source_layer_ids}
        self._state_sources = [i for i in config.kv_source_layer_ids if config.compress_ratios[i] == 2]
        self._rope = rope_tables(config, max_tokens)

    def context(
        self,
        requests: Sequence[int],
        query_lens: Sequence[int],
        capture: Capture | None = None,
        injected: Mapping[str, Tensor] | None = None,
    ) -> ForwardContext:
        """The context of a step in which `requests[i]` advances by `query_lens[i]` tokens; lengths advance with it.

        Raises:
            OperandError: an unknown request, one named twice, or one that would outgrow `max_tokens`.
        """
        self._check_batch(requests, query_lens)
        rows = np.asarray(requests, dtype=np.int64)
        metadata = build_forward_metadata(
            self.config,
            np.concatenate([[0], np.cumsum(query_lens, dtype=np.int64)]),
            self.lengths[rows],
            self._tables["window"][rows],
            {ratio: self._tables[f"c{ratio}a_cmp_kv"][rows] for ratio in self._ratios},
            dict.fromkeys(self._state_sources, self._tables["c2a_state"][rows]) if self._state_sources else {},
        )
        self.lengths[rows] += np.asarray(query_lens, dtype=np.int64)
        return ForwardContext(
            config=self.config,
            metadata=metadata.to_torch(),
            caches=self.caches,
            rope=RopeRows(self._rope),
            capture=capture,
            injected=injected or {},
            max_logits_bytes=self.max_logits_bytes,
            stages=self.stages,
        )

    @torch.inference_mode()
    def step(
        self,
        batch: Sequence[tuple[int, Sequence[int]]],
        capture: Capture | None = None,
        injected: Mapping[str, Tensor] | None = None,
    ) -> ForwardOutput:
        """Advance each `(request, token ids)` of `batch` by its tokens; outputs are packed in batch order.

        Raises:
            OperandError: no weights, a token id outside the vocabulary, or what `context` refuses; no request has
                advanced then.
        """
        if self.weights is None:
            raise OperandError("ReferenceEngine.weights", None, "weights to step with")
        _check_integers(batch)
        tokens = torch.tensor([token for _, part in batch for token in part], dtype=torch.int64)
        check_tokens(tokens, len(tokens), self.config)
        ctx = self.context([request for request, _ in batch], [len(tokens) for _, tokens in batch], capture, injected)
        return forward(ctx, self.weights, tokens, self.parts)

    def release(self, request: int) -> None:
        """Forget a request: its id and its pages, uncleared, are free for another one."""
        self._check_batch([request], [0])
        self.lengths[request] = 0

    def _check_batch(self, requests: Sequence[int], query_lens: Sequence[int]) -> None:
        known, seen = len(self.lengths), set[int]()
        for row, (request, count) in enumerate(zip(requests, query_lens, strict=True)):
            if not 0 <= request < known or request in seen:
                raise OperandError(f"batch[{row}]", request, f"a request from 0 to {known - 1}, once")
            seen.add(request)
            if self.lengths[request] + count > self.max_tokens:
                raise OperandError(f"batch[{row}]", int(self.lengths[request]) + count,
                                   f"at most {self.max_tokens} tokens in a request")  # fmt: skip

    def state_of(self, request: int) -> dict[str, Tensor]:
        """A request's stored state under the keys of a conformance file, decoded.

        Per layer `window_ring` BF16 `[window, head_dim]` (slot position % window, unwritten zero); per KV source
        `compressed_kv` and `index_k` of every published entry; per ratio-2 source with an open pair
        `compressor_kv_state` and `compressor_score_state` FP32 `[1, head_dim]` of its first token.
        """
        length, window = int(self.lengths[request]), self.config.sliding_window
        state: dict[str, Tensor] = {}
        positions = np.arange(max(0, length - window), length)
        rows = self._rows("window", request, positions)
        for layer in self.config.layers:
            ring = torch.zeros(window, self.config.head_dim, dtype=torch.bfloat16)
            ring[torch.from_numpy(positions % window)] = self.caches.window[layer.layer_id].read(rows)
            state[layer_key(layer.layer_id, "window_ring")] = ring
            if not layer.owns_kv:
                continue
            entries = self._rows(f"c{layer.compress_ratio}a_cmp_kv", request, np.arange(length // layer.compress_ratio))
            state[layer_key(layer.layer_id, "compressed_kv")] = self.caches.compressed[layer.layer_id].read(entries)
            state[layer_key(layer.layer_id, "index_k")] = self.caches.index_key[layer.layer_id].read(entries)
            if length % layer.compress_ratio:
                block = int(self._tables["c2a_state"][request, 0])
                open_token = self.caches.state[layer.layer_id][block, [(length - 1) % STATE_CAPACITY]]
                kv, score = open_token.chunk(2, dim=-1)
                state[layer_key(layer.layer_id, "compressor_kv_state")] = kv
                state[layer_key(layer.layer_id, "compressor_score_state")] = score
        return state

    def _rows(self, table: str, request: int, logical: npt.NDArray[np.int64]) -> Tensor:
        blocks = self._tables[table][request][logical // BLOCK_ROWS] if len(logical) else logical
        return torch.from_numpy(blocks * int(BLOCK_ROWS) + logical % BLOCK_ROWS)

    def generate(self, request: int, prompt: Sequence[int], count: int) -> list[int]:
        """Greedy continuation of one request: prefill, then `count` tokens; equal logits give the lowest id.

        Raises:
            OperandError: an empty prompt, which leaves no logits to choose from, a count below 0 or of more tokens than
                a request may hold, or what `step` refuses.
        """
        if not len(prompt):
            raise OperandError("prompt", prompt, "at least one token id")
        if not 0 <= count <= self.max_tokens:
            raise OperandError("count", count, f"0 to max_tokens = {self.max_tokens}")
        produced: list[int] = []
        fed = list(prompt)
        for _ in range(count):
            fed = greedy_tokens(self.step([(request, fed)]).logits[-1:]).tolist()
            produced += fed
        return produced


def _check_integers(batch: Sequence[tuple[int, Sequence[object]]]) -> None:
    """Torch would cut 1.5 down to 1 and take a bool for a token."""
    for row, (_, part) in enumerate(batch):
        for place, token in enumerate(part):
            if isinstance(token, bool) or not isinstance(token, Integral):
                raise OperandError(f"batch[{row}] token {place}", token, "an integer token id")


def _block_tables(
    config: ModelConfig, requests: int, tokens: SourceTokens, shuffle_seed: int | None
) -> dict[str, npt.NDArray[np.int64]]:
    """One table `[requests, pages]` per kind of block, every block used once."""
    tables = {}
    for pool in cache_pools(config):
        pages = 1 if pool.scale is None else blocks_for_tokens(tokens, pool.compress_ratio)
        order = np.arange(requests * pages, dtype=np.int64)
        if shuffle_seed is not None:
            order = np.random.default_rng(shuffle_seed).permutation(order)
        tables[pool.block_table] = order.reshape(requests, pages)
    return tables
