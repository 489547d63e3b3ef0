"""The table of rules against the published tensor list of the release, written out here independently of it."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict

import pytest

from v41_config import FLASH, FLASH6, TINY, ModelConfig
from v41_loader import expected_tensor, expected_tensors
from v41_loader.errors import UnknownTensorError
from v41_loader.expected_tensors import rule_of
from v41_loader.rules import DTYPE_BYTES, RULES, Partition, TensorGroup

Listed = dict[str, tuple[str, tuple[int, ...]]]


def fp8(name: str, out: int, inp: int) -> Listed:
    return {f"{name}.weight": ("F8_E4M3", (out, inp)), f"{name}.scale": ("F8_E8M0", (out // 32, inp // 32))}


def fp4(name: str, out: int, inp: int) -> Listed:
    return {f"{name}.weight": ("I8", (out, inp // 2)), f"{name}.scale": ("F8_E8M0", (out, inp // 32))}


def bf16(name: str, *shape: int) -> Listed:
    return {name: ("BF16", shape)}


def f32(name: str, *shape: int) -> Listed:
    return {name: ("F32", shape)}


def block(p: str, experts: int) -> Listed:
    """What every transformer block of the release has."""
    listed = fp8(p + "attn.wq_a", 1280, 5120) | bf16(p + "attn.q_norm.weight", 1280)
    listed |= fp8(p + "attn.wq_b", 32768, 1280)
    listed |= fp8(p + "attn.wkv", 512, 5120) | bf16(p + "attn.kv_norm.weight", 512)
    listed |= fp8(p + "attn.wo_a", 8192, 4096) | fp8(p + "attn.wo_b", 5120, 8192) | f32(p + "attn.attn_sink", 64)
    listed |= bf16(p + "attn_norm.weight", 5120) | bf16(p + "ffn_norm.weight", 5120)
    for sublayer in ("attn", "ffn"):
        listed |= f32(f"{p}hc_{sublayer}_fn", 24, 20480)
        listed |= f32(f"{p}hc_{sublayer}_base", 24) | f32(f"{p}hc_{sublayer}_scale", 3)
    listed |= bf16(p + "ffn.gate.weight", experts, 5120)
    listed |= f32(p + "ffn.gate.bias", experts) | f32(p + "ffn.gate.bias_vl", experts)
    for w, out, inp in (("w1", 2304, 5120), ("w3", 2304, 5120), ("w2", 5120, 2304)):
        listed |= fp8(f"{p}ffn.shared_experts.{w}", out, inp)
        for expert in range(experts):
            listed |= fp4(f"{p}ffn.experts.{expert}.{w}", out, inp)
    return listed


def release() -> Listed:
    listed = bf16("embed.weight", 129280, 5120) | bf16("head.weight", 129280, 5120) | bf16("norm.weight", 5120)
    for layer in range(40):
        listed |= block(f"layers.{layer}.", 384)
    for layer in (2, 8, 14, 20):
        p = f"layers.{layer}.attn."
        listed |= bf16(p + "compressor.wkv.weight", 512, 5120) | bf16(p + "compressor.norm.weight", 512)
        listed |= bf16(p + "indexer.wk.weight", 128, 512) | bf16(p + "indexer.k_norm.weight", 128)
        listed |= bf16(p + "compressor.wgate.weight", 512, 5120) if layer != 20 else {}
    for layer in (2, 8, 14, 20, 24, 28, 32, 36):
        p = f"layers.{layer}.attn.indexer."
        listed |= fp8(p + "wq_b", 4096, 1280) | bf16(p + "weights_proj.weight", 32, 5120)
    for layer, rows in ((1, 384006168), (14, 384016682)):
        p = f"layers.{layer}.engram."
        listed[p + "embed.weight"], listed[p + "embed.scale"] = ("F8_E4M3", (rows, 256)), ("F8_E8M0", (rows, 8))
        listed |= fp8(p + "wkv", 25600, 6144) | bf16(p + "q_weight", 4, 5120) | bf16(p + "k_weight", 4, 5120)
    for layer in range(3):
        listed |= block(f"mtp.{layer}.", 128)
    listed |= fp8("mtp.0.main_proj", 5120, 15360) | bf16("mtp.0.main_norm.weight", 5120)
    listed |= bf16("mtp.2.norm.weight", 5120) | bf16("mtp.2.confidence_head.proj.weight", 1, 5376)
    listed |= bf16("mtp.2.markov_head.embed.weight", 129280, 256) | bf16("mtp.2.markov_head.head.weight", 129280, 256)
    listed |= bf16("vision.patch_embed.proj.weight", 1024, 588) | bf16("vision.patch_embed.proj.bias", 1024)
    listed |= bf16("vision.norm.weight", 1024)
    for layer in range(32):
        p = f"vision.blocks.{layer}."
        listed |= bf16(p + "norm1.weight", 1024) | bf16(p + "norm2.weight", 1024)
        listed |= bf16(p + "attn.wqkv.weight", 3072, 1024) | bf16(p + "attn.wqkv.bias", 3072)
        listed |= bf16(p + "attn.wo.weight", 1024, 1024) | bf16(p + "attn.wo.bias", 1024)
        listed |= bf16(p + "mlp.w1.weight", 5632, 1024) | bf16(p + "mlp.w2.weight", 1024, 2816)
    listed |= bf16("aligner.w1.weight", 5120, 9216) | bf16("aligner.w1.bias", 5120)
    listed |= bf16("aligner.w2.weight", 5120, 5120) | bf16("aligner.w2.bias", 5120)
    for name in ("image_start", "image_end", "image_newline"):
        listed |= bf16(name, 5120)
    return listed


def test_flash_expands_to_the_released_list() -> None:
    found = {name: (tensor.dtype, tensor.shape) for name, tensor in expected_tensors(FLASH).items()}
    assert found == release()


def test_flash_has_the_published_totals() -> None:
    tensors = expected_tensors(FLASH).values()
    assert len(tensors) == 96_085
    assert sum(tensor.nbytes for tensor in tensors) == 510_286_023_000
    by_dtype: Counter[str] = Counter()
    by_group: defaultdict[TensorGroup, list[int]] = defaultdict(lambda: [0, 0])
    for tensor in tensors:
        by_dtype[tensor.dtype] += tensor.nbytes
        by_group[tensor.rule.group][0] += 1
        by_group[tensor.rule.group][1] += tensor.nbytes
    assert by_dtype == {
        "I8": 278_585_671_680,
        "F8_E4M3": 204_015_223_296,
        "F8_E8M0": 23_563_015_184,
        "BF16": 3_952_883_712,
        "F32": 169_229_128,
    }
    router, vision_bias = by_group.pop(TensorGroup.ROUTER), by_group.pop(TensorGroup.ROUTER_VISION_BIAS)
    assert [sum(column) for column in zip(router, vision_bias, strict=True)] == [120, 157_409_280]
    assert by_group == {
        TensorGroup.ROUTED_EXPERTS: [92160, 288_777_830_400],
        TensorGroup.ENGRAM: [12, 202_758_032_400 + 315_043_840],
        TensorGroup.DRAFTING: [2304 + 97, 7_219_445_760 + 713_428_872],
        TensorGroup.ATTENTION: [520, 5_069_721_600],
        TensorGroup.SHARED_EXPERTS: [240, 1_416_960_000],
        TensorGroup.EMBEDDING: [1, 1_323_827_200],
        TensorGroup.HEAD: [1, 1_323_827_200],
        TensorGroup.VISION: [266, 970_536_960],
        TensorGroup.HYPER_CONNECTIONS: [240, 157_295_040],
        TensorGroup.COMPRESSED_ATTENTION: [43, 81_835_008],
        TensorGroup.NORMS: [81, 829_440],
    }


def test_flash_text_inference_reads_what_is_published() -> None:
    read = sum(tensor.nbytes for tensor in expected_tensors(FLASH).values() if not tensor.skipped)
    bias_vl = 40 * 384 * 4
    assert read == 298_309_535_168 - bias_vl


@pytest.mark.parametrize(("layer", "count"), [(0, 2334), (1, 2340), (2, 2342), (8, 2342), (14, 2348), (20, 2341),
                                              (24, 2337), (36, 2337), (3, 2334), (39, 2334)])  # fmt: skip
def test_flash_has_the_published_count_in_each_layer(layer: int, count: int) -> None:
    assert sum(name.startswith(f"layers.{layer}.") for name in expected_tensors(FLASH)) == count


@pytest.mark.parametrize(("config", "count", "nbytes"), [(TINY, 1289, 8_670_256), (FLASH6, 489, 1_974_315_664)])
def test_small_presets_have_their_published_size(config: ModelConfig, count: int, nbytes: int) -> None:
    tensors = expected_tensors(config).values()
    assert (len(tensors), sum(tensor.nbytes for tensor in tensors)) == (count, nbytes)


def test_every_released_name_matches_exactly_one_rule() -> None:
    patterns = [re.escape(rule.pattern).replace(r"\{layer\}", r"\d+").replace(r"\{expert\}", r"\d+") for rule in RULES]
    matchers = [re.compile(pattern) for pattern in patterns]
    by_shape_of_name: dict[str, int] = {}  # names that differ only in ids match the same rules
    for name in release():
        kind = re.sub(r"\.\d+\.", ".0.", name)
        if kind not in by_shape_of_name:
            by_shape_of_name[kind] = sum(bool(matcher.fullmatch(kind)) for matcher in matchers)
    assert set(by_shape_of_name.values()) == {1}


@pytest.mark.parametrize("config", [FLASH, TINY], ids=["flash", "tiny"])
def test_one_tensor_alone_equals_its_entry_in_the_expansion(config: ModelConfig) -> None:
    expected = expected_tensors(config)
    assert all(expected_tensor(config, name) == expected[name] for name in list(expected)[:: 1 + len(expected) // 2000])


@pytest.mark.parametrize("name", [
    "", "embed", "embed.weight.", "layers.0.attn.wq_a", "layers.40.attn_norm.weight", "layers.-1.attn_norm.weight",
    "layers.00.attn_norm.weight", "layers.٣.attn_norm.weight", "layers.{layer}.attn_norm.weight",
    "layers.0.ffn.experts.384.w1.weight", "layers.0.ffn.experts.1.2.w1.weight",
    "layers.20.attn.compressor.wgate.weight",
    "layers.3.attn.indexer.wq_b.weight", "layers.0.engram.embed.weight", "mtp.1.norm.weight", "mtp.3.attn_norm.weight",
    "mtp.0.ffn.experts.128.w1.scale", "model.embed.weight", "layers.0.ffn.shared_experts.w1.scale_inv",
    "layers.99999999999999999999.attn_norm.weight", "vision.blocks.32.norm1.weight",
])  # fmt: skip
def test_a_name_outside_the_release_is_unknown(name: str) -> None:
    assert name not in expected_tensors(FLASH)
    with pytest.raises(UnknownTensorError, match="tensor"):
        expected_tensor(FLASH, name)


def test_skipped_groups_need_their_config() -> None:
    for name in ("layers.1.engram.embed.weight", "mtp.0.attn_norm.weight", "image_start", "vision.norm.weight"):
        assert expected_tensor(FLASH, name).skipped
        with pytest.raises(UnknownTensorError):
            expected_tensor(TINY, name)


def test_rule_of_reads_layer_and_expert() -> None:
    found = rule_of("layers.12.ffn.experts.345.w2.scale")
    assert found is not None
    assert found[0].scales == "layers.{layer}.ffn.experts.{expert}.w2.weight"
    assert found[1:] == (12, 345)


def test_every_scale_is_cut_with_its_weight() -> None:
    by_pattern = {rule.pattern: rule for rule in RULES}
    scales = [rule for rule in RULES if rule.dtype == "F8_E8M0"]
    assert {rule.scales for rule in scales} == {r.pattern for r in RULES if r.dtype in ("F8_E4M3", "I8")}
    for scale in scales:
        weight = by_pattern[scale.scales or ""]
        for field in ("dims", "group", "layers", "partition", "axis"):
            assert getattr(scale, field) == getattr(weight, field), (scale.pattern, field)
    assert all((rule.scales is None) == (rule.dtype != "F8_E8M0") for rule in RULES)


def test_a_rule_that_is_cut_names_the_dimension() -> None:
    cut = {Partition.HEADS, Partition.OUTPUT_GROUPS, Partition.VOCABULARY}
    assert all((rule.partition in cut) == (rule.axis is not None) for rule in RULES)
    assert {r.pattern.rsplit(".", 2)[-2] for r in RULES if r.partition in cut} == {
        "embed", "head", "wq_b", "wo_a", "wo_b", "attn"}  # fmt: skip
    assert all(r.partition is Partition.REPLICATED for r in RULES if ".indexer." in r.pattern)


def test_nbytes_follow_shape_and_dtype() -> None:
    tensor = expected_tensor(TINY, "layers.0.hc_attn_fn")
    assert tensor.nbytes == math.prod(tensor.shape) * DTYPE_BYTES["F32"] == 24 * 1024 * 4
    assert tensor._replace(shape=(7,)).nbytes == 28
