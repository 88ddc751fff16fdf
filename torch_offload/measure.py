"""What a transition changed, as the allocator and the driver count it, and the report of it."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from . import device as devices
from .plan import Plan
from .report import LeftRow, TransitionReport
from .scope import Scope


class Measured:
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
            targets=scope.titles(),
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
