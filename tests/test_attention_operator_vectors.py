"""Compressor, candidate blocks and sparse attention against numbers of the released reference, to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from v41_config import STATE_CAPACITY, TINY
from v41_goldens.candidate_blocks import candidate_blocks, entries_of_blocks
from v41_goldens.compressor import CompressorRows, compress_ratio_2
from v41_goldens.exact import dot, exp
from v41_goldens.linear import fp32_linear
from v41_goldens.sparse_attention import sparse_attention
from v41_goldens.weights import CompressorWeights


@pytest.fixture(scope="module")
def attention(vectors: Path) -> dict[str, Tensor]:
    return load_file(vectors / "ops_sparse_attention.safetensors")


def _attend(v: dict[str, Tensor], sink: Tensor | None = None) -> Tensor:
    indices = v["indices"]
    kv = v["kv"][indices.clamp(min=0).long()]
    return sparse_attention(v["q"], kv, indices >= 0, v["sink"] if sink is None else sink, float(v["softmax_scale"]))


def test_sparse_attention(attention: dict[str, Tensor]) -> None:
    assert torch.equal(_attend(attention), attention["out"])
    assert not attention["out"][1].any()  # the row without a valid index


def test_sparse_attention_is_within_bf16_of_float64(attention: dict[str, Tensor]) -> None:
    wanted = attention["out_float64_unrounded"]
    distance = (_attend(attention).double() - wanted).norm() / wanted.norm()
    assert distance < 2e-2  # probabilities and result are rounded to BF16


def test_wrong_attention_is_seen(attention: dict[str, Tensor]) -> None:
    assert not torch.equal(_attend(attention, attention["sink"] + 0.05), attention["out"])
    v, live = attention, attention["indices"] >= 0
    kv = torch.where(live.unsqueeze(-1), v["kv"][v["indices"].clamp(min=0).long()], 0)
    scores = torch.where(live.unsqueeze(1), dot(v["q"], kv) * v["softmax_scale"], -torch.inf)
    m = scores.amax(-1, keepdim=True).clamp(min=-1e30)
    p = exp(scores - m)
    unrounded = dot(p, kv.transpose(-1, -2)) / (p.sum(-1, keepdim=True) + exp(v["sink"].view(-1, 1) - m))
    assert not torch.equal(unrounded.bfloat16(), v["out"])  # probabilities must be BF16 in the product


@pytest.mark.parametrize("top", [1, 2, 4, 8])
def test_candidate_blocks(vectors: Path, top: int) -> None:
    v = load_file(vectors / "ops_candidate_blocks.safetensors")
    config = TINY.model_copy(update={"candidate_topk_blocks": top})
    kept = candidate_blocks(v["score"], v["visible"], config).kept
    assert torch.equal(entries_of_blocks(kept, v["score"].shape[1], config), v[f"mask_top{top}"])


def test_candidate_blocks_keep_the_lower_of_equal_blocks(vectors: Path) -> None:
    v = load_file(vectors / "ops_candidate_blocks.safetensors")
    assert not torch.equal(v["mask_top4"], v["mask_top4_torch_topk"])  # so the test above decides ties


class _Compressor:
    """One request's calls of the ratio-2 compressor."""

    def __init__(self, v: dict[str, Tensor]) -> None:
        self.x, self.weights = v["x"], CompressorWeights(v["wkv"], v["norm"], v["wgate"])
        self.state = torch.full((3, STATE_CAPACITY, 2 * TINY.head_dim), torch.nan)

    def __call__(self, start: int, stop: int) -> Tensor:
        position = torch.arange(start, stop)
        rows = CompressorRows(
            closing=torch.nonzero(position % 2 == 1).flatten(),
            request=torch.zeros(stop - start, dtype=torch.long),
            position=position,
            starts=torch.tensor([0, stop - start]),
            state_block=torch.tensor([1]),
        )
        return compress_ratio_2(self.x[start:stop], self.weights, rows, self.state, TINY)


@pytest.fixture
def compressor_vectors(vectors: Path) -> dict[str, Tensor]:
    return load_file(vectors / "ops_compressor.safetensors")


def test_compressor_projections(compressor_vectors: dict[str, Tensor]) -> None:
    v = compressor_vectors
    assert torch.equal(fp32_linear(v["x"], v["wkv"]), v["kv_f32"])
    assert torch.equal(fp32_linear(v["x"], v["wgate"]), v["gate_f32"])


def test_compressor_prefill(compressor_vectors: dict[str, Tensor]) -> None:
    assert torch.equal(_Compressor(compressor_vectors)(0, 12), compressor_vectors["prefill12.latent"])


def test_compressor_continues_from_an_odd_length(compressor_vectors: dict[str, Tensor]) -> None:
    v = compressor_vectors
    compress = _Compressor(v)
    assert torch.equal(compress(0, 5), v["prefill5.latent"])
    kv, score = compress.state[1, 4 % STATE_CAPACITY].chunk(2)
    assert torch.equal(kv, v["prefill5.kv_state"][0])
    assert torch.equal(score, v["prefill5.score_state"][0])
    for position in range(5, 12):
        latent = compress(position, position + 1)
        assert bool(v[f"decode{position:02d}.emits"]) == (len(latent) == 1)
        if len(latent):
            assert torch.equal(latent, v[f"decode{position:02d}.latent"])


def test_one_token_gives_no_latent(compressor_vectors: dict[str, Tensor]) -> None:
    assert bool(compressor_vectors["prefill1.latent_is_none"])
    assert _Compressor(compressor_vectors)(0, 1).shape == (0, TINY.head_dim)


def test_wrong_pairing_is_seen(compressor_vectors: dict[str, Tensor]) -> None:
    shifted = {**compressor_vectors, "x": compressor_vectors["x"].roll(1, 0)}
    assert not torch.equal(_Compressor(shifted)(0, 12), compressor_vectors["prefill12.latent"])
    no_gate = {**compressor_vectors, "wgate": torch.zeros_like(compressor_vectors["wgate"])}
    assert not torch.equal(_Compressor(no_gate)(0, 12), compressor_vectors["prefill12.latent"])
