"""Layer roles against the table of model.md section 1, typed in by hand."""

from __future__ import annotations

import pytest

from v41_config import FLASH, FLASH6, TINY, AttentionMode, ConfigError, LayerConfig, ModelConfig

SWA, C2A_FULL, C2A_REUSE = AttentionMode.SWA, AttentionMode.C2A_FULL, AttentionMode.C2A_REUSE
C1A_FULL, C1A_REINDEX, C1A_REUSE = AttentionMode.C1A_FULL, AttentionMode.C1A_REINDEX, AttentionMode.C1A_REUSE

# (layers, mode, ratio, KV source, index source, candidate source, makes candidates)
Row = tuple[tuple[int, ...], AttentionMode, int, int | None, int | None, int | None, bool]

FLASH_ROLES: list[Row] = [
    ((0, 1), SWA, 0, None, None, None, False),
    ((2,), C2A_FULL, 2, 2, 2, None, False),
    ((3, 4, 5, 6, 7), C2A_REUSE, 2, 2, 2, None, False),
    ((8,), C2A_FULL, 2, 8, 8, None, False),
    ((9, 10, 11, 12, 13), C2A_REUSE, 2, 8, 8, None, False),
    ((14,), C2A_FULL, 2, 14, 14, None, False),
    ((15, 16, 17, 18, 19), C2A_REUSE, 2, 14, 14, None, False),
    ((20,), C1A_FULL, 1, 20, 20, None, True),
    ((21, 22, 23), C1A_REUSE, 1, 20, 20, None, False),
    ((24,), C1A_REINDEX, 1, 20, 24, 20, False),
    ((25, 26, 27), C1A_REUSE, 1, 20, 24, None, False),
    ((28,), C1A_REINDEX, 1, 20, 28, 20, False),
    ((29, 30, 31), C1A_REUSE, 1, 20, 28, None, False),
    ((32,), C1A_REINDEX, 1, 20, 32, 20, False),
    ((33, 34, 35), C1A_REUSE, 1, 20, 32, None, False),
    ((36,), C1A_REINDEX, 1, 20, 36, 20, False),
    ((37, 38, 39), C1A_REUSE, 1, 20, 36, None, False),
]

TINY_ROLES: list[Row] = [
    ((0, 1), SWA, 0, None, None, None, False),
    ((2,), C2A_FULL, 2, 2, 2, None, False),
    ((3,), C2A_REUSE, 2, 2, 2, None, False),
    ((4,), C2A_FULL, 2, 4, 4, None, False),
    ((5,), C2A_REUSE, 2, 4, 4, None, False),
    ((6,), C1A_FULL, 1, 6, 6, None, True),
    ((7,), C1A_REUSE, 1, 6, 6, None, False),
    ((8,), C1A_REINDEX, 1, 6, 8, 6, False),
    ((9,), C1A_REUSE, 1, 6, 8, None, False),
]

FLASH6_ROLES: list[Row] = [
    ((0,), SWA, 0, None, None, None, False),
    ((1,), C2A_FULL, 2, 1, 1, None, False),
    ((2,), C2A_REUSE, 2, 1, 1, None, False),
    ((3,), C1A_FULL, 1, 3, 3, None, True),
    ((4,), C1A_REINDEX, 1, 3, 4, 3, False),
    ((5,), C1A_REUSE, 1, 3, 4, None, False),
]


def expected_plan(rows: list[Row]) -> list[LayerConfig]:
    return [
        LayerConfig(
            layer_id=layer_id,
            mode=mode,
            compress_ratio=ratio,
            kv_source=kv_source,
            index_source=index_source,
            candidate_source=candidate_source,
            makes_candidates=makes_candidates,
            rope_profile="swa" if mode is SWA else "compressed",
        )
        for layers, mode, ratio, kv_source, index_source, candidate_source, makes_candidates in rows
        for layer_id in layers
    ]


@pytest.mark.parametrize(
    ("config", "rows"),
    [(FLASH, FLASH_ROLES), (TINY, TINY_ROLES), (FLASH6, FLASH6_ROLES)],
    ids=["flash", "tiny", "flash6"],
)
def test_roles_are_those_of_the_table(config: ModelConfig, rows: list[Row]) -> None:
    expected = expected_plan(rows)
    assert [layer.layer_id for layer in expected] == list(range(config.num_hidden_layers))
    assert list(config.layers) == expected
    assert [config.layer_config(layer.layer_id) for layer in expected] == expected


def test_owners() -> None:
    assert [layer.layer_id for layer in FLASH.layers if layer.owns_kv] == [2, 8, 14, 20]
    assert [layer.layer_id for layer in FLASH.layers if layer.owns_index] == [2, 8, 14, 20, 24, 28, 32, 36]


@pytest.mark.parametrize("layer_id", [-1, 40, 42])
def test_layers_that_do_not_exist(layer_id: int) -> None:
    with pytest.raises(ConfigError, match=r"layer_id: expected 0 <= layer_id < 40"):
        FLASH.layer_config(layer_id)


def test_mode_names() -> None:
    """Values are stems of operator names such as `decode_attn_c2a_full`, titles those of the documents."""
    assert {mode.value: mode.title for mode in AttentionMode} == {
        "swa": "SWA",
        "c2a_full": "C2A Full",
        "c2a_reuse": "C2A Reuse",
        "c1a_full": "C1A Full",
        "c1a_reindex": "C1A Reindex",
        "c1a_reuse": "C1A Reuse",
    }
