"""What is on a device and nobody claimed: whose it is, as far as Python can tell."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import re
import sys
import types
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

import torch

from .errors import gib
from .parts import parts_of
from .tensors import address_of, attribute, storage_of

_PACKAGE = str(Path(__file__).parent)
_DEPTH = 4  # referrers of referrers, until one has a name


@dataclasses.dataclass(frozen=True)
class UnreachedRow:
    """A storage that no claim covers: its size in bytes, the tensors on it, and who refers to them."""

    nbytes: int
    tensors: tuple[str, ...]
    holders: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Unreached:
    """What no claim covers.

    Attributes:
        nbytes: allocated bytes that no claim covers, from the caching allocator; None where there is none (the CPU).
        seen_nbytes: those on which Python sees a tensor. The rest is held in C++: graphs, communication buffers, pools.
        largest: the largest of what is seen.
    """

    nbytes: int | None
    seen_nbytes: int
    largest: tuple[UnreachedRow, ...]

    def __str__(self) -> str:
        total = "" if self.nbytes is None else f"{gib(self.nbytes)} that no claim covers, "
        lines = [f"{total}{gib(self.seen_nbytes)} on which Python sees a tensor"]
        for each in self.largest:
            lines.append(f"{gib(each.nbytes):>12}  {', '.join(each.tensors)}")
            lines += [f"{'':>12}  held by {holder}" for holder in each.holders or ("nobody with a name",)]
        return "\n".join(lines)


def find(covers: Callable[[torch.device], bool], claimed: Collection[int], *, most: int) -> Unreached:
    """Look for tensors on a device that are on none of the claimed storages.

    Args:
        covers: whether memory on a device is meant.
        claimed: addresses of storages.
        most: how many of the largest are named.
    """
    storages: dict[int, list[torch.Tensor]] = {}
    sizes: dict[int, int] = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor) and covers(attribute(thing, "device")):
            for part in _parts(thing):
                address = address_of(part)
                if address and address not in claimed:
                    storages.setdefault(address, []).append(thing)
                    sizes[address] = storage_of(part).nbytes()
    largest = sorted(sizes, key=lambda address: -sizes[address])[:most]
    ours = {id(storages), id(sizes), *(id(tensors) for tensors in storages.values())}
    rows = tuple(
        UnreachedRow(sizes[each], tuple(map(_described, storages[each][:3])), _holders(storages[each], ours))
        for each in largest
    )
    return Unreached(None, sum(sizes.values()), rows)


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    try:
        return [part.tensor for part in parts_of(tensor)]
    except Exception:  # of somebody's class
        return []


def _described(tensor: torch.Tensor) -> str:
    return f"{type(tensor).__name__} of shape {tuple(attribute(tensor, 'shape'))}, {attribute(tensor, 'dtype')}"


def _holders(tensors: Iterable[torch.Tensor], ours: set[int]) -> tuple[str, ...]:
    """Who refers to these tensors, each named from the nearest thing that has a name: ``Trainer.cache['logits'][0]``."""
    locals_ = _locals()
    found: dict[str, None] = {}
    for tensor in tensors:
        found |= dict.fromkeys(_paths(tensor, "", ours, locals_, _DEPTH))
    return tuple(found)[:5]


def _locals() -> dict[int, list[str]]:
    """The local variables of every function that runs, by the id of their values. The collector does not see those."""
    found: dict[int, list[str]] = {}
    for running in sys._current_frames().values():
        frame: types.FrameType | None = running
        while frame is not None:
            where = f"{frame.f_code.co_qualname}() in {frame.f_code.co_filename}:{frame.f_lineno}"
            if not frame.f_code.co_filename.startswith(_PACKAGE):
                for name, value in frame.f_locals.items():
                    found.setdefault(id(value), []).append(f"the local {name!r} of {where}")
            frame = frame.f_back
    return found


def _paths(thing: Any, below: str, ours: set[int], locals_: dict[int, list[str]], depth: int) -> list[str]:
    found = [f"{name}{below}" for name in locals_.get(id(thing), ())]
    for owner in gc.get_referrers(thing):
        step = None
        with contextlib.suppress(Exception):  # of somebody's class
            step = None if id(owner) in ours else _step(owner, thing)
        if step is None:
            continue
        name, is_named = step
        if is_named:
            of_instance = getattr(owner, "__dict__", None) is thing
            found.append(name + (re.sub(r"^\['(\w+)'\]", r".\1", below) if of_instance else below))
        elif depth > 1:
            found += _paths(owner, f"{name}{below}", ours, locals_, depth - 1)
        if len(found) >= 5:
            break
    return found


def _step(owner: Any, thing: Any) -> tuple[str, bool] | None:
    """How an owner refers to a thing, and whether that is a name to begin with; None if it is of no use."""
    if isinstance(owner, (types.FrameType, types.ModuleType)) or type(owner).__name__.endswith("iterator"):
        return None
    if isinstance(owner, dict):
        keys = [key for key, value in dict.items(owner) if value is thing]  # not a method of somebody's class
        if keys and type(owner) is dict and "__name__" in owner and "__spec__" in owner:
            return f"{owner['__name__']}.{keys[0]}", True
        return (f"[{keys[0]!r:.40}]", False) if keys else None
    if isinstance(owner, (list, tuple)):
        values = list.__iter__(owner) if isinstance(owner, list) else tuple.__iter__(owner)
        indices = [index for index, value in enumerate(values) if value is thing]
        return (f"[{indices[0]}]", False) if indices else None
    if isinstance(owner, types.CellType):
        return "a closure", True
    attributes = getattr(owner, "__dict__", None)
    if attributes is thing:
        return type(owner).__name__, True
    names = [name for name, value in dict.items(attributes) if value is thing] if isinstance(attributes, dict) else []
    return (f"{type(owner).__name__}.{names[0]}" if names else f"a {type(owner).__name__}"), True
