"""The places at which transitions fail, and the link: made to fail, watched, damaged."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from .. import checksum, device, host_memory, storage, transfer


class Seam(enum.Enum):
    """The places at which a transition can fail."""

    HOST_ALLOCATION = "the operating system refuses pages"
    REGISTRATION = "the driver refuses to page-lock"
    SYNCHRONISE = "waiting for a device reports an earlier error"
    CHECKSUM = "the checksum's kernel fails"
    COPY = "a copy cannot be enqueued"
    DEVICE_ALLOCATION = "the device is out of memory"


class InjectedError(RuntimeError):
    """What a failing seam raises."""


class InjectedOutOfMemoryError(InjectedError, torch.OutOfMemoryError):
    """What a failing device allocation raises."""


_SEAMS: dict[Seam, tuple[Any, str]] = {
    Seam.HOST_ALLOCATION: (host_memory, "map_pages"),
    Seam.REGISTRATION: (device, "register_host"),
    Seam.SYNCHRONISE: (device, "synchronize"),
    Seam.CHECKSUM: (checksum, "checksums"),
    Seam.COPY: (transfer, "copy"),
    Seam.DEVICE_ALLOCATION: (storage, "stage"),
}


@dataclasses.dataclass
class Fault:
    """A seam that fails once. ``calls`` counts how often it was reached, ``fired`` says whether it failed."""

    calls: int = 0
    fired: bool = False


@contextlib.contextmanager
def failing(seam: Seam, at: int = 1) -> Iterator[Fault]:
    """Fail the ``at``-th call of a seam with `InjectedError` (a refused registration returns False instead)."""
    owner, name = _SEAMS[seam]
    original: Callable[..., Any] = getattr(owner, name)
    fault = Fault()

    def call(*args: Any, **kwargs: Any) -> Any:
        fault.calls += 1
        if fault.calls != at:
            return original(*args, **kwargs)
        fault.fired = True
        if seam is Seam.REGISTRATION:
            return False
        raise (InjectedOutOfMemoryError if seam is Seam.DEVICE_ALLOCATION else InjectedError)(f"injected: {seam.value}")

    with mock.patch.object(owner, name, call):
        yield fault


@contextlib.contextmanager
def pretended_pinning() -> Iterator[list[int]]:
    """Without a GPU: page-lock for the CPU through calls that do nothing. Gives the addresses that are registered now."""
    registered: list[int] = []

    def register(pointer: int, _nbytes: int) -> bool:
        registered.append(pointer)
        return True

    with (
        mock.patch.object(device, "registers_host_memory", return_value=True),
        mock.patch.object(device, "register_host", register),
        mock.patch.object(device, "unregister_host", registered.remove),
    ):
        try:
            yield registered
        finally:
            host_memory.drain()


@dataclasses.dataclass
class Link:
    """What went over the link: the size in bytes of each copy."""

    copies: list[int] = dataclasses.field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return sum(self.copies)


@contextlib.contextmanager
def link(*, corrupt: Callable[[int, torch.Tensor], None] = lambda _index, _bytes: None) -> Iterator[Link]:
    """Watch the link, and corrupt what comes over it.

    Args:
        corrupt: called after each copy with its index and its destination, a uint8 tensor that it may change.
    """
    seen = Link()
    original = transfer.copy

    def copy(destination: torch.Tensor, source: torch.Tensor) -> None:
        original(destination, source)
        device.synchronize([destination.device, source.device])
        corrupt(len(seen.copies), destination)
        seen.copies.append(destination.numel())

    with mock.patch.object(transfer, "copy", copy):
        yield seen
