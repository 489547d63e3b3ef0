"""Single operators exchanged inside the running model, each call compared with its golden.

An exchanged operator is computed twice from the same inputs, by the golden and by the provider, and the model goes on
with the provider's result: so every difference stands in the layer and tensor where it arises. :class:`SwapReport`
says which comes first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from v41_config import ConstantSpec, ModelConfig, OperatorSpec
from v41_config.similar_names import did_you_mean
from v41_goldens.forward_context import ForwardContext
from v41_model.errors import ProviderError
from v41_model.operator_call import OperatorCalls
from v41_model.operator_calls import CALLS
from v41_model.operator_provider import OperatorProvider, find_provider
from v41_model.operators import Operators
from v41_model.swap_report import SwapReport
from v41_model.world import World

__all__ = ["Swap", "parse_swaps"]

EVERY = "all"
"""Instead of a list of operators: all that the provider has and the model can exchange, but whole attention modes."""


def parse_swaps(texts: Sequence[str]) -> dict[str, str]:
    """``["rms_norm,mhc_post=pypto"]`` to provider names by operator name; ``all=NAME`` names every one it has.

    Errors: :class:`ProviderError` for text of another form, an operator that cannot be exchanged, or one given twice.
    """
    chosen: dict[str, str] = {}
    for text in texts:
        names, separator, provider = text.partition("=")
        if not separator or not provider or not names:
            raise ProviderError("swap", text, "OPERATOR[,OPERATOR...]=PROVIDER")
        for name in names.split(","):
            if name != EVERY:
                _require_exchangeable(name)
            if name in chosen:
                raise ProviderError("swap", f"{name} twice", "each operator once")
            chosen[name] = provider
    return chosen


def _require_exchangeable(name: str) -> None:
    if name not in CALLS:
        meant = did_you_mean(name, CALLS)
        raise ProviderError("swap", name, f"an operator that can be exchanged: {', '.join(CALLS)}{meant}")


class Swap:
    """Operators of some providers, by the ABI's name, inside a table that rank code takes.

    Errors: :class:`ProviderError` for an operator that cannot be exchanged or that its provider has not.
    """

    def __init__(
        self,
        providers: Mapping[str, OperatorProvider],
        config: ModelConfig,
        world: World,
        operators: Operators | None = None,
    ) -> None:
        self.report = SwapReport()
        self._config, self._world = config, world
        self._goldens = operators or Operators()
        self._providers = dict(providers)
        for name, provider in providers.items():
            _require_exchangeable(name)
            if name not in provider.names():
                raise ProviderError(f"swap {name}", "no such operator", f"one of {', '.join(sorted(provider.names()))}")
        self._table_at = functools.cache(self._table)
        self.operators = self._table_at(None)

    @classmethod
    def of_installed(
        cls, chosen: Mapping[str, str], config: ModelConfig, world: World, operators: Operators | None = None
    ) -> Swap:
        """With the providers that are installed; ``chosen`` as :func:`parse_swaps` gives it."""
        loaded = {provider: find_provider(provider) for provider in dict.fromkeys(chosen.values())}
        providers: dict[str, OperatorProvider] = {}
        for name, provider in chosen.items():
            single = [n for n, calls in CALLS.items() if n not in chosen and not calls.whole_mode]
            every = [n for n in single if n in loaded[provider].names()]
            for operator in every if name == EVERY else [name]:
                providers[operator] = loaded[provider]
        return cls(providers, config, world, operators)

    def close(self) -> None:
        """Let providers go that hold something, a worker process say."""
        for provider in dict.fromkeys(self._providers.values()):
            if hasattr(provider, "close"):
                provider.close()

    def _table(self, layer: int | None) -> Operators:
        """The operators of one layer."""
        behind: dict[str, list[OperatorCalls]] = {}
        for name in self._providers:
            behind.setdefault(CALLS[name].entry, []).append(CALLS[name])
        exchanged = {entry: functools.partial(self._call, layer, entry, calls) for entry, calls in behind.items()}
        return _SwappedOperators(**{**vars(self._goldens), **exchanged}, table_at=self._table_at)

    def _call(self, layer: int | None, entry: str, candidates: Sequence[OperatorCalls], *given: Any) -> Any:
        golden = getattr(self._goldens, entry)
        calls = next((calls for calls in candidates if calls.applies(*given)), None)
        return golden(*given) if calls is None else self._beside(layer, calls, golden, given)

    def _beside(
        self, layer: int | None, calls: OperatorCalls, golden: Callable[..., Any], given: tuple[Any, ...]
    ) -> Any:
        """The golden, then from the same state the provider; its result, and a line of the report."""
        spec = calls.spec
        arguments = calls.arguments(*given)
        kept = {name: arguments[name].clone() for name in _updated(spec)}
        with _stages(given, self._goldens):
            result = golden(*given)
        outputs = calls.named_outputs(given, result)
        expected = {name: tensor.flatten(0, tensor.dim() - _rank(spec, name)) for name, tensor in outputs.items()}
        for name, before in kept.items():
            expected[name] = arguments[name].clone()
            _bytes(arguments[name]).copy_(_bytes(before))
        if not any(tensor.numel() for tensor in expected.values()):
            return result
        operands = {name: _operand(spec, name, value) for name, value in arguments.items()}
        constants = {s.name: s.resolve(self._config) for s in spec.scalars if isinstance(s, ConstantSpec)}
        written = {name: _unwritten(expected[name]) for name in outputs}
        spec.check({**operands, **constants, **written})
        self._providers[spec.name].run(spec.name, {**operands, **constants, **written})
        found = {**arguments, **written}
        for name, tensor in expected.items():
            self.report.compare(layer, self._world.current_rank, spec.name, name, found[name], tensor)
        return calls.restored(given, result, [written[name].view(outputs[name].shape) for name in outputs])


@dataclass(frozen=True)
class _SwappedOperators(Operators):
    table_at: Callable[[int | None], Operators] = field(kw_only=True)

    def at(self, layer: int | None) -> Operators:
        return self.table_at(layer)


@contextmanager
def _stages(given: tuple[Any, ...], goldens: Operators) -> Iterator[None]:
    """What a golden is composed of is golden too, though the stages of its context may be exchanged."""
    contexts = [argument for argument in given if isinstance(argument, ForwardContext)]
    before = [context.stages for context in contexts]
    for context in contexts:
        context.stages = goldens
    try:
        yield
    finally:
        for context, stages in zip(contexts, before, strict=True):
            context.stages = stages


def _updated(spec: OperatorSpec) -> list[str]:
    return [tensor.name for tensor in spec.tensors if tensor.direction == "inout"]


def _rank(spec: OperatorSpec, name: str) -> int:
    return next(len(tensor.dims) for tensor in spec.tensors if tensor.name == name)


def _operand(spec: OperatorSpec, name: str, value: Any) -> Any:
    """As the contract has it: contiguous, rows of tiles in one dimension. What is written to is passed as it is."""
    if not isinstance(value, Tensor) or name in _updated(spec):
        return value
    return value.flatten(0, value.dim() - _rank(spec, name)).contiguous()


def _unwritten(like: Tensor) -> Tensor:
    """A destination in which an element that nobody writes shows: NaN, -1, or for masks false."""
    tensor = torch.empty_like(like, memory_format=torch.contiguous_format)
    _bytes(tensor).fill_(0 if like.dtype == torch.bool else 0xFF)
    return tensor


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)
