"""RoPE rows of a forward: read from the tables once for each distinct pair of profile and positions."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from v41_config import TINY
from v41_goldens import ModelWeights, ReferenceEngine, RopeRows, rope_rows, rope_tables
from v41_goldens.errors import PositionError
from v41_goldens.judges import assert_equal_bits
from v41_goldens.rope import materialize_rope_rows


def positions(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_rows_are_shared_by_profile_and_positions() -> None:
    tables = rope_tables(TINY, 32)
    rows = RopeRows(tables)
    here = positions(3, 4, 9)
    first = rows.rows("swa", here)
    assert rows.rows("swa", here) is first
    assert rows.rows("swa", here.clone()) is first, "equal positions, another tensor"
    assert rows.gathers == 1
    assert rows.rows("compressed", here) is not first
    assert rows.rows("swa", positions(3, 4)) is not first
    assert rows.rows("swa", positions(3, 4, 10)) is not first
    assert rows.rows("swa", positions(3, -1, 9)) is not first
    assert rows.gathers == 5
    for profile in ("swa", "compressed"):
        assert_equal_bits(rows.rows(profile, here)[0], tables[profile][0][here.long()], profile)


def test_the_active_count_is_part_of_the_key() -> None:
    """Rows behind it are not looked at: garbage there is no other batch, and no error."""
    tables = rope_tables(TINY, 32)
    rows = RopeRows(tables)
    first = rows.rows("swa", positions(3, -1, 9, 1 << 30), 3)
    assert rows.rows("swa", positions(3, -1, 9, -7), 3) is first
    assert rows.gathers == 1
    assert rows.rows("swa", positions(3, -1, 9, 4)) is not first
    assert rows.rows("swa", positions(3, -1, 9, 4), 2) is not first
    assert rows.rows("swa", positions(3, -1, 9), 3) is not first, "another number of rows"
    assert rows.gathers == 4
    cos, sin = first
    assert_equal_bits(cos[[0, 2]], tables["swa"][0][[3, 9]], "cosines")
    assert (cos[1].tolist(), sin[1].tolist()) == ([1.0] * 16, [0.0] * 16), "a negative position does not rotate"
    assert not cos[3].any()
    assert not sin[3].any()
    with pytest.raises(PositionError, match="num_tokens: expected 0 to T = 2, found 3"):
        rows.rows("swa", positions(1, 2), 3)


def test_positions_outside_the_table_are_refused_and_not_kept() -> None:
    rows = RopeRows(rope_tables(TINY, 32))
    with pytest.raises(PositionError, match="below capacity 32"):
        rows.rows("swa", positions(0, 32))
    assert rows.gathers == 0


def test_a_forward_gathers_each_pair_once(tiny_weights: ModelWeights, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten layers read queries' rows twice or three times; what is distinct: the positions in both profiles, and the
    group starts of ratio 2. Those of ratio 1 are the positions again."""
    gathered: list[tuple[int, list[int]]] = []

    def counted(cos: Tensor, sin: Tensor, ids: Tensor, count: int) -> tuple[Tensor, Tensor]:
        gathered.append((cos.data_ptr(), ids.tolist()))
        return materialize_rope_rows(cos, sin, ids, count)

    monkeypatch.setattr(rope_rows, "materialize_rope_rows", counted)
    engine = ReferenceEngine(TINY, tiny_weights, 2, 64)
    swa, compressed = (engine._rope[profile][0].data_ptr() for profile in ("swa", "compressed"))
    here = [0, 1, 2, 3, 4, 0, 1]
    engine.step([(0, random.Random(0).choices(range(512), k=5)), (1, [7, 8])])
    assert sorted(gathered) == sorted([(swa, here), (compressed, here), (compressed, [-1, 0, -1, 2, -1, -1, 0])])
    gathered.clear()
    engine.step([(1, [9]), (0, [9])])
    assert sorted(gathered) == sorted([(swa, [2, 5]), (compressed, [2, 5]), (compressed, [-1, 4])])
