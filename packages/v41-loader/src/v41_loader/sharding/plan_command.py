"""The command `plan`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from v41_config.parallel_layout import ParallelLayout
from v41_loader.garbage_collection import collection_paused
from v41_loader.inventory import read_inventory
from v41_loader.layouts import LAYOUTS
from v41_loader.rules import TensorGroup
from v41_loader.sharding.shard_plan import ShardPlan, plan_shards

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


def add_plan_command(commands: Commands) -> None:
    """Add it to a parser's commands."""
    plan = commands.add_parser("plan", help="what sharding will read, write and take, from index and headers alone")
    plan.add_argument("--checkpoint", type=Path, required=True, metavar="DIR", help="released-format directory")
    plan.add_argument("--tp", type=int, required=True, help="ranks of an attention group")
    plan.add_argument("--dp", type=int, required=True, help="groups that share the requests; experts go by TP x DP")
    plan.add_argument("--layout", choices=[layout.name for layout in LAYOUTS], default="canonical",
                      help="byte layout of the weights (default: %(default)s)")  # fmt: skip
    plan.add_argument("--json", action="store_true", help="print the plan as JSON")
    plan.add_argument("--without-engram", action="store_true", help="accept a checkpoint whose Engram is left out")
    plan.add_argument("--allowed-root", type=Path, metavar="DIR",
                      help="where links may lead besides the checkpoint, such as a Hugging Face cache")  # fmt: skip
    plan.add_argument("--threads", type=int, help="of the run that is planned; default: one per processor, up to eight")
    plan.set_defaults(run=_plan)


def _plan(arguments: argparse.Namespace) -> None:
    with collection_paused():
        inventory = read_inventory(
            arguments.checkpoint, without_engram=arguments.without_engram, allowed_root=arguments.allowed_root
        )
        layout = ParallelLayout(arguments.tp, arguments.dp)
        plan = plan_shards(inventory, layout, weight_layout=arguments.layout, threads=arguments.threads)
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
