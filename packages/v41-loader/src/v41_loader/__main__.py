"""``python -m v41_loader`` is ``v41-loader``."""

import sys

from v41_loader.cli import main

sys.exit(main())
