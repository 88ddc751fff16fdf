"""The persistent pinned mirror: host memory for many storages, taken once and used again by size.

[Note: exactly one host byte per byte]
A mirror never holds an old and a new copy at once. Memory is used again by exact size; what a storage left behind that
has died, or that comes back under its name in another size, is given up *before* new memory is taken. A block holds the
small slots of one component, which come and go together, and a large slot alone. It goes back to the operating system whole:
when places in it were given up and all others wait, those are given up too and taken anew.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from . import host_memory
from .host_memory import HostBlock

_ALIGNMENT = 16  # bytes: the largest element
_BLOCK = 64 * 2**20  # small slots share blocks of about this size


class Slot:
    """A storage's place in a mirror.

    Attributes:
        nbytes: its size in bytes.
        name: the name its bytes were offloaded under last; component: its component.
        origin: weak reference to the device storage they came from, or None.
        owners: weak references to whoever claimed it.
        mirror: weak reference to the mirror it is of.
        checksum: what `checksum.checksums` said of them; None where they are not known to equal ``origin``'s.
    """

    __slots__ = ("__weakref__", "block", "checksum", "component", "mirror", "name", "nbytes", "offset", "origin", "owners")

    def __init__(self, mirror: PinnedMirror, block: HostBlock, offset: int, nbytes: int) -> None:
        self.mirror = weakref.ref(mirror)
        self.block = block
        self.offset = offset
        self.nbytes = nbytes
        self.name = self.component = ""
        self.origin: weakref.ref[torch.UntypedStorage] | None = None
        self.owners: list[weakref.ref[Any]] = []
        self.checksum: int | None = None

    def bytes(self) -> torch.Tensor:
        """A new uint8 tensor of shape ``(nbytes,)`` over the memory, on a host storage of exactly that size.

        New at each call: one that was made in inference mode could not be written outside of it.
        """
        return self.block.tensor(self.offset, self.nbytes)

    def take_over(self, storage: torch.UntypedStorage, name: str, component: str, owners: Iterable[weakref.ref[Any]]) -> None:
        """Be this storage's from now on; its bytes are still to be copied in."""
        self.origin, self.name, self.component, self.owners = weakref.ref(storage), name, component, list(owners)
        self.checksum = None

    def is_of(self, storage: torch.UntypedStorage) -> bool:
        """Whether the bytes were copied from this very storage."""
        return self.origin is not None and self.origin() is storage

    def origin_address(self) -> int | None:
        """The address of the storage it belonged to; None if that is dead."""
        origin = None if self.origin is None else self.origin()
        return None if origin is None else int(origin._cdata)

    def is_owned_by(self, owners: Iterable[object]) -> bool:
        """Whether one of these claimed the storage."""
        mine = [reference() for reference in self.owners]
        return any(owner is each for owner in owners for each in mine)

    def is_abandoned(self) -> bool:
        """Whether the storage it belonged to is dead."""
        return self.origin_address() is None


@dataclasses.dataclass(frozen=True)
class Need:
    """One storage that wants a slot of ``nbytes`` bytes, at least 1, for a component."""

    storage: torch.UntypedStorage
    nbytes: int
    name: str
    component: str = ""


class PinnedMirror:
    """Host memory of one target: it keeps the slots that wait, and lends the others.

    Example:
        >>> mirror = PinnedMirror(torch.device("cpu"))
        >>> weight = torch.ones(3)
        >>> [[slot]] = take([(mirror, [Need(weight.untyped_storage(), 12, "weight")])])
        >>> slot.bytes().shape, slot.bytes().dtype
        (torch.Size([12]), torch.uint8)
        >>> mirror.lend(slot); mirror.give(slot)

    Args:
        device: the accelerator whose copies the memory is page-locked for, or the CPU for plain memory.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._idle: dict[int, Slot] = {}
        self._blocks: weakref.WeakKeyDictionary[HostBlock, weakref.WeakSet[Slot]] = weakref.WeakKeyDictionary()

    @property
    def nbytes(self) -> int:
        """Host memory held, in bytes: lent and idle, whole pages."""
        return sum(block.nbytes for block in self._blocks)

    @property
    def exact(self) -> bool:
        """Whether every block is of the size that was asked for; torch's own pinned allocator rounds up."""
        return all(block.exact for block in self._blocks)

    @property
    def pinned(self) -> bool:
        """Whether every block is page-locked."""
        return all(block.pinned for block in self._blocks)

    def lend(self, slot: Slot) -> None:
        """Take a slot out of those that wait. Calling it twice is harmless."""
        self._idle.pop(id(slot), None)

    def give(self, slot: Slot) -> None:
        """Let a slot wait to be taken again. Calling it twice is harmless."""
        self._idle[id(slot)] = slot

    def close(self) -> None:
        """Give the memory that waits back to the operating system."""
        self._idle.clear()
        host_memory.drain()

    def serves(self, owners: Sequence[object]) -> bool:
        """Whether a slot here, waiting or lent, is of a storage that one of these claimed."""
        return any(slot.is_owned_by(owners) for slots in self._blocks.values() for slot in slots)

    def give_up(self, owners: Sequence[object]) -> None:
        """Give back what waits here of storages that these claimed."""
        self._drop(lambda slot: slot.is_owned_by(owners))
        host_memory.drain()

    def _waits(self, slot: Slot) -> bool:
        return id(slot) in self._idle

    def _waiting(self, needs: Sequence[Need]) -> list[Slot | None]:
        """A waiting slot for each need: the storage's own, else any of exactly its size, else None."""
        own = {slot.origin(): slot for slot in self._idle.values() if slot.origin is not None}
        found = [own.get(need.storage) for need in needs]
        found = [slot if slot and slot.nbytes == need.nbytes else None for slot, need in zip(found, needs, strict=True)]
        used = {id(slot) for slot in found}
        by_size: dict[int, list[Slot]] = {}
        for slot in sorted(self._idle.values(), key=lambda slot: slot.checksum is None or slot.is_abandoned()):
            if id(slot) not in used:
                by_size.setdefault(slot.nbytes, []).append(slot)
        for index, need in enumerate(needs):
            if found[index] is None and by_size.get(need.nbytes):
                found[index] = by_size[need.nbytes].pop()
        return found

    def _forget(self, lacking: Sequence[Need], found: Sequence[Slot | None], components: set[str] | None) -> None:
        """Give up what the storages and names that lack a slot left here, and what dead storages of these components (None: of
        all) did; nothing of what was found for others."""
        names, storages = {need.name for need in lacking}, {need.storage._cdata for need in lacking}
        kept = set(map(id, found))

        def is_gone(slot: Slot) -> bool:
            is_theirs = slot.name in names or slot.origin_address() in storages
            return is_theirs or (slot.is_abandoned() and (components is None or slot.component in components))

        self._drop(lambda slot: id(slot) not in kept and is_gone(slot))

    def _drop(self, is_gone: Callable[[Slot], bool]) -> None:
        for key in [key for key, slot in self._idle.items() if is_gone(slot)]:
            del self._idle[key]
        self._break_up()

    def _break_up(self) -> None:
        """Drop the slots that still wait in blocks in which places were given up, if none there is lent."""
        for block, slots in list(self._blocks.items()):
            used = sum(_aligned(slot.nbytes) for slot in slots)
            if host_memory.pages(used) < block.nbytes and all(map(self._waits, slots)):
                for key in list(map(id, slots)):
                    del self._idle[key]

    def _allocate(self, needs: Sequence[Need]) -> list[Slot]:
        slots = []
        for layout in _layouts(needs):
            block = HostBlock(_extent(layout), self.device)
            made = [Slot(self, block, offset, nbytes) for offset, nbytes in layout]
            self._blocks[block] = weakref.WeakSet(made)
            slots += made
        return slots


def take(requests: Sequence[tuple[PinnedMirror, Sequence[Need]]], *, components: Iterable[str] = ()) -> list[list[Slot]]:
    """For each mirror, a slot of exactly the right size for each of its needs, in order.

    Host memory is allocated (and page-locked) only for needs that no waiting slot fits, after all of it was found to be
    available. Slots that waited still do until `PinnedMirror.lend` is called for them, so an interrupted caller loses none.

    Args:
        requests: mirrors with their needs, those of one component side by side; all of the mirrors that are to be tidied, also
            if they need nothing.
        components: what dead storages of these left behind is given up if nothing takes it.

    Raises:
        HostMemoryError: the host cannot hold what is missing.
    """
    found = [mirror._waiting(needs) for mirror, needs in requests]
    short = any(slot is None for slots in found for slot in slots)
    for (mirror, needs), slots in zip(requests, found, strict=True):
        lacking = [need for need, slot in zip(needs, slots, strict=True) if slot is None]
        mirror._forget(lacking, slots, None if short else set(components))
        slots[:] = [slot if slot is not None and mirror._waits(slot) else None for slot in slots]
    missing = [
        [need for need, slot in zip(needs, slots, strict=True) if slot is None]
        for (_, needs), slots in zip(requests, found, strict=True)
    ]
    host_memory.drain()
    if any(missing):
        host_memory.require(sum(host_memory.pages(_extent(layout)) for needs in missing for layout in _layouts(needs)))
        for (mirror, _), slots, needs in zip(requests, found, missing, strict=True):
            fresh = iter(mirror._allocate(needs))
            slots[:] = [slot or next(fresh) for slot in slots]
    return [[slot for slot in slots if slot is not None] for slots in found]


def _layouts(needs: Sequence[Need]) -> list[list[tuple[int, int]]]:
    """The blocks for these needs, in order: for each block its slots' (offset, nbytes)."""
    blocks: list[list[tuple[int, int]]] = []
    end, component = 0, None
    for need in needs:
        if need.component != component or end + need.nbytes > _BLOCK:
            blocks.append([])
            end, component = 0, need.component
        blocks[-1].append((end, need.nbytes))
        end = _aligned(end + need.nbytes)
    return blocks


def _extent(layout: Sequence[tuple[int, int]]) -> int:
    """The bytes that a block's layout takes."""
    offset, nbytes = layout[-1]
    return offset + nbytes


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT
