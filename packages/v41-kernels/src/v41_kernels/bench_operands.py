"""Operands to time an operator on, made from its contract alone: bytes, ordinary numbers, and metadata that fits.

Nobody judges the results; goldens and their fixtures are another distribution's.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from v41_config import BoundOperator, CountSpec, ModelConfig, find_operator
from v41_config.operator_spec import BoundTensor

_CONTEXT_PAGES = 2
_REQUESTS = 1


def bind_for_bench(name: str, config: ModelConfig, rows: int) -> BoundOperator:
    """The contract at a model's dimensions, for one request of `rows` rows."""
    spec = find_operator(name)
    extents = {
        **dict.fromkeys(("T", "G", "R", "LOGIT_ROWS"), rows),
        "B": _REQUESTS,
        "CAPACITY": 4096,
        "ENTRIES": _CONTEXT_PAGES * 128,
        "PAGES": _CONTEXT_PAGES,
        **dict.fromkeys(("WINDOW_BLOCKS", "COMPRESSED_BLOCKS", "STATE_BLOCKS"), _CONTEXT_PAGES),
        "ATTENDED": config.sliding_window + config.index_topk,
        "N": config.q_lora_rank,
        "K": config.hidden_size,
    }
    return spec.bind(config, None, **{symbol: extents[symbol] for symbol in spec.given})


def bench_operands(bound: BoundOperator) -> dict[str, object]:
    """A value for every argument of `bound`; the same bytes in every run."""
    generator = torch.Generator().manual_seed(0)
    arguments: dict[str, object] = {name: _tensor(tensor, generator) for name, tensor in bound.tensors.items()}
    rows = bound.dims.get("T", 0)
    arguments |= {name: _metadata(name, tensor, rows) for name, tensor in bound.tensors.items() if _is_metadata(tensor)}
    arguments |= {s.name: 0 for s in bound.spec.scalars if isinstance(s, CountSpec) and s.required}
    return {**arguments, **bound.constants}


def _is_metadata(tensor: BoundTensor) -> bool:
    return tensor.spec.dtype in ("int32", "int64") and tensor.spec.direction == "in"


def _tensor(tensor: BoundTensor, generator: torch.Generator) -> Tensor:
    dtype: torch.dtype = getattr(torch, tensor.spec.dtype)
    if tensor.spec.dtype == "float8_e8m0fnu":
        return torch.randint(118, 124, tensor.shape, generator=generator, dtype=torch.uint8).view(dtype)
    if dtype.itemsize == 1:
        largest = 2 if tensor.spec.dtype == "bool" else 120
        return torch.randint(0, largest, tensor.shape, generator=generator, dtype=torch.uint8).view(dtype)
    if dtype.is_floating_point:
        return torch.randn(tensor.shape, generator=generator).to(dtype)
    return torch.zeros(tensor.shape, dtype=dtype)


def _metadata(name: str, tensor: BoundTensor, rows_of_call: int) -> Tensor:
    """Positions and slots in order; one request that sees half of its entries."""
    dtype: torch.dtype = getattr(torch, tensor.spec.dtype)
    rows = tensor.shape[0]
    order = torch.arange(rows, dtype=dtype)
    values: Mapping[str, Tensor] = {
        "query_start_loc": torch.tensor([0, *[rows_of_call] * (rows - 1)], dtype=dtype),
        "compressed_lens": torch.full(tensor.shape, _CONTEXT_PAGES * 64, dtype=dtype),
    }
    if name in values:
        return values[name]
    if name in ("position_ids", "slots", "window_slots", "compressed_slots", "index_slots"):
        return order
    if name in ("window_indices", "topk_rows", "compressed_block_table", "expert_ids"):
        columns = torch.arange(tensor.shape[1], dtype=dtype)
        limit = {"compressed_block_table": _CONTEXT_PAGES}.get(name, 128)
        return (columns % limit).expand(tensor.shape).contiguous()
    return torch.zeros(tensor.shape, dtype=dtype)
