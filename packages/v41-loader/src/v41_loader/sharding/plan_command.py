"""The command `plan`."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from v41_loader.garbage_collection import collection_paused
from v41_loader.rules import TensorGroup
from v41_loader.sharding.command_options import (
    add_json_option,
    add_sharding_options,
    add_threads_option,
    parallel_layout,
    sharded_inventory,
)
from v41_loader.sharding.shard_plan import ShardPlan, plan_shards

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
        f"{'bytes by class':<28}" + "".join(f"{f'rank {rank.rank}':>18}" for rank in plan.ranks),
    ]
    groups = [group for group in TensorGroup if any(group in rank.groups for rank in plan.ranks)]
    rows = [(group.value, [rank.groups.get(group, 0) for rank in plan.ranks]) for group in groups]
    rows.append(("all", [rank.nbytes for rank in plan.ranks]))
    rows.append(("tensors", [rank.tensors for rank in plan.ranks]))
    rows.append(("read by this rank alone", [rank.read_bytes for rank in plan.ranks]))
    lines += [f"{name:<28}" + "".join(f"{value:>18,}" for value in values) for name, values in rows]
    lines += ["", *(f"skipped: {t.group.value}, {t.tensors:,} tensors, {t.nbytes:,} bytes" for t in plan.skipped)]
    return "\n".join([*lines, *([f"Engram left out: {plan.notice}"] if plan.notice else [])])
