"""Byte layouts of the weights in rank files; docs/layouts.md describes them."""

from __future__ import annotations

from v41_loader.errors import UnknownLayoutError
from v41_loader.layouts.device import DeviceLayout
from v41_loader.layouts.layout import CanonicalLayout, Layout, Transform

__all__ = ["LAYOUTS", "CanonicalLayout", "DeviceLayout", "Layout", "Transform", "get_layout"]

LAYOUTS: tuple[Layout, ...] = (CanonicalLayout(), DeviceLayout())


def get_layout(name: str) -> Layout:
    """The layout of that name.

    Raises:
        UnknownLayoutError: there is none.
    """
    for layout in LAYOUTS:
        if layout.name == name:
            return layout
    raise UnknownLayoutError("weight layout", name, f"one of {', '.join(layout.name for layout in LAYOUTS)}")
