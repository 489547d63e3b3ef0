"""Sparse attention with a sink: against float64, at the edges, and told apart from near misses."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from v41_goldens.errors import OperandError
from v41_goldens.exact import dot, exp, total
from v41_goldens.judges import assert_equal_bits, unequal_bits
from v41_goldens.sparse_attention import CHUNK, sparse_attention

HEADS, WIDTH = 3, 32
SCALE = WIDTH**-0.5


def inputs(tokens: int = 5, entries: int = 150, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, kv, valid with holes, sink; scores spread over several units, so that the running maximum moves."""
    generator = torch.Generator().manual_seed(seed)
    q = (torch.randn(tokens, HEADS, WIDTH, generator=generator) * 2).bfloat16()
    kv = torch.randn(tokens, entries, WIDTH, generator=generator).bfloat16()
    valid = torch.rand(tokens, entries, generator=generator) < 0.8
    return q, kv, valid, torch.tensor([-2.0, 0.3, 2.5])


def dense_float64(q: Tensor, kv: Tensor, valid: Tensor, sink: Tensor) -> Tensor:
    """One softmax in float64 over all entries, the sink as one more logit without a value."""
    logits = torch.einsum("thd,tnd->thn", q.double(), kv.double()) * SCALE
    logits = logits.masked_fill(~valid.unsqueeze(1), -math.inf)
    logits = torch.cat([logits, sink.double().view(1, -1, 1).expand(len(q), -1, 1)], dim=-1)
    return torch.softmax(logits, dim=-1)[..., :-1] @ kv.double()


def largest_error(out: Tensor, expected: Tensor, kv: Tensor) -> float:
    """In units of the largest value that is averaged: what the bound of rounding errors scales with."""
    return float(((out.double() - expected).abs() / kv.double().abs().amax((1, 2)).view(-1, 1, 1)).max())


ROUNDING = 2.0**-8
"""A probability rounded to BF16 is off by 2^-9 of itself, so an average of values by at most 2^-9 of the largest one;
the result's own rounding adds at most as much again. FP32 terms are four orders below."""


def oracle_cases() -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    return [
        inputs(tokens, entries, seed) for seed, (tokens, entries) in enumerate([(5, 150), (2, 64), (3, 65), (1, 1)])
    ]


@pytest.mark.parametrize("case", range(4))
def test_equals_a_dense_softmax_in_float64(case: int) -> None:
    q, kv, valid, sink = oracle_cases()[case]
    valid[:, 0] = True
    assert largest_error(sparse_attention(q, kv, valid, sink, SCALE), dense_float64(q, kv, valid, sink), kv) < ROUNDING


def variant(
    q: Tensor,
    kv: Tensor,
    valid: Tensor,
    sink: Tensor,
    *,
    value_of: Callable[[Tensor], Tensor] = Tensor.bfloat16,
    denominator_of: Callable[[Tensor], Tensor] = lambda p: p,
    first_maximum: Tensor | None = None,
    sink_value: float = 0.0,
    chunk: int = CHUNK,
) -> Tensor:
    """The operator written once more, with one knob for each way to get it wrong."""
    shape = (len(q), HEADS, 1)
    maximum = torch.full(shape, -1e30) if first_maximum is None else first_maximum.view(1, -1, 1).expand(shape).clone()
    denominator, accumulator = torch.zeros(shape), torch.zeros(q.shape)
    for start in range(0, kv.shape[1], chunk):
        part = torch.where(valid[:, start : start + chunk, None], kv[:, start : start + chunk], 0.0)
        scores = dot(q, part) * torch.tensor(SCALE)
        scores = scores.masked_fill(~valid[:, None, start : start + chunk], -math.inf)
        newest = torch.maximum(maximum, scores.amax(-1, keepdim=True))
        decay, p = exp(maximum - newest), exp(scores - newest)
        denominator = denominator * decay + total(denominator_of(p), -1, keepdim=True)
        accumulator = accumulator * decay + dot(value_of(p), part.transpose(1, 2))
        maximum = newest
    sink_term = exp(sink.view(-1, 1) - maximum)
    return ((accumulator + sink_term * sink_value) / (denominator + sink_term)).bfloat16()


def test_wrong_variants_differ() -> None:
    q, kv, valid, sink = inputs(tokens=20)
    right = sparse_attention(q, kv, valid, sink, SCALE)
    assert_equal_bits(variant(q, kv, valid, sink), right, "no knob turned")
    wrong = {
        "sink in the numerator": variant(q, kv, valid, sink, sink_value=1.0),
        "sink in the running maximum": variant(q, kv, valid, sink, first_maximum=sink + 4),
        "probabilities not rounded": variant(q, kv, valid, sink, value_of=lambda p: p),
        "rounded probabilities in the denominator": variant(
            q, kv, valid, sink, denominator_of=lambda p: p.bfloat16().float()
        ),
        "chunks of 32": variant(q, kv, valid, sink, chunk=32),
        "one chunk": variant(q, kv, valid, sink, chunk=150),
        "no sink": sparse_attention(q, kv, valid, torch.full((HEADS,), -math.inf), SCALE),
        "scaled sink": sparse_attention(q, kv, valid, sink * SCALE, SCALE),
        "scale of another width": sparse_attention(q, kv, valid, sink, (2 * WIDTH) ** -0.5),
    }
    for name, out in wrong.items():
        assert unequal_bits(out, right).any(), name


def test_a_window_that_is_not_padded_differs() -> None:
    """The compressed entries of a short context stand at column `window`: elsewhere they meet other chunks."""
    q, kv, _, sink = inputs(tokens=20, entries=100)
    window = 50
    padded = torch.cat([kv[:, :10], kv.new_zeros(20, window - 10, WIDTH), kv[:, 10:]], dim=1)
    valid = torch.ones(20, padded.shape[1], dtype=torch.bool)
    valid[:, 10:window] = False
    right = sparse_attention(q, padded, valid, sink, SCALE)
    packed = sparse_attention(q, kv, torch.ones(20, 100, dtype=torch.bool), sink, SCALE)
    assert unequal_bits(packed, right).any()
    assert largest_error(packed, right.double(), kv) < 2 * ROUNDING


def test_what_invalid_rows_hold_does_not_matter() -> None:
    q, kv, valid, sink = inputs()
    right = sparse_attention(q, kv, valid, sink, SCALE)
    for junk in (math.nan, math.inf, -math.inf, 3e38):
        assert_equal_bits(
            sparse_attention(q, torch.where(valid.unsqueeze(-1), kv, junk), valid, sink, SCALE), right, str(junk)
        )


def test_trailing_padding_changes_nothing_and_moved_entries_do() -> None:
    q, kv, valid, sink = inputs(tokens=20)
    right = sparse_attention(q, kv, valid, sink, SCALE)
    longer = torch.nn.functional.pad(kv, (0, 0, 0, 90), value=math.nan)
    more = torch.nn.functional.pad(valid, (0, 90), value=False)
    assert_equal_bits(sparse_attention(q, longer, more, sink, SCALE), right, "padded")
    shifted = sparse_attention(q, longer.roll(64, dims=1), more.roll(64, dims=1), sink, SCALE)
    assert_equal_bits(shifted, right, "a whole empty chunk first")
    shifted = sparse_attention(q, longer.roll(9, dims=1), more.roll(9, dims=1), sink, SCALE)
    assert unequal_bits(shifted, right).any()


@pytest.mark.parametrize("sink", [-1000.0, 1000.0, -math.inf, math.inf, 0.0])
@pytest.mark.parametrize("entries", [0, 1, 150])
def test_a_row_without_entries_is_zero_under_any_sink(sink: float, entries: int) -> None:
    q, kv, _, _ = inputs(entries=entries)
    valid = torch.zeros(len(q), entries, dtype=torch.bool)
    out = sparse_attention(q, kv * math.nan, valid, torch.full((HEADS,), sink), SCALE)
    assert_equal_bits(out, torch.zeros_like(q), "empty rows")


def test_an_empty_row_leaves_its_neighbours_alone() -> None:
    q, kv, valid, sink = inputs()
    valid[1] = False
    valid[2, :CHUNK] = False
    valid[3, CHUNK : 2 * CHUNK] = False
    valid[4] = False
    valid[4, 77] = True
    out = sparse_attention(q, kv, valid, sink, SCALE)
    assert_equal_bits(out[1], torch.zeros_like(q[1]), "empty row")
    rest = [0, 2, 3, 4]
    assert largest_error(out[rest], dense_float64(q, kv, valid, sink)[rest], kv[rest]) < ROUNDING
    for row in rest:
        one = slice(row, row + 1)
        assert_equal_bits(sparse_attention(q[one], kv[one], valid[one], sink, SCALE), out[one], f"row {row} alone")


def test_extreme_sinks() -> None:
    q, kv, valid, _ = inputs()
    valid[:, 0] = True
    huge = sparse_attention(q, kv, valid, torch.full((HEADS,), 1000.0), SCALE)
    assert_equal_bits(huge.abs(), torch.zeros_like(q), "the sink takes everything")
    none = sparse_attention(q, kv, valid, torch.full((HEADS,), -math.inf), SCALE)
    assert_equal_bits(
        sparse_attention(q, kv, valid, torch.full((HEADS,), -1000.0), SCALE), none, "the sink takes nothing"
    )
    assert largest_error(none, dense_float64(q, kv, valid, torch.full((HEADS,), -1e9)), kv) < ROUNDING


def test_a_single_entry_without_sink_is_its_value() -> None:
    q, kv, valid, _ = inputs()
    valid[:] = False
    valid[:, 70] = True
    out = sparse_attention(q, kv, valid, torch.full((HEADS,), -math.inf), SCALE)
    assert_equal_bits(out, kv[:, 70:71].expand_as(out), "value")


def test_scores_of_any_size_stay_finite() -> None:
    """Maxima of several hundred, growing or falling from chunk to chunk: the decay may underflow, nothing overflows."""
    q, kv, _, sink = inputs(tokens=2)
    steps = torch.tensor([1.0, 40.0, 200.0]).repeat_interleave(CHUNK)[:150]
    growing = (kv * torch.stack([steps, steps.flip(0)]).unsqueeze(-1)).bfloat16()
    valid = torch.ones(2, 150, dtype=torch.bool)
    out = sparse_attention(q, growing, valid, sink, SCALE)
    assert out.isfinite().all()
    assert largest_error(out, dense_float64(q, growing, valid, sink), growing) < ROUNDING


def test_a_nan_that_is_attended_shows() -> None:
    q, kv, valid, sink = inputs()
    valid[0, 3] = True
    kv[0, 3, 5] = math.nan
    out = sparse_attention(q, kv, valid, sink, SCALE)
    assert out[0].isnan().all()
    assert out[1:].isfinite().all()


def test_no_tokens() -> None:
    q, kv, valid, sink = inputs(tokens=0)
    assert sparse_attention(q, kv, valid, sink, SCALE).shape == (0, HEADS, WIDTH)


def test_shapes_that_do_not_fit_are_refused() -> None:
    q, kv, valid, sink = inputs()
    for operands in ((q[1:], kv, valid, sink), (q, kv[:, 1:], valid, sink), (q, kv, valid[1:], sink),
                     (q, kv[..., 1:], valid, sink), (q, kv, valid, sink[1:])):  # fmt: skip
        with pytest.raises(OperandError, match="sparse_attention"):
            sparse_attention(*operands, SCALE)
