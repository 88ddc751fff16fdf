"""Who holds a storage, and the four verbs that give its device memory up and take it back.

The checker answers "if this storage is freed, who else notices?". Every tensor object holds its storage once, and so does
everything in C++ that keeps a tensor alive, so the storage's use count less the tensors that are known says how many holders
are not. Those are looked for among the objects that the garbage collector sees. This module is the one place that reads the
private counter.

[Note: what the counter cannot see]
A leaf that autograd saved is held through the leaf's own tensor object, and a DLPack capsule holds no storage at all. The
first is made loud by version counters (guard.py), the second by nobody.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import enum
import gc
import sys
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from .errors import SharedStorageError, gib, listed
from .parts import PLAIN, Part, parts_of
from .tensors import Storage, address_of, attribute, byte_view, gradient_of, plainly, storage_of

# The verbs -------------------------------------------------------------------------------------------------------------


def stage(storage: Storage, nbytes: int) -> torch.Tensor:
    """Device memory of ``nbytes`` bytes for a storage that was given up, to be filled; returns it as `byte_view` does.

    Raises:
        RuntimeError: the device has no room (``torch.OutOfMemoryError`` on accelerators).
    """
    storage.resize_(nbytes)
    return byte_view(storage)


def publish(storage: Storage) -> None:
    """Make staged memory the storage's own. With `resize_` it already is."""


def abandon(storage: Storage) -> None:
    """Give staged memory back; the storage is as it was before `stage`."""
    storage.resize_(0)


def give_up(storage: Storage) -> None:
    """Give the storage's device memory back to the caching allocator. Tensors over it keep their geometry."""
    storage.resize_(0)


# The checker -----------------------------------------------------------------------------------------------------------


class Holding(enum.Enum):
    """Who would notice if a storage were freed."""

    EXCLUSIVE = "exclusive"  # nobody but the tensors that are known
    ALIASED = "aliased"  # other tensor objects that Python can reach
    IN_USE = "in use"  # a parameter or buffer of a module outside the targets, or the gradient of a tensor outside
    HELD = "held"  # holders without a Python name: most often a graph that is still alive
    NOT_RESIZABLE = "not resizable"  # the memory is not torch's own


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The checker's answer for one storage. Truthy if, and only if, it is exclusive.

    Attributes:
        holding: the kind of answer.
        reasons: one sentence per kind of holder, with names where there are any.
        aliases: the tensors beyond the known ones that Python can reach, to be guarded if the storage is freed.
        leaves: the tensors beyond the known ones into whose gradient, on this storage, a backward would accumulate in C++.
    """

    holding: Holding
    reasons: tuple[str, ...] = ()
    aliases: tuple[torch.Tensor, ...] = ()
    leaves: tuple[torch.Tensor, ...] = ()

    def __bool__(self) -> bool:
        return self.holding is Holding.EXCLUSIVE

    def __str__(self) -> str:
        return f"{self.holding.value}: {'; '.join(self.reasons)}" if self.reasons else self.holding.value


def is_exclusive(tensor: torch.Tensor, known: Iterable[torch.Tensor] = ()) -> Verdict:
    """Whether nobody but ``tensor`` and the ``known`` tensors would notice if ``tensor``'s storage were freed.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(4))
        >>> bool(is_exclusive(weight))
        True
        >>> alias = weight.view(-1)
        >>> is_exclusive(weight).holding, bool(is_exclusive(weight, known=[alias]))
        (<Holding.ALIASED: 'aliased'>, True)

    Args:
        tensor: any tensor. Of one that consists of others, the verdict is about the one of those that is worst off.
        known: other tensors that the caller vouches for: those on the storage, and leaves whose gradient is on it.

    Returns:
        A `Verdict`, truthy or falsy, with reasons. Neither synchronises nor allocates on the device; may run the garbage
        collector, and a backward over nothing, when something is unexplained.
    """
    cases = [(part, [part] if part.suffix else []) for part in parts_of(tensor)]
    verdicts = examine([(storage_of(part.tensor), [part.tensor, tensor, *known], inside) for part, inside in cases])
    return max(verdicts, key=lambda verdict: list(Holding).index(verdict.holding))


def check_exclusive(tensor: torch.Tensor, known: Iterable[torch.Tensor] = ()) -> None:
    """Raise unless `is_exclusive`.

    Raises:
        SharedStorageError: with the verdict and what to do about it.
    """
    verdict = is_exclusive(tensor, known)
    if not verdict:
        shape = tuple(tensor.shape)
        raise SharedStorageError(f"the storage of the tensor of shape {shape} is {verdict}. {advice(verdict)}")


def advice(verdict: Verdict) -> str:
    """What usually helps against a verdict, for a message."""
    return {
        Holding.EXCLUSIVE: "Nothing to do",
        Holding.ALIASED: 'Drop these tensors, or pass shared="guard" to have them raise while offloaded',
        Holding.IN_USE: 'Name that module as a target too, or pass shared="free" to vouch that nobody uses it meanwhile',
        Holding.HELD: "Usually a forward whose graph is still alive: drop its output, run it under torch.no_grad(), call "
        'backward() first, or pass shared="free" to vouch that nobody reads it meanwhile',
        Holding.NOT_RESIZABLE: "Replace it by a clone() that torch allocated itself",
    }[verdict.holding]


def examine(storages: Sequence[tuple[Storage, Sequence[torch.Tensor], Sequence[Part]]]) -> list[Verdict]:
    """`is_exclusive` for many storages, each with its known tensors and the parts of known wholes on it, at the cost of one
    look at the heap at most.

    A look costs 0.1 to 0.4 s. What it found is remembered for as long as that explains all holders.
    """
    cases = [_Case(storage, known, parts) for storage, known, parts in storages]
    doubtful = [case for case in cases if case.is_doubtful() and not case.remembered()]
    if doubtful:
        _look(doubtful)
        if any(case.unexplained() for case in doubtful):
            gc.collect()  # a graph that waits for the collector holds nothing once it is gone
            _finish_failed_backward()
            _look(doubtful)
        for key in [key for key, past in _seen.items() if past.storage() is None]:
            del _seen[key]
        for case in doubtful:
            case.remember()
    return [case.verdict() for case in cases]


class _Case:
    """One storage under examination."""

    def __init__(self, storage: Storage, known: Sequence[torch.Tensor], parts: Sequence[Part]) -> None:
        self.storage = storage
        self.hidden = sum(part.hidden for part in parts)
        # a whole around the very same tensor object adds no holder to its storage, but one to the object
        self.inside = [(weakref.ref(part.tensor), sys.getrefcount(part.tensor)) for part in parts]
        self.given = {id(tensor) for tensor in known}
        self.wholes: dict[int, torch.Tensor] = {}  # found beyond the given ones: around tensors on it
        self.fixed = _not_resizable(storage)
        self.known = {id(tensor): tensor for tensor in known if address_of(tensor) == storage._cdata}
        self.known_leaves = {id(tensor): tensor for tensor in known if gradient_of(tensor) is not None}
        self.leaves: dict[int, torch.Tensor] = {}  # found beyond the known ones
        self.visible: dict[int, torch.Tensor] = {}  # found beyond the known ones
        self.owners: dict[int, _Place] = {}  # where a module has those of them that one owns
        self.quiet: dict[int, torch.Tensor] = {}  # bases that nobody refers to but their views
        for tensor in known:
            self._add_base(tensor)
        self.initial = self.unexplained()

    def _add_base(self, tensor: torch.Tensor) -> None:
        is_quiet = sys.getrefcount(attribute(tensor, "_base")) <= _UNREFERENCED  # before this function refers to it as well
        base = attribute(tensor, "_base")
        if base is None or self._has(base) or address_of(base) != self.storage._cdata:
            return
        (self.quiet if is_quiet else self.visible)[id(base)] = base

    def _has(self, tensor: torch.Tensor) -> bool:
        return id(tensor) in self.known or id(tensor) in self.quiet

    def unexplained(self) -> int | None:
        """Holders that nothing accounts for; None where this torch release keeps no count."""
        count = _use_count(self.storage)
        return None if count is None else count - self.hidden - len(self.known | self.visible | self.quiet)

    def has_unknown_leaf(self) -> bool:
        """Whether C++ refers to a tensor on the storage more often than the leaves and views explain that are known or found.

        What else refers to one is a graph that saved it: a look then finds nothing. A tensor that requires gradients has a
        node that refers to it; those are asked only if they are gradients themselves.
        """
        explained = collections.Counter(id(gradient_of(leaf)) for leaf in {**self.known_leaves, **self.leaves}.values())
        views = {**self.known, **self.visible, **self.quiet}
        bases = collections.Counter(id(attribute(view, "_base")) for view in views.values())
        return any(
            _references_from_cpp(tensor) > explained[key] + bases[key]
            for key, tensor in {**self.known, **self.visible}.items()
            if key in explained or not attribute(tensor, "requires_grad")
        )

    def is_doubtful(self) -> bool:
        """Whether somebody beyond the known tensors may hold the storage."""
        return self.fixed is None and (self.initial != 0 or bool(self.visible or self.inside) or self.has_unknown_leaf())

    def remembered(self) -> bool:
        """Take over what an earlier look found; whether that explains every holder."""
        past = _seen.get(self.storage._cdata)
        if past is None or past.storage() is not self.storage or not _are_same(past.inside, self.inside):
            return False  # never the same inside of sparse tensors, which has no lasting object that could be asked
        for whole, place in past.wholes:
            found = whole()
            if found is None or (place is not None and not place.has(found)):
                return False
            if id(found) not in self.given:
                self.wholes[id(found)] = found
                self.owners |= {} if place is None else {id(found): place}
        for reference, place in past.visible:
            tensor = reference()
            if tensor is None or self._has(tensor) or address_of(tensor) != self.storage._cdata:
                continue
            if place is not None and not place.has(tensor):
                return False
            self.visible[id(tensor)] = tensor
            if place is not None:
                self.owners[id(tensor)] = place
        for reference in past.leaves:
            leaf = reference()
            if leaf is not None and id(leaf) not in self.known_leaves:
                self.leaves[id(leaf)] = leaf
        return self.unexplained() == 0 and not self.has_unknown_leaf()

    def remember(self) -> None:
        found = [(weakref.ref(tensor), self.owners.get(key)) for key, tensor in self.visible.items()]
        wholes = [(weakref.ref(whole), self.owners.get(key)) for key, whole in self.wholes.items()]
        leaves = list(map(weakref.ref, self.leaves.values()))
        _seen[self.storage._cdata] = _Seen(weakref.ref(self.storage), found, leaves, wholes, self.inside)

    def verdict(self) -> Verdict:
        if self.fixed is not None:
            return Verdict(Holding.NOT_RESIZABLE, (self.fixed,))
        aliases = tuple({**self.visible, **self.quiet, **self.wholes}.values())
        reasons, holding = [], Holding.EXCLUSIVE
        around = {**self.visible, **self.wholes}
        if others := [tensor for key, tensor in around.items() if key not in self.owners]:
            holding = Holding.ALIASED
            reasons.append("other tensors on it: " + ", ".join(_described(tensor) for tensor in others[:5]))
        leaves = [leaf for leaf in self.leaves.values() if id(gradient_of(leaf)) in {*self.given, *around}]
        users = {*(place.text for place in self.owners.values()), *(f"the gradient of a {_described(leaf)}" for leaf in leaves)}
        if users:
            holding = Holding.IN_USE
            reasons.append(f"used outside the targets: {listed(sorted(users))}")
        unexplained = self.unexplained()
        if unexplained is None:
            holding = Holding.HELD
            reasons.append(f"torch {torch.__version__} does not count a storage's holders, so none can be excluded")
        elif unexplained > 0:
            holding = Holding.HELD
            nbytes = gib(self.storage.nbytes())
            reasons.append(f"{unexplained} holder(s) without a Python name keep {nbytes}")
        return Verdict(holding, tuple(reasons), aliases, tuple(leaves))


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where a module has a tensor."""

    module: weakref.ref[torch.nn.Module]
    table: str
    name: str
    text: str

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is still there."""
        module = self.module()
        return module is not None and (module.__dict__.get(self.table) or {}).get(self.name) is tensor


@dataclasses.dataclass(frozen=True)
class _Seen:
    """The tensors that a look at the heap found on a storage, where a module has each, and leaves with such a gradient; all
    held weakly."""

    storage: weakref.ref[Storage]
    visible: list[tuple[weakref.ref[torch.Tensor], _Place | None]]
    leaves: list[weakref.ref[torch.Tensor]]
    wholes: list[tuple[weakref.ref[torch.Tensor], _Place | None]]
    inside: list[tuple[weakref.ref[torch.Tensor], int]]


def _are_same(
    one: Sequence[tuple[weakref.ref[torch.Tensor], int]], other: Sequence[tuple[weakref.ref[torch.Tensor], int]]
) -> bool:
    """Whether these are the same tensors, with as many references; weak references would compare values."""
    pairs = zip(one, other, strict=False)
    return len(one) == len(other) and all(mine is theirs and here == there for (mine, here), (theirs, there) in pairs)


_seen: dict[int, _Seen] = {}


def _look(cases: Iterable[_Case]) -> None:
    """Find the tensors on these storages that the garbage collector can see, their leaves, and the modules that own them.

    `isinstance` would run `__class__` properties of foreign objects, so types are asked.
    """
    by_storage = {case.storage._cdata: case for case in cases}
    modules, leaves = [], []
    for thing in gc.get_objects():
        kind = type(thing)
        if issubclass(kind, torch.Tensor):
            address = address_of(thing)
            case = by_storage.get(address)
            if case is not None and id(thing) not in case.known:
                case.visible[id(thing)] = thing
                case.quiet.pop(id(thing), None)
            if address == 0 or kind not in PLAIN:
                with contextlib.suppress(Exception):  # of somebody's class
                    for part in parts_of(thing):
                        case = by_storage.get(address_of(part.tensor))
                        if case is not None and id(thing) not in case.given:
                            case.wholes[id(thing)] = thing
            with contextlib.suppress(RuntimeError):  # a view whose base was changed in place does not say whether it is a leaf
                if gradient_of(thing) is not None:
                    leaves.append(thing)
        elif issubclass(kind, torch.nn.Module):
            modules.append(thing)
    wanted: dict[int, list[_Case]] = {}  # a whole has memory on several storages
    for case in by_storage.values():
        for key in {*case.given, *case.visible, *case.wholes}:
            wanted.setdefault(key, []).append(case)
    for leaf in leaves:
        for case in wanted.get(id(gradient_of(leaf)), ()):
            if id(leaf) not in case.known_leaves:
                case.leaves[id(leaf)] = leaf
    for module in modules:
        for table in ("_parameters", "_buffers"):
            for name, tensor in (module.__dict__.get(table) or {}).items():
                for case in wanted.get(id(tensor), ()):
                    if id(tensor) in case.visible or id(tensor) in case.wholes:
                        case.owners[id(tensor)] = _Place(weakref.ref(module), table, name, f"{type(module).__name__}.{name}")


def _finish_failed_backward() -> None:
    """Where a backward failed, its nodes wait in this thread's queue, and hold what they saved, until the next one begins."""
    with torch.inference_mode(False), torch.enable_grad():
        torch.zeros((), device="cpu", requires_grad=True).backward()  # type: ignore[no-untyped-call]


def _references_from_cpp(tensor: torch.Tensor) -> int:
    """How many references to a tensor C++ holds: one for each leaf whose gradient it is, each view whose base it is, each graph
    that saved it. 0 where this torch release does not count."""
    count: Any = getattr(torch.Tensor, "_use_count", None)
    return 0 if count is None else int(plainly(count, tensor)) - 1


def _not_resizable(storage: Storage) -> str | None:
    if storage.device.type == "cpu" and storage.is_shared():  # resizable() says True, and growing it again crashes
        return "its memory is shared with other processes"
    return None if storage.resizable() else "its memory is not torch's own (numpy, DLPack, a mapped file, ...)"


def _use_count(storage: Storage) -> int | None:
    """Holders of a storage beside this Python object; None on a release without the private counter."""
    counter: Any = getattr(torch._C, "_storage_Use_Count", None)
    return None if counter is None else int(counter(storage._cdata)) - 1


def _described(tensor: torch.Tensor) -> str:
    return f"{type(tensor).__name__} of shape {tuple(tensor.shape)}"


_sample = torch.empty(2, device="cpu")[1:]
_UNREFERENCED = sys.getrefcount(_sample._base)  # of a base that only its view keeps, in this torch and this Python
