"""A capacity plan for readers: a table for the terminal, a bar chart for a page."""

from __future__ import annotations

import importlib
import io
import os
from pathlib import Path
from typing import Any

from v41_config.capacity_plan import CapacityAssumptions, CapacityPlan, Fit
from v41_config.errors import CapacityError

_GB = 10**9


def plan_as_text(plan: CapacityPlan, hbm_bytes: int) -> str:
    """Whether it does not fit, sections and items with their bytes, what is left, what fits, and what was assumed."""
    short = plan.total_bytes - hbm_bytes
    verdict = [f"DOES NOT FIT: {short:,} B more than the card has", ""] if short > 0 else []
    lines = [_headline(plan), "", *verdict]
    for section, items in plan.sections.items():
        lines.append(_line(section, plan.section_bytes(section)))
        lines += [_line(f"  {name}", nbytes) for name, nbytes in items.items()]
    lines += [
        _line("total", plan.total_bytes),
        _line("HBM", hbm_bytes),
        _line("free", hbm_bytes - plan.total_bytes),
        _line("caches of one request", plan.cache_bytes_per_request),
        "",
        _largest_context(plan, plan.largest_context(hbm_bytes)),
        _most_requests(plan, plan.most_requests(hbm_bytes)),
        "",
        _assumptions(plan.assumptions),
    ]
    return "\n".join(lines)


def plot_plan(plan: CapacityPlan, hbm_bytes: int, path: Path) -> None:
    """Write a PNG: one bar per item, grouped by section, with the card's memory for scale.

    Raises:
        CapacityError: matplotlib (extra `plot`) is missing, or the file cannot be written; none is left behind then.
    """
    items = [
        (f"{section}: {name}", section, nbytes)
        for section, part in plan.sections.items()
        for name, nbytes in part.items()
        if nbytes
    ]
    figure = _figure(figsize=(9, 1.5 + 0.27 * len(items)))
    axes = figure.add_subplot()
    sections = list(plan.sections)
    names = [name for name, _, _ in items]
    bars = axes.barh(
        names,
        [nbytes / _GB for _, _, nbytes in items],
        color=[f"C{sections.index(section)}" for _, section, _ in items],
    )
    axes.bar_label(bars, labels=[f"{nbytes / _GB:.2f}" for _, _, nbytes in items], padding=3, fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.12, y=0.02)
    axes.set_xlabel("GB of one card")
    axes.set_title(f"{_headline(plan)}\n{plan.total_bytes / _GB:.1f} of {hbm_bytes / _GB:.1f} GB", fontsize=10)
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=120, bbox_inches="tight")
    _write_whole(path, image.getvalue())


def _figure(**options: Any) -> Any:
    try:
        return importlib.import_module("matplotlib.figure").Figure(**options)
    except ImportError as error:
        raise CapacityError("plot", str(error), "matplotlib: pip install 'v41-config[plot]'") from error


def _write_whole(path: Path, content: bytes) -> None:
    partial = path.with_name(f"{path.name}.partial")
    try:
        partial.write_bytes(content)
        os.replace(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise CapacityError(f"plot {path}", error.strerror, "a file that can be written") from error


def _headline(plan: CapacityPlan) -> str:
    layout = plan.layout
    requests = _requests(plan, plan.requests)
    return f"one card of TP{layout.tp} x DP{layout.dp} (EP{layout.ep}): {requests}, {plan.context:,} tokens each"


def _requests(plan: CapacityPlan, count: int) -> str:
    """A number of requests, and what it comes to over all DP groups."""
    noun = "request" if count == 1 else "requests"
    everywhere = f" ({count * plan.layout.dp:,} in all)" if plan.layout.dp > 1 else ""
    return f"{count:,} {noun} per DP group{everywhere}"


def _largest_context(plan: CapacityPlan, fit: Fit) -> str:
    return f"largest context of {_requests(plan, plan.requests)}: {fit.value:,} tokens, limited by {fit.limited_by}"


def _most_requests(plan: CapacityPlan, fit: Fit) -> str:
    return f"most requests of {plan.context:,} tokens: {_requests(plan, fit.value)}, limited by {fit.limited_by}"


def _assumptions(assumed: CapacityAssumptions) -> str:
    return (
        f"assumed: {assumed.decode_tokens} rows of a request in a decode step, {assumed.prefill_tokens:,} rows of a "
        f"group in a prefill step; caches in {'BF16' if assumed.bf16_cache else 'FP8 and FP4'}; wo_a in "
        f"{'BF16' if assumed.bf16_wo_a else 'FP8'}; Engram {'counted' if assumed.engram else 'left out'}. "
        "Activations and runtime heaps are not counted."
    )


def _line(name: str, nbytes: int) -> str:
    return f"{name:<28}{nbytes:>20,} B{nbytes / _GB:>10.3f} GB"
