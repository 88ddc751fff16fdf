"""One transition: find what the strategies hold, plan what goes and what comes back, move it, report.

A storage is offloaded if all components that claim it are away. Each target's set ``away`` changes when the transition has
committed, together with the hooks that depend on it.
"""

from __future__ import annotations

import functools
import logging
import time
import weakref
from collections.abc import Mapping, Sequence

import torch

from . import device as devices
from . import ledger, transfer
from .errors import OffloadedTensorError, TransitionError, listed
from .interrupts import Deferred
from .ledger import TargetState
from .plan import Plan, Planned
from .report import LeftRow, MirrorRow, TransitionReport
from .storage import Storage
from .strategies.base import Strategy

_log = logging.getLogger("torch_offload")
Away = Mapping[int, frozenset[str]]  # id of a strategy -> the components of its target that are to be away
_pending: weakref.ref[PreparedOffload] | None = None


class Scope:
    """Whose memory transitions are about, and what is remembered between them.

    Attributes:
        strategies: the strategies of all targets; those whose target is gone are passed over.
        device: whose memory is meant, as `device.resolve` gave it.
        verify: whether bytes are checksummed.
        known: size in bytes and dtype of each parameter offloaded before, by strategy and name.
        report: of the last transition.
    """

    def __init__(self, strategies: Sequence[Strategy], device: torch.device, *, verify: bool) -> None:
        self.strategies = tuple(strategies)
        self.device = device
        self.verify = verify
        self.known: dict[tuple[int, str], tuple[int, torch.dtype]] = {}
        self.report: TransitionReport | None = None

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
        rows = {id(mirror): (each.name, mirror) for each in self.alive() for mirror in state_of(each).mirrors.values()}
        return tuple(MirrorRow(name, mirror.nbytes, mirror.pinned) for name, mirror in rows.values())


def state_of(strategy: Strategy) -> TargetState:
    return ledger.state_of(strategy.target)


class PreparedOffload:
    """An offload that has done everything that can fail, and freed nothing yet.

    Until `commit` or `abandon` the tensors are guarded and other transitions raise. Dropped without either call, it is
    abandoned when the next transition starts.
    """

    def __init__(self, scope: Scope, chosen: frozenset[str], away: Away, *, keep: Sequence[Storage] = ()) -> None:
        start(scope.device)
        for strategy in scope.alive():
            strategy.check(chosen.intersection(strategy.components))
        plan = scope.plan()
        plan.check_names(scope.away())
        plan.check_sizes(scope.known, chosen)
        resident = [each for each in plan.storages.values() if each.entry is None]
        going = [each for each in resident if not each.held_by(away) or _is_in(each.storage, keep)]
        moves, self._left = plan.outgoing(going)
        self._left += plan.elsewhere + [
            _held_back(each, away) for each in resident if each not in going and each.is_wanted(away)
        ]
        self._scope, self._away, self._plan = scope, away, plan
        self._nbytes = [move.storage.nbytes() for move in moves]
        self._measured = _Measured("offload", chosen, [move.storage.device for move in moves])
        self._transfer: transfer.Prepared | None = transfer.Prepared(moves, verify=scope.verify)

    def wait(self) -> PreparedOffload:
        """Have other transitions raise until `commit` or `abandon`; without this the next one abandons it."""
        global _pending
        _pending = weakref.ref(self)
        return self

    def commit(self) -> TransitionReport:
        """Free the device memory. Cannot fail.

        Raises:
            TransitionError: it was committed or abandoned before.
        """
        with Deferred(), ledger.LOCK:
            prepared = self._taken()
            prepared.commit()
            _settle(self._scope, self._away)
            return self._measured.report(self._scope, self._plan, self._nbytes, prepared.copied_nbytes, self._left)

    def abandon(self) -> None:
        """Leave everything resident, as it was.

        Raises:
            TransitionError: it was committed or abandoned before.
        """
        with Deferred(), ledger.LOCK:
            self._taken().abandon()

    def is_pending(self) -> bool:
        """Whether neither was called yet."""
        return self._transfer is not None

    def _taken(self) -> transfer.Prepared:
        prepared, self._transfer = self._transfer, None
        if prepared is None:
            raise TransitionError("this prepared offload was committed or abandoned before; call prepare() again")
        return prepared


def bring_back(
    scope: Scope, chosen: frozenset[str], away: Away, *, keep: Sequence[Storage] = (), check_names: bool = True
) -> TransitionReport:
    """Reload every storage that a component claims which is not to be away, but those in ``keep``."""
    start(scope.device)
    plan = scope.plan()
    if check_names:
        plan.check_names(scope.away())
    back = [each for each in plan.storages.values() if each.entry and each.held_by(away) and not _is_in(each.storage, keep)]
    measured = _Measured("reload", chosen, [each.storage.device for each in back])
    entries = [each.entry for each in back if each.entry is not None]
    copied = sum(entry.nbytes for entry in entries if entry.slot is not None)
    transfer.allocate_then_copy(entries, verify=scope.verify)
    _settle(scope, away)
    return measured.report(scope, plan, [each.nbytes for each in back], copied, plan.elsewhere)


def start(device: torch.device) -> None:
    """What every transition does first: refuse to run now, or tidy up after what was interrupted or died.

    Raises:
        TransitionError: a stream is capturing, or a prepared offload waits for its commit.
    """
    pending = _pending() if _pending is not None else None
    if pending is not None and pending.is_pending():
        raise TransitionError("a prepared offload waits: call its commit() or abandon() before the next transition")
    transfer.check_possible(device)
    transfer.repair()
    ledger.drain()


def _settle(scope: Scope, away: Away) -> None:
    """Remember what is away, and set or remove the hooks on the targets accordingly."""
    for strategy in scope.alive():
        state = state_of(strategy)
        state.away = set(away[id(strategy)])
        state.lost = {(component, name) for component, name in state.lost if component in state.away}
        if state.away and not state.barriers:
            state.barriers.extend(strategy.barriers(functools.partial(_check_call, strategy.name, weakref.ref(state))))
        while state.barriers and not state.away:
            state.barriers.pop()()


def _check_call(name: str, reference: weakref.ref[TargetState], call: str) -> None:
    state = reference()
    if state is None or not state.away:
        return
    offloaded = [entry.name for entry in ledger.entries() if entry.offloaded and entry.is_claimed_by(state)]
    what = f", of which {listed(offloaded)} is offloaded" if offloaded else ", which is away"
    raise OffloadedTensorError(f"{call} on {name!r}{what}. Call reload() on its Offloader first")


def _held_back(planned: Planned, away: Away) -> LeftRow:
    held = planned.held_by(away)
    return LeftRow(
        planned.name, planned.nbytes, f"held back by {listed(held)}, resident, which claims it too; offload that as well"
    )


def _is_in(storage: Storage, storages: Sequence[Storage]) -> bool:
    return any(storage is each for each in storages)


class _Measured:
    """The allocator's and the driver's numbers before a transition, to be compared with those after it."""

    def __init__(self, direction: str, chosen: frozenset[str], used: Sequence[torch.device]) -> None:
        self._direction, self._chosen, self._devices = direction, chosen, used
        self._started = time.perf_counter()
        self._allocated = devices.allocated_nbytes(used)
        self._driver_free = devices.driver_free_nbytes(used)

    def report(self, scope: Scope, plan: Plan, sizes: Sequence[int], copied: int, left: Sequence[LeftRow]) -> TransitionReport:
        time_s = time.perf_counter() - self._started
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
            time_s=time_s,
            host_nbytes=sum(row.nbytes for row in mirrors),
            mirrors=mirrors,
            left=tuple(left),
        )
        scope.report = report
        _log.info("%s", report.line())
        return report


def _difference(before: int | None, after: int | None, sign: int) -> int | None:
    return None if before is None or after is None else sign * (before - after)
