"""Every way to break a contract is one typed error before anything is launched."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from v41_config import FLASH, OperatorError
from v41_kernels import OPERATORS
from v41_kernels.arguments import BoundArguments, bind
from v41_kernels.registry import find_kernel

SPEC = OPERATORS["rms_norm"].spec


def arguments(**changed: object) -> dict[str, object]:
    given: dict[str, object] = {
        "x": torch.zeros(5, 32, dtype=torch.bfloat16),
        "weight": torch.zeros(32, dtype=torch.bfloat16),
        "out": torch.zeros(5, 32, dtype=torch.bfloat16),
    }
    return {name: value for name, value in (given | changed).items() if value is not ...}


def test_complete() -> None:
    bound = bind(SPEC, arguments())
    assert bound.dims == {"T": 5, "D": 32}
    assert bound.counts == {"num_tokens": 5}
    assert bound.constants == {"eps": FLASH.rms_norm_eps}
    assert bound.static_dims == {"D": 32}
    assert bind(SPEC, arguments(num_tokens=0, eps=1)).constants == {"eps": 1.0}


SHARED = torch.zeros(6, 32, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("changed", "where", "complaint"),
    [
        ({"weight": ...}, "rms_norm: weight", "no argument"),
        ({"scale": 1}, "rms_norm: scale", "unknown argument"),
        ({"x": [[1.0]]}, "rms_norm: x", "list"),
        ({"x": torch.zeros(5, 32)}, "rms_norm: x", "float32"),
        ({"x": torch.zeros(5, 32, dtype=torch.bfloat16, device="meta")}, "rms_norm: x", "device meta"),
        ({"x": torch.zeros(160, dtype=torch.bfloat16)}, "rms_norm: x", r"\[160\]"),
        ({"weight": torch.zeros(31, dtype=torch.bfloat16)}, "rms_norm: weight", r"\[31\]"),
        ({"out": torch.zeros(4, 32, dtype=torch.bfloat16)}, "rms_norm: out", r"\[4, 32\]"),
        ({"x": torch.zeros(32, 5, dtype=torch.bfloat16).T}, "rms_norm: x", "strides"),
        ({"num_tokens": 6}, "rms_norm: num_tokens", "integer from 0 to T = 5"),
        ({"num_tokens": -1}, "rms_norm: num_tokens", "integer from 0"),
        ({"num_tokens": 2.0}, "rms_norm: num_tokens", "integer from 0"),
        ({"num_tokens": True}, "rms_norm: num_tokens", "integer from 0"),
        ({"eps": "small"}, "rms_norm: eps", "a number"),
        ({"x": SHARED[:5], "out": SHARED[1:]}, "rms_norm: out", "memory shared with x"),
    ],
)
def test_broken(changed: dict[str, object], where: str, complaint: str) -> None:
    with pytest.raises(OperatorError, match=complaint) as caught:
        bind(SPEC, arguments(**changed))
    assert caught.value.where == where


def test_neighbours_in_one_storage_are_no_conflict() -> None:
    storage = torch.zeros(10, 32, dtype=torch.bfloat16)
    bind(SPEC, arguments(x=storage[:5], out=storage[5:]))


def test_an_unknown_operator() -> None:
    with pytest.raises(OperatorError, match=r"v41-kernels list.*softmax"):
        find_kernel("softmax")


def rope_call(positions: list[int], num_tokens: int) -> BoundArguments:
    count = len(positions)
    given: dict[str, object] = {name: torch.zeros(8, 4) for name in ("freqs_cos", "freqs_sin")}
    given |= {name: torch.zeros(count, 4) for name in ("rope_cos", "rope_sin")}
    given |= {"position_ids": torch.tensor(positions, dtype=torch.int32), "num_tokens": num_tokens}
    return bind(OPERATORS["materialize_rope_rows"].spec, given)


@pytest.mark.parametrize(
    ("positions", "num_tokens", "bad"),
    [([0, 8, 9], 3, "position_ids[1]"), ([8], 1, "position_ids[0]"), ([-1, 2**31 - 1], 2, "position_ids[1]")],
)
def test_a_position_behind_the_tables(positions: list[int], num_tokens: int, bad: str) -> None:
    check = OPERATORS["materialize_rope_rows"].check
    with pytest.raises(OperatorError, match="below the tables' capacity 8") as caught:
        check(rope_call(positions, num_tokens))
    assert caught.value.where == f"materialize_rope_rows: {bad}"


@pytest.mark.parametrize(("positions", "num_tokens"), [([], 0), ([8], 0), ([7, -1, -(2**31), 8], 3)])
def test_allowed_positions(positions: list[int], num_tokens: int) -> None:
    check = OPERATORS["materialize_rope_rows"].check
    check(rope_call(positions, num_tokens))


def test_an_array_is_no_tensor() -> None:
    """It has a shape and a dtype, and so passes the contract's own check."""
    call = dict(rope_call([0], 1).tensors) | {"rope_cos": np.zeros((1, 4), np.float32)}
    with pytest.raises(OperatorError, match="a torch tensor, found 'ndarray'") as caught:
        bind(OPERATORS["materialize_rope_rows"].spec, call)
    assert caught.value.where == "materialize_rope_rows: rope_cos"
