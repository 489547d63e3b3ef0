"""The operator tables, one module per part of the model, and the lookup by name."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import MappingProxyType

from v41_config.errors import OperatorError
from v41_config.operator_spec import OperatorSpec
from v41_config.similar_names import did_you_mean


@functools.cache
def operators() -> Mapping[str, OperatorSpec]:
    """Every operator by name, in the order of a forward. The tables are loaded when they are first asked for."""
    from v41_config.operator_tables.attention_entries import ATTENTION_ENTRIES
    from v41_config.operator_tables.attention_stages import ATTENTION_STAGES
    from v41_config.operator_tables.boundaries import BOUNDARIES
    from v41_config.operator_tables.expert_stages import EXPERT_STAGES
    from v41_config.operator_tables.row_stages import ROW_STAGES

    tables = (*BOUNDARIES, *ROW_STAGES, *ATTENTION_STAGES, *ATTENTION_ENTRIES, *EXPERT_STAGES)
    by_name = {spec.name: spec for spec in tables}
    assert len(by_name) == len(tables), "two operators share a name"
    return MappingProxyType(by_name)


def find_operator(name: str) -> OperatorSpec:
    """The operator of that name; an error suggests names that look like it.

    Raises:
        OperatorError: there is none.
    """
    found = operators().get(name)
    if found is None:
        meant = did_you_mean(name, operators(), most=3)
        raise OperatorError("operator", name, f"an operator{meant}" if meant else f"one of {', '.join(operators())}")
    return found
