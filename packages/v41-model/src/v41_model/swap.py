"""Single operators exchanged inside the running model, each call compared with its golden.

An exchanged operator is computed twice from the same inputs, by the golden and by the provider, and the model goes on
with the provider's result: so every difference stands in the layer and tensor where it arises. :class:`SwapReport`
says which comes first.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from v41_config import ConstantSpec, ModelConfig, OperatorSpec, ParallelLayout, operators
from v41_config.similar_names import did_you_mean
from v41_goldens import linear
from v41_goldens.forward_context import ForwardContext
from v41_goldens.linear import Linear, exchanged_linears
from v41_model.errors import ProviderError
from v41_model.linear_calls import LINEAR_CALLS
from v41_model.operator_call import OperatorCalls
from v41_model.operator_calls import CALLS
from v41_model.operator_provider import OperatorProvider, find_provider
from v41_model.operators import Golden, Operators
from v41_model.rank_layer import RankStep
from v41_model.swap_report import SwapReport
from v41_model.world import World

__all__ = ["EVERY", "Swap", "parse_swaps"]

EVERY = "all"
"""Instead of a list of operators: all that the provider has and the model can exchange, but those made of others."""


def parse_swaps(texts: Sequence[str], layout: ParallelLayout | None = None) -> dict[str, str]:
    """``["rms_norm,mhc_post=pypto"]`` to provider names by operator name; ``all=NAME`` names every one it has.

    Errors: :class:`ProviderError` for text of another form, an operator that cannot be exchanged (in ``layout``, one
    rank where None), or one given twice.
    """
    layout = layout or ParallelLayout()
    chosen: dict[str, str] = {}
    for text in texts:
        names, separator, provider = text.partition("=")
        if not separator or not provider or not names:
            raise ProviderError("swap", text, "OPERATOR[,OPERATOR...]=PROVIDER")
        for name in names.split(","):
            if name != EVERY:
                _require_exchangeable(name, layout)
            if name in chosen:
                raise ProviderError("swap", f"{name} twice", "each operator once")
            chosen[name] = provider
    return chosen


def _require_exchangeable(name: str, layout: ParallelLayout) -> None:
    if name not in CALLS and name in operators():
        raise ProviderError("swap", name, "an operator that moves no rows between ranks, which no provider does")
    if name not in CALLS:
        meant = did_you_mean(name, CALLS) or f": {', '.join(CALLS)}"
        raise ProviderError("swap", name, f"an operator that can be exchanged{meant}")
    group = CALLS[name].joins
    ranks = {"": 1, "TP": layout.tp, "EP": layout.ep}[group]
    if ranks > 1:
        expected = f"one rank in the {group} group, since no provider moves rows between ranks"
        raise ProviderError(f"swap {name}", f"{ranks} ranks", expected)


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
            _require_exchangeable(name, world.layout)
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
            single = [n for n, calls in CALLS.items() if n not in chosen and not calls.composed]
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
        """The operators of one layer: entries, what goes around several, and linears inside of those that stay."""
        linears = {
            entry: functools.partial(self._call, layer, inspect.unwrap(getattr(linear, entry)), calls)
            for entry, calls in self._behind(name for name in self._providers if name in LINEAR_CALLS).items()
        }
        others = self._behind(name for name in self._providers if name not in LINEAR_CALLS)
        table = dict(vars(self._goldens))
        for entry, golden in table.items():
            if entry in others:
                table[entry] = functools.partial(self._call, layer, golden, others[entry])
            elif linears:
                table[entry] = functools.partial(_with_linears, linears, golden)

        def around(golden: Callable[..., Any]) -> Callable[..., Any]:
            calls = others.get(golden.__name__)
            golden = self._goldens.around(golden)
            return golden if calls is None else functools.partial(self._call, layer, golden, calls)

        return _SwappedOperators(**table, table_at=self._table_at, exchanged_around=around)

    @staticmethod
    def _behind(names: Iterable[str]) -> dict[str, list[OperatorCalls]]:
        """Those of some names, by entry."""
        behind: dict[str, list[OperatorCalls]] = {}
        for name in names:
            behind.setdefault(CALLS[name].entry, []).append(CALLS[name])
        return behind

    def _call(
        self, layer: int | None, golden: Callable[..., Any], candidates: Sequence[OperatorCalls], *given: Any
    ) -> Any:
        calls = next((calls for calls in candidates if calls.applies(*given)), None)
        if calls is None:
            return golden(*given)
        with exchanged_linears({}):  # neither the golden nor the provider, which may be made of goldens
            return self._beside(layer, calls, golden, given)

    def _beside(
        self, layer: int | None, calls: OperatorCalls, golden: Callable[..., Any], given: tuple[Any, ...]
    ) -> Any:
        """The golden, then from the same state the provider; its result, and a line of the report."""
        spec = calls.spec
        arguments = calls.arguments(*given)
        kept = {name: arguments[name].clone() for name in _updated(spec)}
        with _goldens_inside(given, self._goldens) as within:
            result = golden(*within)
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
    exchanged_around: Callable[[Any], Any] = field(kw_only=True)

    def at(self, layer: int | None) -> Operators:
        return self.table_at(layer)

    def around(self, golden: Golden) -> Golden:
        exchanged: Golden = self.exchanged_around(golden)
        return exchanged


def _with_linears(linears: Mapping[str, Linear], golden: Callable[..., Any], *given: Any) -> Any:
    with exchanged_linears(linears):
        return golden(*given)


@contextmanager
def _goldens_inside(given: tuple[Any, ...], goldens: Operators) -> Iterator[tuple[Any, ...]]:
    """What a golden is composed of is golden too, though the tables among its arguments may have exchanged parts."""
    contexts = [
        a.attention if isinstance(a, RankStep) else a for a in given if isinstance(a, (RankStep, ForwardContext))
    ]
    before = [context.stages for context in contexts]
    for context in contexts:
        context.stages = goldens
    try:
        yield tuple(_with_table(argument, goldens) for argument in given)
    finally:
        for context, stages in zip(contexts, before, strict=True):
            context.stages = stages


def _with_table(argument: Any, table: Operators) -> Any:
    if isinstance(argument, RankStep):
        return replace(argument, operators=table)
    return table if isinstance(argument, Operators) else argument


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
