"""What a byte layout is: for each tensor the bytes as they are, or a transform of consecutive blocks of its rows."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from v41_loader.expected_tensors import ExpectedTensor

Bytes = npt.NDArray[np.uint8]


class Transform(Protocol):
    """Rewrites a tensor, or a rank's part of one, `rows_per_block` stored rows at a time (at the end maybe fewer).

    What `apply` makes of the blocks, one behind the other, is the stored tensor: a block's output depends on no other
    block. Where a layout spreads each row over the whole output, the one block is the whole tensor.
    """

    @property
    def output_dtype(self) -> str:
        """The safetensors dtype of the result."""

    @property
    def output_shape(self) -> tuple[int, ...]:
        """The stored items of the result."""

    @property
    def rows_per_block(self) -> int:
        """Rows of the tensor, as the checkpoint stores it, that `apply` takes at a time."""

    def apply(self, block: Bytes) -> Bytes:
        """The bytes that stand for a block of rows `[rows, bytes of a row]`, in memory of their own."""

    def inverse(self, block: Bytes) -> Bytes | None:
        """The block of rows that `apply` makes these bytes of; None where it never makes them."""


class Layout(Protocol):
    """A byte layout of rank files. `version` is another number whenever its bytes change."""

    @property
    def name(self) -> str: ...

    @property
    def version(self) -> int: ...

    def transform(self, tensor: ExpectedTensor, part_shape: tuple[int, ...]) -> Transform | None:
        """What to do with a part of `tensor` of that many stored items; None: copy its bytes.

        Raises:
            LayoutGeometryError: the layout has no place for a matrix of this size.
        """


class CanonicalLayout:
    """The released orientation and bytes."""

    name = "canonical"
    version = 1

    def transform(self, tensor: ExpectedTensor, part_shape: tuple[int, ...]) -> Transform | None:
        """None: every tensor is copied."""
        return None
