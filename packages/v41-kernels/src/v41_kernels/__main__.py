"""``python -m v41_kernels`` is ``v41-kernels``."""

import sys

from v41_kernels.cli import main

sys.exit(main())
