"""The tensors that an object holds, under whatever name."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch


def tensors_in(thing: Any, skip: Collection[int]) -> Iterator[tuple[tuple[str, ...], torch.Tensor]]:
    """The tensors in any nesting of containers, records and plain objects, and the names on the way to each.

    Args:
        thing: where to begin.
        skip: ids of tensors that are passed over, such as parameters.
    """
    waiting: list[tuple[tuple[str, ...], Any]] = [((), thing)]
    seen: set[int] = set()
    while waiting:
        path, found = waiting.pop()
        if isinstance(found, torch.Tensor):
            if id(found) not in skip:
                yield path, found
        elif id(found) not in seen:
            seen.add(id(found))
            waiting += [((*path, _label(key)), value) for key, value in reversed(_members(found))]


def _label(key: Any) -> str:
    """A key as a part of a name; printing a tensor would read it."""
    return type(key).__name__ if isinstance(key, torch.Tensor) else str(key)


def _members(thing: Any) -> list[tuple[Any, Any]]:
    """What a container, a record or a plain object has; nothing of what is code, or claimed by its own strategy."""
    if isinstance(thing, (type, ModuleType, FunctionType, MethodType, torch.nn.Module, torch.optim.Optimizer)):
        return []
    if isinstance(thing, Mapping):
        return list(thing.items())
    if isinstance(thing, (list, tuple, deque, set, frozenset)):
        return list(enumerate(thing))
    if dataclasses.is_dataclass(thing):
        return [(field.name, getattr(thing, field.name, None)) for field in dataclasses.fields(thing)]
    return list(vars(thing).items()) if type(thing).__dictoffset__ else []
