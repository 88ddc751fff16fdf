"""Whose memory transitions are about, where one is to lead, and what is remembered of the last.

[Note: logging]
A handler of the log has a lock of its own, in which it may format an offloaded tensor, which waits for ours. So lines are kept
and logged when our lock is free again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import weakref
from collections.abc import Iterable, Mapping, Sequence

import torch

from . import ledger
from .errors import listed
from .ledger import TargetState
from .plan import Plan, Planned
from .report import MirrorRow, TransitionReport
from .strategies.base import Strategy
from .tensors import Storage

_log = logging.getLogger("torch_offload")
Away = Mapping[int, frozenset[str]]  # id of a strategy -> the components of its target that are to be away


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

    def names(self) -> str:
        """The targets, for a message."""
        return listed(strategy.name for strategy in self.strategies)

    def components(self) -> tuple[str, ...]:
        """The components that the targets have."""
        return tuple(dict.fromkeys(name for strategy in self.strategies for name in strategy.components))

    def chosen(self, components: Iterable[str] | str | None) -> frozenset[str]:
        """The components that a caller named: all for None.

        Raises:
            ValueError: no target has one of them.
            TypeError: one is no name.
        """
        if components is None:
            return frozenset(self.components())
        given = list(components) if isinstance(components, Iterable) and not isinstance(components, str) else [components]
        if wrong := [name for name in given if not isinstance(name, str)]:
            raise TypeError(f"components are names such as 'params', not {wrong[0]!r}")
        chosen = frozenset(given)
        if unknown := sorted(chosen - set(self.components())):
            accepted = listed(self.components(), most=10) or "none"
            raise ValueError(f"no target has a component {listed(unknown)}; these targets have {accepted}")
        return chosen

    def titles(self) -> tuple[str, ...]:
        """The targets, for a report."""
        return tuple(each.name if each.target is not None else f"{each.name} (gone)" for each in self.strategies)

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
