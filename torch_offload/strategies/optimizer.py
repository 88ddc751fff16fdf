"""The state of any torch optimizer."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch

from ..errors import UnsupportedTargetError
from .base import Claim, Strategy


class OptimizerStrategy(Strategy):
    """Every tensor in the state of a `torch.optim.Optimizer`, under any key, in any nesting of containers, records and plain
    objects.

    Looking creates no state, and nothing is added to it. Beside an accelerator, tensors in host memory (AdamW's ``step``)
    are left alone. While the state is away, `load_state_dict` raises, since it would build fresh state on the device, and
    so does `step`, before it counts.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = torch.optim.AdamW([weight])
        >>> weight.sum().backward(); optimizer.step()
        >>> [(claim.of_name, claim.name) for claim in OptimizerStrategy(optimizer).claims()]
        [('param 0', 'step'), ('param 0', 'exp_avg'), ('param 0', 'exp_avg_sq')]

    Args:
        optimizer: the optimizer, or a list of them. Held weakly.
        name, shared: as for `Strategy`.

    Raises:
        UnsupportedTargetError: ``optimizer`` is no torch optimizer.
        ValueError: an unknown policy.
    """

    components = ("optimizer",)

    def accept(self, target: Any) -> None:
        if not isinstance(target, torch.optim.Optimizer):
            raise UnsupportedTargetError(f"{type(self).__name__} takes a torch.optim.Optimizer, not a {type(target).__name__}")

    def claims(self) -> Iterable[Claim]:
        names = _parameter_names(self.target)
        for index, (key, state) in enumerate(self.target.state.items()):
            is_parameter = isinstance(key, torch.Tensor)
            of_name = names.get(id(key), f"state {index}") if is_parameter else str(key)
            for path, tensor in _tensors(state, names):
                yield Claim(
                    tensor=tensor,
                    name=".".join(path) or "state",
                    component="optimizer",
                    of=key if is_parameter else None,
                    of_name=of_name,
                    host=True,
                )

    def leaves(self) -> Iterable[torch.Tensor]:
        return (parameter for group in self.target.param_groups for parameter in group["params"])

    def barriers(self, check: Callable[[str], None]) -> Iterable[Callable[[], None]]:
        loading = self.target.register_load_state_dict_pre_hook(lambda *_: check("load_state_dict()"), prepend=True)
        stepping = self.target.register_step_pre_hook(lambda *_: check("step()"))
        return loading.remove, stepping.remove


def _parameter_names(optimizer: torch.optim.Optimizer) -> dict[int, str]:
    names: dict[int, str] = {}
    for group in optimizer.param_groups:
        given = group.get("param_names", ())
        for index, parameter in enumerate(group["params"]):
            names[id(parameter)] = given[index] if index < len(given) else f"param {len(names)}"
    return names


def _tensors(state: Any, parameters: Collection[int]) -> Iterator[tuple[tuple[str, ...], torch.Tensor]]:
    """The tensors in a state and the names on the way to each, but for the parameters with these ids."""
    waiting: list[tuple[tuple[str, ...], Any]] = [((), state)]
    seen: set[int] = set()
    while waiting:
        path, thing = waiting.pop()
        if isinstance(thing, torch.Tensor):
            if id(thing) not in parameters:
                yield path, thing
        elif id(thing) not in seen:
            seen.add(id(thing))
            waiting += [((*path, _label(key)), value) for key, value in reversed(_members(thing))]


def _label(key: Any) -> str:
    """A key as a part of a name; printing a tensor would read it."""
    return type(key).__name__ if isinstance(key, torch.Tensor) else str(key)


def _members(thing: Any) -> list[tuple[Any, Any]]:
    """What a container, a record or a plain object has; nothing of what is code or has tensors of its own."""
    if isinstance(thing, Mapping):
        return list(thing.items())
    if isinstance(thing, (list, tuple, deque, set, frozenset)):
        return list(enumerate(thing))
    if dataclasses.is_dataclass(thing) and not isinstance(thing, type):
        return [(field.name, getattr(thing, field.name, None)) for field in dataclasses.fields(thing)]
    is_code = isinstance(thing, (type, ModuleType, FunctionType, MethodType, torch.nn.Module, torch.optim.Optimizer))
    return list(vars(thing).items()) if type(thing).__dictoffset__ and not is_code else []
