"""No number of a config is unbounded: what asks for a hang or for all memory is one error that names the field."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from v41_config import FLASH, TINY, ConfigError, ModelConfig
from v41_config.config_schema import config_schema

HUGE = 2**31 - 1


def fields_of(config: ModelConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in ModelConfig.model_fields}


RELEASED = FLASH.to_released_json()


def numbers(node: Any, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """The place of every number in a document."""
    if isinstance(node, dict):
        return [found for key, value in node.items() for found in numbers(value, (*path, key))]
    if isinstance(node, list):
        return numbers(node[-1], (*path, len(node) - 1)) if node else []
    return [path] if isinstance(node, (int, float)) and not isinstance(node, bool) else []


PLACES = [
    place for place in numbers(RELEASED) if place[-1] not in ("initializer_range", "attention_dropout", "max_wh_ratio")
]
"""Without those that are kept as they are and used by nothing."""

AS_LARGE_AS_INT32 = {
    "dspark_noise_token_id", "dspark_target_layer_ids", "engram_pad_token_id", "engram_num_embeddings",
    "engram_vocab_size", "engram_compressed_vocab_size", "min_pixels", "rope_theta", "compress_rope_theta",
}  # fmt: skip


def with_value(place: tuple[str | int, ...], value: object) -> str:
    document = json.loads(json.dumps(RELEASED))
    node = document
    for key in place[:-1]:
        node = node[key]
    node[place[-1]] = value
    return json.dumps(document)


def test_the_release_has_numbers_to_attack() -> None:
    assert len(PLACES) > 60
    assert ("text_config", "hc_sinkhorn_iters") in PLACES
    assert ("text_config", "rope_scaling", "beta_fast") in PLACES


@pytest.mark.parametrize("place", PLACES, ids=lambda place: ".".join(map(str, place)))
def test_an_absurd_number_is_refused_by_name(place: tuple[str | int, ...], tmp_path: Path) -> None:
    """In a file, each number in turn: negative, near 2^31, beyond 64 bits, beyond a double."""
    path = tmp_path / "config.json"
    name = next(str(key) for key in reversed(place) if isinstance(key, str))
    # A number of layers is compared with what is listed of them first.
    named = {"compress_ratios", name, name.partition("_")[2]} if "layers" in name else {name, name.partition("_")[2]}
    start = time.process_time()
    for value in [-1, -HUGE, 2**64, 10**400, *([] if name in AS_LARGE_AS_INT32 else [HUGE])]:
        path.write_text(with_value(place, value))
        with pytest.raises(ConfigError) as caught:
            ModelConfig.from_json(path)
        assert named & set(caught.value.where.split("."))
    assert time.process_time() - start < 2


@pytest.mark.parametrize(("field", "largest"), [
    ("hc_sinkhorn_iters", 1024), ("sliding_window", 65536), ("index_topk", 65536), ("candidate_topk_blocks", 65536),
    ("candidate_block_size", 4096), ("hc_mult", 32), ("n_routed_experts", 65536), ("num_hidden_layers", 4096),
    ("max_position_embeddings", 1 << 24), ("vocab_size", 1 << 24), ("hidden_size", 1 << 17), ("o_groups", 4096),
])  # fmt: skip
def test_the_largest_size_and_one_more(field: str, largest: int) -> None:
    with pytest.raises(ConfigError) as caught:
        ModelConfig.model_validate(fields_of(FLASH) | {field: largest + 1})
    assert (caught.value.where, caught.value.found) == (field, largest + 1)
    assert caught.value.expected == f"less than or equal to {largest}"
    assert ModelConfig.model_json_schema()["properties"][field]["maximum"] == largest


@pytest.mark.parametrize(("field", "least", "most"), [
    ("rms_norm_eps", 2.0**-126, 1), ("hc_eps", 2.0**-126, 1), ("swiglu_limit", 2.0**-20, 2**20),
    ("routed_scaling_factor", 2.0**-20, 2**20), ("rope_theta", 1.5, 2**40), ("compress_rope_theta", 1.5, 2**40),
])  # fmt: skip
def test_the_ends_of_a_range(field: str, least: float, most: float) -> None:
    for value in (least, most):
        assert getattr(ModelConfig.model_validate(fields_of(TINY) | {field: value}), field) == value
    for value in (least / 2, most * 1.001, 1e-300, 1e308):
        with pytest.raises(ConfigError) as caught:
            ModelConfig.model_validate(fields_of(TINY) | {field: value})
        assert caught.value.where == field


@pytest.mark.parametrize("field", ["factor", "beta_fast", "beta_slow"])
@pytest.mark.parametrize("value", [1e-300, 1e308, 2.0**-21, 2.0**21])
def test_yarn_stays_in_the_range_of_its_logarithms(field: str, value: float) -> None:
    scaling = {name: getattr(TINY.rope_scaling, name) for name in type(TINY.rope_scaling).model_fields}
    with pytest.raises(ConfigError) as caught:
        ModelConfig.model_validate(fields_of(TINY) | {"rope_scaling": scaling | {field: value}})
    assert caught.value.where == f"rope_scaling.{field}"
    assert "a number from" in caught.value.expected


@pytest.mark.parametrize(("group", "changes", "where"), [
    ("engram", {"layer_ids": (1, 40)}, "engram_layer_ids"),
    ("engram", {"layer_ids": (14, 1)}, "engram_layer_ids"),
    ("engram", {"num_embeddings": (1,)}, "engram_num_embeddings"),
    ("engram", {"num_embeddings": (-1, 5)}, "engram.num_embeddings.0"),
    ("engram", {"pad_token_id": -1}, "engram.pad_token_id"),
    ("drafting", {"target_layer_ids": (-1,)}, "drafting.target_layer_ids.0"),
    ("drafting", {"noise_token_id": 2**31}, "drafting.noise_token_id"),
])  # fmt: skip
def test_groups_agree_with_the_model(group: str, changes: dict[str, object], where: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ModelConfig.model_validate(fields_of(FLASH) | {group: getattr(FLASH, group).model_dump() | changes})
    assert caught.value.where == where


def test_the_image_token_is_a_token() -> None:
    with pytest.raises(ConfigError, match=r"^image_token_id: expected a token id below vocab_size = 129280"):
        ModelConfig.model_validate(fields_of(FLASH) | {"image_token_id": 129280})


def test_a_repeated_key_is_named_and_many_keys_take_no_time(tmp_path: Path) -> None:
    """Readers differ in which of two values they keep; the search for the key is linear."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(RELEASED).replace('"hc_mult":', '"hc_mult": 2, "hc_mult":'))
    with pytest.raises(ConfigError, match=r"^hc_mult: expected one value for a key"):
        ModelConfig.from_json(path)
    keys = ",".join(f'"{n}":0' for n in range(80_000))
    path.write_text(f'{{{keys},"79999":1}}')
    start = time.process_time()
    with pytest.raises(ConfigError, match=r"^79999: expected one value for a key"):
        ModelConfig.from_json(path)
    assert time.process_time() - start < 2


def test_the_schema_states_the_bounds() -> None:
    text = config_schema()["properties"]["text_config"]["properties"]
    assert text["hc_sinkhorn_iters"]["maximum"] == 1024
    assert (text["rms_norm_eps"]["minimum"], text["rms_norm_eps"]["maximum"]) == (2.0**-126, 1.0)
