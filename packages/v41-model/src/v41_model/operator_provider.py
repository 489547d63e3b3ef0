"""Providers of operators other than the goldens: what they offer, and finding those that are installed.

A distribution registers a provider under the entry-point group :data:`PROVIDER_GROUP`; the entry point's name is the
provider's, its value an :class:`OperatorProvider`, or a class or function without parameters that makes one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Protocol, runtime_checkable

from v41_model.errors import ProviderError

__all__ = ["PROVIDER_GROUP", "OperatorProvider", "find_provider", "installed_providers"]

PROVIDER_GROUP = "v41.operator_providers"


@runtime_checkable
class OperatorProvider(Protocol):
    """Operators in the destination form of the ABI (``v41-config operators`` prints every contract)."""

    def names(self) -> Collection[str]:
        """The ABI's names of the operators there are."""
        ...

    def run(self, name: str, arguments: Mapping[str, object], /) -> None:
        """Run one operator.

        ``arguments`` are the contract's tensors by name, contiguous, and scalars under their names; a count that is
        missing means all rows. ``out`` and ``inout`` tensors are the caller's and are written in place. Errors:
        whatever says what is wrong, with nothing written.
        """
        ...


def installed_providers() -> dict[str, EntryPoint]:
    """Entry points by provider name; nothing is imported."""
    return {point.name: point for point in entry_points(group=PROVIDER_GROUP)}


def find_provider(name: str) -> OperatorProvider:
    """The provider of that name, made ready.

    Errors: :class:`ProviderError` when none of that name is installed, it cannot be imported, or it is no provider.
    """
    installed = installed_providers()
    if name not in installed:
        hint = " (v41-model[pypto] installs one)" if name == "pypto" else ""
        expected = f"an installed provider of operators: {', '.join(sorted(installed)) or 'there is none'}{hint}"
        raise ProviderError("operator provider", name, expected)
    try:
        loaded = installed[name].load()
        provider = loaded() if callable(loaded) else loaded
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
        raise ProviderError(f"operator provider {name}", found, "one that can be loaded") from error
    if not isinstance(provider, OperatorProvider):
        raise ProviderError(f"operator provider {name}", type(provider).__name__, "an object with names() and run()")
    return provider
