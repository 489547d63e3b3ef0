"""The operator tables as text, for a terminal or as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from v41_config.dimensions import DIMENSIONS, Dimension
from v41_config.operator_spec import ConstantSpec, CountSpec, OperatorSpec


def operators_as_text(specs: Iterable[OperatorSpec]) -> str:
    """One block per contract; operators that share one are listed together."""
    blocks = []
    for names, spec in _contracts(specs):
        width = max(len(tensor.name) for tensor in spec.tensors)
        lines = [*names, f"    {spec.doc}"]
        lines += [f"    {t.direction:<6}{t.name:<{width}}  {t.dtype:<15}{_shape(t.dims)}" for t in spec.tensors]
        lines += [f"    scalar {scalar_text(scalar)}" for scalar in spec.scalars]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


_INTRODUCTION = (
    "What each operator takes and writes. Written by `v41-config operators --markdown`; do not edit. A dimension is a "
    "number or an expression over the symbols below. Rows at and behind `num_tokens` (`num_rows`) are padding: neither "
    "read nor, in destinations, written. Scalars that are not required may be left out of a call: a count defaults "
    "to its limit, a constant to the model's."
)


def operators_as_markdown(specs: Iterable[OperatorSpec]) -> str:
    """The symbols, then a table per contract."""
    parts = [
        "# Operators",
        _INTRODUCTION,
        "## Dimensions",
        _table(("symbol", "meaning", "size"), [(f"`{d.symbol}`", d.meaning, _origin(d)) for d in DIMENSIONS.values()]),
        "## Contracts",
    ]
    for names, spec in _contracts(specs):
        parts.append("### " + ", ".join(f"`{name}`" for name in names))
        parts.append(spec.doc)
        rows = [(f"`{t.name}`", f"`{_shape(t.dims)}`", t.dtype, t.direction) for t in spec.tensors]
        parts.append(_table(("tensor", "shape", "dtype", "direction"), rows))
        if spec.scalars:
            parts.append("Scalars: " + "; ".join(f"`{scalar_text(scalar)}`" for scalar in spec.scalars) + ".")
    return "\n\n".join(parts) + "\n"


def scalar_text(scalar: CountSpec | ConstantSpec) -> str:
    """A scalar with its range or its value."""
    if isinstance(scalar, CountSpec):
        return f"0 <= {scalar.name} <= {scalar.limit}{', required' if scalar.required else ''}"
    return scalar.name if scalar.name == scalar.value else f"{scalar.name} = {scalar.value}"


def _contracts(specs: Iterable[OperatorSpec]) -> list[tuple[list[str], OperatorSpec]]:
    """Specs that differ in name alone, together."""
    names: dict[object, list[str]] = {}
    first: dict[object, OperatorSpec] = {}
    for spec in specs:
        contract = (spec.tensors, spec.scalars, spec.doc)
        names.setdefault(contract, []).append(spec.name)
        first.setdefault(contract, spec)
    return [(names[contract], first[contract]) for contract in names]


def _shape(dims: Sequence[int | str]) -> str:
    return f"[{', '.join(map(str, dims))}]"


def _origin(dimension: Dimension) -> str:
    if dimension.constant is not None:
        return str(dimension.constant)
    if dimension.of_model is not None:
        return "model and layout"
    return f"follows from `{dimension.needs}`" if dimension.needs else "given by the call"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
