"""The command `plan`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from v41_loader.garbage_collection import collection_paused
from v41_loader.rules import TensorGroup
from v41_loader.sharding.command_options import (
    add_json_option,
    add_sharding_options,
    add_threads_option,
    parallel_layout,
    ranks_text,
    sharded_inventory,
)
from v41_loader.sharding.shard_plan import RankPlan, ShardPlan, plan_shards

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


def add_plan_command(commands: Commands) -> None:
    """Add it to a parser's commands."""
    plan = commands.add_parser("plan", help="what sharding will read, write and take, from index and headers alone")
    add_sharding_options(plan)
    add_threads_option(plan)
    add_json_option(plan)
    plan.set_defaults(run=_plan)


def _plan(arguments: argparse.Namespace) -> None:
    with collection_paused():
        plan = plan_shards(
            sharded_inventory(arguments),
            parallel_layout(arguments),
            arguments.ranks,
            arguments.layout,
            arguments.threads,
        )
        print(json.dumps(plan.to_json(), indent=2) if arguments.json else _as_text(plan))


def _as_text(plan: ShardPlan) -> str:
    layout = plan.layout
    checkpoint = f"{plan.checkpoint_tensors:,} tensors, {plan.checkpoint_bytes:,} bytes"
    lines = [
        f"tp={layout.tp}, dp={layout.dp}, ep={layout.ep}, {plan.weight_layout} layout",
        f"checkpoint: {checkpoint} in {plan.checkpoint_files} files",
        f"read: {plan.tensors:,} tensors, {plan.read_bytes:,} bytes of {plan.files} files, each byte once",
        f"written: {plan.written_bytes:,} bytes in {len(plan.ranks)} files",
        f"memory: at most {plan.memory_bound:,} bytes",
        "",
        *_rank_table(plan.ranks),
        "",
    ]
    lines += [f"skipped: {t.group.value}, {t.tensors:,} tensors, {t.nbytes:,} bytes" for t in plan.skipped]
    return "\n".join([*lines, *([f"Engram left out: {plan.notice}"] if plan.notice else [])])


def _rank_table(ranks: Sequence[RankPlan]) -> list[str]:
    """A column for all ranks that take the same: a large layout has few kinds of them."""
    groups = [group for group in TensorGroup if any(group in rank.groups for rank in ranks)]
    names = [*(group.value for group in groups), "all", "tensors", "read by one rank alone"]
    columns: dict[tuple[int, ...], list[int]] = {}
    for rank in ranks:
        sizes = (*(rank.groups.get(group, 0) for group in groups), rank.nbytes, rank.tensors, rank.read_bytes)
        columns.setdefault(sizes, []).append(rank.rank)
    heads = [f"each of ranks {ranks_text(held)}" if held[1:] else f"rank {held[0]}" for held in columns.values()]
    widths = [max(18, len(head) + 2) for head in heads]
    lines = [f"{'bytes by class':<28}" + "".join(f"{head:>{width}}" for head, width in zip(heads, widths, strict=True))]
    for name, values in zip(names, zip(*columns, strict=True), strict=True):
        lines.append(f"{name:<28}" + "".join(f"{value:>{width},}" for value, width in zip(values, widths, strict=True)))
    return lines
