"""The checksum notices what goes wrong with memory, adds up over rows, and is the formula that its module documents."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_offload import checksum
from torch_offload.checksum import ROW, checksums, partial, wrapped

PAGE = 4096  # bytes
SIZES = [0, 1, 3, 4, 7, 8, ROW - 1, ROW, ROW + 1, 3 * ROW, 3 * ROW + 13, PAGE - 1, PAGE, PAGE + 1]


def reference(data: bytes, first_row: int = 0) -> int:
    """The documented formula in plain integers: signed bytes times weights, eight sums a row, mixed with their position."""
    total = 0
    for start in range(0, len(data), ROW):
        row = [byte - 256 if byte > 127 else byte for byte in data[start : start + ROW]]
        sums = [sum(byte * weight for byte, weight in zip(row, column, strict=False)) % 2**32 for column in weights()]
        position = (first_row + start // ROW) * 4 + 1
        for index in range(4):
            word = sums[2 * index] | sums[2 * index + 1] << 32
            total += splitmix64((word + (position + index) * GOLDEN) % 2**64)
    total %= 2**64
    return total - 2**64 if total >= 2**63 else total


GOLDEN = 0x9E3779B97F4A7C15


@functools.cache
def weights() -> list[list[int]]:
    """Eight columns of numbers from -127 to 127 without 0, the splitmix64 sequence of seed 0."""
    drawn = [(splitmix64((index + 1) * GOLDEN % 2**64) >> 33) % 254 - 127 for index in range(8 * ROW)]
    drawn = [each + (each >= 0) for each in drawn]
    return [drawn[start : start + ROW] for start in range(0, 8 * ROW, ROW)]


def splitmix64(value: int) -> int:
    """The finalizer of splitmix64.c: https://prng.di.unimi.it/splitmix64.c."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB % 2**64
    return value ^ (value >> 31)


def view_of(data: bytes, device: str = "cpu") -> torch.Tensor:
    return torch.tensor(list(data), dtype=torch.uint8, device=device)


def random_bytes(nbytes: int, seed: int = 0, device: str = "cpu") -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (nbytes,), dtype=torch.uint8, generator=generator).to(device)


def checksum_of(view: torch.Tensor) -> int:
    (value,) = checksums([view])
    return value


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone().view(-1).view(torch.uint8)


# The formula ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", SIZES)
def test_it_is_the_documented_formula_at_every_kind_of_size(device: str, nbytes: int) -> None:
    view = random_bytes(nbytes, device=device)
    assert checksum_of(view) == reference(bytes(view.tolist()))


@given(st.binary(max_size=3 * ROW))
def test_it_is_the_documented_formula_for_any_bytes(device: str, data: bytes) -> None:
    assert checksum_of(view_of(data, device)) == reference(data)


@given(st.binary(min_size=1, max_size=ROW + 100), st.integers(0, 2**40))
def test_it_is_the_documented_formula_at_any_row(data: bytes, first_row: int) -> None:
    assert partial(view_of(data), first_row) == reference(data, first_row)


@pytest.mark.parametrize("rows_in_a_piece", [1, 2, 32, 33, 64])
@pytest.mark.parametrize("nbytes", [*SIZES, 32 * ROW, 33 * ROW + 1, 70 * ROW + 13])
def test_the_size_of_the_pieces_does_not_matter(
    device: str, monkeypatch: pytest.MonkeyPatch, nbytes: int, rows_in_a_piece: int
) -> None:
    view = random_bytes(nbytes, device=device)
    at_once = checksum_of(view)
    monkeypatch.setattr(checksum, "_PIECE", rows_in_a_piece * ROW)
    assert checksum_of(view) == at_once


@pytest.mark.parametrize("rows_in_a_piece", [1, 8, 33, 2**16])
def test_many_views_are_summed_as_each_alone(device: str, monkeypatch: pytest.MonkeyPatch, rows_in_a_piece: int) -> None:
    monkeypatch.setattr(checksum, "_PIECE", rows_in_a_piece * ROW)
    views = [random_bytes(nbytes, seed, device) for seed, nbytes in enumerate([*SIZES, 40 * ROW + 3, *SIZES[::-1], 32 * ROW])]
    assert checksums(views) == [reference(bytes(view.tolist())) for view in views]


def test_no_views_have_no_checksums() -> None:
    assert checksums([]) == []


def test_it_changes_nothing_and_takes_part_in_no_graph(device: str) -> None:
    view = random_bytes(2 * ROW + 5, device=device)
    before, version = view.clone(), view._version
    checksum_of(view)
    assert torch.equal(view, before)
    assert view._version == version


@pytest.mark.gpu
def test_it_takes_little_memory_on_a_device_that_may_be_nearly_full() -> None:
    for sizes in ([2**30], [2**25] * 32, [2**13] * 2**15):
        views = [torch.ones(nbytes, dtype=torch.uint8, device="cuda") for nbytes in sizes]
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        checksums(views)
        assert torch.cuda.max_memory_allocated() - before <= 64 * 2**20


# What it notices -----------------------------------------------------------------------------------------------------


@given(st.binary(min_size=1, max_size=2 * ROW + 50), st.data())
def test_any_flipped_bit_changes_it(device: str, data: bytes, draw: st.DataObject) -> None:
    bit = draw.draw(st.integers(0, 8 * len(data) - 1))
    view = view_of(data, device)
    before = checksum_of(view)
    view[bit // 8] ^= 1 << bit % 8
    assert checksum_of(view) != before


@given(st.integers(0, 2**32), st.integers(2, 5), st.data())
def test_a_zeroed_row_changes_it(device: str, seed: int, rows: int, data: st.DataObject) -> None:
    view = random_bytes(rows * ROW, seed, device)
    before = checksum_of(view)
    view.view(rows, ROW)[data.draw(st.integers(0, rows - 1))] = 0
    assert checksum_of(view) != before


@given(st.integers(0, 2**32), st.integers(2, 5), st.data())
def test_swapped_rows_change_it(device: str, seed: int, rows: int, data: st.DataObject) -> None:
    view = random_bytes(rows * ROW, seed, device)
    before = checksum_of(view)
    one, other = data.draw(st.lists(st.integers(0, rows - 1), min_size=2, max_size=2, unique=True))
    view.view(rows, ROW)[[one, other]] = view.view(rows, ROW)[[other, one]]
    assert checksum_of(view) != before


@given(st.integers(0, 2**32), st.integers(2, 5), st.data())
def test_a_stale_row_changes_it(seed: int, rows: int, data: st.DataObject) -> None:
    view, stale = random_bytes(rows * ROW, seed), random_bytes(rows * ROW, seed + 1)
    before = checksum_of(view)
    row = data.draw(st.integers(0, rows - 1))
    view.view(rows, ROW)[row] = stale.view(rows, ROW)[row]
    assert checksum_of(view) != before


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8])
@pytest.mark.parametrize("value", [1, 2, 8])
def test_a_zeroed_page_of_equal_elements_changes_it(dtype: torch.dtype, value: int) -> None:
    constant = bytes_of(torch.full((2 * PAGE // dtype.itemsize,), value, dtype=dtype))
    before = checksum_of(constant)
    constant[:PAGE] = 0
    assert checksum_of(constant) != before


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_changed_sign_of_every_element_changes_it(dtype: torch.dtype) -> None:
    weight = torch.randn(4 * PAGE, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert checksum_of(bytes_of(-weight)) != checksum_of(bytes_of(weight))


# What it leaves to those who compare sizes ---------------------------------------------------------------------------


@given(st.integers(0, 2**32), st.integers(0, 3), st.integers(1, 3))
def test_appended_rows_of_zeros_change_it(seed: int, rows: int, appended: int) -> None:
    view = random_bytes(rows * ROW, seed)
    longer = torch.cat([view, torch.zeros(appended * ROW, dtype=torch.uint8)])
    assert checksum_of(longer) != checksum_of(view)


@given(st.integers(0, 2**32), st.integers(1, 3 * ROW))
def test_zeros_appended_within_the_last_row_do_not(seed: int, nbytes: int) -> None:
    view = random_bytes(nbytes, seed)
    filled = torch.cat([view, torch.zeros(-nbytes % ROW, dtype=torch.uint8)])
    assert checksum_of(filled) == checksum_of(view)


# Sums of parts -------------------------------------------------------------------------------------------------------


@settings(max_examples=100)
@given(st.integers(0, 2**32), st.integers(1, 6 * ROW), st.data())
def test_parts_that_begin_at_rows_add_up(device: str, seed: int, nbytes: int, data: st.DataObject) -> None:
    view = random_bytes(nbytes, seed, device)
    last = (nbytes - 1) // ROW
    cuts = sorted(data.draw(st.sets(st.integers(1, last)))) if last else []
    starts, ends = [0, *cuts], [*cuts, last + 1]
    parts = [partial(view[start * ROW : end * ROW], start) for start, end in zip(starts, ends, strict=True)]
    assert wrapped(sum(parts)) == checksum_of(view)


@given(st.integers(0, 2**32), st.integers(0, 4))
def test_a_rewritten_row_is_accounted_for_by_its_difference(seed: int, row: int) -> None:
    view, fresh = random_bytes(5 * ROW, seed), random_bytes(ROW, seed + 1)
    before = checksum_of(view)
    here = view[row * ROW : (row + 1) * ROW]
    taken = partial(here, row)
    here.copy_(fresh)
    assert wrapped(before - taken + partial(here, row)) == checksum_of(view)


@given(st.integers(-(2**70), 2**70))
def test_wrapped_is_a_signed_64_bit_integer_congruent_to_its_argument(value: int) -> None:
    assert -(2**63) <= wrapped(value) < 2**63
    assert (wrapped(value) - value) % 2**64 == 0
