"""What a transition did, frozen."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

from .errors import gib


class Residency(enum.Enum):
    """Where a component's memory is."""

    RESIDENT = "resident"  # on the device; usable
    OFFLOADED = "offloaded"  # in the mirror alone; no device memory
    LEFT = "left"  # some of its storages are on the device: left for the reasons in the report, or of a target that is not away


@dataclasses.dataclass(frozen=True)
class MirrorRow:
    """Host memory of one target: bytes held (whole pages), whether all of it is page-locked, and whether all of it is of the
    size that was asked for (torch's own pinned allocator, used beside accelerators other than CUDA and HIP, may round up)."""

    target: str
    nbytes: int
    pinned: bool
    exact: bool


@dataclasses.dataclass(frozen=True)
class LeftRow:
    """A storage that stayed where it was: its name, size in bytes, and why."""

    name: str
    nbytes: int
    reason: str


@dataclasses.dataclass(frozen=True)
class TransitionReport:
    """One transition. Sizes in bytes, times in seconds; None where there is no caching allocator to ask (the CPU).

    Attributes:
        direction: ``"offload"`` or ``"reload"``.
        targets: the names of the targets; ``"Linear (gone)"`` for one that nobody holds any more.
        components: the components that the call named.
        nbytes: sum of the storages that moved: what is expected to be freed, or to be taken again.
        storages: how many.
        copied_nbytes: what went over the link; less than ``nbytes`` for discarded bytes and frozen references.
        measured_nbytes: change of the caching allocator's allocated bytes: freed by an offload, taken by a reload.
        driver_nbytes: the same for the driver's free memory; other processes move this number.
        fragmented_nbytes: bytes that the caching allocator still holds from the driver beyond what is allocated.
        unreached_nbytes: allocated bytes on the devices that no claim of this call covers.
        exported_nbytes: bytes that were expected to be freed and are not: their memory has holders beyond torch (IPC).
        time_s: wall-clock time of the call.
        host_nbytes: host memory that the mirrors of this call's targets hold: in use and idle.
        mirrors: one row per target.
        left: one row per storage that stayed, with the reason.
    """

    direction: str
    targets: tuple[str, ...]
    components: tuple[str, ...]
    nbytes: int
    storages: int
    copied_nbytes: int
    measured_nbytes: int | None
    driver_nbytes: int | None
    fragmented_nbytes: int | None
    unreached_nbytes: int | None
    exported_nbytes: int | None
    time_s: float
    host_nbytes: int
    mirrors: tuple[MirrorRow, ...]
    left: tuple[LeftRow, ...]

    @property
    def left_nbytes(self) -> int:
        """Sum of the storages that stayed."""
        return sum(row.nbytes for row in self.left)

    def as_dict(self) -> dict[str, Any]:
        """Everything, as plain lists, numbers and strings."""
        return dataclasses.asdict(self)

    def line(self) -> str:
        """One line for a log."""
        storages = "1 storage" if self.storages == 1 else f"{self.storages} storages"
        copied = "" if self.copied_nbytes == self.nbytes else f" ({gib(self.copied_nbytes)} copied)"
        what = f"{' + '.join(self.targets) or 'nothing'} ({', '.join(self.components) or 'nothing'})"
        parts = [
            f"{self.direction} {what}: {gib(self.nbytes)}{copied} in {storages}",
            f"{self.time_s:.3f} s",
            f"host {gib(self.host_nbytes)}",
        ]
        if self.measured_nbytes is not None:
            parts.append(f"allocator {gib(self.measured_nbytes)}")
        if self.left:
            parts.append(f"left {gib(self.left_nbytes)} in {len(self.left)}")
        return ", ".join(parts)

    def __str__(self) -> str:
        rows = [(self.direction, f"{' + '.join(self.targets)} ({', '.join(self.components)})")]
        rows += [
            (field.removesuffix("_nbytes"), gib(value))
            for field in (
                "copied_nbytes",
                "measured_nbytes",
                "driver_nbytes",
                "fragmented_nbytes",
                "unreached_nbytes",
                "exported_nbytes",
            )
            if (value := getattr(self, field)) is not None
        ]
        rows.insert(1, ("storages", f"{self.storages} ({gib(self.nbytes)})"))
        rows.append(("time", f"{self.time_s:.3f} s"))
        for row in self.mirrors:
            kind = ("pinned" if row.pinned else "pageable") + ("" if row.exact else ", rounded up")
            rows.append((f"mirror {row.target}", f"{gib(row.nbytes)} {kind}"))
        rows += [(f"left {left.name}", f"{gib(left.nbytes)}: {left.reason}") for left in self.left]
        width = max(len(key) for key, _ in rows)
        return "\n".join(f"{key:<{width}}  {value}" for key, value in rows)
