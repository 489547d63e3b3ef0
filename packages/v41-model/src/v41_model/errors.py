"""The typed errors of this distribution; all are :class:`v41_config.errors.V41Error`."""

from __future__ import annotations

from v41_config.errors import V41Error

__all__ = [
    "OptionError",
    "OutputError",
    "PoolError",
    "ProviderError",
    "RankError",
    "RequestError",
    "SessionError",
    "TextError",
    "VectorsError",
    "WorldError",
]


class WorldError(V41Error):
    """A collective that cannot complete: ranks disagree, or one of them will never arrive."""


class RankError(WorldError):
    """A rank's program raised, or its process ended. ``rank`` names it.

    ``error`` is the original error, also ``__cause__``; of a rank in another process it is a text.
    """

    def __init__(self, rank: int, error: BaseException | str) -> None:
        found = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        super().__init__(f"rank {rank}", found, "the rank's program to finish")
        self.rank = rank
        self.error = error

    def __reduce__(self) -> tuple[type[RankError], tuple[int, BaseException | str]]:  # type: ignore[override]
        return type(self), (self.rank, self.error)


class RequestError(V41Error):
    """A request, or a file of requests, that the model cannot run."""


class OutputError(V41Error):
    """A file that cannot be written where it was asked for."""


class CacheError(V41Error):
    """A file in the user's cache directory that is not as this program writes it; it can be removed."""


class PoolError(V41Error):
    """A page pool that has no block left, or a block returned that was not lent."""


class SessionError(V41Error):
    """A session used against its contract."""


class VectorsError(V41Error):
    """A conformance file that does not hold what its keys promise."""


class OptionError(V41Error):
    """A command-line option outside its range."""


class ProviderError(V41Error):
    """A provider of operators that is not there, is none, or has not what was asked of it."""


class TextError(V41Error):
    """Text that cannot be turned into tokens, for want of a tokenizer or of one of its tokens."""
