"""Strategies: one object per kind of target, which describes its tensors and never moves a byte."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from ..errors import UnsupportedTargetError
from ..parts import foreign
from .base import Claim, Strategy
from .flat_buffer import FlatBufferStrategy
from .fsdp2 import FSDP2Strategy
from .megatron_optimizer import MegatronOptimizerStrategy
from .optimizer import OptimizerStrategy
from .per_parameter import PerParameterStrategy, is_sharded

__all__ = [
    "Claim",
    "FSDP2Strategy",
    "FlatBufferStrategy",
    "MegatronOptimizerStrategy",
    "OptimizerStrategy",
    "PerParameterStrategy",
    "Strategy",
    "strategies_for",
    "strategy_for",
]

_ACCEPTED = "a torch.nn.Module, a list of them, a torch.optim.Optimizer or one of Megatron-core's, None, or a Strategy object"

# Modules that hold their tensors in ways no strategy here describes whole, or read them in C++ past every guard:
# (module of the class, its name).
_FOREIGN = (
    ("torch.jit", "ScriptModule"),
    ("torch.distributed.fsdp", "FullyShardedDataParallel"),
    ("torch.nn.parallel", "DistributedDataParallel"),
    ("megatron.core.distributed", "DistributedDataParallel"),  # inside of another module; pass the wrapper itself
    ("megatron.core.distributed", "FullyShardedDataParallel"),
)


def strategy_for(target: object, **policy: Any) -> Strategy:
    """The strategy for a module or an optimizer.

    Example:
        >>> strategy_for(torch.nn.Linear(1, 1), grads="discard").name
        'Linear'

    Args:
        target: a module or an optimizer; a strategy object is returned as it is.
        policy: keywords of that strategy.

    Raises:
        UnsupportedTargetError: no strategy describes this target whole.
        TypeError: the strategy takes no such keyword.
    """
    if isinstance(target, Strategy):
        return target
    if target is None or isinstance(target, (list, tuple)):
        raise UnsupportedTargetError(
            f"strategy_for() takes one module or optimizer, not {target!r:.60}; an Offloader takes lists and None"
        )
    (strategy,) = strategies_for([target], policy)
    return strategy


def strategies_for(targets: Iterable[object], policy: Mapping[str, Any]) -> list[Strategy]:
    """The strategies for some targets; lists of modules are taken apart, and None is nothing to do.

    Args:
        targets: modules, lists of modules, optimizers, None, or strategy objects.
        policy: keywords, each for those targets given as objects whose strategy takes it.

    Raises:
        UnsupportedTargetError: no strategy describes a target whole.
        TypeError: a keyword that no target takes.
    """
    found: list[Strategy] = []
    taken: set[str] = set()
    for index, target in _flat(targets):
        if target is None:
            taken |= _keywords(PerParameterStrategy) | _keywords(OptimizerStrategy)
        elif isinstance(target, Strategy):
            for strategy in target.each():
                if strategy.target is None:
                    raise UnsupportedTargetError(
                        f"the target of {strategy.name!r} is gone: strategies hold it weakly, keep it yourself"
                    )
                found.append(strategy)
        else:
            kind = _kind(target)
            found.append(kind(target, **{key: policy[key] for key in policy if key in _keywords(kind)}))
            found[-1].name += index
            taken |= _keywords(kind)
    if unknown := sorted(set(policy) - taken):
        accepted = ", ".join(sorted(taken)) or "no keyword: strategy objects keep the policies they were made with"
        raise TypeError(f"no target takes the keyword {unknown[0]!r}; these targets take {accepted}")
    return found


def _flat(targets: Iterable[object], index: str = "") -> Iterator[tuple[str, object]]:
    """The targets in nested lists, each with its index there, ``"[1]"``; without one where it stands alone."""
    for target in targets:
        if isinstance(target, (list, tuple)):
            for number, each in enumerate(target or [None]):
                yield from _flat([each], f"{index}[{number}]" if len(target) > 1 else index)
        else:
            yield index, target


def _kind(target: object) -> Callable[..., Strategy]:
    if isinstance(target, foreign("megatron.core.distributed", "DistributedDataParallel")):
        return FlatBufferStrategy
    if isinstance(target, torch.nn.Module):
        _refuse_foreign(target)
        return FSDP2Strategy if is_sharded(target) else PerParameterStrategy
    if isinstance(target, torch.optim.Optimizer):
        return OptimizerStrategy
    if isinstance(target, foreign("megatron.core.optimizer.optimizer", "MegatronOptimizer")):
        return MegatronOptimizerStrategy
    raise UnsupportedTargetError(f"a {type(target).__name__} cannot be offloaded ({target!r:.60}). Pass {_ACCEPTED}")


def _keywords(kind: Callable[..., Strategy]) -> set[str]:
    parameters = inspect.signature(kind).parameters
    return {name for name, parameter in parameters.items() if parameter.kind is inspect.Parameter.KEYWORD_ONLY}


def _refuse_foreign(module: torch.nn.Module) -> None:
    for path, part in module.named_modules():
        for where, name in _FOREIGN:
            if isinstance(part, foreign(where, name)):
                raise UnsupportedTargetError(
                    f"{type(module).__name__} has a {where}.{name} at {path or 'its root'!r}, which holds or reads tensors in "
                    "a way that its parameters do not tell. Nothing was touched. Pass it itself, or a Strategy that knows it"
                )
