"""Copies between host memory and storages that stay where they are: on the device, or offloaded in a mirror."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from . import checksum, device, ledger, transfer
from .errors import IntegrityError, TransitionError, listed
from .ledger import Entry
from .mirror import Slot
from .tensors import Storage, byte_view, plainly


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
        changed: those whose versions change, so that a graph that saved one raises.
    """

    name: str
    storage: Storage
    slot: Slot
    checksum: int | None
    tensors: Sequence[torch.Tensor]
    changed: Sequence[torch.Tensor]

    @property
    def takes_all(self) -> bool:
        """Whether every byte is meant, as a contiguous tensor shows; what several views make up is not put together."""
        nbytes = self.slot.nbytes
        return any(each.is_contiguous() and each.numel() * each.element_size() == nbytes for each in self.tensors)


def copy_in(incoming: Sequence[Incoming], *, verify: bool) -> None:
    """Copy host memory into storages, or into their mirrors where they are offloaded; wait, and compare the checksums.

    Where every byte goes onto a device they are compared there, afterwards; all others in host memory, before anything is
    written.

    Raises:
        TransitionError: a storage's bytes were discarded. Nothing was written.
        IntegrityError: the host memory has other bytes than were put there, and nothing was written; or what arrived on a
            device is something else.
    """
    entries = [ledger.entry_of(each.storage) for each in incoming]
    if gone := [entry.name for entry in entries if entry is not None and entry.offloaded and entry.slot is None]:
        raise TransitionError(f"{listed(gone)} was discarded and comes back as zeros: call reload() before copying into it")
    summed = [(each, entry) for each, entry in zip(incoming, entries, strict=True) if verify and each.checksum is not None]
    arriving = [each for each, entry in summed if entry is None and each.takes_all]
    _check_kept([each for each, entry in summed if entry is not None or not each.takes_all])
    devices = [each.storage.device for each in incoming]
    device.synchronize(devices)
    with torch.no_grad():
        for each, entry in zip(incoming, entries, strict=True):
            if entry is not None and entry.offloaded and entry.slot is not None:
                _into_mirror(each, entry, entry.slot)
            else:
                _copy_bytes(each, each.storage)
                versioned = [one for one in each.changed if not plainly(torch.Tensor.is_inference, one)]
                torch.autograd.graph.increment_version(versioned)
    device.synchronize(devices)
    sums = transfer.checksums_of([each.storage for each in arriving])
    if wrong := [each.name for each, value in zip(arriving, sums, strict=True) if value != each.checksum]:
        raise IntegrityError(
            f"the bytes that arrived are not those of the snapshot: {listed(wrong)}. Call copy_to() again in case the copy was "
            "at fault; if it fails again the snapshot's host memory is"
        )


def _check_kept(incoming: Sequence[Incoming]) -> None:
    sums = checksum.checksums([each.slot.bytes() for each in incoming])
    if wrong := [each.name for each, value in zip(incoming, sums, strict=True) if value != each.checksum]:
        raise IntegrityError(
            f"the snapshot has other bytes than were copied into it: {listed(wrong)}. Nothing was written. The host memory is "
            "at fault; use another snapshot"
        )


def _into_mirror(incoming: Incoming, entry: Entry, slot: Slot) -> None:
    """Whatever comes of it, the mirror's checksum is that of what it has."""
    try:
        _copy_bytes(incoming, slot.bytes().untyped_storage())
    finally:
        if entry.checksum is not None:
            (entry.checksum,) = checksum.checksums([slot.bytes()])
        entry.written()


def _copy_bytes(incoming: Incoming, into: Storage) -> None:
    """Copy all bytes, or those of the tensors that are meant."""
    there, here = byte_view(into), incoming.slot.bytes()
    if incoming.takes_all:
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
