"""Cutting: a shard decodes to the shard of the decoded weight, and the ranks' parts are the source, once each."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from v41_config import TINY, LayoutError, ModelConfig, ParallelLayout
from v41_loader import (
    Checkpoint,
    expected_tensor,
    expected_tensors,
    open_checkpoint,
    rank_part,
    rank_tensors,
    shard_tensor,
    synthesize_checkpoint,
)
from v41_loader.errors import ShardingError, TensorDtypeError, TensorShapeError
from v41_loader.rules import Partition

TINY8 = ModelConfig.model_validate(
    {f: getattr(TINY, f) for f in ModelConfig.model_fields}
    | {
        "num_hidden_layers": 5,
        "compress_ratios": (0, 2, 2, 1, 1),
        "kv_source_layer_ids": (1, 3),
        "index_source_layer_ids": (1, 3, 4),
        "candidate_source_layer_id": 3,
        "num_attention_heads": 16,
        "o_groups": 8,
        "vocab_size": 64,
    }
)
"""A config that eight TP ranks divide; its groups hold two heads each."""

LAYOUTS = [ParallelLayout(tp, dp) for tp, dp in [(1, 1), (2, 1), (4, 1), (1, 2), (4, 2), (4, 4)]]
LAYOUTS8 = [ParallelLayout(8, 1), ParallelLayout(8, 2), ParallelLayout(2, 4)]
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def tiny(tiny_checkpoint: Path) -> Checkpoint:
    return open_checkpoint(tiny_checkpoint)


@pytest.fixture(scope="module")
def tiny8(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    directory = tmp_path_factory.mktemp("tiny8") / "checkpoint"
    synthesize_checkpoint(TINY8, 1, directory)
    return open_checkpoint(directory)


def numbers(name: str, tensors: Tensors) -> torch.Tensor:
    """The FP32 values of a stored weight, decoded here from the format's definition."""
    stored = tensors[name]
    scale = tensors.get(name.removesuffix(".weight") + ".scale")
    if scale is None:
        return stored.float()
    exponents = scale.view(torch.uint8).int() - 127
    if stored.dtype == torch.int8:
        codes = torch.stack([stored.view(torch.uint8) & 15, stored.view(torch.uint8) >> 4], dim=-1).flatten(-2).int()
        values = torch.where(codes >= 8, -_E2M1[codes & 7], _E2M1[codes & 7])
        exponents = exponents.repeat_interleave(32, dim=1)
    else:
        values = stored.float()
        exponents = exponents.repeat_interleave(32, dim=0).repeat_interleave(32, dim=1)
    assert exponents.shape == values.shape, name
    return torch.ldexp(values, exponents)


def weights_of(tensors: Tensors) -> list[str]:
    return [name for name in tensors if not name.endswith(".scale")]


def cut(name: str, whole: torch.Tensor, config: ModelConfig, layout: ParallelLayout, rank: int) -> torch.Tensor | None:
    """A rank's part of a decoded weight, from what the model says about heads, groups and vocabulary; None: all."""
    last = name.split(".")[-2] if name.endswith(".weight") else name.rsplit(".", maxsplit=1)[-1]
    heads, groups = layout.head_range(config, rank), layout.output_group_range(config, rank)
    vocab = layout.vocab_range(config, rank)
    if ".indexer." in name:
        return None
    if last == "wq_b":
        return whole.view(config.num_attention_heads, config.head_dim, -1)[heads.start : heads.stop].flatten(0, 1)
    if last == "attn_sink":
        return whole[heads.start : heads.stop]
    if last == "wo_a":
        return whole.view(config.o_groups, config.o_lora_rank, -1)[groups.start : groups.stop].flatten(0, 1)
    if last == "wo_b":
        split = whole.view(-1, config.o_groups, config.o_lora_rank)
        return split[:, groups.start : groups.stop].flatten(1)
    return whole[vocab.start : vocab.stop] if last in ("embed", "head") else None


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def check_layout(checkpoint: Checkpoint, layout: ParallelLayout) -> None:
    config = checkpoint.config
    whole = checkpoint.read(checkpoint.names)
    held: dict[str, set[int]] = {}
    for rank in range(layout.world_size):
        shard = rank_tensors(checkpoint, layout, rank)
        for name, tensor in shard.items():
            held.setdefault(name, set()).add(rank)
            assert tensor.is_contiguous()
            assert same_bytes(tensor, shard_tensor(name, whole[name], config, layout, rank)), (name, rank)
        for name in weights_of(shard):
            part = cut(name, numbers(name, whole), config, layout, rank) if ".ffn." not in name else None
            if part is None:  # equal bytes of weight and scale decode to equal numbers
                for stored in {name, name.removesuffix(".weight") + ".scale"} & set(shard):
                    assert same_bytes(shard[stored], whole[stored]), (stored, rank)
            else:
                assert torch.equal(numbers(name, shard), part), (name, rank)
    assert set(held) == set(whole)
    for name, ranks in held.items():
        expert = int(name.split(".")[4]) if ".experts." in name else None
        owners = {r for r in range(layout.world_size) if expert is None or expert in layout.expert_range(config, r)}
        assert ranks == owners, name


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda at: f"tp{at.tp}-dp{at.dp}")
def test_decoded_shards_are_shards_of_the_decoded(tiny: Checkpoint, layout: ParallelLayout) -> None:
    check_layout(tiny, layout)


@pytest.mark.parametrize("layout", LAYOUTS8, ids=lambda at: f"tp{at.tp}-dp{at.dp}")
def test_eight_tp_ranks_divide_a_config_that_allows_it(tiny8: Checkpoint, layout: ParallelLayout) -> None:
    check_layout(tiny8, layout)


def test_the_decoder_of_these_tests_rejects_a_wrong_scale(tiny: Checkpoint) -> None:
    name = "layers.0.ffn.experts.0.w1.weight"
    tensors = tiny.read([name, name.replace("weight", "scale")])
    right = numbers(name, tensors)
    shifted = {**tensors, name.replace("weight", "scale"): tensors[name.replace("weight", "scale")].roll(1, 0)}
    assert not torch.equal(numbers(name, shifted), right)


@pytest.mark.parametrize(("config", "layouts"), [(TINY, LAYOUTS), (TINY8, LAYOUTS8)], ids=["tiny", "tiny8"])
def test_parts_tile_the_source(config: ModelConfig, layouts: list[ParallelLayout]) -> None:
    for layout in layouts:
        for tensor in expected_tensors(config).values():
            if tensor.rule.axis is None:
                continue
            for group in range(layout.dp):
                ranks = range(group * layout.tp, (group + 1) * layout.tp)
                parts = [rank_part(tensor, config, layout, rank) for rank in ranks]
                covered = [item for part in parts if part for item in range(part.start, part.stop)]
                assert covered == list(range(tensor.shape[tensor.rule.axis])), (tensor.name, layout)


@given(tp=st.integers(1, 16), dp=st.integers(1, 16))
def test_a_layout_that_does_not_divide_is_refused(tp: int, dp: int) -> None:
    layout = ParallelLayout(tp, dp)
    divides = all(n % tp == 0 for n in (8, 4, 512)) and 16 % (tp * dp) == 0
    tensor = expected_tensor(TINY, "embed.weight")
    if divides:
        part = rank_part(tensor, TINY, layout, layout.world_size - 1)
        assert part is not None
        assert part.stop == 512
    else:
        with pytest.raises(LayoutError, match="expected a divisor of"):
            rank_part(tensor, TINY, layout, 0)


def test_a_rank_outside_the_world_is_refused(tiny: Checkpoint) -> None:
    with pytest.raises(LayoutError, match="rank"):
        rank_tensors(tiny, ParallelLayout(2, 2), 4)


def test_a_cut_inside_a_scale_tile_is_refused() -> None:
    scale = expected_tensor(TINY, "layers.0.attn.wq_b.scale")
    coarse = scale._replace(shape=(2, 2))  # as if a tile spanned four heads
    assert rank_part(coarse, TINY, ParallelLayout(2, 1), 0) is not None
    with pytest.raises(ShardingError, match="between tiles"):
        rank_part(coarse, TINY, ParallelLayout(4, 1), 0)


def test_only_a_holder_can_shard_an_expert(tiny: Checkpoint) -> None:
    name, layout = "layers.0.ffn.experts.3.w1.weight", ParallelLayout(4, 2)
    tensor = tiny.tensor(name)
    assert shard_tensor(name, tensor, TINY, layout, 1).shape == tensor.shape
    with pytest.raises(ShardingError, match=r"experts\.3"):
        shard_tensor(name, tensor, TINY, layout, 0)


@pytest.mark.parametrize(("tensor", "error"), [
    (torch.zeros(256, 512, dtype=torch.bfloat16), TensorShapeError),
    (torch.zeros(512, 256), TensorDtypeError),
])  # fmt: skip
def test_a_tensor_that_is_not_the_stored_form_is_refused(tensor: torch.Tensor, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"embed\.weight"):
        shard_tensor("embed.weight", tensor, TINY, ParallelLayout(), 0)


def test_a_shard_does_not_share_memory_with_its_source(tiny: Checkpoint) -> None:
    whole = tiny.tensor("layers.0.attn.attn_sink")
    part = shard_tensor("layers.0.attn.attn_sink", whole, TINY, ParallelLayout(2, 1), 0)
    part.fill_(7)
    assert not (whole == 7).any()


def test_skipped_groups_belong_to_no_rank() -> None:
    skipped = [tensor for tensor in expected_tensors(TINY).values() if tensor.rule.partition is Partition.SKIPPED]
    assert len(skipped) == 10
    assert all(rank_part(tensor, TINY, ParallelLayout(), 0) is None for tensor in skipped)
