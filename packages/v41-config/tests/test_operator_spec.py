"""Operator specs as values: bound shapes, and one typed error for each kind of wrong argument."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from v41_config import FLASH, TINY, LayoutError, OperatorError, ParallelLayout
from v41_config.dimensions import DIMENSIONS, evaluate, symbols_of
from v41_config.operator_spec import ConstantSpec, CountSpec, OperatorSpec, TensorSpec
from v41_config.operator_tables import find_operator


@dataclass(frozen=True)
class Like:
    """Something with a shape and a dtype, as torch tensors have them."""

    shape: tuple[int, ...]
    dtype: str


SCALE = OperatorSpec(
    "scale",
    (
        TensorSpec("x", ("T", "D"), "float32"),
        TensorSpec("starts", ("B+1",), "int32"),
        TensorSpec("requests", ("B",), "int32"),
        TensorSpec("packed", ("N", "D/2"), "uint8"),
        TensorSpec("mask", (4, "T"), "bool"),
        TensorSpec("out", ("T", "D"), "float32", "out"),
    ),
    (CountSpec("num_tokens", "T"), ConstantSpec("eps", "rms_norm_eps"), ConstantSpec("gain", 2)),
    "x times gain",
)


def arguments(**changes: Any) -> dict[str, Any]:
    """A call of `SCALE` with T = 3, D = 8, B = 2, N = 5 that is right, and then changed."""
    right = {
        "x": np.zeros((3, 8), np.float32),
        "starts": np.zeros(3, np.int32),
        "requests": np.zeros(2, np.int32),
        "packed": np.zeros((5, 4), np.uint8),
        "mask": np.zeros((4, 3), np.bool_),
        "out": np.zeros((3, 8), np.float32),
    }
    return {name: value for name, value in {**right, **changes}.items() if value is not None}


def test_check_returns_the_sizes_it_saw() -> None:
    assert SCALE.check(arguments()) == {"T": 3, "D": 8, "B": 2, "N": 5}


def test_check_takes_torch_spellings_and_any_object_with_shape_and_dtype() -> None:
    assert SCALE.check(arguments(x=Like((3, 8), "torch.float32"), mask=Like((4, 3), "torch.bool")))["T"] == 3


def test_destinations_may_be_left_to_a_function_that_returns_them() -> None:
    assert SCALE.check(arguments(out=None), outputs=False)["D"] == 8
    with pytest.raises(OperatorError, match=r"^scale: out: expected arguments x, starts,"):
        SCALE.check(arguments(), outputs=False)


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"x": None}, "x", "expected float32 [T, D], found no argument"),
    ({"out": None}, "out", "found no argument"),
    ({"y": 3}, "y", "found an unknown argument"),
    ({"x": [[1.0]]}, "x", "found 'list'"),
    ({"x": np.zeros((3, 8), np.float64)}, "x", "expected float32 [T, D], found 'float64'"),
    ({"starts": np.zeros(3, np.int64)}, "starts", "expected int32 [B+1], found 'int64'"),
    ({"starts": np.zeros(3, np.dtype(">i4"))}, "starts", "expected int32 [B+1], found '>i4'"),
    ({"mask": np.zeros((4, 3), np.uint8)}, "mask", "expected bool [4, T], found 'uint8'"),
    ({"x": np.zeros((3, 8, 1), np.float32)}, "x", "found [3, 8, 1]"),
    ({"x": np.zeros(24, np.float32)}, "x", "found [24]"),
    ({"out": np.zeros((4, 8), np.float32)}, "out", "expected float32 [T, D] with T = 3, found [4, 8]"),
    ({"starts": np.zeros(2, np.int32)}, "starts", "with B+1 = 3, found [2]"),
    ({"packed": np.zeros((5, 8), np.uint8)}, "packed", "with D/2 = 4, found [5, 8]"),
    ({"mask": np.zeros((3, 3), np.bool_)}, "mask", "with 4 = 4, found [3, 3]"),
    ({"num_tokens": 4}, "num_tokens", "an integer from 0 to T = 3, found 4"),
    ({"num_tokens": -1}, "num_tokens", "found -1"),
    ({"num_tokens": True}, "num_tokens", "found True"),
    ({"num_tokens": 2.0}, "num_tokens", "found 2.0"),
    ({"eps": "1e-20"}, "eps", "a number, found '1e-20'"),
    ({"gain": False}, "gain", "a number, found False"),
]


@pytest.mark.parametrize(("changes", "argument", "message"), WRONG)
def test_a_wrong_argument_is_named(changes: dict[str, Any], argument: str, message: str) -> None:
    with pytest.raises(OperatorError) as caught:
        SCALE.check(arguments(**changes))
    assert caught.value.where == f"scale: {argument}"
    assert message in str(caught.value)


@pytest.mark.parametrize("count", [0, 3, np.int64(2)])
def test_counts_may_be_any_integer_in_range(count: int) -> None:
    SCALE.check(arguments(num_tokens=count, eps=1e-6, gain=3))


def test_a_required_count_has_no_default_and_is_bounded_once_its_limit_is_known() -> None:
    spec = find_operator("embed")
    call: dict[str, object] = {"token_ids": Like((3,), "int32"), "embed_weight": Like((512, 256), "bfloat16")}
    with pytest.raises(OperatorError, match=r"^embed: vocab_start: .*found no argument$"):
        spec.check(call, outputs=False)
    spec.check({**call, "vocab_start": 4096}, outputs=False)  # nothing here says how large the vocabulary is
    with pytest.raises(OperatorError, match=r"an integer from 0 to V, found -1$"):
        spec.check({**call, "vocab_start": -1}, outputs=False)
    with pytest.raises(OperatorError, match=r"an integer from 0 to V = 512, found 4096$"):
        spec.bind(TINY, T=3).check({**call, "vocab_start": 4096}, outputs=False)


def test_a_size_that_cannot_be_divided_is_named() -> None:
    with pytest.raises(OperatorError, match=r"^scale: packed: expected uint8 \[N, D/2\] with D/2 a division") as caught:
        SCALE.check(arguments(x=np.zeros((3, 7), np.float32), out=np.zeros((3, 7), np.float32)))
    assert caught.value.found == {"D": 7}


def test_an_expression_over_sizes_nobody_shows_is_a_size_of_its_own() -> None:
    spec = find_operator("q_proj_rope")  # only its destination shows H_local and HEAD_DIM alone
    call = {
        "qr": Like((2, 64), "bfloat16"),
        "wq_b": Like((512, 64), "float8_e4m3fn"),
        "wq_b_scale": Like((16, 2), "float8_e8m0fnu"),
        "rope_cos": Like((2, 16), "float32"),
        "rope_sin": Like((2, 16), "float32"),
    }
    assert spec.check(call, outputs=False) == {"T": 2, "Q_LORA": 64, "HALF_ROPE": 16}
    with pytest.raises(OperatorError, match="wq_b_scale"):
        spec.check({**call, "wq_b_scale": Like((16, 3), "float8_e8m0fnu")}, outputs=False)


def test_bind_gives_shapes_bytes_and_constants() -> None:
    bound = SCALE.bind(FLASH, T=6, B=2, N=7)
    assert bound.shapes == {
        "x": (6, 5120), "starts": (3,), "requests": (2,), "packed": (7, 2560), "mask": (4, 6), "out": (6, 5120),
    }  # fmt: skip
    assert bound.tensors["x"].nbytes == 6 * 5120 * 4
    assert bound.constants == {"eps": 1e-20, "gain": 2}
    assert SCALE.given == ("T", "B", "N")
    assert SCALE.destinations == ("out",)


def test_a_bound_operator_knows_every_size_beforehand() -> None:
    bound = SCALE.bind(TINY, T=3, B=2, N=5)
    right = {name: Like(tensor.shape, tensor.spec.dtype) for name, tensor in bound.tensors.items()}
    bound.check(right)
    # consistent in itself, but of another model: only the bound check can see it
    other = {**right, "x": Like((3, 8), "float32"), "packed": Like((5, 4), "uint8"), "out": Like((3, 8), "float32")}
    assert SCALE.check(other)["D"] == 8
    with pytest.raises(OperatorError, match=r"^scale: x: expected float32 \[T, D\] with D = 256, found \[3, 8\]$"):
        bound.check(other)


@pytest.mark.parametrize(
    ("extents", "where"),
    [
        ({"B": 2}, "bind"),
        ({"T": 3, "B": 2, "N": 5, "R": -1}, "R"),
        ({"T": 3, "B": 2, "N": 5, "T_local": 3}, "T_local"),
        ({"T": 3, "B": 2, "N": 5, "X": 3}, "X"),
        ({"T": 3, "B": 2, "N": 5, "D": 256}, "D"),
        ({"T": -1, "B": 2, "N": 5}, "T"),
        ({"T": True, "B": 2, "N": 5}, "T"),
        ({"T": 3.0, "B": 2, "N": 5}, "T"),
    ],
)
def test_bind_wants_the_extents_that_nothing_else_gives(extents: dict[str, Any], where: str) -> None:
    with pytest.raises(OperatorError) as caught:
        SCALE.bind(TINY, **extents)
    assert caught.value.where == f"scale: {where}"


def test_one_set_of_extents_serves_every_operator_and_all_that_is_missing_is_named() -> None:
    assert SCALE.bind(TINY, T=3, B=2, N=5, R=9) == SCALE.bind(TINY, T=3, B=2, N=5)
    with pytest.raises(OperatorError) as caught:
        SCALE.bind(TINY, B=2)
    assert caught.value.found == "no T, N"
    assert "N, outputs of a linear" in caught.value.expected


def test_bind_refuses_a_layout_that_does_not_divide() -> None:
    with pytest.raises(LayoutError, match="tp: expected a divisor of num_attention_heads"):
        find_operator("o_proj").bind(FLASH, ParallelLayout(3), T=1)


def test_an_empty_step_has_empty_shapes() -> None:
    assert find_operator("mhc_pre").bind(FLASH, T=0).shapes == {
        "x_hc": (0, 4, 5120),
        "pre_mix": (0, 4),
        "out": (0, 5120),
    }


def test_expressions() -> None:
    sizes = {"B": 2, "H_local": 3, "HEAD_DIM": 64, "MX": 32}
    assert evaluate("B+1", sizes) == 3
    assert evaluate("H_local*HEAD_DIM/MX", sizes) == 6
    assert evaluate("2*B+H_local", sizes) == 7
    assert evaluate(5, {}) == 5
    assert symbols_of("2*H_local*HEAD_DIM/MX+1") == ("H_local", "HEAD_DIM", "MX")
    assert symbols_of(3) == ()
    with pytest.raises(KeyError):
        evaluate("T", sizes)
    with pytest.raises(OperatorError, match=r"^HEAD_DIM/H_local: expected a division"):
        evaluate("HEAD_DIM/H_local", sizes)


def test_a_symbol_has_one_origin_and_a_meaning() -> None:
    for dimension in DIMENSIONS.values():
        origins = (dimension.constant is not None, dimension.of_model is not None, dimension.of_call is not None)
        assert sum(origins) + dimension.given == 1, dimension.symbol
        assert (dimension.of_call is None) == (dimension.needs is None)
        assert dimension.meaning
