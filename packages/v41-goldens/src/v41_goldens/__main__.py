"""`python -m v41_goldens` is `v41-golden`."""

from __future__ import annotations

import sys

from v41_goldens.cli import main

if __name__ == "__main__":
    sys.exit(main())
