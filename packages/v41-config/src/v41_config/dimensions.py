"""The one home of dimension symbols: what `T`, `H_local` or `PAGES` means, and where its size comes from.

A dimension of an operand is an int or an expression over these symbols: a sum of products, each divided from the left
(`"D"`, `"B+1"`, `"H_local*HEAD_DIM/MX"`). Divisions are exact. Where a call leaves a symbol open, `bind` asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from types import MappingProxyType

from v41_config.cache_abi import BLOCK_ROWS, STATE_CAPACITY
from v41_config.errors import OperatorError
from v41_config.model_config import FP4_CACHE_GROUP, MX_GROUP, ModelConfig
from v41_config.parallel_layout import ParallelLayout

Dim = int | str
"""A size, or an expression over the symbols of `DIMENSIONS`."""


@dataclass(frozen=True)
class Dimension:
    """One symbol. Exactly one of `constant`, `of_model` and `of_call` says where its size comes from.

    `of_model` takes config and layout; `of_call` the config, the layout and the sizes that the call gave. Where all
    three are None, the call gives the size itself.
    """

    symbol: str
    meaning: str
    constant: int | None = None
    of_model: Callable[[ModelConfig, ParallelLayout], int] | None = None
    of_call: Callable[[ModelConfig, ParallelLayout, Mapping[str, int]], int] | None = None
    needs: str | None = None

    @property
    def given(self) -> bool:
        """Whether only the call can know it."""
        return self.constant is None and self.of_model is None and self.of_call is None


_ALL = (
    # given by the call
    Dimension("T", "packed token rows of the TP group; of a row-wise operator, the rows handed in"),
    Dimension("B", "requests of the step"),
    Dimension("G", "compression groups that close in the step"),
    Dimension("R", "rows received by a rank's experts"),
    Dimension("LOGIT_ROWS", "rows that logits are wanted of"),
    Dimension("CAPACITY", "positions of a RoPE table"),
    Dimension("ENTRIES", "compressed entries that a row of scores spans"),
    Dimension("PAGES", "columns of the compressed block table"),
    Dimension("WINDOW_BLOCKS", "physical blocks of a layer's window pool"),
    Dimension("COMPRESSED_BLOCKS", "physical blocks of a KV source's compressed and index-key pools"),
    Dimension("STATE_BLOCKS", "physical blocks of a KV source's compressor state"),
    Dimension("ATTENDED", "entries of a token's attention list"),
    Dimension("N", "outputs of a linear"),
    Dimension("K", "inputs of a linear"),
    # derived from what the call gives
    Dimension("T_local", "rows of a rank's token slab, ceil(T / TP)",
              of_call=lambda _, layout, sizes: layout.slab_rows(sizes["T"]), needs="T"),
    Dimension("CANDIDATE_BLOCKS", "candidate blocks that a row of scores spans, the last perhaps not full",
              of_call=lambda c, _, sizes: -(-sizes["ENTRIES"] // c.candidate_block_size), needs="ENTRIES"),
    # the model
    Dimension("D", "hidden size", of_model=lambda c, _: c.hidden_size),
    Dimension("HC", "lanes of the residual streams", of_model=lambda c, _: c.hc_mult),
    Dimension("HC_MIXES", "coefficients of a hyper-connection: pre, post and the square mix",
              of_model=lambda c, _: c.hc_mixes),
    Dimension("V", "vocabulary", of_model=lambda c, _: c.vocab_size),
    Dimension("H", "attention heads", of_model=lambda c, _: c.num_attention_heads),
    Dimension("HEAD_DIM", "channels of a head, keys and values at once", of_model=lambda c, _: c.head_dim),
    Dimension("HALF_ROPE", "rotated pairs of channels", of_model=lambda c, _: c.qk_rope_head_dim // 2),
    Dimension("Q_LORA", "rank of the query projection", of_model=lambda c, _: c.q_lora_rank),
    Dimension("O_LORA", "rank of one output group", of_model=lambda c, _: c.o_lora_rank),
    Dimension("O_GROUPS", "output groups", of_model=lambda c, _: c.o_groups),
    Dimension("WINDOW", "tokens of the sliding window", of_model=lambda c, _: c.sliding_window),
    Dimension("INDEX_HEADS", "heads of the indexer", of_model=lambda c, _: c.index_n_heads),
    Dimension("INDEX_DIM", "channels of an index key", of_model=lambda c, _: c.index_head_dim),
    Dimension("INDEX_TOPK", "entries that a selection holds", of_model=lambda c, _: c.index_topk),
    Dimension("E", "routed experts", of_model=lambda c, _: c.n_routed_experts),
    Dimension("TOPK", "experts of a token", of_model=lambda c, _: c.num_experts_per_tok),
    Dimension("I", "intermediate size of an expert", of_model=lambda c, _: c.moe_intermediate_size),
    # a rank's share
    Dimension("TP", "ranks of a TP group", of_model=lambda _, layout: layout.tp),
    Dimension("EP", "ranks that share the experts", of_model=lambda _, layout: layout.ep),
    Dimension("H_local", "attention heads of a rank", of_model=lambda c, layout: len(layout.head_range(c, 0))),
    Dimension("O_GROUPS_local", "output groups of a rank",
              of_model=lambda c, layout: len(layout.output_group_range(c, 0))),
    Dimension("V_local", "vocabulary rows of a rank", of_model=lambda c, layout: len(layout.vocab_range(c, 0))),
    Dimension("E_local", "routed experts of a rank", of_model=lambda c, layout: len(layout.expert_range(c, 0))),
    # formats
    Dimension("MX", "elements of an E8M0 scale", constant=MX_GROUP),
    Dimension("FP4_GROUP", "elements of a compressed row's E4M3 scale", constant=FP4_CACHE_GROUP),
    Dimension("BLOCK_ROWS", "rows of a physical cache block", constant=BLOCK_ROWS),
    Dimension("STATE_CAPACITY", "tokens of a compressor state ring", constant=STATE_CAPACITY),
)  # fmt: skip

DIMENSIONS: Mapping[str, Dimension] = MappingProxyType({dimension.symbol: dimension for dimension in _ALL})
"""Every symbol, in the order in which documents list them."""

CONSTANTS: Mapping[str, int] = MappingProxyType({d.symbol: d.constant for d in _ALL if d.constant is not None})
"""The symbols that no model changes."""


def symbols_of(dim: Dim) -> tuple[str, ...]:
    """The symbols of an expression, in order, none for a number."""
    if isinstance(dim, int):
        return ()
    factors = dim.replace("+", "*").replace("/", "*").split("*")
    return tuple(factor for factor in factors if not factor.isdigit())


def evaluate(dim: Dim, sizes: Mapping[str, int]) -> int:
    """The size of an expression.

    Raises:
        OperatorError: a division that leaves a remainder.
        KeyError: a symbol without a size.
    """
    return dim if isinstance(dim, int) else sum(_evaluate_term(term, sizes) for term in dim.split("+"))


def _evaluate_term(term: str, sizes: Mapping[str, int]) -> int:
    product, *divisors = term.split("/")
    value = prod(_evaluate_factor(factor, sizes) for factor in product.split("*"))
    for divisor in divisors:
        value, rest = divmod(value, _evaluate_factor(divisor, sizes))
        if rest:
            raise OperatorError(term, {s: sizes[s] for s in symbols_of(term)}, "a division without remainder")
    return value


def _evaluate_factor(factor: str, sizes: Mapping[str, int]) -> int:
    return int(factor) if factor.isdigit() else sizes[factor]


def model_sizes(config: ModelConfig, layout: ParallelLayout) -> dict[str, int]:
    """Every symbol whose size follows from config and layout.

    Raises:
        LayoutError: the layout does not divide the model.
    """
    layout.check(config)
    derived = {d.symbol: d.of_model(config, layout) for d in _ALL if d.of_model is not None}
    return {**CONSTANTS, **derived}
