"""One transition: find what the strategies hold, plan what goes and what comes back, move it, report.

A storage is offloaded if all components that claim it are away. Each target's set ``away`` changes when the transition has
committed, together with the hooks that depend on it.

[Note: one at a time]
The lock keeps other threads out. A signal handler, a finalizer or a hook may still start a transition in the thread that is
inside one, on top of its frames; that is refused by looking for them, since a flag would stay set if the transition were cut.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import weakref
from collections.abc import Sequence
from types import CodeType, FrameType

import torch

from . import ledger, transfer
from .errors import OffloadedTensorError, TransitionError, listed
from .interrupts import Deferred
from .ledger import Entry, TargetState
from .measure import Measured
from .plan import Plan, Planned
from .report import LeftRow, TransitionReport
from .scope import Aim, Away, Logged, Scope, state_of

_pending: weakref.ref[PreparedOffload] | None = None


class PreparedOffload:
    """An offload that has done everything that can fail, and freed nothing yet.

    Made by `prepare`. Until `commit` or `abandon` the tensors are guarded and other transitions raise. Dropped without either
    call, it is abandoned when the next transition starts.
    """

    def __init__(self, scope: Scope, chosen: frozenset[str], aim: Aim, *, check: bool = True) -> None:
        start(scope.device)
        self._held = scope.hold()
        self._scope, self._aim = scope, aim
        for strategy in scope.alive():
            strategy.wait()
        if check:
            _drop_scratch(scope)
        self._plan: Plan | None = _checked_plan(scope, chosen) if check else scope.plan()
        resident = [each for each in self._plan.storages.values() if each.entry is None]
        moves, self._left = self._plan.outgoing([each for each in resident if aim.is_to_go(each)])
        self._left += self._plan.elsewhere
        self._left += [_kept(each, aim) for each in resident if not aim.is_to_go(each) and each.is_wanted(aim.away)]
        self._nbytes = [move.storage.nbytes() for move in moves]
        away = [(each.entry, each) for each in self._plan.storages.values() if aim.is_to_go(each)]
        self._away_already = [(entry, each.owned()) for entry, each in away if entry is not None]  # by whomever
        self._measured = Measured("offload", chosen, [each.storage.device for each in self._plan.storages.values()])
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
        if self._transfer is not None:
            self._transfer.check()
        prepared, plan = self._taken()
        self._measured.resume()
        prepared.commit()
        for entry, claims in self._away_already:
            entry.add_claims(claims)
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

    def names(self) -> str:
        """The targets, for a message."""
        return self._scope.names()

    def is_pending(self) -> bool:
        """Whether neither was called yet."""
        return self._transfer is not None

    def _taken(self) -> tuple[transfer.Prepared, Plan]:
        """What was prepared, which this object then no longer refers to."""
        prepared, plan = self._transfer, self._plan
        if prepared is None or plan is None:
            raise TransitionError(
                f"the prepared offload of {self._scope.names()} was committed or abandoned before; call prepare() again"
            )
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


def bring_back(
    scope: Scope, chosen: frozenset[str], aim: Aim, *, check_names: bool = True, dropped: Sequence[Entry] = ()
) -> TransitionReport:
    """Reload every storage that is not to be away, and these, which the targets may have dropped."""
    start(scope.device)
    held = scope.hold()
    plan = scope.plan()
    if check_names:
        plan.check_names(scope.away())
    back = [each for each in plan.storages.values() if each.entry is not None and not aim.is_to_go(each)]
    measured = Measured("reload", chosen, [each.storage.device for each in plan.storages.values()])
    entries = list(dict.fromkeys([*(each.entry for each in back if each.entry is not None), *dropped]))
    nbytes = [entry.nbytes for entry in entries]
    copied = sum(entry.nbytes for entry in entries if entry.slot is not None)
    transfer.allocate_then_copy(entries, verify=scope.verify)
    _settle(scope, aim.away)
    del held
    return measured.report(scope, plan, nbytes, copied, plan.elsewhere)


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
        raise TransitionError(
            f"a prepared offload of {pending.names()} waits: call its commit() or abandon() before the next transition"
        )
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


def _drop_scratch(scope: Scope) -> None:
    """Have caches dropped, each once."""
    dropped: list[object] = []
    for strategy in scope.alive():
        for drop in strategy.scratch():
            if drop not in dropped:
                dropped.append(drop)
                drop()


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
                state.barriers[-1]()
            state.barriers[-1:] = []


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
