"""Who is offloaded, and what is remembered of a target and of a storage: the process-wide tables, all weak.

The *ledger* maps a storage to its `Entry`. A storage is offloaded if, and only if, its entry says so; that its size is 0
proves nothing, since a foreign `set_` regrows a freed storage. The flag is raised before the memory is given up and lowered
after the bytes are back and verified, so a transition that is cut anywhere leaves every byte recoverable, and the next call
finishes it. An entry is there from before its tensors are guarded until after the last of them is free again.

The *targets* map a module or optimizer to its `TargetState`: the components that are away, the mirror, the open contexts. The
*places* say which slot a storage had last, whoever's mirror that is in.

[Note: nothing is held]
No table keeps a tensor, a storage or a target alive. When an offloaded storage dies, the next call gives its slot back to
the mirror; if the target is gone too, nobody can use the slot again, and a callback gives it up at once. It may run in any
thread, inside a locked region or a loop over the table, so it does no more than that.
"""

from __future__ import annotations

import enum
import functools
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from . import host_memory
from .errors import TransitionError
from .mirror import PinnedMirror, Slot
from .tensors import Storage

Key = tuple[int, str]  # what a claim is called within its target: (id of the tensor it belongs to, or 0; name)
LOCK = threading.RLock()  # transitions and reads from mirrors exclude each other


class Stage(enum.Enum):
    """How far an entry is. Only OFFLOADED means that the mirror, not the device, holds the bytes that count."""

    PREPARED = enum.auto()  # tensors guarded, bytes on the device, perhaps in the mirror too
    OFFLOADED = enum.auto()  # bytes in the mirror alone
    RELOADED = enum.auto()  # bytes on the device again; the tensors are being freed


class Entry:
    """Where the bytes of one storage are while it is offloaded.

    Attributes:
        stage: how far it is.
        storage: weak reference to the storage.
        nbytes: its size in bytes when resident.
        name: the name of its first claim, for messages.
        slot: the host memory, lent by its mirror; None for bytes that were discarded and come back as zeros.
        checksum: of the bytes in the slot; None if unknown.
        writes: how many times the mirror was written on purpose.
        guards: weak references to the guards of the tensors on it (guard.py), in order; the dead leave.
        barriers: weak references to what stops a backward from accumulating into it (barriers.py).
        claims: (target's state, component, key) for each claim on it, to notice a name that is re-pointed meanwhile.
    """

    def __init__(self, storage: Storage, name: str) -> None:
        self.stage = Stage.PREPARED
        self.cdata = storage._cdata
        self.storage = weakref.ref(storage, functools.partial(_died, self.cdata))
        self.nbytes = storage.nbytes()
        self.name = name
        self.slot: Slot | None = None
        self.checksum: int | None = None
        self.writes = 0
        self.guards: dict[weakref.ref[Any], None] = {}
        self.barriers: list[weakref.ref[Any]] = []
        self.claims: list[tuple[weakref.ref[TargetState], str, Key]] = []
        self.pid = os.getpid()
        self._exports: list[weakref.ref[Storage]] = []
        self._export: Storage | None = None
        self._shared: list[Storage] = []

    @property
    def offloaded(self) -> bool:
        return self.stage is Stage.OFFLOADED

    def is_current(self) -> bool:
        """Whether the ledger still has this entry."""
        return _entries.get(self.cdata) is self

    def holds_tensors(self) -> bool:
        """Whether its tensors are to be guarded."""
        return self.stage is not Stage.RELOADED and self.is_current()

    def add_claims(self, claims: Iterable[tuple[weakref.ref[TargetState], str, Key]]) -> None:
        """Note the claims of owners that have none on it yet."""
        owners = {id(owner) for owner, _, _ in self.claims}
        self.claims += [claim for claim in claims if id(claim[0]) not in owners]

    def is_claimed_by(self, state: TargetState) -> bool:
        """Whether one of its claims was made for this target."""
        return any(reference() is state for reference, _, _ in self.claims)

    def check_process(self) -> None:
        """Raise in a forked child, which has no mirror.

        Raises:
            TransitionError: this is another process than the one that offloaded.
        """
        if self.pid != os.getpid():
            what = "offloaded" if self.offloaded else "prepared"
            raise TransitionError(
                f"{self.name!r} was {what} by process {self.pid}, and its mirror is not in this forked child. Reload (or "
                "abandon) before you fork, or read it in the parent"
            )

    def host_storage(self) -> Storage:
        """A new host storage of exactly ``nbytes`` bytes that shares the mirror's memory; zeros for what was discarded."""
        self.check_process()
        if self.slot is None:
            return torch.zeros(self.nbytes, dtype=torch.uint8, device="cpu").untyped_storage()
        return self.slot.bytes().untyped_storage()

    def export(self) -> Storage:
        """`host_storage` for whoever saves: the same one for all tensors, until the mirror is written.

        `multiprocessing` moves what it sends to shared memory, where others may write it, and closes its file once nothing
        refers to it: then the next one gets a new storage, and the old one is kept.
        """
        if self.slot is None:
            return self.host_storage()
        if self._export is None or self._export.is_shared():
            self._end_export()
            self._export = self.host_storage()
            self._exports.append(weakref.ref(self._export))
            weakref.finalize(self._export, _keep, self.slot).atexit = False  # the slot's place is taken until then
        return self._export

    def written(self) -> None:
        """Note that the mirror's bytes were changed on purpose."""
        self.writes += 1
        self._end_export()

    def _end_export(self) -> None:
        if self._export is not None and self._export.is_shared():
            self._shared.append(self._export)
        self._export = None

    def remove_barriers(self, *, needed: bool) -> None:
        """Remove the barriers; the needed ones too, or only those whose gradient was replaced or dropped."""
        for reference in self.barriers:
            barrier = reference()
            if barrier is not None and (needed or not barrier.is_needed()):
                barrier.remove()

    def release(self) -> None:
        """Leave the ledger; the barriers are gone and the slot waits in its mirror again. Calling it twice is harmless.

        A slot that somebody still saves from does not wait: its memory is theirs until they are done.
        """
        self.remove_barriers(needed=True)
        mirror = None if self.slot is None else self.slot.mirror()
        if self.slot is not None and mirror is not None:
            self._export = None
            self._shared.clear()
            if all(export() is None for export in self._exports):
                mirror.give(self.slot)
        if self.is_current():
            del _entries[self.cdata]


class TargetState:
    """What is remembered of a target.

    Attributes:
        away: the components that are to be away.
        mirrors: its host memory, by type of device; made at the first offload.
        elsewhere: mirrors of other targets that hold bytes of storages it claims too.
        contexts: weak references to the open contexts over it, innermost last.
        barriers: for each component that is away, what undoes the hooks that were set on the target for it.
        lost: (component, key) of storages that died while they were offloaded.
    """

    def __init__(self) -> None:
        self.away: set[str] = set()
        self.mirrors: dict[str, PinnedMirror] = {}
        self.elsewhere: weakref.WeakSet[PinnedMirror] = weakref.WeakSet()
        self.contexts: list[weakref.ref[Any]] = []
        self.barriers: list[Callable[[], None]] = []
        self.lost: set[tuple[str, Key]] = set()

    def open_contexts(self) -> list[Any]:
        """The open contexts over it, innermost last; those that were dropped are not open."""
        return [context for reference in self.contexts if (context := reference()) is not None]

    def mirror_for(self, device: torch.device) -> PinnedMirror:
        """The mirror for storages on this device."""
        return self.mirrors.setdefault(device.type, PinnedMirror(device))

    def uses(self, mirror: PinnedMirror) -> None:
        """Note that storages it claims have their bytes in this mirror."""
        if not any(mirror is own for own in self.mirrors.values()):
            self.elsewhere.add(mirror)


_entries: dict[int, Entry] = {}
_targets: MutableMapping[Any, TargetState] = WeakIdKeyDictionary()
_places: weakref.WeakKeyDictionary[Storage, weakref.ref[Slot]] = weakref.WeakKeyDictionary()


def _keep(_slot: Slot) -> None:
    """A finalizer whose argument lives as long as what it is set on."""


def _died(cdata: int, reference: object) -> None:
    """See [Note: nothing is held]."""
    entry = _entries.get(cdata)
    if entry is None or entry.storage is not reference:
        return
    if (entry.slot is None or entry.slot.mirror() is None) and all(state() is None for state, _, _ in entry.claims):
        _entries.pop(cdata, None)


def entry_of(storage: Storage) -> Entry | None:
    """The storage's entry; None while it is resident and in no transition."""
    entry = _entries.get(storage._cdata)
    return entry if entry is not None and entry.storage() is storage else None


def nbytes_of(storage: Storage) -> int:
    """The storage's size in bytes when it is resident."""
    entry = entry_of(storage)
    return storage.nbytes() if entry is None else entry.nbytes


def is_offloaded(storage: Storage) -> bool:
    """Whether the mirror, not the device, holds the storage's bytes."""
    entry = entry_of(storage)
    return entry is not None and entry.offloaded


def is_empty() -> bool:
    """Whether nothing is offloaded or about to be."""
    return not _entries


def add(entry: Entry) -> None:
    """Enter a storage that is about to be offloaded."""
    _entries[entry.cdata] = entry


def entries() -> Iterator[Entry]:
    """The entries whose storages are alive."""
    return (entry for entry in list(_entries.values()) if entry.storage() is not None)


def home_of(storage: Storage) -> PinnedMirror | None:
    """The mirror, of whatever target, in which a slot waits for this storage."""
    reference = _places.get(storage)
    slot = None if reference is None else reference()
    return slot.mirror() if slot is not None and slot.is_of(storage) else None


def place(storage: Storage, slot: Slot) -> None:
    """Remember that the slot is the storage's last."""
    _places[storage] = weakref.ref(slot)


def state_of(target: object) -> TargetState:
    """What is remembered of a target; a new state for a new one. Held weakly."""
    state = _targets.get(target)
    if state is None:
        state = _targets[target] = TargetState()
    return state


def _disown() -> None:
    """In a forked child: other threads do not exist, and the parent's mirrors are not there."""
    global LOCK
    LOCK = threading.RLock()
    _places.clear()
    for state in _targets.values():
        state.mirrors.clear()


os.register_at_fork(after_in_child=_disown)


def drain() -> None:
    """Give back what died since the last call: the slots of dead storages, and retired pinned pages."""
    for entry in list(_entries.values()):
        if entry.storage() is None:
            for state, component, key in entry.claims if entry.offloaded else ():
                owner = state()
                if owner is not None:
                    owner.lost.add((component, key))
            entry.release()
    host_memory.drain()


def clear() -> None:
    """Forget everything, for tests."""
    _entries.clear()
    _targets.clear()
    _places.clear()
    drain()
