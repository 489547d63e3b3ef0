"""What ``v41-model forward`` writes: per request the logits of a prefill and of greedy decode steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from v41_model.atomic_file import atomic_file
from v41_model.errors import RequestError
from v41_model.generation import GroupStep, Request, admit, advance
from v41_model.layer_capture import merge_captures, request_tensors
from v41_model.session import ModelSession

__all__ = ["forward_tensors", "write_tensors"]


def forward_tensors(
    session: ModelSession, prompts: Sequence[Sequence[int]], decode: int = 0, layers: bool = False
) -> dict[str, Tensor]:
    """Prefill every prompt in one step, then ``decode`` greedy steps.

    Per request i: ``request.{i}.tokens`` INT32 ``[T]`` and ``request.{i}.logits`` FP32 ``[T, V]`` of every prompt
    position; with ``decode`` = N > 0 ``request.{i}.decode_tokens`` INT32 ``[N]``, the tokens fed, and
    ``request.{i}.decode_logits`` FP32 ``[N, V]``; with ``layers`` the prefill's tensors under the keys of a
    conformance file after ``request.{i}.`` (all heads, packed order, top-k as logical entries).

    Errors: :class:`RequestError` for a prompt that cannot be run, a negative ``decode``, or more than the session's
    limits let into one step.
    """
    if decode < 0:
        raise RequestError("decode", decode, "at least 0 steps")
    # the token chosen after the last decode step is never fed: it ends the request
    requests = [Request(tuple(prompt), decode + 1) for prompt in prompts]
    index_of = {id(request): index for index, request in enumerate(requests)}
    rows = sum(map(len, prompts))
    groups = admit(session, requests, max_rows=rows)
    if any(group.waiting for group in groups):
        raise RequestError("requests", f"{len(prompts)} of them", f"at most {session.limits.sequences} in a DP group")
    tensors: dict[str, Tensor] = {}
    for step in advance(session, groups, rows, all_logits=True, capture=layers):
        merged = merge_captures(step.output.captures) if layers and step.planned else {}
        for row, (request, _) in enumerate(step.planned):
            prefix = f"request.{index_of[id(request)]}."
            tensors[f"{prefix}tokens"] = torch.tensor(request.prompt, dtype=torch.int32)
            bounds = step.output.metadata.query_start_loc
            tensors[f"{prefix}logits"] = step.output.logits[int(bounds[row]) : int(bounds[row + 1])]
            if layers:
                own = request_tensors(session.config, merged, step.output.metadata, row)
                tensors.update({prefix + key: tensor for key, tensor in own.items()})
    decoded: list[list[Tensor]] = [[] for _ in prompts]
    for _ in range(decode):
        for step in advance(session, groups):
            _append_logits(decoded, step, index_of)
    for index, request in enumerate(requests):
        if decode:
            tensors[f"request.{index}.decode_tokens"] = torch.tensor(request.generated[:decode], dtype=torch.int32)
            tensors[f"request.{index}.decode_logits"] = torch.stack(decoded[index])
    return tensors


def _append_logits(decoded: list[list[Tensor]], step: GroupStep, index_of: Mapping[int, int]) -> None:
    for (request, _), logits in zip(step.planned, step.output.logits, strict=True):
        decoded[index_of[id(request)]].append(logits)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file whole or not at all. Errors: :class:`v41_model.errors.OutputError`."""
    with atomic_file(path) as temporary:
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, temporary, metadata=dict(metadata))
