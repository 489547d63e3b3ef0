"""What several tests share: synthetic weights (a checkpoint's tensors by name, each a pure function of seed and name),
and number formats as grids of exact rationals."""

from __future__ import annotations

import bisect
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from v41_config import TINY, ModelConfig
from v41_goldens import LayerWeights, ModelWeights

_FP4_RMS = 2.9
"""Root mean square of the sixteen E2M1 values."""


class SyntheticTensors:
    """Makes tensors in the formats of a checkpoint, so that `x @ w.T` has about `gain` times the size of x."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def _generator(self, name: str) -> torch.Generator:
        # Of a seed, Torch's CPU generator takes 32 bits alone: everything has to be in them.
        return torch.Generator().manual_seed(zlib.crc32(f"{self._seed}/{name}".encode()))

    def bf16(self, name: str, *shape: int, std: float, mean: float = 0.0) -> tuple[str, Tensor]:
        return name, (torch.randn(shape, generator=self._generator(name)) * std + mean).bfloat16()

    def fp32(self, name: str, *shape: int, std: float, mean: float = 0.0) -> tuple[str, Tensor]:
        return name, torch.randn(shape, generator=self._generator(name)) * std + mean

    def fp8(self, name: str, n: int, k: int, gain: float) -> Iterator[tuple[str, Tensor]]:
        """Codes of either sign with magnitudes from 0.5 to 1.875, about 1 on average."""
        generator = self._generator(name)
        codes = _random_bytes((n, k), generator).bitwise_and_(0x8F).add_(0x30)
        yield f"{name}.weight", codes.view(torch.float8_e4m3fn)
        yield f"{name}.scale", _scales(n // 32, k // 32, gain / math.sqrt(k), generator)

    def fp4(self, name: str, n: int, k: int, gain: float) -> Iterator[tuple[str, Tensor]]:
        generator = self._generator(name)
        yield f"{name}.weight", _random_bytes((n, k // 2), generator).view(torch.int8)
        yield f"{name}.scale", _scales(n, k // 32, gain / math.sqrt(k) / _FP4_RMS, generator)

    def layer(self, config: ModelConfig, layer_id: int) -> Iterator[tuple[str, Tensor]]:
        c, layer, prefix = config, config.layer_config(layer_id), f"layers.{layer_id}."
        d, hd, i, attn, ffn = c.hidden_size, c.head_dim, c.moe_intermediate_size, prefix + "attn.", prefix + "ffn."
        heads, rank = c.num_attention_heads, c.o_groups * c.o_lora_rank
        for norm, width in (("attn_norm", d), ("ffn_norm", d), ("attn.q_norm", c.q_lora_rank), ("attn.kv_norm", hd)):
            yield self.bf16(f"{prefix}{norm}.weight", width, std=0.15, mean=1.0)
        for site in ("hc_attn", "hc_ffn"):
            yield self.fp32(f"{prefix}{site}_fn", c.hc_mixes, c.hc_dim, std=c.hc_dim**-0.5)
            yield self.fp32(f"{prefix}{site}_base", c.hc_mixes, std=0.6)
            yield self.fp32(f"{prefix}{site}_scale", 3, std=0.1, mean=0.8)
        yield self.fp32(attn + "attn_sink", heads, std=1.5)
        yield from self.fp8(attn + "wq_a", c.q_lora_rank, d, 1.0)
        yield from self.fp8(attn + "wq_b", heads * hd, c.q_lora_rank, 1.3)
        yield from self.fp8(attn + "wkv", hd, d, 1.0)
        yield from self.fp8(attn + "wo_a", rank, heads * hd // c.o_groups, 1.4)
        yield from self.fp8(attn + "wo_b", d, rank, 0.6)
        if layer.owns_kv:
            yield self.bf16(attn + "compressor.wkv.weight", hd, d, std=d**-0.5)
            yield self.bf16(attn + "compressor.norm.weight", hd, std=0.15, mean=1.0)
            if layer.compress_ratio == 2:
                yield self.bf16(attn + "compressor.wgate.weight", hd, d, std=1.5 * d**-0.5)
            yield self.bf16(attn + "indexer.wk.weight", c.index_head_dim, hd, std=hd**-0.5)
            yield self.bf16(attn + "indexer.k_norm.weight", c.index_head_dim, std=0.15, mean=1.0)
        if layer.owns_index:
            yield from self.fp8(attn + "indexer.wq_b", c.index_n_heads * c.index_head_dim, c.q_lora_rank, 1.5)
            yield self.bf16(attn + "indexer.weights_proj.weight", c.index_n_heads, d, std=d**-0.5)
        yield self.bf16(ffn + "gate.weight", c.n_routed_experts, d, std=2.5 * d**-0.5)
        yield self.fp32(ffn + "gate.bias", c.n_routed_experts, std=0.25)
        for matrix, n, k, gain in (("w1", i, d, 1.5), ("w3", i, d, 1.5), ("w2", d, i, 0.3)):
            yield from self.fp8(f"{ffn}shared_experts.{matrix}", n, k, gain)
            for expert in range(c.n_routed_experts):
                yield from self.fp4(f"{ffn}experts.{expert}.{matrix}", n, k, gain)

    def model(self, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
        d, vocabulary = config.hidden_size, config.vocab_size
        yield self.bf16("embed.weight", vocabulary, d, std=8.0)
        for layer_id in range(config.num_hidden_layers):
            yield from self.layer(config, layer_id)
        yield self.bf16("norm.weight", d, std=0.15, mean=1.0)
        yield self.bf16("head.weight", vocabulary, d, std=2.5 * d**-0.5)


def _random_bytes(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    """uint8, eight of them from each random number."""
    words = torch.randint(-(2**63), 2**63 - 1, (shape[0], shape[1] // 8), generator=generator, dtype=torch.int64)
    return words.view(torch.uint8)


def _scales(rows: int, columns: int, size: float, generator: torch.Generator) -> Tensor:
    """E8M0 scales around `size`, over three powers of two."""
    exponent = round(math.log2(size)) + 127
    codes = torch.randint(exponent - 1, exponent + 2, (rows, columns), generator=generator, dtype=torch.uint8)
    return codes.view(torch.float8_e8m0fnu)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Small operators gain nothing from a second thread, and lose a lot where another process has the core."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def make_layer() -> Callable[[ModelConfig, int, int], LayerWeights]:
    """`make_layer(config, layer_id, seed)`: one layer's weights, made anew at each call."""

    def make(config: ModelConfig, layer_id: int, seed: int) -> LayerWeights:
        return LayerWeights.from_tensors(config, layer_id, dict(SyntheticTensors(seed).layer(config, layer_id)))

    return make


@pytest.fixture(scope="session")
def make_model() -> Callable[[ModelConfig, int], ModelWeights]:
    """`make_model(config, seed)`: a whole model's weights."""

    def make(config: ModelConfig, seed: int) -> ModelWeights:
        return ModelWeights.from_tensors(config, dict(SyntheticTensors(seed).model(config)))

    return make


@pytest.fixture(scope="session")
def tiny_tensors() -> dict[str, Tensor]:
    """The tensors of a checkpoint of TINY's structure."""
    return dict(SyntheticTensors(7).model(TINY))


@pytest.fixture(scope="session")
def tiny_weights(tiny_tensors: dict[str, Tensor]) -> ModelWeights:
    """A model of TINY's structure."""
    return ModelWeights.from_tensors(TINY, tiny_tensors)


def _nearest_even(magnitude: Fraction, grid: Sequence[Fraction]) -> int:
    """Index of the grid value nearest to `magnitude`; a tie goes to the even index, beyond the grid to its end."""
    above = min(bisect.bisect_left(grid, magnitude), len(grid) - 1)
    below = max(above - 1, 0)
    to_above, to_below = abs(grid[above] - magnitude), abs(magnitude - grid[below])
    if to_above == to_below:
        return below if below % 2 == 0 else above
    return above if to_above < to_below else below


@pytest.fixture(scope="session")
def nearest_even() -> Callable[[Fraction, Sequence[Fraction]], int]:
    """Rounds an exact rational to a grid of codes: the definition the formats are tested against."""
    return _nearest_even


@pytest.fixture(scope="session")
def e4m3_grid() -> list[Fraction]:
    """Magnitudes of E4M3 codes 0 to 126, from the definition of the format (4 exponent bits, bias 7)."""
    return [
        Fraction(code & 7, 8) * Fraction(1, 64)
        if code >> 3 == 0
        else (1 + Fraction(code & 7, 8)) * Fraction(2) ** ((code >> 3) - 7)
        for code in range(127)
    ]


@pytest.fixture(scope="session")
def e2m1_grid() -> list[Fraction]:
    """Magnitudes of E2M1 codes 0 to 7, from the definition of the format (2 exponent bits, bias 1)."""
    return [
        Fraction(code & 1, 2) if code >> 1 == 0 else (1 + Fraction(code & 1, 2)) * Fraction(2) ** ((code >> 1) - 1)
        for code in range(8)
    ]
