"""What integer operands may hold: a row of a pool, a page, a request. A kernel would read or write somewhere else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from v41_config import BLOCK_ROWS, OperatorError
from v41_kernels.arguments import BoundArguments

_Limit = Callable[[Mapping[str, int]], "tuple[int, str]"]


@dataclass(frozen=True)
class _Rule:
    """Values from `lowest` up to what `limit` says of a call's sizes and counts, and says in words.

    A rule holds for calls that have all sizes that it `needs`. With `start`, a count, values from 0 to it are refused.
    """

    operands: tuple[str, ...]
    lowest: int
    needs: tuple[str, ...]
    limit: _Limit
    start: str | None = None

    def fits(self, sizes: Mapping[str, int]) -> bool:
        return all(name in sizes for name in self.needs)


def _rows_of(blocks: str) -> _Limit:
    return lambda sizes: (sizes[blocks] * BLOCK_ROWS, f"-1, or a row of the pool's {sizes[blocks] * BLOCK_ROWS}")


def _index_of(what: str, count: str) -> _Limit:
    return lambda sizes: (sizes[count], f"{what} of {sizes[count]}")


def _entries(sizes: Mapping[str, int]) -> tuple[int, str]:
    count = sizes["PAGES"] * BLOCK_ROWS if "PAGES" in sizes else sizes["ENTRIES"]
    return count + 1, f"a number of entries from 0 to {count}"


def _held_expert(sizes: Mapping[str, int]) -> tuple[int, str]:
    start, beyond = sizes["expert_start"], sizes["expert_start"] + sizes["E_local"]
    return beyond, f"a negative id, or an expert from {start} to {beyond - 1}"


_RULES = (
    _Rule(("slots", "window_slots", "window_indices"), -1, ("WINDOW_BLOCKS",), _rows_of("WINDOW_BLOCKS")),
    _Rule(
        ("slots", "compressed_slots", "index_slots", "topk_rows"), -1, ("COMPRESSED_BLOCKS",),
        _rows_of("COMPRESSED_BLOCKS"),
    ),
    _Rule(
        ("compressed_block_table",), -1, ("COMPRESSED_BLOCKS",), _index_of("-1, or a block", "COMPRESSED_BLOCKS"),
    ),
    _Rule(("compressed_lens",), 0, ("PAGES",), _entries),
    _Rule(("compressed_lens",), 0, ("ENTRIES",), _entries),
    _Rule(("state_block_table",), -1, ("STATE_BLOCKS",), _index_of("-1, or a block", "STATE_BLOCKS")),
    _Rule(("token_to_req_indices",), 0, ("B",), _index_of("a request", "B")),
    _Rule(("compressor_source_token_indices",), 0, ("num_tokens",), _index_of("an active token", "num_tokens")),
    _Rule(("query_start_loc",), 0, ("T",), lambda sizes: (sizes["T"] + 1, f"a row from 0 to {sizes['T']}")),
    _Rule(("row_expert_ids",), -(1 << 31), ("E_local",), _held_expert, "expert_start"),
    _Rule(("position_ids",), 0, ("STATE_BLOCKS",), lambda _: (1 << 31, "a position")),
    _Rule(
        ("position_ids",), -(1 << 31), ("CAPACITY",),
        lambda sizes: (sizes["CAPACITY"], f"a position below the tables' capacity {sizes['CAPACITY']}"),
    ),
)  # fmt: skip


def check_operand_values(bound: BoundArguments) -> None:
    """Check every integer operand that is read, padding rows left out. Errors: `OperatorError` naming the element."""
    sizes = {**bound.dims, **bound.counts}
    for tensor in bound.spec.tensors:
        if tensor.direction == "out":
            continue
        for rule in _RULES:
            if tensor.name in rule.operands and rule.fits(sizes):
                active = bound.counts.get("num_tokens") if tensor.dims[0] == "T" else None
                _check(bound.spec.name, tensor.name, bound.tensors[tensor.name][:active], rule, sizes)
    if "query_start_loc" in bound.tensors:
        _check_ascending(bound.spec.name, bound.tensors["query_start_loc"])


def _check(operator: str, name: str, values: Tensor, rule: _Rule, sizes: Mapping[str, int]) -> None:
    if values.numel() == 0:
        return
    values, (beyond, expected) = values.long(), rule.limit(sizes)
    wrong = (values < rule.lowest) | (values >= beyond)
    if rule.start is not None:
        wrong |= (values >= 0) & (values < sizes[rule.start])
    if wrong.any():
        element = wrong.nonzero()[0].tolist()
        found = int(values[tuple(element)])
        raise OperatorError(f"{operator}: {name}{element}", found, expected)


def _check_ascending(operator: str, starts: Tensor) -> None:
    falling = starts[1:] < starts[:-1]
    if falling.any():
        request = int(falling.nonzero()[0])
        found = starts[request : request + 2].tolist()
        raise OperatorError(f"{operator}: query_start_loc[{request}]", found, "starts in ascending order")
