"""One 64-bit number for many bytes, computed where the bytes are.

Each row of 4 KiB is multiplied, as signed bytes, with eight columns of fixed random weights; the eight exact sums are mixed
with the row's position and added up. No weight is 0, so a changed bit always changes the number; a zeroed, stale, negated,
permuted or swapped row changes it but for a chance far below that of a broken machine. It finds faulty hardware and faulty
code and is no defence against somebody who forges data. As an 8-bit matrix product it reads memory once and its temporaries
are a small part of what it reads: the device may be nearly full. The mixing function is splitmix64's (Steele, Lea and Flood,
"Fast splittable pseudorandom number generators", OOPSLA 2014, in the variant of Sebastiano Vigna).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence

import torch

ROW = 4096  # bytes
_SUMS = 8
_FEWEST = 32  # rows in one product; cuBLAS wants more than 16
_PIECE = 256 * 2**20  # bytes at once; the device may be nearly full
_COPIED = 8  # as many times a byte counts that has to be copied
_GOLDEN = 0x9E3779B97F4A7C15


@dataclasses.dataclass(frozen=True)
class _Part:
    """Bytes of one view, at most a piece, that begin at a row: whole rows enough for a product of their own, or the rest."""

    view: int
    bytes: torch.Tensor
    first_row: int

    @property
    def rows(self) -> int:
        return -(-self.bytes.numel() // ROW)

    @property
    def is_whole(self) -> bool:
        """Whether a product takes it as it lies there; other parts are copied together first."""
        return self.bytes.numel() >= _FEWEST * ROW


def checksums(views: Sequence[torch.Tensor]) -> list[int]:
    """A checksum for each view: uint8 tensors of shape ``(nbytes,)``, each over a whole storage. Waits for their devices."""
    return _totals([(view, 0) for view in views])


def partial(view: torch.Tensor, first_row: int = 0) -> int:
    """What the bytes of ``view`` add to the checksum of a storage in which they start at row ``first_row``.

    Args:
        view: uint8 tensor of shape ``(nbytes,)``.
        first_row: the number of whole rows before it.

    Returns:
        A signed 64-bit integer. Sums wrap around (`wrapped`), so parts may be added and subtracted.
    """
    (total,) = _totals([(view, first_row)])
    return total


def wrapped(value: int) -> int:
    """``value`` as a signed 64-bit integer, as sums of `partial` wrap."""
    return (value + 2**63) % 2**64 - 2**63


def _totals(views: Sequence[tuple[torch.Tensor, int]]) -> list[int]:
    """The checksums of views that begin at these rows. A few launches for each batch, and one or two for each view in it."""
    found = []
    for batch in _batches(part for index, (view, row) in enumerate(views) for part in _parts(index, view, row)):
        parts = sorted(batch, key=lambda part: not part.is_whole)
        found.append((parts, _sums(parts)))
    totals = [0] * len(views)
    for parts, sums in found:
        for part, value in zip(parts, sums.tolist(), strict=True):
            totals[part.view] = wrapped(totals[part.view] + value)
    return totals


def _parts(index: int, view: torch.Tensor, first_row: int) -> Iterator[_Part]:
    for start in range(0, view.numel(), _PIECE):
        piece, row = view[start : start + _PIECE], first_row + start // ROW
        whole = piece.numel() // ROW * ROW if piece.numel() >= _FEWEST * ROW else 0
        if whole:
            yield _Part(index, piece[:whole], row)
        if whole < piece.numel():
            yield _Part(index, piece[whole:], row + whole // ROW)


def _batches(parts: Iterable[_Part]) -> Iterator[list[_Part]]:
    """The parts, in order, as many of one device at once as are about a piece in size."""
    batch: list[_Part] = []
    nbytes = 0
    for part in parts:
        taken = part.bytes.numel() if part.is_whole else _COPIED * part.bytes.numel()
        if batch and (part.bytes.device != batch[0].bytes.device or nbytes + taken > _PIECE):
            yield batch
            batch, nbytes = [], 0
        batch.append(part)
        nbytes += taken
    if batch:
        yield batch


def _sums(parts: Sequence[_Part]) -> torch.Tensor:
    """The sum of each part's mixed rows, on their device: int64 of shape ``(parts,)``. Those that are whole come first."""
    device = parts[0].bytes.device
    products = [_product(part.bytes) for part in parts if part.is_whole]
    if rest := [part for part in parts if not part.is_whole]:
        products.append(_product(_padded([part.bytes for part in rest]))[: sum(part.rows for part in rest)])
    words = torch.cat(products).view(torch.int64).view(-1)
    first, count = torch.tensor([(part.first_row, part.rows) for part in parts], device="cpu").t() * (_SUMS // 2)
    end = count.cumsum(0)
    there = torch.stack([first + 1 - (end - count), count, end - 1]).to(device, non_blocking=True)
    positions = torch.arange(words.numel(), device=device)
    positions += torch.repeat_interleave(there[0], there[1], output_size=words.numel())
    running = _mix(words + positions * wrapped(_GOLDEN)).cumsum(0)[there[2]]
    return torch.diff(running, prepend=running.new_zeros(1))


def _product(data: torch.Tensor) -> torch.Tensor:
    """Eight sums for each row: int32 of shape ``(rows, _SUMS)``."""
    return torch._int_mm(data.view(torch.int8).view(-1, ROW), _weights(data.device))


def _padded(rests: Sequence[torch.Tensor]) -> torch.Tensor:
    """The rests one after the other, each filled up to whole rows, and rows of zeros up to what a product takes."""
    zeros = torch.zeros(_FEWEST * ROW, dtype=torch.uint8, device=rests[0].device)
    filled = [piece for rest in rests for piece in (rest, zeros[: -rest.numel() % ROW])]
    missing = _FEWEST * ROW - sum(piece.numel() for piece in filled)
    return torch.cat([*filled, zeros[: max(0, missing)]])


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
