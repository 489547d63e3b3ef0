"""`v41-golden`: list the goldens, run one on its fixture or on a saved tree."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from v41_config import PRESETS, ParallelLayout, operators
from v41_config.command_line import run_command
from v41_goldens.errors import OperandError

if TYPE_CHECKING:
    from v41_goldens.fixtures import FixtureCase
    from v41_goldens.fixtures.batch import Phase
    from v41_goldens.saved_tree import SavedTree

FAILED = 1
"""Exit code of a run in which a tensor was rejected."""

PHASES: tuple[Phase, ...] = ("prefill", "decode")

_REQUESTS = 6

_NO_COMPOSITIONS = {"save_data": None, "golden_data": None, "epochs": None, "wiring": "both"}
"""Options that say how an operator is run, with their defaults: a composition has none of them."""

_SAVED = {
    "tokens": None, "active_tokens": None, "requests": _REQUESTS, "tp": 1, "dp": None, "dp_tokens": None, "seed": 0,
}  # fmt: skip
"""Options that a saved tree has decided, with their defaults."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; 0 on success, 1 where a golden fails, 2 with one line on standard error for bad input."""
    arguments = _parser().parse_args(argv)
    return run_command("v41-golden", lambda: arguments.run(arguments))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="v41-golden", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    listing = commands.add_parser("list", help="every golden, with what it computes")
    listing.set_defaults(run=_list)

    run = commands.add_parser("run", help="run a golden on deterministic operands and judge every tensor")
    run.add_argument("name", metavar="NAME", help="an operator; with --phase, its name without the phase")
    run.add_argument("--phase", choices=PHASES, help="default: that of the name, else prefill")
    run.add_argument("--preset", choices=sorted(PRESETS), default="tiny", help="default: %(default)s")
    run.add_argument("--tokens", type=int, help="packed rows of a TP group; default: 33, with --tp 4 32")
    run.add_argument("--active-tokens", type=int, metavar="N", help="valid rows; default: 31, of 32 tokens 24, or all")
    run.add_argument("--requests", type=int, default=_REQUESTS, help="of a DP group; default: %(default)s")
    run.add_argument("--epochs", type=int, help="runs with the same operands; default: 2, with --dp-tokens 3")
    run.add_argument("--tp", type=int, default=1, help="ranks of an attention group; default: %(default)s")
    run.add_argument("--dp", type=int, help="groups; default: those of --dp-tokens, else 1")
    run.add_argument("--dp-tokens", metavar="N,N", help="valid rows of each DP group, such as 7,1")
    run.add_argument("--wiring", choices=("both", "replicated", "sharded"), default="both", help="default: both")
    run.add_argument("--seed", type=int, default=0, help="of the operands; default: %(default)s")
    run.add_argument("--save-data", type=Path, metavar="DIR", help="save operands and results to DIR/<wiring>")
    run.add_argument("--golden-data", type=Path, metavar="DIR", help="replay DIR/<wiring> and compare to the bit")
    run.set_defaults(run=_run)
    return parser


def _list(_: argparse.Namespace) -> int:
    from v41_goldens.compositions import COMPOSITIONS

    docs = {name: spec.doc for name, spec in operators().items()} | {n: c.doc for n, c in COMPOSITIONS.items()}
    width = max(map(len, docs))
    print("\n".join(f"{name:<{width}}  {doc}" for name, doc in docs.items()))
    return 0


def _run(arguments: argparse.Namespace) -> int:
    from v41_goldens.compositions import COMPOSITIONS
    from v41_goldens.fixtures import FixtureCase
    from v41_goldens.golden_run import validate, wirings

    name, phase = _name_and_phase(arguments.name, arguments.phase, tuple(COMPOSITIONS))
    dp_tokens = _dp_tokens(arguments.dp_tokens)
    dp = arguments.dp if arguments.dp is not None else len(dp_tokens or (0,))
    tokens = arguments.tokens
    if tokens is None:
        tokens = max(dp_tokens) if dp_tokens else 32 if arguments.tp == 4 else 33
    active = arguments.active_tokens
    if active is None and arguments.tokens is None and dp_tokens is None:
        active = {32: 24, 33: 31}[tokens]
    case = FixtureCase(
        config=PRESETS[arguments.preset],
        layout=ParallelLayout(arguments.tp, dp),
        phase=phase,
        tokens=tokens,
        active_tokens=active,
        requests=arguments.requests,
        dp_tokens=dp_tokens,
        seed=arguments.seed,
    )
    epochs = arguments.epochs if arguments.epochs is not None else 3 if dp_tokens else 2
    shown = f"{name}: {_described(arguments, case)}"
    if name in COMPOSITIONS:
        _refuse_given(arguments, _NO_COMPOSITIONS, "an operator: a composition has none", found=name)
        if case.layout.world_size > 1:
            raise OperandError("--tp, --dp", case.layout, "one rank: a composition is the model in one process")
        result = COMPOSITIONS[name].validate(case)
    else:
        forms = " and ".join(wirings(name, arguments.wiring))
        shown = f"{shown}, {forms}, {epochs} epoch{'s' * (epochs != 1)}"
        result = validate(
            name,
            case,
            preset=arguments.preset,
            epochs=epochs,
            wiring=arguments.wiring,
            save_data=arguments.save_data,
            golden_data=arguments.golden_data,
        )
    if result.replayed is not None:
        shown = f"{shown}; {_saved(result.replayed)}"
    print(shown)
    if not result.passed:
        print(f"[GOLDEN] FAIL {name}: {result.error}")
        return FAILED
    print(f"[GOLDEN] PASS {name}: {len(result.checks)} verdicts")
    return 0


def _name_and_phase(name: str, phase: Phase | None, others: Sequence[str]) -> tuple[str, Phase]:
    """The full name, and the phase that the batch is made for."""
    own = [p for p in PHASES if name.startswith(f"{p}_")]
    if own and phase not in (None, own[0]):
        raise OperandError("--phase", phase, f"{own[0]}, the phase of {name}")
    chosen = own[0] if own else phase or "prefill"
    if name not in operators() and name not in others and f"{chosen}_{name}" in operators():
        name = f"{chosen}_{name}"
    return name, chosen


def _refuse_given(
    arguments: argparse.Namespace, defaults: Mapping[str, object], expected: str, found: str | None = None
) -> None:
    """Refuse the first of some options that is not at its default, with `found` in place of its value."""
    for option, plain in defaults.items():
        value = getattr(arguments, option)
        if value != plain:
            raise OperandError(f"--{option.replace('_', '-')}", found or value, expected)


def _described(arguments: argparse.Namespace, case: FixtureCase) -> str:
    """The case of a run, in words.

    Raises:
        OperandError: an option that a saved tree has decided is given beside one.
    """
    if arguments.golden_data is not None:
        _refuse_given(arguments, _SAVED, "nothing beside --golden-data, whose tree has its own")
        return f"{case.phase}, {arguments.preset}, operands saved in {arguments.golden_data}"
    layout = case.layout
    active = "+".join(str(case.active(dp_rank)) for dp_rank in range(layout.dp)) if case.dp_tokens else case.active(0)
    return (
        f"{case.phase}, {arguments.preset}, {case.tokens} tokens, {active} active, {case.requests} requests, "
        f"tp={layout.tp}, dp={layout.dp}, seed {case.seed}"
    )


def _saved(tree: SavedTree) -> str:
    """What the operands of a saved tree are: sizes and counts of its first rank, and the layout."""
    counts = {name: value for name, value in tree.arguments[0].items() if isinstance(value, int)}
    sizes = ", ".join(f"{name}={value}" for name, value in {**tree.extents[0], **counts}.items())
    return f"rank 0 {sizes}, tp={tree.layout.tp}, dp={tree.layout.dp}"


def _dp_tokens(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    parts = text.split(",")
    if not all(part.isascii() and part.strip().isdecimal() and len(part) < 10 for part in parts):
        raise OperandError("--dp-tokens", text, "numbers with commas between, such as 7,1")
    return tuple(int(part) for part in parts)
