"""Contexts: make a state for the length of a block, and put the state of the entry back.

What is put back is the set of components that were away, and each storage that was offloaded, by whomever: a context over
part of a model that is away leaves that part away.
"""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Generic, TypeVar

from . import ledger
from .errors import TransitionError
from .interrupts import Deferred
from .transition import PreparedOffload, Scope, bring_back

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
        while True:
            with Deferred() as signals, ledger.LOCK:
                self._open()
                if signals.noted:
                    self._close()
            if not signals.noted:
                return self._given

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        with Deferred(), ledger.LOCK:
            self._close()

    def __call__(self, function: _Function) -> _Function:
        if (
            inspect.isgeneratorfunction(function)
            or inspect.iscoroutinefunction(function)
            or inspect.isasyncgenfunction(function)
        ):
            raise TypeError(
                f"{function.__qualname__} suspends: its body would run after the context is left. Enter the context inside it"
            )

        @functools.wraps(function)
        def inside(*args: object, **kwargs: object) -> object:
            with self:
                return function(*args, **kwargs)

        return inside  # type: ignore[return-value]

    def _open(self) -> None:
        frame = _Frame(self._scope)
        frame.push()
        self._frames.append(frame)
        try:
            if self._away:
                PreparedOffload(self._scope, self._chosen, self._scope.away(plus=self._chosen)).commit()
            else:
                bring_back(self._scope, self._chosen, self._scope.away(minus=self._chosen))
        except BaseException:
            self._close()
            raise

    def _close(self) -> None:
        frame = self._frames.pop()
        frame.pop()
        frame.put_back()


class _Frame:
    """The state of one entry."""

    def __init__(self, scope: Scope) -> None:
        self._scope = scope
        self._thread = threading.get_ident()
        self._states = scope.states()
        self._away = scope.away()
        self._offloaded = [weakref.ref(each.storage) for each in scope.plan().storages.values() if each.entry is not None]

    def push(self) -> None:
        for state in self._states:
            if any(frame._thread != self._thread for frame in state.contexts):
                raise TransitionError(
                    "another thread has a context open over this target: leaving either would undo the other. Open one "
                    "context around both threads"
                )
        for state in self._states:
            state.contexts.append(self)

    def pop(self) -> None:
        is_last = all(state.contexts[-1:] == [self] for state in self._states)
        for state in self._states:
            if self in state.contexts:
                state.contexts.remove(self)
        if not is_last:
            raise TransitionError(
                "contexts over one target must be left in the reverse order of entering; this one was left first, and nothing "
                "was moved. Call offload() or reload() for the state you want"
            )

    def put_back(self) -> None:
        keep = [storage for reference in self._offloaded if (storage := reference()) is not None]
        now = self._scope.away()
        alive = [each for each in self._scope.alive() if id(each) in self._away]
        missing = frozenset[str]().union(*(self._away[id(each)] - now[id(each)] for each in alive))
        if missing or not all(map(ledger.is_offloaded, keep)):
            PreparedOffload(self._scope, missing, self._away, keep=keep).commit()
        extra = frozenset[str]().union(*(now[id(each)] - self._away[id(each)] for each in alive))
        bring_back(self._scope, extra, self._away, keep=keep)
