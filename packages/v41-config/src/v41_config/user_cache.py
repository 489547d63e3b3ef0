"""Where programs keep what they can make again."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache_directory(program: str) -> Path:
    """`$XDG_CACHE_HOME/program`, or `~/.cache/program`; an empty or relative value counts as unset."""
    configured = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(configured) if os.path.isabs(configured) else Path.home() / ".cache"
    return base / program
