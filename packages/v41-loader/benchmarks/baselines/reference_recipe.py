"""The recipe of synthetic checkpoints written out plainly: whole tensors, torch, one thread of thought.

What the package's own generator is compared with (tests) and timed against (benchmarks). It shares no code with it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator

import numpy as np
import torch

from v41_config import ModelConfig

Made = dict[str, torch.Tensor]

_LANE_STD = (4 * (65536**2 - 1) / 12) ** 0.5
_E2M1_MIDPOINTS = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])


def raw(seed: int, name: str, count: int) -> np.ndarray:
    key = np.array([seed, zlib.crc32(name.encode())], dtype=np.uint64)
    return np.asarray(np.random.Philox(key=key).random_raw(count))


def normal(seed: int, name: str, *shape: int) -> np.ndarray:
    words = raw(seed, name, int(np.prod(shape)))
    lanes = sum(((words >> np.uint64(s)) & np.uint64(0xFFFF)).astype(np.int64) for s in (0, 16, 32, 48))
    return np.asarray((lanes - 2 * 65535).astype(np.float64) / _LANE_STD).reshape(shape)


def uniform(seed: int, name: str, low: float, high: float, count: int) -> torch.Tensor:
    words = raw(seed, name, count)
    return torch.from_numpy(low + (high - low) * ((words >> np.uint64(40)).astype(np.float64) / 2.0**24)).float()


def affine(seed: int, name: str, std: float, mean: float, *shape: int) -> torch.Tensor:
    return torch.from_numpy(normal(seed, name, *shape) * std + mean)


def bf16(seed: int, name: str, std: float, mean: float, *shape: int) -> torch.Tensor:
    return affine(seed, name, std, mean, *shape).to(torch.bfloat16)


def mix_base(seed: int, name: str, lanes: int) -> torch.Tensor:
    base = normal(seed, name, (2 + lanes) * lanes) * 0.4
    order = np.argsort(raw(seed, name + "#perm", lanes), kind="stable")
    base[2 * lanes :] += 1.2 * np.eye(lanes)[order].reshape(-1)
    return torch.from_numpy(base).float()


def matrix(seed: int, name: str, out: int, inp: int, gain: float) -> torch.Tensor:
    w = normal(seed, name, out, inp) * (gain / inp**0.5)
    w *= ((8 + (raw(seed, name + "#rows", out) & np.uint64(7)).astype(np.float64)) / 11.0)[:, None]
    w *= ((8 + (raw(seed, name + "#cols", inp) & np.uint64(7)).astype(np.float64)) / 11.0)[None, :]
    return torch.from_numpy(w).float()


def pow2_ceil(x: torch.Tensor) -> torch.Tensor:
    bits = x.contiguous().view(torch.int32)
    return (((bits >> 23) + ((bits & 0x7FFFFF) != 0).int()) << 23).view(torch.float32)


def e8m0(scale: torch.Tensor) -> torch.Tensor:
    return ((scale.contiguous().view(torch.int32) >> 23) & 255).to(torch.uint8).view(torch.float8_e8m0fnu)


def fp8(seed: int, name: str, out: int, inp: int, gain: float) -> tuple[torch.Tensor, torch.Tensor]:
    tiles = matrix(seed, name, out, inp, gain).view(out // 32, 32, inp // 32, 32)
    scale = pow2_ceil(tiles.abs().amax((1, 3)).clamp_min(1e-10) / torch.tensor(448.0))
    codes = (tiles / scale[:, None, :, None]).clamp(-448, 448).view(out, inp).to(torch.float8_e4m3fn)
    return codes, e8m0(scale)


def fp4(seed: int, name: str, out: int, inp: int, gain: float) -> tuple[torch.Tensor, torch.Tensor]:
    groups = matrix(seed, name, out, inp, gain).view(out, inp // 32, 32)
    scale = pow2_ceil(groups.abs().amax(-1).clamp_min(1e-10) / torch.tensor(6.0))
    v = (groups / scale.unsqueeze(-1)).clamp(-6, 6).reshape(out, inp)
    magnitude = v.abs().contiguous()
    code = torch.bucketize(magnitude, _E2M1_MIDPOINTS)
    ties_to_even = sum((magnitude == m).int() * (i % 2) for i, m in enumerate(_E2M1_MIDPOINTS.tolist()))
    nibbles = ((code + ties_to_even) | (torch.signbit(v).long() << 3)).to(torch.uint8)
    return (nibbles[:, 0::2] | (nibbles[:, 1::2] << 4)).view(torch.int8), e8m0(scale)


def recipes(c: ModelConfig, seed: int) -> Iterator[tuple[str, Callable[[], Made]]]:
    """Every tensor of a synthetic checkpoint, a quantised one with its scale, as a name and a call that makes it."""

    def quantised(kind: Callable[..., tuple[torch.Tensor, torch.Tensor]], name: str, out: int, inp: int, gain: float
                  ) -> tuple[str, Callable[[], Made]]:  # fmt: skip
        def make() -> Made:
            weight, scale = kind(seed, name, out, inp, gain)
            return {f"{name}.weight": weight, f"{name}.scale": scale}

        return name, make

    def single(kind: Callable[..., torch.Tensor], name: str, *args: float) -> tuple[str, Callable[[], Made]]:
        return name, lambda: {name: kind(seed, name, *args)}

    def f32(seed: int, name: str, std: float, *shape: int) -> torch.Tensor:
        return affine(seed, name, std, 0.0, *shape).float()

    d, inter, experts, hc = c.hidden_size, c.moe_intermediate_size, c.n_routed_experts, c.hc_mult
    width, out_width = c.num_attention_heads * c.head_dim, c.o_groups * c.o_lora_rank
    yield single(bf16, "embed.weight", 8.0, 0.0, c.vocab_size, d)
    for layer in range(c.num_hidden_layers):
        p, a, f = f"layers.{layer}.", f"layers.{layer}.attn.", f"layers.{layer}.ffn."
        yield quantised(fp8, a + "wq_a", c.q_lora_rank, d, 1.0)
        yield single(bf16, a + "q_norm.weight", 0.15, 1.0, c.q_lora_rank)
        yield quantised(fp8, a + "wq_b", width, c.q_lora_rank, 1.3)
        yield quantised(fp8, a + "wkv", c.head_dim, d, 1.0)
        yield single(bf16, a + "kv_norm.weight", 0.15, 1.0, c.head_dim)
        yield quantised(fp8, a + "wo_a", out_width, width // c.o_groups, 1.4)
        yield quantised(fp8, a + "wo_b", d, out_width, 0.6)
        yield single(uniform, a + "attn_sink", -3.0, 2.5, c.num_attention_heads)
        yield single(bf16, p + "attn_norm.weight", 0.15, 1.0, d)
        yield single(bf16, p + "ffn_norm.weight", 0.15, 1.0, d)
        for sublayer in ("attn", "ffn"):
            yield single(f32, f"{p}hc_{sublayer}_fn", 1.0 / (hc * d) ** 0.5, (2 + hc) * hc, hc * d)
            yield single(mix_base, f"{p}hc_{sublayer}_base", hc)
            yield single(uniform, f"{p}hc_{sublayer}_scale", 0.5, 1.0, 3)
        yield single(bf16, f + "gate.weight", 2.5 / d**0.5, 0.0, experts, d)
        yield single(f32, f + "gate.bias", 0.25, experts)
        yield single(f32, f + "gate.bias_vl", 0.25, experts)
        up, down = (4.0, 0.06) if layer == 3 else (1.5, 0.3)
        yield quantised(fp8, f + "shared_experts.w1", inter, d, up)
        yield quantised(fp8, f + "shared_experts.w3", inter, d, up)
        yield quantised(fp8, f + "shared_experts.w2", d, inter, down)
        for x in range(experts):
            yield quantised(fp4, f"{f}experts.{x}.w1", inter, d, 1.5)
            yield quantised(fp4, f"{f}experts.{x}.w3", inter, d, 1.5)
            yield quantised(fp4, f"{f}experts.{x}.w2", d, inter, 0.3)
        if layer in c.kv_source_layer_ids:
            yield single(bf16, a + "compressor.wkv.weight", 1.0 / d**0.5, 0.0, c.head_dim, d)
            yield single(bf16, a + "compressor.norm.weight", 0.15, 1.0, c.head_dim)
            if c.compress_ratios[layer] > 1:
                yield single(bf16, a + "compressor.wgate.weight", 1.5 / d**0.5, 0.0, c.head_dim, d)
            yield single(bf16, a + "indexer.wk.weight", 1.0 / c.head_dim**0.5, 0.0, c.index_head_dim, c.head_dim)
            yield single(bf16, a + "indexer.k_norm.weight", 0.15, 1.0, c.index_head_dim)
        if layer in c.index_source_layer_ids:
            yield quantised(fp8, a + "indexer.wq_b", c.index_n_heads * c.index_head_dim, c.q_lora_rank, 1.5)
            yield single(bf16, a + "indexer.weights_proj.weight", 1.0 / d**0.5, 0.0, c.index_n_heads, d)
    yield single(bf16, "norm.weight", 0.15, 1.0, d)
    yield single(bf16, "head.weight", 2.5 / d**0.5, 0.0, c.vocab_size, d)
