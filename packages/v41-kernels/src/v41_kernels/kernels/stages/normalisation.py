"""Root-mean-square normalisation of tiles (model.md section 6)."""

from typing import Any

import pypto

from v41_kernels.kernels.stages.compensated import divided, inverse_root, row_sum


def inverse_rms(x: Any, width: int, eps: float) -> Any:
    """FP32 `rsqrt(mean(x^2) + eps)` `[R, 1]` of an FP32 tile `[R, width]`, mean and root rounded like the golden's."""
    return inverse_root(divided(*row_sum(x * x, width), width) + eps)


def normalise(x: Any, weight: Any, width: int, eps: float) -> Any:
    """BF16 `[R, width]` of BF16 `x` `[R, width]` and `weight` `[1, width]`: FP32 until the one rounding."""
    values = pypto.cast(x, pypto.DT_FP32)
    scaled = values * inverse_rms(values, width, eps)
    return pypto.cast(scaled * pypto.cast(weight, pypto.DT_FP32), pypto.DT_BF16)
