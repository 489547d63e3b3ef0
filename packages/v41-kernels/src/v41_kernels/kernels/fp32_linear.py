"""`bf16_linear` left in FP32 (model.md section 3); also the head, whose logits are FP32."""

from collections.abc import Callable

from v41_kernels.kernels.bf16_linear import make_entry as make_bf16_linear


def make_entry(*, N: int, K: int) -> Callable[..., None]:
    """The entry for weights `[N, K]`, with an FP32 destination; tiles as in `bf16_linear`."""
    return make_bf16_linear(N=N, K=K, exact_type="DT_FP32")
