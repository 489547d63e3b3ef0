"""Weights: real bytes of the release, exact dequantisation, and one typed error for whatever does not fit."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from torch import Tensor

from v41_config import TINY
from v41_goldens.errors import WeightError
from v41_goldens.judges import assert_equal_bits
from v41_goldens.quantized_weights import Fp4Weight, Fp8Weight
from v41_goldens.weights import ExpertWeights, LayerWeights, ModelWeights, MoeWeights


@pytest.fixture
def tensors(tiny_tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A copy whose entries a test may replace."""
    return dict(tiny_tensors)


def random_bytes(seed: int, *shape: int) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def random_scales(seed: int, *shape: int) -> Tensor:
    scales = torch.randint(60, 190, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return scales.view(torch.float8_e8m0fnu)


def test_bytes_of_the_released_wkv() -> None:
    """First eight codes of layers.0.attn.wkv.weight with their scale, and the values other readers report."""
    codes = torch.zeros(32, 32, dtype=torch.uint8)
    codes[0, :8] = torch.tensor(list(bytes.fromhex("d871f2797069f0e5")), dtype=torch.uint8)
    scale = torch.tensor([[0x73]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    values = Fp8Weight(codes.view(torch.float8_e4m3fn), scale).dequantize()[0, :8].tolist()
    assert values == [-0.00390625, 0.03515625, -0.0390625, 0.0703125, 0.03125, 0.017578125, -0.03125, -0.0126953125]


def test_bytes_of_a_released_expert() -> None:
    """First eight bytes of layers.0.ffn.experts.0.w1.weight: sixteen values, even ones in the low nibble."""
    packed = torch.zeros(1, 16, dtype=torch.uint8)
    packed[0, :8] = torch.tensor(list(bytes.fromhex("a0a8ec4aadaf42aa")), dtype=torch.uint8)
    scale = torch.tensor([[0x78]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    values = Fp4Weight(packed.view(torch.int8), scale).dequantize()[0, :16].tolist()
    assert values == [
        *(0, -0.0078125, 0, -0.0078125, -0.015625, -0.03125, -0.0078125, 0.015625),
        *(-0.0234375, -0.0078125, -0.046875, -0.0078125, 0.0078125, 0.015625, -0.0078125, -0.0078125),
    ]


def test_fp8_dequantises_tile_by_tile(e4m3_grid: list[Fraction]) -> None:
    codes, scale = random_bytes(0, 96, 64), random_scales(1, 3, 2)
    codes[codes & 0x7F == 0x7F] = 0  # NaN has its own test
    weight = Fp8Weight(codes.view(torch.float8_e4m3fn), scale)
    values = weight.dequantize()
    assert weight.shape == values.shape == (96, 64)
    assert values.dtype == torch.float32
    powers = scale.view(torch.uint8).int() - 127
    for n, k in ((0, 0), (31, 31), (32, 31), (31, 32), (95, 63), (64, 5)):
        code = int(codes[n, k])
        exactly = e4m3_grid[code & 0x7F] * Fraction(2) ** int(powers[n // 32, k // 32]) * (-1 if code >> 7 else 1)
        assert Fraction(values[n, k].item()) == exactly
    assert_equal_bits(weight.rows(32, 96).dequantize(), values[32:], "rows")


def test_fp4_dequantises_group_by_group(e2m1_grid: list[Fraction]) -> None:
    packed, scale = random_bytes(2, 5, 48), random_scales(3, 5, 3)
    weight = Fp4Weight(packed.view(torch.int8), scale)
    values = weight.dequantize()
    assert weight.shape == values.shape == (5, 96)
    powers = scale.view(torch.uint8).int() - 127
    for n in range(5):
        for k in range(96):
            code = int(packed[n, k // 2]) >> (4 * (k % 2)) & 15
            exactly = e2m1_grid[code & 7] * Fraction(2) ** int(powers[n, k // 32]) * (-1 if code >> 3 else 1)
            assert Fraction(values[n, k].item()) == exactly
    assert_equal_bits(weight.rows(1, 4).dequantize(), values[1:4], "rows")


def test_every_fp8_code_times_every_scale(e4m3_grid: list[Fraction]) -> None:
    """Each scale alone and all of them together; those near the end of FP32's range leave no room on the way."""
    magnitudes = torch.tensor([float(value) for value in e4m3_grid])  # 127 of them; the code after them is NaN
    codes = torch.arange(127, dtype=torch.uint8).repeat(1, 32, 1)
    codes = torch.cat([codes, codes | 0x80, torch.zeros(1, 32, 2, dtype=torch.uint8)], dim=-1).repeat(255, 1, 1)
    values = torch.cat([magnitudes, -magnitudes, torch.zeros(2)]).double()
    scale = torch.arange(255, dtype=torch.uint8).view(255, 1).repeat(1, 8)
    expected = (values * torch.pow(2.0, torch.arange(255).double() - 127).view(255, 1, 1)).float().expand(255, 32, 256)

    def weight(of: slice) -> Fp8Weight:
        own = codes[of].reshape(-1, 256).view(torch.float8_e4m3fn)
        return Fp8Weight(own, scale[of].contiguous().view(torch.float8_e8m0fnu))

    assert_equal_bits(weight(slice(None)).dequantize(), expected.flatten(0, 1), "all scales")
    for code in range(255):
        assert_equal_bits(weight(slice(code, code + 1)).dequantize(), expected[code], f"scale {code}")


def test_extreme_scales_stay_exact_and_nan_stays_nan() -> None:
    smallest = torch.zeros(1, 1, dtype=torch.uint8).view(torch.float8_e8m0fnu)  # 2^-127
    codes = torch.ones(32, 32, dtype=torch.uint8)  # 2^-9
    assert Fp8Weight(codes.view(torch.float8_e4m3fn), smallest).dequantize().unique().tolist() == [2.0**-136]
    half = torch.full((1, 16), 0x11, dtype=torch.uint8).view(torch.int8)
    assert Fp4Weight(half, smallest).dequantize().unique().tolist() == [2.0**-128]
    no_number = torch.full((1, 1), 255, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    assert Fp8Weight(codes.view(torch.float8_e4m3fn), no_number).dequantize().isnan().all()
    assert Fp4Weight(half, no_number).dequantize().isnan().all()
    codes[3, 4] = 0x7F
    nan = Fp8Weight(codes.view(torch.float8_e4m3fn), smallest).dequantize().isnan()
    assert nan.nonzero().tolist() == [[3, 4]]


def test_quantised_weights_that_do_not_fit_are_refused() -> None:
    e4m3, e8m0 = torch.float8_e4m3fn, torch.float8_e8m0fnu

    def raw(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.uint8).view(dtype)

    for codes, scale in (
        (raw(torch.int8, 32, 32), raw(e8m0, 1, 1)),
        (raw(e4m3, 32, 32), raw(torch.uint8, 1, 1)),
        (raw(e4m3, 32, 40), raw(e8m0, 1, 1)),
        (raw(e4m3, 33, 32), raw(e8m0, 1, 1)),
        (raw(e4m3, 64, 32), raw(e8m0, 1, 2)),
        (raw(e4m3, 32), raw(e8m0, 1)),
    ):
        with pytest.raises(WeightError, match="Fp8Weight"):
            Fp8Weight(codes, scale)
    for packed, scale in (
        (raw(torch.uint8, 4, 16), raw(e8m0, 4, 1)),
        (raw(torch.int8, 4, 16), raw(e8m0, 4, 2)),
        (raw(torch.int8, 4, 24), raw(e8m0, 4, 1)),
        (raw(torch.int8, 4, 16, 1), raw(e8m0, 4, 1)),
    ):
        with pytest.raises(WeightError, match="Fp4Weight"):
            Fp4Weight(packed, scale)


def test_each_role_has_its_tensors(tensors: dict[str, Tensor]) -> None:
    model = ModelWeights.from_tensors(TINY, tensors)
    assert len(model.layers) == TINY.num_hidden_layers
    for layer_id, layer in enumerate(model.layers):
        role, attention = TINY.layer_config(layer_id), layer.attention
        assert (attention.compressor is not None) == (attention.index_keys is not None) == role.owns_kv
        assert (attention.indexer is not None) == role.owns_index
        if attention.compressor is not None:
            assert (attention.compressor.wgate is not None) == (role.compress_ratio == 2)
        assert sorted(layer.moe.experts) == list(range(TINY.n_routed_experts))


def test_w1_is_the_gate_w3_the_up_and_w2_the_down_projection(tensors: dict[str, Tensor]) -> None:
    expert = MoeWeights.from_tensors(TINY, 3, tensors).experts[5]
    for name in ("w1", "w2", "w3"):
        weight = getattr(expert, name)
        assert weight.packed is tensors[f"layers.3.ffn.experts.5.{name}.weight"]
        assert weight.scale is tensors[f"layers.3.ffn.experts.5.{name}.scale"]


def test_a_rank_may_hold_fewer_experts_heads_and_vocabulary_rows(tensors: dict[str, Tensor]) -> None:
    prefix = "layers.0."
    kept = {name: t for name, t in tensors.items() if ".experts." not in name or ".experts.7." in name}
    assert list(MoeWeights.from_tensors(TINY, 0, kept).experts) == [7]

    half_heads, half_rank = TINY.num_attention_heads // 2, TINY.o_groups * TINY.o_lora_rank // 2
    for layer_id in range(TINY.num_hidden_layers):
        attn = f"layers.{layer_id}.attn."
        kept[attn + "attn_sink"] = kept[attn + "attn_sink"][:half_heads]
        for name, rows in (("wq_b", half_heads * TINY.head_dim), ("wo_a", half_rank)):
            kept[f"{attn}{name}.weight"] = kept[f"{attn}{name}.weight"][:rows]
            kept[f"{attn}{name}.scale"] = kept[f"{attn}{name}.scale"][: rows // 32]
        kept[attn + "wo_b.weight"] = kept[attn + "wo_b.weight"][:, :half_rank]
        kept[attn + "wo_b.scale"] = kept[attn + "wo_b.scale"][:, : half_rank // 32]
    for name in ("embed.weight", "head.weight"):
        kept[name] = kept[name][:100]
    model = ModelWeights.from_tensors(TINY, kept)
    assert model.layers[0].attention.attn_sink.shape == (half_heads,)
    assert model.head.shape == (100, TINY.hidden_size)

    kept[prefix + "attn.attn_sink"] = kept[prefix + "attn.attn_sink"][:1]
    with pytest.raises(WeightError, match=r"layers\.0\.attn\.attn_sink"):
        LayerWeights.from_tensors(TINY, 0, kept)


@pytest.mark.parametrize(
    "name",
    [
        "embed.weight",
        "norm.weight",
        "head.weight",
        "layers.1.attn_norm.weight",
        "layers.2.attn.wq_b.weight",
        "layers.2.attn.wq_b.scale",
        "layers.2.attn.compressor.wgate.weight",
        "layers.2.attn.indexer.wk.weight",
        "layers.8.attn.indexer.weights_proj.weight",
        "layers.4.hc_ffn_base",
        "layers.5.ffn.gate.bias",
        "layers.6.ffn.shared_experts.w3.scale",
        "layers.7.ffn.experts.3.w2.weight",
    ],
)
def test_a_tensor_that_is_missing_or_wrong_is_named(tensors: dict[str, Tensor], name: str) -> None:
    good = tensors.pop(name)
    with pytest.raises(WeightError) as missing:
        ModelWeights.from_tensors(TINY, tensors)
    tensors[name] = good.to(torch.float16)
    with pytest.raises(WeightError) as mistyped:
        ModelWeights.from_tensors(TINY, tensors)
    tensors[name] = torch.cat([good.view(torch.uint8)] * 2, dim=-1).view(good.dtype)
    with pytest.raises(WeightError) as misshaped:
        ModelWeights.from_tensors(TINY, tensors)
    assert missing.value.where == mistyped.value.where == misshaped.value.where == name
    assert "float16" in str(mistyped.value)


def test_an_expert_beyond_the_config_is_refused(tensors: dict[str, Tensor]) -> None:
    tensors["layers.0.ffn.experts.16.w1.weight"] = tensors["layers.0.ffn.experts.0.w1.weight"]
    with pytest.raises(WeightError, match="expert ids below 16, found 16"):
        MoeWeights.from_tensors(TINY, 0, tensors)


def test_the_vision_bias_is_ignored(tensors: dict[str, Tensor]) -> None:
    tensors["layers.0.ffn.gate.bias_vl"] = torch.full((TINY.n_routed_experts,), float("nan"))
    assert MoeWeights.from_tensors(TINY, 0, tensors).gate_bias is tensors["layers.0.ffn.gate.bias"]


def test_weights_are_views_of_the_checkpoint(tensors: dict[str, Tensor]) -> None:
    shared: ExpertWeights = MoeWeights.from_tensors(TINY, 0, tensors).shared
    assert isinstance(shared.w1, Fp8Weight)
    assert shared.w1.codes is tensors["layers.0.ffn.shared_experts.w1.weight"]
    part = shared.w1.rows(32, 64)
    assert part.codes.data_ptr() == shared.w1.codes[32:].data_ptr()


def test_a_part_of_a_tile_is_refused() -> None:
    w = Fp8Weight(torch.zeros(64, 64).to(torch.float8_e4m3fn), torch.ones(2, 2).to(torch.float8_e8m0fnu))
    for part in (w.rows, w.columns):
        with pytest.raises(WeightError, match=r"expected multiples of 32, found \(16, 48\)"):
            part(16, 48)
    with pytest.raises(WeightError, match=r"Fp8Weight decoder: expected multiples of 32, found \(16, 48\)"):
        w.decoder()(16, 48)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("start", "stop"), [(0, 96), (64, 96), (-32, 64), (64, 32)])
def test_rows_that_a_weight_does_not_have_are_not_decoded(dtype: torch.dtype, start: int, stop: int) -> None:
    w = Fp8Weight(torch.zeros(64, 64).to(torch.float8_e4m3fn), torch.ones(2, 2).to(torch.float8_e8m0fnu))
    with pytest.raises(WeightError, match="Fp8Weight decoder: expected rows of 64"):
        w.decoder(dtype)(start, stop)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [0, 127, 254])
def test_rows_decoded_one_after_the_other_are_those_of_the_whole(dtype: torch.dtype, scale: int) -> None:
    """None of them as well, and of a matrix without columns; FP4's also where tiles would end."""
    codes, scales = random_bytes(3, 96, 64) & 0x7E, torch.full((96, 4), scale, dtype=torch.uint8)
    e8m0 = scales.view(torch.float8_e8m0fnu)
    fp8 = Fp8Weight(codes.view(torch.float8_e4m3fn), e8m0[:3, :2])
    fp4 = Fp4Weight(codes.view(torch.int8), e8m0)
    cuts = [(0, 0), (0, 32), (32, 96), (96, 96)]
    for weight, bounds in ((fp8, cuts), (fp4, [*cuts, (3, 50), (95, 96)])):
        whole, rows = weight.dequantize(dtype), weight.decoder(dtype)
        kept = whole.clone()
        for start, stop in bounds:
            assert_equal_bits(rows(start, stop), kept[start:stop], f"rows {start} to {stop}")
        assert_equal_bits(whole, kept, "what was decoded before")
    assert fp8.columns(32, 32).dequantize(dtype).shape == (96, 0)
