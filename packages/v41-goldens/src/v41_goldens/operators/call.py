"""One rank's call of an operator: its active operands by name, and weights put together from them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from v41_config import BoundOperator, ConstantSpec, CountSpec, ModelConfig
from v41_config.dimensions import CONSTANTS, Dim, evaluate, symbols_of
from v41_goldens.quantized_weights import Fp4Weight, Fp8Weight
from v41_goldens.weights import (
    AttentionWeights,
    CompressorWeights,
    ExpertWeights,
    HyperConnectionWeights,
    IndexerWeights,
    IndexKeyWeights,
    MoeWeights,
)

Results = dict[str, Tensor]
"""What a golden gives back: every `out` tensor by name, its active rows alone."""


@dataclass(frozen=True)
class Call:
    """Active operands of a call; padding rows are cut off, so that a golden cannot read them.

    Attributes:
        bound: the operator with its sizes.
        rank: the caller's rank in `bound.layout`.
        tensors: what is read or updated, by name; caches are the caller's own storage.
        scalars: every count and constant, given or default.
        selection: logical entries `[active rows, k]` to attend to instead of the operator's own choice.
    """

    bound: BoundOperator
    rank: int
    tensors: Mapping[str, Tensor]
    scalars: Mapping[str, int | float]
    selection: Tensor | None = None

    @staticmethod
    def of(bound: BoundOperator, arguments: Mapping[str, object], rank: int, selection: Tensor | None = None) -> Call:
        """Of arguments that `bound.check` has accepted."""
        scalars = dict(bound.constants)
        for scalar in bound.spec.scalars:
            if isinstance(scalar, CountSpec) and scalar.limit in bound.dims:
                scalars[scalar.name] = bound.dims[scalar.limit]
            given = arguments.get(scalar.name)
            if given is not None:
                scalars[scalar.name] = given if isinstance(given, float) else int(given)  # type: ignore[call-overload]
        call = Call(bound, rank, {}, scalars, selection)
        tensors = {}
        for tensor in bound.spec.tensors:
            value = arguments[tensor.name]
            assert isinstance(value, Tensor)
            if tensor.direction != "out":
                tensors[tensor.name] = value[: call.active_rows(tensor.dims[0])]
        return dataclasses.replace(call, tensors=tensors)

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    @property
    def config(self) -> ModelConfig:
        """The model, with the constants of this call."""
        changed = {
            scalar.value: self.scalars[scalar.name]
            for scalar in self.bound.spec.scalars
            if isinstance(scalar, ConstantSpec) and isinstance(scalar.value, str)
        }
        return self.bound.config.model_copy(update=changed)

    @property
    def limit(self) -> CountSpec | None:
        """The count behind which rows are padding."""
        counts = [s for s in self.bound.spec.scalars if isinstance(s, CountSpec) and s.name.startswith("num_")]
        return counts[0] if counts else None

    @property
    def active(self) -> int | None:
        """Active rows, None where the operator has no count."""
        return None if self.limit is None else int(self.scalars[self.limit.name])

    def active_rows(self, rows: Dim) -> int:
        """How many of a first dimension's rows are active."""
        sizes = {**CONSTANTS, **self.bound.dims}
        if self.limit is not None and self.active is not None:
            sizes[self.limit.limit] = self.active
            if self.limit.limit == "T":
                sizes["T_local"] = self.bound.layout.active_rows(self.bound.dims["T"], self.active, self.rank)
        return evaluate(rows, sizes)

    def is_cleared(self, rows: Dim) -> bool:
        """Whether inactive rows of a destination are zero: slabs of a batch whose count is the group's."""
        return self.limit is not None and self.limit.limit == "T" and symbols_of(rows) == ("T_local",)

    def fp8(self, name: str) -> Fp8Weight:
        """A quantised weight with its scale."""
        return Fp8Weight(self[name], self[f"{name}_scale"])

    def fp4(self, name: str) -> Fp4Weight:
        """A packed weight with its scale."""
        return Fp4Weight(self[name], self[f"{name}_scale"])

    def rope(self, prefix: str = "") -> tuple[Tensor, Tensor]:
        """Cosine and sine rows."""
        return self[f"{prefix}rope_cos"], self[f"{prefix}rope_sin"]

    def attention(self) -> AttentionWeights:
        """The attention weights among the operands; the others are None, and not there to be read."""
        weights: dict[str, object] = {field.name: None for field in dataclasses.fields(AttentionWeights)}
        for name in weights:
            if name in self.tensors:
                weights[name] = self.fp8(name) if f"{name}_scale" in self.tensors else self[name]
        if "compressor_wkv" in self.tensors:
            weights["compressor"] = self.compressor()
        if "index_wk" in self.tensors:
            weights["index_keys"] = self.index_keys()
        if "index_wq_b" in self.tensors:
            weights["indexer"] = IndexerWeights(self.fp8("index_wq_b"), self["index_weights_proj"])
        return AttentionWeights(**weights)  # type: ignore[arg-type]

    def compressor(self) -> CompressorWeights:
        """The compressor of a KV source."""
        return CompressorWeights(self["compressor_wkv"], self["compressor_norm"], self.tensors.get("compressor_wgate"))

    def index_keys(self) -> IndexKeyWeights:
        """The index keys of a KV source."""
        return IndexKeyWeights(self["index_wk"], self["index_k_norm"])

    def hyper_connection(self, prefix: str = "") -> HyperConnectionWeights:
        """One hyper-connection."""
        return HyperConnectionWeights(*(self[f"{prefix}{part}"] for part in ("fn", "base", "scale")))

    def shared_expert(self) -> ExpertWeights:
        """The expert of every token."""
        return ExpertWeights(*(self.fp8(f"shared_{name}") for name in ("w1", "w2", "w3")))

    def experts(self, first: int | None = None) -> dict[int, ExpertWeights]:
        """This rank's routed experts by global id, from `first` on if that is given."""
        if first is None:
            first = self.bound.layout.expert_range(self.bound.config, self.rank).start
        return {first + row: ExpertWeights(*(self._expert(name, row) for name in ("w1", "w2", "w3")))
                for row in range(len(self["w1"]))}  # fmt: skip

    def moe(self) -> MoeWeights:
        """Gate, shared expert and this rank's routed experts."""
        return MoeWeights(self["gate_weight"], self["gate_bias"], self.shared_expert(), self.experts())

    def _expert(self, name: str, row: int) -> Fp4Weight:
        return Fp4Weight(self[name][row], self[f"{name}_scale"][row])
