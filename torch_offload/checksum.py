"""One 64-bit number for many bytes, computed where the bytes are.

Each row of 512 bytes is summed as 32-bit integers into a 64-bit one, which cannot overflow, mixed with its position and added
up. A changed bit always changes the number; a zeroed, stale or swapped page (eight rows) changes it unless all eight sums happen
to agree. It finds faulty hardware and faulty code and is no defence against somebody who forges data. The mixing function is splitmix64's (Steele, Lea and Flood, "Fast splittable
pseudorandom number generators", OOPSLA 2014, in the variant of Sebastiano Vigna).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

ROW = 512  # bytes
# Bytes summed at once. The temporaries are a sixteenth of it, since the device may be nearly full; on the CPU, whose sum first
# widens what it adds, they are twice as much.
_PIECE = 256 * 2**20
_PIECE_CPU = 2**20


def checksums(views: Sequence[torch.Tensor]) -> list[int]:
    """A checksum for each view: uint8 tensors of shape ``(nbytes,)``, each over a whole storage. Waits once a device."""
    totals = [partial(view) for view in views]
    found: dict[int, int] = {}
    for device in {total.device for total in totals}:
        here = [index for index, total in enumerate(totals) if total.device == device]
        found.update(zip(here, torch.stack([totals[index] for index in here]).tolist(), strict=True))
    return [found[index] for index in range(len(totals))]


def partial(view: torch.Tensor, first_row: int = 0) -> torch.Tensor:
    """What the bytes of ``view`` add to the checksum of a storage in which they start at row ``first_row``.

    Args:
        view: uint8 tensor of shape ``(nbytes,)`` whose address is a multiple of 4.
        first_row: the number of whole rows before it.

    Returns:
        int64 tensor of shape ``()`` on the view's device. Sums wrap around, so parts may be added and subtracted.
    """
    total = torch.zeros((), dtype=torch.int64, device=view.device)
    piece = _PIECE_CPU if view.device.type == "cpu" else _PIECE
    for start in range(0, view.numel(), piece):
        total += _rows(view[start : start + piece], first_row + start // ROW)
    return total


def wrapped(value: int) -> int:
    """``value`` as a signed 64-bit integer, as sums of `partial` wrap."""
    return (value + 2**63) % 2**64 - 2**63


def _rows(view: torch.Tensor, first_row: int) -> torch.Tensor:
    whole = view.numel() // ROW * ROW
    sums = [view[:whole].view(torch.int32).view(-1, ROW // 4).sum(1)]
    if whole < view.numel():
        tail = torch.zeros(ROW, dtype=torch.uint8, device=view.device)
        tail[: view.numel() - whole] = view[whole:]
        sums.append(tail.view(torch.int32).sum().view(1))
    row_sums = torch.cat(sums)
    positions = torch.arange(first_row + 1, first_row + 1 + row_sums.numel(), device=view.device)
    return _mix(row_sums + positions * wrapped(0x9E3779B97F4A7C15)).sum()


def _mix(value: torch.Tensor) -> torch.Tensor:
    value = (value ^ _shifted(value, 30)) * wrapped(0xBF58476D1CE4E5B9)
    value = (value ^ _shifted(value, 27)) * wrapped(0x94D049BB133111EB)
    return value ^ _shifted(value, 31)


def _shifted(value: torch.Tensor, by: int) -> torch.Tensor:
    return (value >> by) & ((1 << (64 - by)) - 1)  # torch shifts the sign in
