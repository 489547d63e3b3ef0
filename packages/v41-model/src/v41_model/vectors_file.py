"""A conformance file: one sequence's tokens and the tensors some engine computed from them.

Keys are those that captures use (`layer.07.attn_out`, `final.norm_out`, `logits`, ...). A prefill file holds one
forward of all its tokens; a decode file also has `decode_tokens`, fed one at a time after the prompt, and its
tensors are stacked over those steps.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from v41_config import LayerConfig, ModelConfig
from v41_config.bounded_file import require_regular
from v41_goldens.capture import layer_key
from v41_model.errors import VectorsError
from v41_model.tensor_report import INTEGERS

_DERIVED = re.compile(r".*_gap$|logits_torch_topk")
"""Diagnostics of a run (margins, another tie rule), not results of the model."""

_REQUEST_KEY = re.compile(r"request\.(\d{1,9})\.")
_LAYER_KEY = re.compile(r"(final_state\.)?layer\.\d{2,}\.\w[\w.]*")


@dataclass(frozen=True)
class VectorsFile:
    """A checked file: `tokens` (the prompt), `decode_tokens` (empty for a prefill file) and `tensors`."""

    tokens: list[int]
    decode_tokens: list[int]
    tensors: dict[str, Tensor]

    @property
    def rows(self) -> int:
        """Token rows that every per-token tensor has."""
        return len(self.decode_tokens) or len(self.tokens)

    def has_layer_inputs(self, config: ModelConfig) -> bool:
        """Whether some layer of the model can be replayed from stored inputs."""
        names = ("X", "attn_in", "moe_in")
        return any(layer_key(layer.layer_id, name) in self.tensors for layer in config.layers for name in names)


def read_vectors(path: Path, config: ModelConfig, request: int | None = None) -> VectorsFile:
    """Read and check a file: keys of layers, token ids in range, shapes and dtypes of what a replay starts from.

    `request` chooses one of those that `v41-model forward` wrote: the keys behind `request.N.`. Its tensors are of the
    prompt; what `--decode` added to them is left out.

    Errors: `VectorsError`, naming the file's tensor.
    """
    try:
        require_regular(path, VectorsError)
        with safe_open(path, framework="pt") as file:
            chosen = _chosen_keys(file.keys(), request)
            tensors = {name: file.get_tensor(key) for name, key in chosen.items()}
    except (OSError, SafetensorError) as error:
        raise VectorsError(str(path), str(error), "a readable safetensors file") from error
    tensors = {key: value for key, value in tensors.items() if not _DERIVED.fullmatch(key)}
    _check_keys(tensors)
    prompt = _token_ids(tensors, "tokens", config)
    if not prompt:
        raise VectorsError("tokens", [], "at least one token")
    decode = _token_ids(tensors, "decode_tokens", config) if "decode_tokens" in tensors else []
    file_ = VectorsFile(prompt, decode, tensors)
    total = len(prompt) + len(decode)
    if total > config.max_position_embeddings:
        raise VectorsError("tokens", total, f"at most max_position_embeddings = {config.max_position_embeddings}")
    for layer in config.layers:
        for name, (shape, dtypes) in _replayed(config, layer, file_.rows, total).items():
            _check(tensors, layer_key(layer.layer_id, name), shape, dtypes)
    for name in _MODEL_INPUTS:
        _check(tensors, name, (file_.rows, config.hidden_size), (torch.bfloat16,))
    _check_selections(file_, config)
    return file_


def _chosen_keys(keys: list[str], request: int | None) -> dict[str, str]:
    """The file's keys by the name they have in a vectors file."""
    requests = sorted({int(match[1]) for key in keys if (match := _REQUEST_KEY.match(key))})
    if request is None:
        if requests and "tokens" not in keys:
            raise VectorsError("keys", f"requests {requests}, none at the top", "one of them, chosen with --request")
        return {key: key for key in keys}
    if request not in requests:
        raise VectorsError("--request", request, f"one of the file's requests, {requests}")
    prefix = f"request.{request}."
    names = {key.removeprefix(prefix): key for key in keys if key.startswith(prefix)}
    return {name: key for name, key in names.items() if not name.startswith("decode_")}


_Spec = tuple[tuple[int | None, ...], tuple[torch.dtype, ...]]


def _replayed(config: ModelConfig, layer: LayerConfig, rows: int, total: int) -> dict[str, _Spec]:
    """Shape (None: any size) and dtypes of what a replay of `layer` starts from."""
    hidden: _Spec = ((rows, config.hidden_size), (torch.bfloat16,))
    specs: dict[str, _Spec] = dict.fromkeys(("attn_in", "attn_out", "moe_in", "moe_out"), hidden)
    specs["X"] = ((rows, config.hc_mult, config.hidden_size), (torch.bfloat16,))
    specs["pre_mix"] = ((rows, config.hc_mult), (torch.float32,))
    if layer.owns_index:
        specs["topk"] = ((rows, None), INTEGERS)
    if layer.makes_candidates:
        specs["candidate_mask"] = ((rows, total // layer.compress_ratio), INTEGERS)
    return specs


_MODEL_INPUTS = ("embed_out", "final.collapsed", "final.norm_out")


def replay_keys(config: ModelConfig) -> frozenset[str]:
    """Keys of the stored tensors that a layer-local replay goes on with; `read_vectors` has checked their form."""
    of_layers = (layer_key(i.layer_id, name) for i in config.layers for name in _replayed(config, i, 0, 0))
    return frozenset((*_MODEL_INPUTS, *of_layers))


def _check_keys(tensors: Mapping[str, Tensor]) -> None:
    for key, value in tensors.items():
        if key.startswith(("layer.", "final_state.")) and not _LAYER_KEY.fullmatch(key):
            raise VectorsError("keys", key, "layer.NN.NAME with the layer in two digits, such as layer.07.attn_out")
        if key.endswith(("compressor_kv_state", "compressor_score_state")) and value.dim() != 2:
            raise VectorsError(key, list(value.shape), "[rows, head_dim]")


def _token_ids(tensors: Mapping[str, Tensor], key: str, config: ModelConfig) -> list[int]:
    if key not in tensors:
        raise VectorsError(key, f"no such tensor among {len(tensors)}", "token ids, integers [T]")
    ids = tensors[key]
    if ids.dim() != 1 or ids.dtype not in INTEGERS:
        raise VectorsError(key, f"{ids.dtype} {list(ids.shape)}", "integers [T]")
    if ids.numel() > config.max_position_embeddings:
        expected = f"at most max_position_embeddings = {config.max_position_embeddings}"
        raise VectorsError(key, f"{ids.numel()} ids", expected)
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < config.vocab_size:
        raise VectorsError(key, [int(ids.min()), int(ids.max())], f"ids from 0 to {config.vocab_size - 1}")
    result: list[int] = ids.long().tolist()
    return result


def _check(
    tensors: dict[str, Tensor], key: str, shape: tuple[int | None, ...], dtypes: tuple[torch.dtype, ...]
) -> None:
    if key not in tensors:
        return
    found = tensors[key]
    fits = found.dim() == len(shape) and all(
        want in (None, have) for want, have in zip(shape, found.shape, strict=True)
    )
    if not fits or found.dtype not in dtypes:
        wanted = f"{' or '.join(str(d).removeprefix('torch.') for d in dtypes)} {list(shape)}"
        raise VectorsError(key, f"{str(found.dtype).removeprefix('torch.')} {list(found.shape)}", wanted)


def _check_selections(file: VectorsFile, config: ModelConfig) -> None:
    """A stored selection names visible entries only: anything else would read rows nobody published."""
    first = len(file.tokens) if file.decode_tokens else 0
    positions = torch.arange(first, first + file.rows)
    for layer in config.layers:
        key = layer_key(layer.layer_id, "topk")
        if not layer.owns_index or key not in file.tensors:
            continue
        entries = file.tensors[key].long()
        if entries.shape[1] > config.index_topk:
            raise VectorsError(key, entries.shape[1], f"at most index_topk = {config.index_topk} entries a token")
        visible = (positions + 1) // layer.compress_ratio
        wrong = (entries < -1) | (entries >= visible.unsqueeze(-1))
        if wrong.any():
            row, column = (int(i) for i in wrong.nonzero()[0])
            raise VectorsError(f"{key}[{row}, {column}]", int(entries[row, column]),
                               f"-1 or an entry below {int(visible[row])}, visible there")  # fmt: skip
