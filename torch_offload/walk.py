"""The tensors that an object holds, under whatever name."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from types import FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import torch


def tensors_in(thing: Any, skip: Collection[int], *, objects: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in any nesting of containers, each once, and the names on the way to it: ``"groups.0.exp_avg"``.

    Args:
        thing: where to begin.
        skip: ids of tensors that are passed over, such as parameters.
        objects: whether to look into records and plain objects too; never into code, modules and optimizers.
    """
    waiting: list[tuple[tuple[str, ...], Any]] = [((), thing)]
    seen: set[int] = set()
    while waiting:
        path, found = waiting.pop()
        if id(found) in seen:
            continue
        seen.add(id(found))
        if isinstance(found, torch.Tensor):
            if id(found) not in skip:
                yield ".".join(path), found
        else:
            members = [*_members(found), *(_attributes(found) if objects else [])]
            inside = [
                (_label(index, key), value)
                for index, (key, value) in enumerate(members)
                if id(value) not in skip and not _is_bare(value)
            ]
            waiting += [((*path, label), value) for label, value in reversed(inside)]


_BARE = {int, float, bool, str, type(None)}


def _is_bare(thing: Any) -> bool:
    """Whether it is a number or a name, or a tuple of those: most of what there is, so told at once."""
    return type(thing) in _BARE or (type(thing) is tuple and _BARE.issuperset(map(type, thing)))


def _members(thing: Any) -> list[tuple[Any, Any]]:
    if isinstance(thing, (dict, Mapping)):
        return list(thing.items())
    if isinstance(thing, (list, tuple, deque, set, frozenset)):
        return list(enumerate(thing))
    return []


def _label(index: int, key: Any) -> str:
    """A key as a part of a name; printing a tensor would read it."""
    return str(index) if isinstance(key, torch.Tensor) else str(key)


def _attributes(thing: Any) -> list[tuple[str, Any]]:
    """What a record or a plain object has; nothing of what is code or has tensors of its own."""
    if isinstance(thing, (type, ModuleType, FunctionType, MethodType, torch.nn.Module, torch.optim.Optimizer)):
        return []
    found = list(vars(thing).items()) if type(thing).__dictoffset__ else []
    for members in (vars(kind) for kind in type(thing).__mro__ if "__slots__" in vars(kind)):
        for name, slot in members.items():
            if isinstance(slot, MemberDescriptorType):
                with contextlib.suppress(AttributeError):  # never set
                    found.append((name, slot.__get__(thing)))  # asked itself: a method of the class may stand before it
    return found
