"""Copies between host memory and storages that stay where they are: on the device, or offloaded in a mirror."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from . import checksum, device, ledger, transfer
from .errors import IntegrityError, TransitionError, listed
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
            raise IntegrityError(f"the mirror of {listed(wrong)} has other bytes than were offloaded. Nothing was changed")
        sums |= {found._cdata: value for (found, _), value in zip(late, made, strict=True)}
    return [sums.get(found._cdata) for found, _ in pairs]


def copy_in(copies: Sequence[tuple[Storage, Slot, int | None, Sequence[torch.Tensor]]], *, verify: bool) -> None:
    """Copy host memory into storages, or into their mirrors where they are offloaded; wait, and compare the checksums.

    Args:
        copies: storage, host memory, checksum, and the tensors on the storage that are meant; what else lies on it stays.
        verify: compare what is on a device afterwards.

    Raises:
        TransitionError: a storage's bytes were discarded. Nothing was written.
        IntegrityError: what arrived on a device is something else.
    """
    devices = [found.device for found, *_ in copies]
    entries = [entry if entry is not None and entry.offloaded else None for entry in (ledger.entry_of(f) for f, *_ in copies)]
    if gone := [entry.name for entry in entries if entry is not None and entry.slot is None]:
        raise TransitionError(f"{listed(gone)} was discarded and comes back as zeros: call reload() before copying into it")
    device.synchronize(devices)
    compared: list[tuple[Storage, int]] = []
    with torch.no_grad():
        for (found, slot, value, tensors), entry in zip(copies, entries, strict=True):
            whole = any(_covers(tensor, slot.nbytes) for tensor in tensors)
            if entry is not None and entry.slot is not None:
                into = entry.slot.bytes()
                _copy_parts(into.untyped_storage(), slot, tensors, whole=whole)
                entry.checksum = None if entry.checksum is None else checksum.checksums([into])[0]
                entry.written()
            else:
                _copy_parts(found, slot, tensors, whole=whole)
                torch.autograd.graph.increment_version([each for each in tensors if not each.is_inference()])
                compared += [(found, value)] if whole and value is not None else []
    device.synchronize(devices)
    if verify:
        sums = transfer.checksums_of([found for found, _ in compared])
        if wrong := [found.nbytes() for (found, value), new in zip(compared, sums, strict=True) if value != new]:
            raise IntegrityError(
                f"{len(wrong)} storages do not have the bytes of the snapshot. It is whole: call copy_to() again"
            )


def _covers(tensor: torch.Tensor, nbytes: int) -> bool:
    """Whether the tensor takes every byte of its storage."""
    return tensor.is_contiguous() and tensor.numel() * tensor.element_size() == nbytes


def _copy_parts(into: Storage, slot: Slot, tensors: Sequence[torch.Tensor], *, whole: bool) -> None:
    """Copy all bytes, or those of these tensors, whose geometry is the same on both sides."""
    if whole:
        transfer.copy(byte_view(into), slot.bytes())
        return
    for tensor in tensors:
        itemsize = tensor.element_size()
        there, here = byte_view(into), slot.bytes()
        dims = [(size, stride) for size, stride in zip(tensor.size(), tensor.stride(), strict=True) if stride and size > 1]
        if tensor.numel() and _overlaps(dims):  # elements share bytes, so all bytes between the first and the last are its own
            extent = 1 + sum((size - 1) * stride for size, stride in dims)
            dims = [(extent, 1)]
        shape = [*(size for size, _ in dims), itemsize] if tensor.numel() else [0]
        stride = [*(stride * itemsize for _, stride in dims), 1] if tensor.numel() else [1]
        offset = tensor.storage_offset() * itemsize
        there.as_strided(shape, stride, offset).copy_(here.as_strided(shape, stride, offset))


def _overlaps(dims: Sequence[tuple[int, int]]) -> bool:
    """Whether elements of a tensor with these (size, stride), in elements, may lie on top of each other."""
    end = 1
    for size, stride in sorted(dims, key=lambda dim: dim[1]):
        if stride < end:
            return True
        end = (size - 1) * stride + end
    return False
