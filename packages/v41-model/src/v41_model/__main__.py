"""``python -m v41_model`` is ``v41-model``."""

import sys

from v41_model.cli import main

sys.exit(main())
