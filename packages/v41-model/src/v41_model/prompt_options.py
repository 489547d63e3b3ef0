"""Where a command's prompts come from: a file of requests or the command line, as ids or as text."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from v41_config import ModelConfig
from v41_model.errors import OptionError
from v41_model.request_file import Prompt, read_request_file
from v41_model.text_codec import TextCodec

__all__ = ["Prompts", "add_prompt_options", "given_prompts", "token_prompts"]

CHAT, THINKING = "answer", "thinking"


@dataclass(frozen=True)
class Prompts:
    """Token ids of every prompt, and the codec where one of them was text."""

    tokens: list[list[int]]
    codec: TextCodec | None


def add_prompt_options(parser: argparse.ArgumentParser) -> None:
    """``--requests``, ``--prompt`` and ``--chat``."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--requests", type=Path, metavar="FILE.json", help='{"requests": [[token ids] or "text", ...]}')
    source.add_argument(
        "--prompt",
        action="append",
        metavar="TEXT",
        help="a prompt as text, for a checkpoint with a tokenizer; repeatable",
    )
    parser.add_argument(
        "--chat",
        nargs="?",
        const=CHAT,
        choices=(CHAT, THINKING),
        help="take every text as a user's turn in the released chat form, to be answered without thinking (default) "
        "or with it",
    )


def given_prompts(arguments: argparse.Namespace) -> list[Prompt]:
    """What the options name, before the checkpoint is opened.

    Errors: :class:`v41_model.errors.RequestError` for a file that is none.
    """
    prompts: Sequence[Prompt] = arguments.prompt or []
    return list(prompts) if arguments.requests is None else read_request_file(arguments.requests)


def token_prompts(prompts: Sequence[Prompt], config: ModelConfig, directory: Path, chat: str | None) -> Prompts:
    """Prompts as token ids; text is encoded by the tokenizer in ``directory``.

    Errors: :class:`v41_model.errors.TextError` where there is none, :class:`OptionError` for a chat without text.
    """
    if chat is not None and not any(isinstance(prompt, str) for prompt in prompts):
        raise OptionError("--chat", "prompts of token ids", "text: ids are taken as they are")
    if all(isinstance(prompt, list) for prompt in prompts):
        return Prompts([list(prompt) for prompt in prompts if isinstance(prompt, list)], None)
    codec = TextCodec.open(directory, config.bos_token_id)

    def encoded(text: str) -> list[int]:
        return codec.encode(text) if chat is None else codec.encode_chat(text, thinking=chat == THINKING)

    return Prompts([encoded(prompt) if isinstance(prompt, str) else prompt for prompt in prompts], codec)
