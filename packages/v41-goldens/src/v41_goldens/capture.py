"""Recording a forward's intermediate tensors under the names of a conformance file."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


def layer_key(layer_id: int, name: str) -> str:
    """`layer.07.attn_out`: the key of one layer's tensor."""
    return f"layer.{layer_id:02d}.{name}"


@dataclass
class Capture:
    """Tensors by name, as they were when recorded: a later in-place write does not reach them."""

    tensors: dict[str, Tensor] = field(default_factory=dict)

    def put(self, key: str, tensor: Tensor) -> None:
        self.tensors[key] = tensor.detach().clone()
