"""One sequence that is being continued: its prompt, what was generated, and how much of both is stored."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from v41_config import ModelConfig
from v41_model.errors import RequestError
from v41_model.integer_checks import checked_integer, checked_token_ids
from v41_model.sampling import GREEDY, Sampling

__all__ = ["Request", "check_prompt", "checked_request"]


@dataclass(eq=False)
class Request:
    """A sequence, for as long as it runs; two with the same numbers are still two.

    ``row`` is its place in the page allocator while it holds pages; ``cancelled`` says that nobody waits for it.
    """

    prompt: tuple[int, ...]
    max_new_tokens: int
    stop_ids: frozenset[int] = frozenset()
    sampling: Sampling = GREEDY
    generated: list[int] = field(default_factory=list)
    stored: int = 0
    row: int | None = None
    cancelled: bool = False

    @property
    def longest(self) -> int:
        """Tokens it may reach."""
        return len(self.prompt) + self.max_new_tokens

    @property
    def pending(self) -> int:
        """Tokens known but not stored yet: the rest of the prompt, or the last one generated."""
        return len(self.prompt) + len(self.generated) - self.stored

    @property
    def decodes(self) -> bool:
        """Whether the whole prompt is stored."""
        return self.stored >= len(self.prompt)

    @property
    def finished(self) -> bool:
        """Whether it needs no further step."""
        stopped = bool(self.generated) and self.generated[-1] in self.stop_ids
        return self.cancelled or stopped or len(self.generated) >= self.max_new_tokens

    def next_tokens(self, count: int) -> list[int]:
        """The first ``count`` pending tokens."""
        return self._tokens(self.stored, self.stored + count)

    def tokens_before(self, count: int) -> list[int]:
        """The last ``count`` stored tokens: after a step, those it has run."""
        return self._tokens(self.stored - count, self.stored)

    def _tokens(self, start: int, stop: int) -> list[int]:
        prompt = len(self.prompt)
        return [*self.prompt[start:stop], *self.generated[max(0, start - prompt) : max(0, stop - prompt)]]


def check_prompt(config: ModelConfig, where: str, tokens: Sequence[int], new_tokens: int) -> tuple[int, ...]:
    """A prompt's ids as plain integers.

    Errors: :class:`RequestError` for a prompt that is empty, holds anything but ids of the vocabulary, or grows past
    the last position.
    """
    ids = checked_token_ids(where, tokens, config.vocab_size)
    if not ids:
        raise RequestError(where, "no tokens", "at least one token id")
    if len(ids) + new_tokens > config.max_position_embeddings:
        expected = f"at most max_position_embeddings = {config.max_position_embeddings} with what is generated"
        raise RequestError(where, f"{len(ids)} tokens + {new_tokens} new ones", expected)
    return ids


def checked_request(
    config: ModelConfig,
    where: str,
    prompt: Sequence[int],
    max_new_tokens: int,
    stop_ids: Collection[int] = (),
    sampling: Sampling = GREEDY,
) -> Request:
    """A new request of what a caller gave. Errors: :class:`RequestError` naming what it cannot run."""
    count = checked_integer("max_new_tokens", max_new_tokens, 1)
    stops = frozenset(checked_token_ids("stop_ids", stop_ids, config.vocab_size))
    return Request(check_prompt(config, where, prompt, count), count, stops, sampling)
