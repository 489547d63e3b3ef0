"""``v41-model conform``: the table, the first difference, and the exit code."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tqdm import tqdm

from v41_model.atomic_file import require_writable
from v41_model.checkpoint_weights import streamed_weights
from v41_model.command_options import Subparsers, add_checkpoint_options, opened_checkpoint
from v41_model.conform import (
    NOTHING_TO_REPLAY,
    conformance_reports,
    exit_code,
    format_table,
    not_compared,
    steps_of,
    summary,
    write_json,
)
from v41_model.errors import OptionError
from v41_model.vectors_file import read_vectors

__all__ = ["add_conform_command"]


def add_conform_command(subparsers: Subparsers) -> None:
    """Add the command's parser."""
    parser = subparsers.add_parser(
        "conform",
        help="find the first layer where a dump of another engine differs",
        description="Replays a vectors file layer by layer from its stored inputs and selections, then end to end. "
        "Exit code 0: all that was compared is within --max-relative-l2; 1: something differs; "
        "2: nothing to replay, or bad input.",
    )
    add_checkpoint_options(parser)
    parser.add_argument(
        "--vectors", type=Path, required=True, metavar="FILE.safetensors", help="keys: docs/vectors.md of v41-model"
    )
    parser.add_argument(
        "--request",
        type=int,
        metavar="N",
        help="replay request N of a file that v41-model forward --capture layers wrote",
    )
    parser.add_argument("--json", type=Path, metavar="OUT", help="also write the table as JSON")
    parser.add_argument(
        "--max-relative-l2",
        type=float,
        default=0.0,
        metavar="BOUND",
        help="accept floats within this relative L2 distance (default 0: equal bits)",
    )
    parser.add_argument("--differing", action="store_true", help="print only the tensors that are not accepted")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the table (with ``--differing`` what is not accepted of it) and the verdict."""
    if not 0 <= arguments.max_relative_l2 < 1:
        raise OptionError("--max-relative-l2", arguments.max_relative_l2, "a bound from 0 to below 1")
    if arguments.json is not None:
        require_writable(arguments.json)
    with opened_checkpoint(arguments) as checkpoint:
        config = checkpoint.config
        file = read_vectors(arguments.vectors, config, arguments.request)
        if not file.has_layer_inputs(config):
            print(
                f"v41-model: nothing to replay: {arguments.vectors} has no layer's inputs (X, attn_in, moe_in)",
                file=sys.stderr,
            )
            return NOTHING_TO_REPLAY
        total = steps_of(file) * config.num_hidden_layers
        with tqdm(total=total, unit="layer", desc="replay", disable=None) as progress:
            weights = streamed_weights(checkpoint, on_read=lambda _: progress.update())
            reports = conformance_reports(config, weights, file, arguments.max_relative_l2)
    skipped = not_compared(reports, file)
    shown = [report for report in reports if not (arguments.differing and report.passed)]
    if shown:
        print(format_table(shown))
    if skipped:
        print(f"not compared: {', '.join(skipped)}")
    print(summary(reports, len(skipped)))
    if arguments.json is not None:
        write_json(arguments.json, reports, skipped)
    return exit_code(reports)
