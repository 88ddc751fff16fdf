"""One 64-bit number for many bytes, computed where the bytes are.

Each row of 4 KiB is multiplied, as signed bytes, with eight columns of fixed random weights; the eight exact sums are mixed
with the row's position and added up. No weight is 0, so a changed bit always changes the number; a zeroed, stale, negated,
permuted or swapped row changes it but for a chance far below that of a broken machine. It finds faulty hardware and faulty
code and is no defence against somebody who forges data. As an 8-bit matrix product it reads memory once and its temporaries
are a small part of what it reads: the device may be nearly full. The mixing function is splitmix64's (Steele, Lea and Flood,
"Fast splittable pseudorandom number generators", OOPSLA 2014, in the variant of Sebastiano Vigna).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

ROW = 4096  # bytes
_SUMS = 8
_FEWEST = 32  # rows in one product; cuBLAS wants more than 16
_PIECE = 256 * 2**20  # bytes at once; the device may be nearly full
_GOLDEN = 0x9E3779B97F4A7C15


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
        view: uint8 tensor of shape ``(nbytes,)``.
        first_row: the number of whole rows before it.

    Returns:
        int64 tensor of shape ``()`` on the view's device. Sums wrap around, so parts may be added and subtracted.
    """
    total = torch.zeros((), dtype=torch.int64, device=view.device)
    for start in range(0, view.numel(), _PIECE):
        piece = view[start : start + _PIECE]
        whole = piece.numel() // ROW * ROW if piece.numel() >= _FEWEST * ROW else 0
        row = first_row + start // ROW
        if whole:
            total += _mixed(piece[:whole].view(torch.int8).view(-1, ROW), row)
        if whole < piece.numel():
            total += _mixed_rest(piece[whole:], row + whole // ROW)
    return total


def wrapped(value: int) -> int:
    """``value`` as a signed 64-bit integer, as sums of `partial` wrap."""
    return (value + 2**63) % 2**64 - 2**63


def _mixed_rest(rest: torch.Tensor, first_row: int) -> torch.Tensor:
    """Fewer rows than a product takes, the last of them perhaps short."""
    padded = torch.zeros(_FEWEST * ROW, dtype=torch.uint8, device=rest.device)
    padded[: rest.numel()] = rest
    return _mixed(padded.view(torch.int8).view(-1, ROW), first_row, count=-(-rest.numel() // ROW))


def _mixed(rows: torch.Tensor, first_row: int, count: int | None = None) -> torch.Tensor:
    words = torch._int_mm(rows, _weights(rows.device))[:count].contiguous().view(torch.int64).view(-1)
    start = first_row * (_SUMS // 2) + 1
    positions = torch.arange(start, start + words.numel(), device=words.device)
    return _mix(words + positions * wrapped(_GOLDEN)).sum()


@functools.cache
def _weights(device: torch.device) -> torch.Tensor:
    """int8 tensor of shape ``(ROW, _SUMS)``, its columns contiguous: fixed numbers from -127 to 127 without 0."""
    with torch.inference_mode(False):
        mixed = _mix(torch.arange(1, ROW * _SUMS + 1, device="cpu") * wrapped(_GOLDEN))
        drawn = _shifted(mixed, 33) % 254 - 127
        weights = drawn + (drawn >= 0)
        return weights.to(torch.int8).view(_SUMS, ROW).to(device).t()


def _mix(value: torch.Tensor) -> torch.Tensor:
    value = (value ^ _shifted(value, 30)) * wrapped(0xBF58476D1CE4E5B9)
    value = (value ^ _shifted(value, 27)) * wrapped(0x94D049BB133111EB)
    return value ^ _shifted(value, 31)


def _shifted(value: torch.Tensor, by: int) -> torch.Tensor:
    return (value >> by) & ((1 << (64 - by)) - 1)  # torch shifts the sign in
