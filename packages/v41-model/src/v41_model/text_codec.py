"""Text in and text out, with the tokenizer of a checkpoint's directory and the released chat form.

Of the released form this knows one user turn: BOS, ``<｜User｜>``, the text, ``<｜Assistant｜>``, and then ``</think>``
for an answer without thinking or ``<think>`` for one with it. Several turns, system prompts and tools are in the
encoder that comes with the release, not here.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from v41_model.errors import TextError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["TOKENIZER_FILE", "TextCodec", "TextStream"]

TOKENIZER_FILE = "tokenizer.json"
MAX_TOKENIZER_BYTES = 256 << 20

USER, ASSISTANT, THINK, END_THINK = "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"


class TextCodec:
    """A tokenizer that adds no special tokens by itself, with the BOS id that begins every prompt."""

    def __init__(self, tokenizer: Tokenizer, bos_token_id: int) -> None:
        self._tokenizer = tokenizer
        self._bos = bos_token_id

    @classmethod
    def open(cls, directory: Path | str, bos_token_id: int) -> TextCodec:
        """The ``tokenizer.json`` of a checkpoint's directory.

        Errors: :class:`TextError` when the file is missing or none, or the library ``tokenizers`` is not installed.
        """
        path = Path(directory) / TOKENIZER_FILE
        if not path.is_file():
            raise TextError(str(path), "no such file", "the tokenizer of the checkpoint; without it prompts are ids")
        if path.stat().st_size > MAX_TOKENIZER_BYTES:
            raise TextError(str(path), f"{path.stat().st_size} bytes", f"at most {MAX_TOKENIZER_BYTES}")
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise TextError("text prompts", "no library tokenizers", "pip install 'v41-model[text]'") from error
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library has no type of its own for what it cannot read
            raise TextError(str(path), str(error), "a file that tokenizers can read") from error
        return cls(tokenizer, bos_token_id)

    def encode(self, text: str) -> list[int]:
        """BOS and the text. What looks like a special token in it is text, so that no prompt can forge a turn.

        Errors: :class:`TextError` for half a surrogate pair, which is no character, and for text that the tokenizer has
        no tokens for.
        """
        return [self._bos, *self._ids(text)]

    def encode_chat(self, text: str, *, thinking: bool = False) -> list[int]:
        """One user turn in the released form, ready for the answer.

        Errors: :class:`TextError` when the tokenizer lacks a token of the form, and as :meth:`encode`.
        """
        user, assistant, opening = map(self._special, (USER, ASSISTANT, THINK if thinking else END_THINK))
        return [self._bos, user, *self._ids(text), assistant, opening]

    def decode(self, ids: list[int]) -> str:
        """The text of ids, special tokens left out."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text

    def stream(self) -> TextStream:
        """A decoder of one request's tokens as they come."""
        return TextStream(self._tokenizer)

    def _ids(self, text: str) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise TextError("text prompt", text, f"characters, which position {error.start} is not") from error
        self._tokenizer.encode_special_tokens = True
        try:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        except Exception as error:  # a vocabulary without a token for what it does not know, say
            raise TextError(TOKENIZER_FILE, str(error), "a tokenizer that can encode the prompt") from error
        return ids

    def _special(self, token: str) -> int:
        found = self._tokenizer.token_to_id(token)
        if found is None:
            raise TextError(TOKENIZER_FILE, f"no token {token}", "the tokens of the released chat form")
        return int(found)


class TextStream:
    """Pieces of text of one request: a character whose bytes come in several tokens is held back until it is whole."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        from tokenizers.decoders import DecodeStream

        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)

    def push(self, token: int) -> str:
        """The text that is complete with this token; empty while it is not."""
        return self._stream.step(self._tokenizer, token) or ""
