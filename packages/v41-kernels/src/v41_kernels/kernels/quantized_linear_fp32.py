"""`quantized_linear` before its rounding: the partial of a row-parallel output (model.md section 18)."""

from collections.abc import Callable

from v41_kernels.kernels.quantized_linear import make_entry as make_quantized_linear


def make_entry(*, N: int, K: int) -> Callable[..., None]:
    """The entry for weights `[N, K]`, with an FP32 destination; tiles as in `quantized_linear`."""
    return make_quantized_linear(N=N, K=K, exact_type="DT_FP32")
