"""Sync, copy, then free; and back. The one place that moves bytes, waits for devices and ends a storage's residency.

Each direction is one transaction over all its storages. What may fail comes first and is undone completely; what follows
cannot fail. Copies are asynchronous inside; the functions always synchronise.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import weakref
from collections.abc import Iterable, Sequence

import torch

from . import barriers, checksum, device, guard, ledger, mirror, storage
from .errors import DeviceMemoryError, IntegrityError, TransitionError, gib, listed
from .ledger import Entry, Stage
from .mirror import Need, PinnedMirror
from .tensors import Storage, byte_view


@dataclasses.dataclass(frozen=True, eq=False)
class Move:
    """One storage that is to be offloaded.

    Attributes:
        storage: the storage; it is resident.
        name: its name in messages.
        mirror: where its host memory comes from, unless a slot waits for it in another one.
        tensors: every tensor on it that can be made loud, with its name.
        gradients: (leaf, its attribute, name) of each gradient on it, for the barriers against a backward.
        claims: what `Entry.claims` is to hold.
        component: the component of its first claim.
        discard: give the bytes up; they come back as zeros.
        read_only: copy nothing if the mirror is shown to have these bytes.
    """

    storage: Storage
    name: str
    mirror: PinnedMirror
    tensors: Sequence[tuple[torch.Tensor, str]]
    gradients: Sequence[tuple[torch.Tensor, str, str]] = ()
    claims: Sequence[tuple[weakref.ref[ledger.TargetState], str, ledger.Key]] = ()
    component: str = ""
    discard: bool = False
    read_only: bool = False


class Prepared:
    """Storages whose bytes are on the device and in the mirror, guarded, waiting for `commit` or `abandon`.

    Building one copies and may fail, in which case nothing happened. `commit` and `abandon` do not fail.
    """

    def __init__(self, moves: Sequence[Move], *, verify: bool, components: Iterable[str] = ()) -> None:
        self._moves = moves
        self._entries: list[Entry] = []
        self._devices = [move.storage.device for move in moves]
        self.copied_nbytes = 0
        try:
            self._guard()
            device.synchronize(self._devices)
            self._find_host_memory(components)
            self._copy(verify)
        except BaseException:
            with contextlib.suppress(Exception):  # copies may be under way into slots that are about to wait
                device.synchronize(self._devices)
            self.abandon()
            raise

    def _guard(self) -> None:
        for move in self._moves:  # all hooks before any guard: torch would ask a guarded leaf's class for each
            entry = Entry(move.storage, move.name)
            entry.claims = list(move.claims)
            self._entries.append(entry)
            ledger.add(entry)
            for leaf, attribute, name in move.gradients:
                if leaf.is_floating_point() or leaf.is_complex():
                    barriers.Barrier(leaf, attribute, name, entry)
        for move, entry in zip(self._moves, self._entries, strict=True):
            guard.guard(move.tensors, entry)
        barriers.watch_steps()

    def _find_host_memory(self, components: Iterable[str]) -> None:
        """A slot for each storage whose bytes are kept: the one that waits for it, in whichever mirror, before any other."""
        requests: dict[int, tuple[PinnedMirror, list[Need], list[Entry]]] = {}
        for move, entry in sorted(zip(self._moves, self._entries, strict=True), key=lambda pair: pair[0].component):
            found = ledger.home_of(move.storage) or move.mirror
            for reference in _owners(move):
                state = reference()
                if state is not None:
                    state.uses(found)
            for each in (move.mirror, found):
                _, needs, entries = requests.setdefault(id(each), (each, [], []))
            if not move.discard:
                needs.append(Need(move.storage, entry.nbytes, move.name, move.component))
                entries.append(entry)
        taken = mirror.take([(found, needs) for found, needs, _ in requests.values()], components=components)
        for (found, _, entries), slots in zip(requests.values(), taken, strict=True):
            for entry, slot in zip(entries, slots, strict=True):
                entry.slot = slot
                found.lend(slot)

    def _copy(self, verify: bool) -> None:
        pairs = [(move, entry, entry.slot) for move, entry in zip(self._moves, self._entries, strict=True) if entry.slot]
        summed = [(move, entry) for move, entry, _ in pairs if verify or move.read_only]
        for (_, entry), value in zip(summed, checksums_of([move.storage for move, _ in summed]), strict=True):
            entry.checksum = value
        for move, entry, slot in pairs:
            if move.read_only and slot.is_of(move.storage) and slot.checksum == entry.checksum:
                continue
            slot.take_over(move.storage, move.name, move.component, _owners(move))
            ledger.place(move.storage, slot)
            copy(slot.bytes(), byte_view(move.storage))
            self.copied_nbytes += entry.nbytes
        device.synchronize(self._devices)

    def check(self) -> None:
        """Raise unless `commit` can be called.

        Raises:
            TransitionError: this is another process than the one that prepared, or another transition undid it meanwhile.
        """
        for entry in self._entries:
            entry.check_process()
            if not entry.is_current():
                raise TransitionError(f"another transition undid what was prepared of {entry.name!r}; call prepare() again")

    def commit(self) -> None:
        """Free the device memory: every storage is offloaded, and wholly free segments are with the driver."""
        for entry, move in zip(self._entries, self._moves, strict=True):
            entry.stage = Stage.OFFLOADED
            storage.give_up(move.storage)
        device.empty_cache(self._devices)

    def abandon(self) -> None:
        """Leave every storage as it was, and the host memory idle."""
        for entry in self._entries:
            _dismiss(entry)


def _owners(move: Move) -> list[weakref.ref[ledger.TargetState]]:
    """Whose claims are on it, each once."""
    return list({id(reference): reference for reference, _, _ in move.claims}.values())


def copy_then_free(moves: Sequence[Move], *, verify: bool = True) -> None:
    """Offload these storages: wait for their devices, checksum, copy into the mirror, wait, free.

    Args:
        moves: the storages, each resident and named once.
        verify: checksum the bytes, so that `allocate_then_copy` can tell whether they came back.

    Raises:
        HostMemoryError: the host cannot hold the mirror. Nothing was touched.
    """
    Prepared(moves, verify=verify).commit()


def allocate_then_copy(entries: Sequence[Entry], *, verify: bool = True) -> None:
    """Reload these entries' storages: allocate all, copy, wait, compare checksums, then free the tensors to be used.

    Raises:
        DeviceMemoryError: the device cannot hold them. All stay offloaded, and the call can be repeated.
        IntegrityError: bytes that came back are not those that left. All stay offloaded, the mirror is kept.
    """
    alive = [(entry, found) for entry in entries if (found := entry.storage()) is not None]
    devices = [found.device for _, found in alive]
    for entry, _ in alive:
        entry.check_process()
    try:
        _fill(alive, devices, verify)
    except BaseException:
        try:
            device.synchronize(devices)
        finally:
            for entry, found in alive:
                if entry.offloaded:
                    storage.abandon(found)
            device.empty_cache(devices)
        raise
    for entry, found in alive:
        storage.publish(found)
        entry.stage = Stage.RELOADED
        if entry.slot is not None:
            entry.slot.checksum = entry.checksum
        _dismiss(entry)


def _fill(alive: Sequence[tuple[Entry, Storage]], devices: Sequence[torch.device], verify: bool) -> None:
    """Allocate all, copy, wait, compare."""
    for entry, _ in alive:
        if verify and entry.slot is not None and entry.checksum is None:
            (entry.checksum,) = checksum.checksums([entry.slot.bytes()])
    views = _stage_all(alive)
    device.synchronize(devices)  # the memory may be written still by what used it before on another stream
    for (entry, _), view in zip(alive, views, strict=True):
        if entry.slot is None:
            view.zero_()
        else:
            copy(view, entry.slot.bytes())
    device.synchronize(devices)
    if verify:
        _compare([(entry, found) for entry, found in alive if entry.slot is not None])


def repair() -> None:
    """Finish what an interrupted transition left half done: storages that are not offloaded are resident, wholly."""
    for entry in list(ledger.entries()):
        found = entry.storage()
        if not entry.offloaded:
            _dismiss(entry)
        elif entry.pid == os.getpid():
            entry.remove_barriers(needed=False)
            if found is not None and found.nbytes():
                storage.give_up(found)  # cut between the flag and the free, or regrown by a foreign set_


def check_possible(where: torch.device) -> None:
    """Raise if no transition of memory on this device can run now.

    Raises:
        TransitionError: the current stream is capturing a graph, or this is called from inside a backward.
    """
    if device.is_capturing(where):
        raise TransitionError(
            "the current stream is capturing a CUDA graph, and a transition waits, allocates and frees. Offload or reload "
            "before or after the capture"
        )
    if torch._C._current_graph_task_id() != -1:
        raise TransitionError(
            "a backward is running in this thread, and a transition would take the memory from under it. Offload or reload "
            "after backward() has returned, not from a hook"
        )


def copy(destination: torch.Tensor, source: torch.Tensor) -> None:
    """Enqueue a copy of uint8 bytes between host and device."""
    destination.copy_(source, non_blocking=True)


def _dismiss(entry: Entry) -> None:
    """The storage is resident: free its tensors, give its slot back, forget it. Calling it twice is harmless."""
    guard.lift(entry)
    entry.release()


def _stage_all(alive: Sequence[tuple[Entry, Storage]]) -> list[torch.Tensor]:
    views = []
    for index, (entry, found) in enumerate(alive):
        try:
            # the default stream's pool is the one that the memory is to belong to
            with device.naming_captures(), device.default_stream(found.device):
                views.append(storage.stage(found, entry.nbytes))
        except RuntimeError as error:
            if not device.is_out_of_memory(error):
                raise
            missing = gib(sum(later.nbytes for later, _ in alive[index:]))
            total = gib(sum(each.nbytes for each, _ in alive))
            free = device.driver_free_nbytes([found.device])
            room = "" if free is None else f" and {gib(free)} is free"
            raise DeviceMemoryError(
                f"no device memory on {found.device} to reload {entry.name!r} ({gib(entry.nbytes)}): {missing} of {total} is "
                f"missing{room}. Everything stays offloaded; free device memory and call reload() again"
            ) from error
    return views


def _compare(pairs: Sequence[tuple[Entry, Storage]]) -> None:
    sums = checksums_of([found for _, found in pairs])
    if wrong := [entry.name for (entry, _), value in zip(pairs, sums, strict=True) if value != entry.checksum]:
        raise IntegrityError(
            f"the bytes that came back are not those that were offloaded: {listed(wrong)}. The mirror is kept and everything "
            "stays offloaded. Call reload() again in case the copy was at fault; if it fails again the host memory is, and "
            "verify=False brings the bytes back as they are"
        )


def checksums_of(storages: Sequence[Storage]) -> list[int]:
    """The checksums of what these storages hold on their devices.

    Raises:
        DeviceMemoryError: there is no room for the little that it takes.
    """
    try:
        return checksum.checksums([byte_view(each) for each in storages])
    except RuntimeError as error:
        if not device.is_out_of_memory(error):
            raise
        raise DeviceMemoryError(
            "no device memory for the few MiB that checksums take. Nothing was moved; free some (empty_cache()) and call "
            "again, or pass verify=False"
        ) from error
