"""Coefficients of a sublayer from its residual streams (model.md section 5)."""
# mypy: disable-error-code="valid-type, no-untyped-def"

from collections.abc import Callable
from typing import Any

import pypto

from v41_kernels.kernels.stages.compensated import compensated_sum
from v41_kernels.kernels.stages.functions import sigmoid
from v41_kernels.kernels.stages.linear import divisor_tile, product
from v41_kernels.kernels.stages.normalisation import inverse_rms
from v41_kernels.kernels.stages.rows import row_tile, vector_row

ROW_TILE = 8
COLUMN_TILE = 512
# Why: the projection has only 24 outputs, so its inputs are walked in pieces of 512, whose FP32 products are summed
# with compensation; after it everything is a handful of [8, 4] tiles, and one of [32, 4] for the comb matrices: a step
# of the Sinkhorn iteration is one sum and one division for all four source streams.


def projection(x_hc: Any, fn: Any, first: Any, rows: Any, width: int, outputs: int) -> Any:
    """FP32 `[R, outputs]` of the flattened streams and the FP32 weights."""
    piece = divisor_tile(width, COLUMN_TILE)
    partials = []
    for start in range(0, width, piece):
        pypto.set_vec_tile_shapes(ROW_TILE, piece)
        x_tile = pypto.cast(row_tile(x_hc, ROW_TILE, first, rows, piece, start), pypto.DT_FP32)
        partials.append(product(x_tile, pypto.view(fn, [outputs, piece], [0, start])))
    pypto.set_vec_tile_shapes(ROW_TILE, 32)
    return partials[0] if len(partials) == 1 else compensated_sum(partials)


def columns(tile: Any, HC: int) -> list[Any]:
    """The columns of `[R, HC]`, each `[R, 1]`."""
    cut = []
    for k in range(HC):
        cut.append(tile[:, k : k + 1])
    return cut


def factor(scale: Any, index: int, HC: int) -> Any:
    """`scale[index]` as `[1, HC]`: the compiler broadcasts along one axis at a time."""
    return pypto.expand_clone(pypto.reshape(pypto.view(scale, [1], [index]), [1, 1]), [1, HC])


def softmax_row(logits: Any, HC: int, hc_eps: float) -> Any:
    """`softmax(logits) + hc_eps` of `[R, HC]`."""
    exponentials = pypto.exp(logits - pypto.amax(logits, -1, keepdim=True))
    return exponentials / compensated_sum(columns(exponentials, HC)) + hc_eps


def sinkhorn(logits: list[Any], HC: int, iterations: int, hc_eps: float) -> Any:
    """Rows of the comb matrices of eight tokens, those of one source stream below the other: `[HC * R, HC]`.

    Softmax over the target stream, then columns and rows in turn; columns come last.
    """
    pypto.set_vec_tile_shapes(HC * ROW_TILE, 32)
    comb = softmax_row(pypto.concat(logits, 0), HC, hc_eps)
    for iteration in range(iterations):
        if iteration:
            comb = comb / (compensated_sum(columns(comb, HC)) + hc_eps)
        sources = []
        for j in range(HC):
            sources.append(comb[j * ROW_TILE : (j + 1) * ROW_TILE, :])
        comb = comb / pypto.concat([compensated_sum(sources) + hc_eps] * HC, 0)
    return comb


def make_entry(
    *, D: int, HC: int, HC_MIXES: int, eps: float, hc_eps: float, hc_sinkhorn_iters: float
) -> Callable[..., None]:
    """The entry for `HC` streams of `D` channels."""
    width = HC * D

    def mhc_mixes(
        x_hc: pypto.Tensor([pypto.DYNAMIC, width], pypto.DT_BF16),
        fn: pypto.Tensor([HC_MIXES, width], pypto.DT_FP32),
        base: pypto.Tensor([HC_MIXES], pypto.DT_FP32),
        scale: pypto.Tensor([3], pypto.DT_FP32),
        num_tokens: pypto.Tensor([1], pypto.DT_INT32),
        pre: pypto.Tensor([pypto.DYNAMIC, HC], pypto.DT_FP32),
        post: pypto.Tensor([pypto.DYNAMIC, HC], pypto.DT_FP32),
        comb: pypto.Tensor([pypto.DYNAMIC, HC * HC], pypto.DT_FP32),
    ):
        active = num_tokens[0]
        for tile in pypto.loop((active + ROW_TILE - 1) // ROW_TILE, name="TILES", idx_name="tile"):
            first = tile * ROW_TILE
            rows = pypto.min(active - first, ROW_TILE)
            pypto.set_vec_tile_shapes(ROW_TILE, COLUMN_TILE)
            streams = pypto.cast(row_tile(x_hc, ROW_TILE, first, rows, width), pypto.DT_FP32)
            root = inverse_rms(streams, width, eps)
            mixes = projection(x_hc, fn, first, rows, width, HC_MIXES) * root
            offsets = vector_row(base, HC_MIXES)
            pre_logits = mixes[:, 0:HC] * factor(scale, 0, HC) + offsets[:, 0:HC]
            post_logits = mixes[:, HC : 2 * HC] * factor(scale, 1, HC) + offsets[:, HC : 2 * HC]
            pypto.assemble(sigmoid(pre_logits) + hc_eps, [first, 0], pre)
            pypto.assemble(sigmoid(post_logits) * 2.0, [first, 0], post)
            mixes = pypto.fillpad(mixes, "constant", 0.0)
            logits = []
            for j in range(HC):
                start = (2 + j) * HC
                logits.append(mixes[:, start : start + HC] * factor(scale, 2, HC) + offsets[:, start : start + HC])
            mixed = sinkhorn(logits, HC, int(hc_sinkhorn_iters), hc_eps)
            pypto.set_vec_tile_shapes(ROW_TILE, 32)
            for j in range(HC):
                kept = pypto.view(mixed, [ROW_TILE, HC], [j * ROW_TILE, 0], valid_shape=[rows, HC])
                pypto.assemble(pypto.clone(kept), [first, j * HC], comb)

    return mhc_mixes
