"""`python -m v41_config`."""

from __future__ import annotations

import sys

from v41_config.cli import main

sys.exit(main())
