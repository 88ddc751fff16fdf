"""Copies between host memory and storages that stay where they are: on the device, or offloaded in a mirror."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from . import checksum, device, ledger, transfer
from .errors import IntegrityError, TransitionError, listed
from .ledger import Entry
from .mirror import Slot
from .tensors import Storage, byte_view


def nbytes_of(found: Storage) -> int:
    """The storage's size in bytes when it is resident."""
    entry = ledger.entry_of(found)
    return found.nbytes() if entry is None else entry.nbytes


def copy_out(pairs: Sequence[tuple[Storage, Slot]], *, verify: bool) -> list[int | None]:
    """Copy what each storage holds, on the device or in its mirror, into host memory; wait. The checksums of the bytes."""
    devices = [found.device for found, _ in pairs]
    device.synchronize(devices)
    away = {found._cdata: entry for found, _ in pairs if (entry := ledger.entry_of(found)) is not None and entry.offloaded}
    resident = [found for found, _ in pairs if found._cdata not in away]
    sums = dict(zip((found._cdata for found in resident), transfer.checksums_of(resident), strict=True)) if verify else {}
    for found, slot in pairs:
        if found._cdata in away:
            slot.bytes().copy_(torch.empty(0, dtype=torch.uint8, device="cpu").set_(away[found._cdata].host_storage()))
        elif found.nbytes():
            transfer.copy(slot.bytes(), byte_view(found))
    device.synchronize(devices)
    if verify:
        late = [(found, slot) for found, slot in pairs if found._cdata in away]
        known = [away[found._cdata].checksum for found, _ in late]
        made = checksum.checksums([slot.bytes() for _, slot in late])
        if wrong := [away[f._cdata].name for (f, _), old, new in zip(late, known, made, strict=True) if old not in (None, new)]:
            raise IntegrityError(
                f"the mirror has other bytes than were offloaded: {listed(wrong)}. Nothing was changed. The host memory is at "
                "fault; reload() on an Offloader with verify=False brings the bytes back as they are"
            )
        sums |= {found._cdata: value for (found, _), value in zip(late, made, strict=True)}
    return [sums.get(found._cdata) for found, _ in pairs]


@dataclasses.dataclass(frozen=True, eq=False)
class Incoming:
    """Bytes in host memory and the storage that they are to be copied into.

    Attributes:
        name: of the first tensor that is meant, for messages.
        storage: where they go: onto its device, or into its mirror.
        slot: where they are.
        checksum: of them; None if unknown.
        tensors: those on the storage that are meant, with the same geometry on both sides; what else lies there stays.
        around: the tensors whose versions change, so that a graph that saved one raises.
    """

    name: str
    storage: Storage
    slot: Slot
    checksum: int | None
    tensors: Sequence[torch.Tensor]
    around: Sequence[torch.Tensor]

    @property
    def is_whole(self) -> bool:
        """Whether one of the tensors takes every byte."""
        nbytes = self.slot.nbytes
        return any(each.is_contiguous() and each.numel() * each.element_size() == nbytes for each in self.tensors)


def copy_in(incoming: Sequence[Incoming], *, verify: bool) -> None:
    """Copy host memory into storages, or into their mirrors where they are offloaded; wait, and compare the checksums.

    What goes into a mirror is compared when it is reloaded.

    Raises:
        TransitionError: a storage's bytes were discarded. Nothing was written.
        IntegrityError: with the names of what arrived on a device as something else.
    """
    entries = [ledger.entry_of(each.storage) for each in incoming]
    if gone := [entry.name for entry in entries if entry is not None and entry.offloaded and entry.slot is None]:
        raise TransitionError(f"{listed(gone)} was discarded and comes back as zeros: call reload() before copying into it")
    devices = [each.storage.device for each in incoming]
    device.synchronize(devices)
    with torch.no_grad():
        for each, entry in zip(incoming, entries, strict=True):
            if entry is not None and entry.offloaded and entry.slot is not None:
                _into_mirror(each, entry, entry.slot)
            else:
                _copy_bytes(each, each.storage)
                torch.autograd.graph.increment_version([one for one in each.around if not one.is_inference()])
    device.synchronize(devices)
    whole = [each for each, entry in zip(incoming, entries, strict=True) if entry is None and each.is_whole]
    known = [each for each in whole if each.checksum is not None] if verify else []
    sums = transfer.checksums_of([each.storage for each in known])
    if wrong := [each.name for each, value in zip(known, sums, strict=True) if value != each.checksum]:
        raise IntegrityError(
            f"the bytes that arrived are not those of the snapshot: {listed(wrong)}. Call copy_to() again in case the copy was "
            "at fault; if it fails again the snapshot's host memory is"
        )


def _into_mirror(incoming: Incoming, entry: Entry, slot: Slot) -> None:
    """The mirror's checksum is the snapshot's own where that is known: bytes that went bad are noticed at the reload."""
    is_known = incoming.is_whole and incoming.checksum is not None
    try:
        _copy_bytes(incoming, slot.bytes().untyped_storage())
    finally:
        if entry.checksum is not None:
            entry.checksum = incoming.checksum if is_known else checksum.checksums([slot.bytes()])[0]
        entry.written()


def _copy_bytes(incoming: Incoming, into: Storage) -> None:
    """Copy all bytes, or those of the tensors that are meant."""
    there, here = byte_view(into), incoming.slot.bytes()
    if incoming.is_whole:
        transfer.copy(there, here)
        return
    for tensor in incoming.tensors:
        itemsize, offset = tensor.element_size(), tensor.storage_offset() * tensor.element_size()
        dims = [(size, stride) for size, stride in zip(tensor.size(), tensor.stride(), strict=True) if stride and size > 1]
        if _overlaps(dims):  # elements share bytes, so all bytes between the first and the last are its own
            dims = [(1 + sum((size - 1) * stride for size, stride in dims), 1)]
        shape = [*(size for size, _ in dims), itemsize if tensor.numel() else 0]
        stride = [*(stride * itemsize for _, stride in dims), 1]
        there.as_strided(shape, stride, offset).copy_(here.as_strided(shape, stride, offset))


def _overlaps(dims: Sequence[tuple[int, int]]) -> bool:
    """Whether elements of a tensor with these (size, stride), in elements, may lie on top of each other."""
    end = 1
    for size, stride in sorted(dims, key=lambda dim: dim[1]):
        if stride < end:
            return True
        end = (size - 1) * stride + end
    return False
