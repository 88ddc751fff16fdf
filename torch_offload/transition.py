"""One transition: find what the strategies hold, plan what goes and what comes back, move it, report.

A storage is offloaded if all components that claim it are away. Each target's set ``away`` changes when the transition has
committed, together with the hooks that depend on it.

[Note: one at a time]
The lock keeps other threads out. A signal handler, a finalizer or a hook may still start a transition in the thread that is
inside one, on top of its frames; that is refused by looking for them, since a flag would stay set if the transition were cut.

[Note: logging]
A handler of the log has a lock of its own, in which it may format an offloaded tensor, which waits for ours. So lines are kept
and logged when our lock is free again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import sys
import time
import weakref
from collections.abc import Mapping, Sequence
from types import CodeType, FrameType

import torch

from . import device as devices
from . import ledger, transfer
from .errors import OffloadedTensorError, TransitionError, listed
from .interrupts import Deferred
from .ledger import Entry, TargetState
from .plan import Plan, Planned
from .report import LeftRow, MirrorRow, TransitionReport
from .storage import Storage
from .strategies.base import Strategy

_log = logging.getLogger("torch_offload")
Away = Mapping[int, frozenset[str]]  # id of a strategy -> the components of its target that are to be away
_pending: weakref.ref[PreparedOffload] | None = None


@dataclasses.dataclass(frozen=True)
class Aim:
    """Where a transition is to lead.

    Attributes:
        away: for each strategy the components of its target that are to be away.
        exactly: storages that are to be as they once were, by address: (weak reference, whether it was offloaded).
    """

    away: Away
    exactly: Mapping[int, tuple[weakref.ref[Storage], bool]] = dataclasses.field(default_factory=dict)

    def is_to_go(self, planned: Planned) -> bool:
        """Whether this storage is to be offloaded."""
        reference, was_offloaded = self.exactly.get(planned.storage._cdata, (None, False))
        if reference is not None and reference() is planned.storage:
            return was_offloaded
        return not planned.kept_by(self.away)


class Scope:
    """Whose memory transitions are about, and what is remembered between them.

    Attributes:
        strategies: the strategies of all targets; those whose target is gone are passed over.
        device: whose memory is meant, as `device.resolve` gave it.
        verify: whether bytes are checksummed.
        known: size in bytes and dtype of each parameter offloaded before, by strategy and name.
        report: of the last transition.
        unlogged: lines of transitions for the log.
    """

    def __init__(self, strategies: Sequence[Strategy], device: torch.device, *, verify: bool) -> None:
        self.strategies = tuple(strategies)
        self.device = device
        self.verify = verify
        self.known: dict[tuple[int, str], tuple[int, torch.dtype]] = {}
        self.report: TransitionReport | None = None
        self.unlogged: list[str] = []

    def hold(self) -> list[object]:
        """The targets, for as long as the caller keeps the list: none of them dies in the middle of a transition."""
        return [strategy.target for strategy in self.strategies]

    def alive(self) -> list[Strategy]:
        return [strategy for strategy in self.strategies if strategy.target is not None]

    def plan(self) -> Plan:
        return Plan(self.alive(), self.device)

    def away(self, *, plus: frozenset[str] = frozenset(), minus: frozenset[str] = frozenset()) -> Away:
        """What is away now, with some components added or taken away."""
        return {
            id(each): (frozenset(state_of(each).away) | plus.intersection(each.components)) - minus for each in self.alive()
        }

    def states(self) -> list[TargetState]:
        """The targets' states, each once."""
        return list({id(state): state for state in map(state_of, self.alive())}.values())

    def mirrors(self) -> tuple[MirrorRow, ...]:
        """The targets' own mirrors, and those of others in which some of their bytes are."""
        rows = {id(mirror): (each.name, mirror) for each in self.alive() for mirror in state_of(each).mirrors.values()}
        states = self.states()
        for mirror in [mirror for state in states for mirror in state.elsewhere if mirror.serves(states)]:
            rows.setdefault(id(mirror), ("another target", mirror))
        return tuple(MirrorRow(name, mirror.nbytes, mirror.pinned, mirror.exact) for name, mirror in rows.values())


class Logged:
    """Log what happened in a block when it is left. See [Note: logging]."""

    def __init__(self, scope: Scope) -> None:
        self._scope = scope

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        while self._scope.unlogged:
            with contextlib.suppress(Exception):  # a handler's own
                _log.info("%s", self._scope.unlogged.pop(0))


def state_of(strategy: Strategy) -> TargetState:
    return ledger.state_of(strategy.target)


class PreparedOffload:
    """An offload that has done everything that can fail, and freed nothing yet.

    Made by `prepare`. Until `commit` or `abandon` the tensors are guarded and other transitions raise. Dropped without either
    call, it is abandoned when the next transition starts.
    """

    def __init__(self, scope: Scope, chosen: frozenset[str], aim: Aim, *, check: bool = True) -> None:
        start(scope.device)
        self._held = scope.hold()
        self._scope, self._aim = scope, aim
        self._plan: Plan | None = _checked_plan(scope, chosen) if check else scope.plan()
        resident = [each for each in self._plan.storages.values() if each.entry is None]
        moves, self._left = self._plan.outgoing([each for each in resident if aim.is_to_go(each)])
        self._left += self._plan.elsewhere
        self._left += [_kept(each, aim) for each in resident if not aim.is_to_go(each) and each.is_wanted(aim.away)]
        self._nbytes = [move.storage.nbytes() for move in moves]
        self._measured = _Measured("offload", chosen, [each.storage.device for each in self._plan.storages.values()])
        try:
            _set_barriers(scope, aim.away)
            self._transfer: transfer.Prepared | None = transfer.Prepared(moves, verify=scope.verify, components=chosen)
        except BaseException:
            _settle(scope, scope.away())
            raise
        self._measured.pause()

    def commit(self) -> TransitionReport:
        """Free the device memory. Cannot fail.

        Raises:
            TransitionError: it was committed or abandoned before, or this is a forked child of the process that prepared it.
        """
        with Logged(self._scope), Deferred(), ledger.LOCK:
            _refuse_on_top_of_another()
            return self._commit()

    def _commit(self) -> TransitionReport:
        prepared, plan = self._taken(prepared_here=True)
        self._measured.resume()
        prepared.commit()
        _settle(self._scope, self._aim.away)
        return self._measured.report(self._scope, plan, self._nbytes, prepared.copied_nbytes, self._left)

    def abandon(self) -> None:
        """Leave everything resident, as it was.

        Raises:
            TransitionError: it was committed or abandoned before.
        """
        with Deferred(), ledger.LOCK:
            _refuse_on_top_of_another()
            prepared, _ = self._taken()
            prepared.abandon()
            _settle(self._scope, self._scope.away())

    def is_pending(self) -> bool:
        """Whether neither was called yet."""
        return self._transfer is not None

    def _taken(self, *, prepared_here: bool = False) -> tuple[transfer.Prepared, Plan]:
        """What was prepared, which this object then no longer refers to."""
        prepared, plan = self._transfer, self._plan
        if prepared is None or plan is None:
            raise TransitionError("this prepared offload was committed or abandoned before; call prepare() again")
        if prepared_here:
            prepared.check()
        self._transfer = self._plan = None
        self._held = []
        return prepared, plan


def put_away(scope: Scope, chosen: frozenset[str], aim: Aim, *, check: bool = True) -> TransitionReport:
    """Offload every storage that is to be away."""
    return PreparedOffload(scope, chosen, aim, check=check)._commit()


def prepare(scope: Scope, chosen: frozenset[str], aim: Aim) -> PreparedOffload:
    """Do all of it that can fail, and have other transitions raise until it is committed or abandoned."""
    global _pending
    prepared = PreparedOffload(scope, chosen, aim)
    _pending = weakref.ref(prepared)
    return prepared


def bring_back(scope: Scope, chosen: frozenset[str], aim: Aim, *, check_names: bool = True) -> TransitionReport:
    """Reload every storage that is not to be away."""
    start(scope.device)
    held = scope.hold()
    plan = scope.plan()
    if check_names:
        plan.check_names(scope.away())
    back = [each for each in plan.storages.values() if each.entry is not None and not aim.is_to_go(each)]
    measured = _Measured("reload", chosen, [each.storage.device for each in plan.storages.values()])
    entries = [each.entry for each in back if each.entry is not None]
    copied = sum(entry.nbytes for entry in entries if entry.slot is not None)
    transfer.allocate_then_copy(entries, verify=scope.verify)
    _settle(scope, aim.away)
    del held
    return measured.report(scope, plan, [each.nbytes for each in back], copied, plan.elsewhere)


def reload_entries(entries: Sequence[Entry], device: torch.device, *, verify: bool) -> None:
    """Reload these storages, whoever claims them."""
    start(device)
    transfer.allocate_then_copy([entry for entry in entries if entry.is_current()], verify=verify)


def start(device: torch.device) -> None:
    """What every transition does first: refuse to run now, or tidy up after what was interrupted or died.

    Raises:
        TransitionError: a stream is capturing, a backward is running, a prepared offload waits for its commit, or this
            thread is inside another transition.
    """
    _refuse_on_top_of_another()
    pending = _pending() if _pending is not None else None
    if pending is not None and pending.is_pending():
        raise TransitionError("a prepared offload waits: call its commit() or abandon() before the next transition")
    transfer.check_possible(device)
    transfer.repair()
    ledger.drain()


def _refuse_on_top_of_another() -> None:
    """See [Note: one at a time]."""
    inside = 0
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        inside += frame.f_code in _TRANSITIONS
        frame = frame.f_back
    if inside > 1:
        raise TransitionError(
            "a transition is under way in this thread: a signal handler, a finalizer or a hook called another on top of it. "
            "Nothing was moved; call it again later"
        )


_TRANSITIONS: frozenset[CodeType] = frozenset(
    function.__code__
    for function in (put_away, prepare, PreparedOffload.commit, PreparedOffload.abandon, bring_back, reload_entries)
)


def _disown() -> None:
    """In a forked child: what the parent prepared is the parent's."""
    global _pending
    _pending = None


os.register_at_fork(after_in_child=_disown)


def _checked_plan(scope: Scope, chosen: frozenset[str]) -> Plan:
    for strategy in scope.alive():
        strategy.check(chosen.intersection(strategy.components))
    plan = scope.plan()
    plan.check_names(scope.away())
    plan.check_sizes(scope.known, chosen)
    return plan


def _set_barriers(scope: Scope, away: Away) -> None:
    """Set the hooks on targets of which something is about to be away; they let everything pass until it is."""
    for strategy in scope.alive():
        state = state_of(strategy)
        if away[id(strategy)] and not state.barriers:
            check = functools.partial(_check_call, strategy.name, weakref.ref(state))
            state.barriers.extend(strategy.barriers(check))


def _settle(scope: Scope, away: Away) -> None:
    """Remember what is away, and remove the hooks on targets of which nothing is."""
    for strategy in scope.alive():
        state = state_of(strategy)
        state.away = set(away[id(strategy)])
        state.lost = {lost for lost in state.lost if lost[0] in state.away}
        while state.barriers and not state.away:
            with contextlib.suppress(Exception):  # a user's own, and the bytes are where they should be
                state.barriers.pop()()


def _check_call(name: str, reference: weakref.ref[TargetState], call: str) -> None:
    state = reference()
    if state is None or not state.away:
        return
    offloaded = [entry.name for entry in ledger.entries() if entry.offloaded and entry.is_claimed_by(state)]
    what = f", of which {listed(offloaded)} is offloaded" if offloaded else ", which is away"
    raise OffloadedTensorError(f"{call} on {name!r}{what}. Call reload() on its Offloader first")


def _kept(planned: Planned, aim: Aim) -> LeftRow:
    components = listed(planned.kept_by(aim.away))
    return LeftRow(
        planned.name, planned.nbytes, f"held back by {components}, resident, which claims it too; offload that as well"
    )


class _Measured:
    """The allocator's and the driver's numbers before a transition, to be compared with those after it."""

    def __init__(self, direction: str, chosen: frozenset[str], used: Sequence[torch.device]) -> None:
        self._direction, self._chosen, self._devices = direction, chosen, used
        self._started = time.perf_counter()
        self._time_s = 0.0
        self._allocated = devices.allocated_nbytes(used)
        self._driver_free = devices.driver_free_nbytes(used)

    def pause(self) -> None:
        """Stop the clock; what the caller does between `prepare` and `commit` is theirs."""
        self._time_s += time.perf_counter() - self._started

    def resume(self) -> None:
        """Start it again."""
        self._started = time.perf_counter()

    def report(self, scope: Scope, plan: Plan, sizes: Sequence[int], copied: int, left: Sequence[LeftRow]) -> TransitionReport:
        self.pause()
        sign = 1 if self._direction == "offload" else -1
        allocated, reserved = devices.allocated_nbytes(self._devices), devices.reserved_nbytes(self._devices)
        measured = _difference(self._allocated, allocated, sign)
        resident = sum(each.nbytes for each in plan.storages.values() if each.entry is None)
        mirrors = scope.mirrors()
        report = TransitionReport(
            direction=self._direction,
            targets=tuple(strategy.name for strategy in scope.alive()),
            components=tuple(sorted(self._chosen)),
            nbytes=sum(sizes),
            storages=len(sizes),
            copied_nbytes=copied,
            measured_nbytes=measured,
            driver_nbytes=_difference(self._driver_free, devices.driver_free_nbytes(self._devices), -sign),
            fragmented_nbytes=_difference(reserved, allocated, 1),
            unreached_nbytes=None if allocated is None else max(0, allocated - resident),
            exported_nbytes=None if measured is None else max(0, sum(sizes) - measured) if sign > 0 else 0,
            time_s=self._time_s,
            host_nbytes=sum(row.nbytes for row in mirrors),
            mirrors=mirrors,
            left=tuple(left),
        )
        scope.report = report
        scope.unlogged.append(report.line())
        return report


def _difference(before: int | None, after: int | None, sign: int) -> int | None:
    return None if before is None or after is None else sign * (before - after)
