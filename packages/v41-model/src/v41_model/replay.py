"""Running a conformance file's sequence through the golden, layer-local or end to end."""

from __future__ import annotations

import torch
from torch import Tensor

from v41_config import ModelConfig
from v41_goldens.capture import Capture
from v41_goldens.greedy import greedy_tokens
from v41_goldens.reference_engine import ReferenceEngine
from v41_goldens.weights import ModelWeights
from v41_model.vectors_file import VectorsFile, replay_keys


def replay(config: ModelConfig, weights: ModelWeights, file: VectorsFile, *, layer_local: bool) -> dict[str, Tensor]:
    """Every tensor the golden computes for the file, under the file's keys.

    With `layer_local` each sublayer starts from the file's stored inputs and attends to its stored selections, so a
    tensor differs only where it was computed differently; a decode file's prompt is always computed here.
    """
    engine = ReferenceEngine(config, weights, max_tokens=len(file.tokens) + len(file.decode_tokens))
    injected = replay_inputs(file, config) if layer_local else {}
    if not file.decode_tokens:
        capture = Capture()
        last = engine.step([(0, file.tokens)], capture, injected).logits[-1:]
        return capture.tensors | engine.state_of(0) | {"logits_last": last[0]} | _greedy("next_token", last)

    logits, steps = [engine.step([(0, file.tokens)]).logits[-1:]], []
    for step, token in enumerate(file.decode_tokens):
        capture = Capture()
        here = {key: value[step : step + 1] for key, value in injected.items()}
        logits.append(engine.step([(0, [token])], capture, here).logits[-1:])
        steps.append(capture.tensors)
    result = {key: _stacked([tensors[key] for tensors in steps if key in tensors]) for key in steps[-1]}
    result |= {f"final_state.{key}": value for key, value in engine.state_of(0).items()}
    return result | _greedy("decode_tokens", torch.cat(logits[:-1])) | _greedy("next_token", logits[-1])


def _greedy(key: str, logits: Tensor) -> dict[str, Tensor]:
    """The tokens that logits `[R, V]` choose; none where a stored input with a NaN has reached them."""
    return {} if bool(logits.isnan().any()) else {key: greedy_tokens(logits)}


def replay_inputs(file: VectorsFile, config: ModelConfig) -> dict[str, Tensor]:
    """The stored tensors that a layer-local replay goes on with, as `ForwardContext.injected` takes them."""
    return {key: _padded(key, file.tensors[key], config) for key in replay_keys(config) & set(file.tensors)}


def _padded(key: str, value: Tensor, config: ModelConfig) -> Tensor:
    """Selections are INT32 of full width; other tensors as they are."""
    if not key.endswith(".topk"):
        return value
    return torch.nn.functional.pad(value.int(), (0, config.index_topk - value.shape[1]), value=-1)


def _stacked(rows: list[Tensor]) -> Tensor:
    """One-token captures on top of each other; those that grow with the context are padded with -1."""
    if rows[0].dtype == torch.bool:
        rows = [row.to(torch.int8) for row in rows]
    width = max(row.shape[-1] for row in rows)
    return torch.cat([torch.nn.functional.pad(row, (0, width - row.shape[-1]), value=-1) for row in rows])
