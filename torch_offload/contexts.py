"""Contexts: make a state for the length of a block, and put the state of the entry back.

What is put back is the set of components that were away, and each storage that was offloaded, by whomever: a context over
part of a model that is away leaves that part away.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import weakref
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Generic, TypeVar

from . import ledger
from .errors import TransitionError
from .interrupts import Deferred
from .ledger import Entry
from .scope import Aim, Logged, Scope
from .transition import bring_back, put_away

_Given = TypeVar("_Given")
_Function = TypeVar("_Function", bound=Callable[..., object])


class Context(Generic[_Given]):
    """Components of some targets away, or resident, for a block or for each call of a function it decorates.

    Args:
        given: what ``as`` binds.
        scope: the targets.
        chosen: the components.
        away: whether they are to be away or resident.
    """

    def __init__(self, given: _Given, scope: Scope, chosen: frozenset[str], *, away: bool) -> None:
        self._given, self._scope, self._chosen, self._away = given, scope, chosen, away
        self._frames: list[_Frame] = []

    def __enter__(self) -> _Given:
        is_open = False
        try:
            with Logged(self._scope), Deferred(), ledger.LOCK:
                self._open(sys._getframe(1))
                is_open = True
        except BaseException as error:
            if is_open:  # a signal that waited was raised when all was done, and the body is not going to run
                with Logged(self._scope), Deferred(), ledger.LOCK:
                    self._close(error, sys._getframe(1))
            raise
        return self._given

    def __exit__(self, _kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        with Logged(self._scope), Deferred(), ledger.LOCK:
            self._close(error, sys._getframe(1))

    def __call__(self, function: _Function) -> _Function:
        name = getattr(function, "__qualname__", repr(function))
        if not callable(function):
            raise TypeError(f"a context decorates functions, not a {type(function).__name__}")
        kinds = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
        if any(kind(each) for kind in kinds for each in (function, type(function).__call__)):
            raise TypeError(f"{name} suspends: its body would run after the context is left. Enter the context inside it")

        @functools.wraps(function)
        def inside(*args: object, **kwargs: object) -> object:
            with self:
                return function(*args, **kwargs)

        return inside  # type: ignore[return-value]

    def _open(self, block: FrameType) -> None:
        held = self._scope.hold()
        frame = _Frame(self._scope, block)
        frame.push()
        self._frames.append(frame)
        report = self._scope.report
        try:
            if self._away:
                put_away(self._scope, self._chosen, Aim(self._scope.away(plus=self._chosen)))
            else:
                bring_back(self._scope, self._chosen, Aim(self._scope.away(minus=self._chosen)))
        except BaseException as error:
            self._close(error, block)
            self._scope.report = report
            raise
        del held

    def _close(self, error: BaseException | None, block: FrameType) -> None:
        if not self._frames:
            raise TransitionError(f"this context over {self._scope.names()} is left more often than it was entered")
        frame = self._frames.pop()
        frame.pop(error, block)
        frame.put_back()


class _Frame:
    """The state of one entry.

    Args:
        scope: the targets.
        block: the Python frame of the block.
    """

    def __init__(self, scope: Scope, block: FrameType) -> None:
        self._scope = scope
        self._block, self._task = id(block), _task()
        self._thread = threading.get_ident()
        self._states = scope.states()
        storages = {key: (weakref.ref(each.storage), each.entry is not None) for key, each in scope.plan().storages.items()}
        self._aim = Aim(scope.away(), storages)

    def push(self) -> None:
        for state in self._states:
            if any(frame._thread != self._thread for frame in state.open_contexts()):
                raise TransitionError(
                    f"another thread has a context open over {self._scope.names()} or a part of it: leaving either would undo "
                    "the other. Open one context around both threads"
                )
        for state in self._states:
            state.contexts.append(weakref.ref(self))

    def pop(self, error: BaseException | None, block: FrameType) -> None:
        """Close this entry, whose block is left.

        Those above it that are still open were cut while they were left, if an exception comes from inside of this block;
        otherwise somebody mixed the order up. An exception in a generator, or in another task, did not come through the block
        of whoever runs the generator or waits for the task.
        """
        stacks = [state.open_contexts() for state in self._states]
        above = [each for stack in stacks if self in stack for each in stack[stack.index(self) + 1 :]]
        outside, task = _outside(block), _task()
        were_cut = error is not None and all(each._task == task and each._block not in outside for each in above)
        is_next = all(self in stack for stack in stacks) and (were_cut or not above)
        for state, stack in zip(self._states, stacks, strict=True):
            stays = stack[: stack.index(self)] if is_next else [each for each in stack if each is not self]
            state.contexts[:] = map(weakref.ref, stays)
        if not is_next:
            raise TransitionError(
                "contexts over one target must be left in the reverse order of entering; this one over "
                f"{self._scope.names()} was left first. Nothing was moved; call offload() or reload() for the state you want"
            )

    def put_back(self) -> None:
        held = self._scope.hold()
        now, then = self._scope.away(), self._aim.away
        alive = [id(each) for each in self._scope.alive() if id(each) in then]
        gone = frozenset[str]().union(*(then[key] - now[key] for key in alive))
        come = frozenset[str]().union(*(now[key] - then[key] for key in alive))
        changed = {
            was_offloaded
            for reference, was_offloaded in self._aim.exactly.values()
            if (storage := reference()) is not None and ledger.is_offloaded(storage) != was_offloaded
        }
        if gone or True in changed:
            put_away(self._scope, gone, self._aim, check=False)
        if come or False in changed:
            bring_back(self._scope, come, self._aim, dropped=self._dropped())
        del held

    def _dropped(self) -> list[Entry]:
        """What is offloaded, was not at the entry, and is claimed by nobody else: it may have left its module meanwhile."""
        were_resident = [reference() for reference, was_offloaded in self._aim.exactly.values() if not was_offloaded]
        entries = [ledger.entry_of(storage) for storage in were_resident if storage is not None]
        return [
            entry
            for entry in entries
            if entry is not None and entry.offloaded and all(owner() in (None, *self._states) for owner, _, _ in entry.claims)
        ]


def _task() -> int:
    """The asyncio task that runs; 0 if none does."""
    asyncio = sys.modules.get("asyncio")
    try:
        return 0 if asyncio is None else id(asyncio.current_task())
    except RuntimeError:  # no loop runs here
        return 0


def _outside(block: FrameType | None) -> set[int]:
    """The ids of the Python frames that called the function of a block; what only forwards the leaving belongs to it."""
    while block is not None and any(each is not None and each.f_code.co_name in _EXITS for each in (block, block.f_back)):
        block = block.f_back
    found = set()
    while block is not None and (block := block.f_back) is not None:
        found.add(id(block))
    return found


_EXITS = ("__exit__", "__aexit__")  # of contextlib's stacks and generators, and of anybody's own contexts
