"""Every operator of the ABI as a golden: `golden(name)` with its contract, its function and its destination form.

`golden("rms_norm").run(bound, arguments)` writes into the destinations among the arguments, as a kernel does;
`bound` is `golden.spec.bind(config, layout, T=..., ...)`. `run_ranks` takes the arguments of all ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import MappingProxyType

from v41_config import find_operator, operators
from v41_goldens.operators.golden import Golden, Ranks

__all__ = ["Golden", "Ranks", "golden", "names"]


def names() -> tuple[str, ...]:
    """Every operator, in the order of the ABI. The goldens behind them are loaded when one is asked for."""
    return tuple(operators())


def golden(name: str) -> Golden:
    """The golden of an operator.

    Raises:
        OperatorError: there is no operator of that name.
    """
    return _goldens()[find_operator(name).name]


@functools.cache
def _goldens() -> Mapping[str, Golden]:
    from v41_goldens.operators.attention_entries import ATTENTION_ENTRIES
    from v41_goldens.operators.attention_stages import ATTENTION_STAGES
    from v41_goldens.operators.boundaries import BOUNDARIES
    from v41_goldens.operators.expert_stages import EXPERT_STAGES
    from v41_goldens.operators.row_stages import ROW_STAGES

    table = (*BOUNDARIES, *ROW_STAGES, *ATTENTION_STAGES, *ATTENTION_ENTRIES, *EXPERT_STAGES)
    return MappingProxyType({golden.name: golden for golden in table})
