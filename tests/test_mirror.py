"""Slots are taken, lent and given back so that host memory is never more than the storages it is for."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import weakref
from collections.abc import Callable, Iterator, Mapping
from unittest import mock

import pytest
import torch
from fresh import output_of
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from torch_offload import HostMemoryError, host_memory, mirror
from torch_offload.host_memory import PAGE
from torch_offload.mirror import Need, PinnedMirror, Slot, take
from torch_offload.testing import Seam, failing, pretended_pinning

CPU = torch.device("cpu")
Storage = torch.UntypedStorage


@pytest.fixture
def kept() -> PinnedMirror:
    return PinnedMirror(CPU)


@pytest.fixture(params=["plain", "pinned"])
def either(request: pytest.FixtureRequest) -> Iterator[PinnedMirror]:
    """A mirror of plain memory, and one that believes its memory is page-locked."""
    with pretended_pinning() if request.param == "pinned" else contextlib.nullcontext():
        mirror = PinnedMirror(CPU)
        yield mirror
        mirror.close()


@pytest.fixture(params=["shared blocks", "a block for each slot"])
def _blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "a block for each slot":
        monkeypatch.setattr(mirror, "_BLOCK", 1)


class Mapped:
    """The pages that mirrors map: bytes there are now, and since `reset` how often some were mapped and the most after that."""

    def __init__(self) -> None:
        self.made = 0
        self.now = 0
        self.peak = 0

    def reset(self) -> None:
        self.made, self.peak = 0, 0

    def add(self, pages: mmap.mmap) -> None:
        nbytes = len(pages)
        self.made += 1
        self.now += nbytes
        self.peak = max(self.peak, self.now)
        weakref.finalize(pages, self._gone, nbytes)

    def _gone(self, nbytes: int) -> None:
        self.now -= nbytes


def watched(seen: Mapped) -> mock._patch[Callable[[int], mmap.mmap]]:
    original = host_memory.map_pages

    def map_pages(nbytes: int) -> mmap.mmap:
        pages = original(nbytes)
        seen.add(pages)
        return pages

    return mock.patch.object(host_memory, "map_pages", map_pages)


@pytest.fixture
def mapped() -> Iterator[Mapped]:
    seen = Mapped()
    with watched(seen):
        yield seen


def taken(of: PinnedMirror, storages: Mapping[str, Storage]) -> dict[str, Slot]:
    """A slot for each storage by name."""
    [slots] = take([(of, [Need(storage, storage.nbytes(), name) for name, storage in storages.items()])])
    return dict(zip(storages, slots, strict=True))


def lent(of: PinnedMirror, storages: Mapping[str, Storage], *, checksum: int | None = 1) -> dict[str, Slot]:
    """The same, with what an offload notes on them."""
    slots = taken(of, storages)
    for name, slot in slots.items():
        of.lend(slot)
        slot.name, slot.origin, slot.checksum = name, weakref.ref(storages[name]), checksum
    return slots


def cycled(of: PinnedMirror, storages: Mapping[str, Storage], *, checksum: int | None = 1) -> dict[str, Slot]:
    """The same, given back as a reload does."""
    slots = lent(of, storages, checksum=checksum)
    for slot in slots.values():
        of.give(slot)
    return slots


def allowed(storages: Mapping[str, Storage], blocks: int) -> int:
    """The most that mirrors may hold for these storages: their bytes, each aligned, and a page for each block."""
    return sum(storage.nbytes() + 16 for storage in storages.values()) + blocks * PAGE


# Taking again --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_blocks")
def test_slots_are_of_exactly_the_sizes_asked_in_order(kept: PinnedMirror) -> None:
    sizes = [1, 64, 65, 3, PAGE, 2 * PAGE + 1, 1]
    slots = taken(kept, {str(index): Storage(nbytes) for index, nbytes in enumerate(sizes)}).values()
    assert [slot.nbytes for slot in slots] == sizes
    assert [slot.bytes().untyped_storage().nbytes() for slot in slots] == sizes


@pytest.mark.usefixtures("_blocks")
def test_slots_share_no_byte(kept: PinnedMirror) -> None:
    sizes = [1, 64, 65, 3, PAGE, 2 * PAGE + 1, 1]
    slots = list(taken(kept, {str(index): Storage(nbytes) for index, nbytes in enumerate(sizes)}).values())
    for index, slot in enumerate(slots):
        slot.bytes().fill_(index)
    for index, slot in enumerate(slots):
        assert bool((slot.bytes() == index).all())


def test_each_look_at_a_slot_is_the_same_memory_on_a_storage_of_its_own(kept: PinnedMirror) -> None:
    slot = taken(kept, {"bias": Storage(10), "weight": Storage(100)})["weight"]
    first, second = slot.bytes(), slot.bytes()
    second.fill_(5)
    assert bool((first == 5).all())
    assert first.untyped_storage() is not second.untyped_storage()
    assert (second.untyped_storage().nbytes(), second.data_ptr()) == (100, first.data_ptr())


def test_a_slot_first_looked_at_in_inference_mode_can_be_written_outside_of_it(kept: PinnedMirror) -> None:
    with torch.inference_mode():
        slot = taken(kept, {"weight": Storage(100)})["weight"]
        slot.bytes().fill_(1)
    assert int(slot.bytes().add_(1).sum()) == 200


def test_a_second_cycle_takes_the_same_slots_and_no_memory(kept: PinnedMirror, mapped: Mapped) -> None:
    storages = {"a": Storage(100), "b": Storage(100), "c": Storage(7)}
    first = cycled(kept, storages)
    mapped.reset()
    assert cycled(kept, dict(reversed(storages.items()))) == first
    assert mapped.made == 0


def test_a_new_storage_of_the_same_size_takes_the_slot_of_a_dead_one(kept: PinnedMirror, mapped: Mapped) -> None:
    first = cycled(kept, {"grad": Storage(100)})["grad"]
    mapped.reset()
    assert cycled(kept, {"grad": Storage(100)})["grad"] is first
    assert mapped.made == 0


@pytest.mark.parametrize("nbytes", [99, 101])
def test_another_size_never_takes_a_slot(kept: PinnedMirror, nbytes: int) -> None:
    first = cycled(kept, {"grad": Storage(100)})["grad"]
    assert cycled(kept, {"grad": Storage(nbytes)})["grad"] is not first


def test_lent_slots_are_not_taken(kept: PinnedMirror) -> None:
    storage = Storage(100)
    first = lent(kept, {"weight": storage})["weight"]
    assert taken(kept, {"other": Storage(100)})["other"] is not first
    kept.give(first)
    assert lent(kept, {"weight": storage})["weight"] is first
    assert taken(kept, {"other": Storage(100)})["other"] is not first


def test_slots_wait_until_they_are_lent(kept: PinnedMirror) -> None:
    storage = Storage(100)
    first = cycled(kept, {"weight": storage})["weight"]
    assert taken(kept, {"weight": storage})["weight"] is first
    assert taken(kept, {"weight": storage})["weight"] is first  # the first caller was interrupted


def test_a_slot_that_is_lent_twice_and_given_twice_waits_once(kept: PinnedMirror) -> None:
    one, other = Storage(100), Storage(100)
    slot = lent(kept, {"weight": one})["weight"]
    kept.lend(slot)
    kept.give(slot)
    kept.give(slot)
    slots = taken(kept, {"weight": one, "other": other})
    assert slots["weight"] is slot
    assert slots["other"] is not slot


def test_a_storage_gets_its_own_slot_before_another_of_the_size(kept: PinnedMirror) -> None:
    storages = {str(index): Storage(100) for index in range(4)}
    first = cycled(kept, storages)
    for name in ("2", "0", "3", "1"):
        assert taken(kept, {name: storages[name]}) == {name: first[name]}


def test_a_newcomer_does_not_take_the_slot_of_a_storage_in_the_same_call(kept: PinnedMirror) -> None:
    weight, newcomer = Storage(100), Storage(100)
    first = cycled(kept, {"weight": weight, "gone": Storage(100)})
    slots = taken(kept, {"newcomer": newcomer, "weight": weight})
    assert slots == {"newcomer": first["gone"], "weight": first["weight"]}


@pytest.mark.parametrize("known", [0, 1, 2])
def test_slots_whose_content_is_known_are_taken_last(kept: PinnedMirror, known: int) -> None:
    storages = {str(index): Storage(100) for index in range(3)}
    slots = cycled(kept, storages, checksum=None)
    slots[str(known)].checksum = 1
    newcomers = lent(kept, {name: Storage(100) for name in ("first", "second", "third")})
    assert newcomers["third"] is slots[str(known)]


def test_a_slot_is_of_the_storage_it_was_filled_from_while_that_lives(kept: PinnedMirror) -> None:
    storage, other = Storage(100), Storage(100)
    slot = taken(kept, {"weight": storage})["weight"]
    assert (slot.is_of(storage), slot.is_abandoned()) == (False, True)
    slot.origin = weakref.ref(storage)
    assert (slot.is_of(storage), slot.is_of(other), slot.is_abandoned()) == (True, False, False)
    del storage
    assert slot.is_abandoned()


def test_mirrors_do_not_share_slots(kept: PinnedMirror) -> None:
    storage = Storage(100)
    first = cycled(kept, {"weight": storage})["weight"]
    other = PinnedMirror(CPU)
    [[slot]] = take([(other, [Need(storage, 100, "weight")])])
    assert slot is not first


def test_one_call_serves_several_mirrors_in_order() -> None:
    one, other, none = (PinnedMirror(CPU) for _ in range(3))
    storages = [Storage(nbytes) for nbytes in (10, 20, 30)]
    needs = [Need(storage, storage.nbytes(), "weight") for storage in storages]
    slots = take([(one, needs[:2]), (none, []), (other, needs[2:])])
    assert [[slot.nbytes for slot in each] for each in slots] == [[10, 20], [], [30]]
    assert (one.nbytes, other.nbytes, none.nbytes) == (PAGE, PAGE, 0)


def test_nothing_is_needed_for_nothing(kept: PinnedMirror, mapped: Mapped) -> None:
    assert take([]) == []
    assert take([(kept, [])]) == [[]]
    assert mapped.made == 0


# Giving back ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_blocks")
def test_a_changed_size_is_given_up_before_new_memory_is_taken(either: PinnedMirror, mapped: Mapped) -> None:
    cycled(either, {"grad": Storage(10 * PAGE)})
    mapped.reset()
    cycled(either, {"grad": Storage(12 * PAGE)})
    assert mapped.peak == mapped.now == 12 * PAGE


@pytest.mark.usefixtures("_blocks")
def test_a_changed_size_of_a_living_storage_is_given_up_first(either: PinnedMirror, mapped: Mapped) -> None:
    storage = Storage(10 * PAGE)
    cycled(either, {"buffer": storage})
    storage.resize_(12 * PAGE)
    mapped.reset()
    cycled(either, {"buffer": storage})
    assert mapped.peak == mapped.now == 12 * PAGE


@pytest.mark.usefixtures("_blocks")
def test_what_vanished_storages_left_is_given_up_before_new_memory_is_taken(either: PinnedMirror, mapped: Mapped) -> None:
    cycled(either, {"one": Storage(10 * PAGE), "two": Storage(5 * PAGE)})
    mapped.reset()
    cycled(either, {"three": Storage(12 * PAGE)})
    assert mapped.peak == mapped.now == 12 * PAGE


def test_what_living_storages_left_is_kept(kept: PinnedMirror, mapped: Mapped, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirror, "_BLOCK", 1)
    weight = Storage(PAGE)
    first = cycled(kept, {"weight": weight})["weight"]
    cycled(kept, {"grad": Storage(3 * PAGE)})
    assert mapped.now == 4 * PAGE
    assert taken(kept, {"weight": weight})["weight"] is first


@pytest.mark.usefixtures("_blocks")
def test_closing_gives_back_what_waits_and_not_what_is_lent(kept: PinnedMirror, mapped: Mapped) -> None:
    weight, grad = Storage(10 * PAGE), Storage(5 * PAGE)
    slot = lent(kept, {"weight": weight})["weight"]
    slot.bytes().fill_(3)
    cycled(kept, {"grad": grad})
    kept.close()
    assert (mapped.now, kept.nbytes) == (10 * PAGE, 10 * PAGE)
    assert bool((slot.bytes() == 3).all())
    kept.close()
    assert kept.nbytes == 10 * PAGE


def test_closing_ends_the_registrations_of_what_waits() -> None:
    with pretended_pinning() as registered:
        kept = PinnedMirror(CPU)
        slots = lent(kept, {"weight": Storage(PAGE)})
        cycled(kept, {"grad": Storage(PAGE)})
        assert (len(registered), kept.pinned) == (2, True)
        kept.close()
        assert (registered, kept.pinned) == ([slots["weight"].bytes().data_ptr()], True)
        del kept, slots
    assert not registered


def test_a_dropped_mirror_gives_everything_back(mapped: Mapped) -> None:
    kept = PinnedMirror(CPU)
    cycled(kept, {"weight": Storage(PAGE), "grad": Storage(PAGE)})
    del kept
    assert mapped.now == 0


# How much is held ----------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 3 * PAGE), min_size=1, max_size=30), st.sampled_from([1, 5 * PAGE, 2**26]))
def test_what_is_held_is_the_sum_of_the_sizes_page_rounding_apart(sizes: list[int], block: int) -> None:
    kept, seen = PinnedMirror(CPU), Mapped()
    storages = {str(index): Storage(nbytes) for index, nbytes in enumerate(sizes)}
    with watched(seen), mock.patch.object(mirror, "_BLOCK", block):
        slots = taken(kept, storages)
    assert kept.nbytes == seen.now
    assert sum(sizes) <= kept.nbytes <= allowed(storages, seen.made)
    del slots
    assert kept.nbytes == seen.now == 0


_needs = st.builds(Need, st.just(Storage(1)), st.integers(1, 2**27), st.just("weight"), st.sampled_from(["grads", "params"]))


@settings(max_examples=100)
@given(st.lists(_needs, max_size=40))
def test_a_layout_is_aligned_in_order_and_without_overlap(needs: list[Need]) -> None:
    layouts = mirror._layouts(needs)
    assert [nbytes for layout in layouts for _, nbytes in layout] == [need.nbytes for need in needs]
    for layout in layouts:
        assert layout[0][0] == 0
        assert all(offset % 16 == 0 for offset, _ in layout)
        ends = [offset + nbytes for offset, nbytes in layout]
        starts = [offset for offset, _ in layout[1:]]
        assert all(0 <= start - end < 16 for end, start in zip(ends, starts, strict=False))
        assert len(layout) == 1 or ends[-1] <= mirror._BLOCK


@settings(max_examples=100)
@given(st.lists(_needs, min_size=2, max_size=40))
def test_a_layout_begins_a_block_when_the_last_is_full_or_of_another_component(needs: list[Need]) -> None:
    layouts, left = mirror._layouts(needs), iter(needs)
    components = [[next(left).component for _ in layout] for layout in layouts]
    assert all(len(set(each)) == 1 for each in components)
    for (layout, following), (one, other) in zip(itertools.pairwise(layouts), itertools.pairwise(components), strict=True):
        end = layout[-1][0] + layout[-1][1]
        assert one != other or -(-end // 16) * 16 + following[0][1] > mirror._BLOCK


_names = st.sampled_from("abcdef")
_sizes = st.integers(1, 4 * PAGE) | st.sampled_from([1, PAGE, 2 * PAGE])


@given(st.lists(st.dictionaries(_names, _sizes, min_size=1), min_size=2, max_size=8), st.booleans())
def test_cycles_in_shared_blocks_hold_no_more_than_the_storages(cycles: list[dict[str, int]], pinned: bool) -> None:
    """A target whose storages come, go and change size between cycles that move all of it."""
    seen = Mapped()
    with watched(seen), pretended_pinning() if pinned else mock.patch.object(mirror, "_BLOCK", 2**26):
        kept = PinnedMirror(CPU)
        storages: dict[str, Storage] = {}
        for wanted in cycles:
            same = {name: storage for name, storage in storages.items() if wanted.get(name) == storage.nbytes()}
            storages = {name: same.get(name) or Storage(nbytes) for name, nbytes in wanted.items()}
            before = seen.now
            seen.reset()
            cycled(kept, storages)
            assert kept.nbytes == seen.now
            assert seen.peak <= max(before, allowed(storages, blocks=len(storages)))
            if seen.made:
                assert seen.now <= allowed(storages, blocks=len(storages))
        del kept


class Mirrors(RuleBasedStateMachine):
    """Any order of taking and giving, each slot in a block of its own, beside a plain model: the living storages it had."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = Mapped()
        self.patches = [watched(self.seen), mock.patch.object(mirror, "_BLOCK", 1)]
        for patch in self.patches:
            patch.start()
        self.kept = PinnedMirror(CPU)
        self.storages: dict[str, Storage] = {}
        self.known: dict[str, Storage] = {}
        self.lent: dict[str, tuple[Slot, int]] = {}
        self.count = 0

    def teardown(self) -> None:
        for patch in self.patches:
            patch.stop()

    @rule(name=_names, nbytes=_sizes)
    def appear_or_change(self, name: str, nbytes: int) -> None:
        if name not in self.lent:
            self.known.pop(name, None)
            self.storages[name] = Storage(nbytes)

    @rule(name=_names)
    def vanish(self, name: str) -> None:
        if name not in self.lent:
            self.known.pop(name, None)
            self.storages.pop(name, None)

    @rule(names=st.sets(_names, min_size=1), checksum=st.none() | st.just(1))
    def take_some(self, names: set[str], checksum: int | None) -> None:
        wanted = {name: self.storages[name] for name in sorted(names) if name in self.storages and name not in self.lent}
        self.known |= wanted
        before = self.seen.now
        self.seen.reset()
        slots = lent(self.kept, wanted, checksum=checksum)
        assert {name: slot.nbytes for name, slot in slots.items()} == {name: each.nbytes() for name, each in wanted.items()}
        assert self.seen.peak <= max(before, allowed(self.known, blocks=len(self.known)))
        if self.seen.made:
            assert self.seen.now <= allowed(self.known, blocks=len(self.known))
        for name, slot in slots.items():
            self.count += 1
            slot.bytes().fill_(self.count % 251)
            self.lent[name] = (slot, self.count % 251)

    @precondition(lambda self: self.lent)
    @rule(data=st.data())
    def give_some(self, data: st.DataObject) -> None:
        for name in data.draw(st.sets(st.sampled_from(sorted(self.lent)), min_size=1)):
            slot, content = self.lent.pop(name)
            assert bool((slot.bytes() == content).all())
            self.kept.give(slot)

    @precondition(lambda self: not self.lent)
    @rule()
    def close(self) -> None:
        self.kept.close()
        assert self.kept.nbytes == 0

    @invariant()
    def what_it_says_is_what_is_mapped(self) -> None:
        assert self.kept.nbytes == self.seen.now


TestMirrors = Mirrors.TestCase
TestMirrors.settings = settings(max_examples=60, stateful_step_count=25)


# Failing -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [1, 2, 3, 4, 5])
def test_whichever_allocation_fails_the_waiting_slots_still_wait(
    mapped: Mapped, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    monkeypatch.setattr(mirror, "_BLOCK", 1)
    mirrors = [PinnedMirror(CPU), PinnedMirror(CPU)]
    old = [{f"{index}{name}": Storage(PAGE) for name in "ab"} for index in range(2)]
    waiting = [cycled(kept, storages) for kept, storages in zip(mirrors, old, strict=True)]
    new = [{f"{index}{name}": Storage(2 * PAGE) for name in names} for index, names in enumerate(["cd", "efg"])]
    every = [{**some, **more} for some, more in zip(old, new, strict=True)]
    requests = [
        (kept, [Need(storage, storage.nbytes(), name) for name, storage in storages.items()])
        for kept, storages in zip(mirrors, every, strict=True)
    ]
    with failing(Seam.HOST_ALLOCATION, at) as fault, pytest.raises(RuntimeError, match="refuses pages"):
        take(requests)
    assert fault.calls == at
    assert mapped.now == sum(kept.nbytes for kept in mirrors) == 4 * PAGE
    for kept, storages, slots in zip(mirrors, old, waiting, strict=True):
        assert taken(kept, storages) == slots
    assert [[slot.nbytes for slot in slots] for slots in take(requests)] == [
        [PAGE] * 2 + [2 * PAGE] * count for count in (2, 3)
    ]


def test_a_refusal_for_want_of_memory_leaves_the_waiting_slots(
    kept: PinnedMirror, mapped: Mapped, monkeypatch: pytest.MonkeyPatch
) -> None:
    storages = {"a": Storage(PAGE), "b": Storage(2 * PAGE)}
    waiting = cycled(kept, storages)
    mapped.reset()
    monkeypatch.setattr(host_memory, "available_nbytes", lambda **_: (5 * PAGE - 1, "the limit"))
    with pytest.raises(HostMemoryError, match="the limit"):
        taken(kept, {**storages, "c": Storage(5 * PAGE)})
    assert mapped.made == 0
    assert taken(kept, storages) == waiting


def test_what_waits_is_not_asked_for_again(kept: PinnedMirror, monkeypatch: pytest.MonkeyPatch) -> None:
    storages = {"a": Storage(PAGE), "b": Storage(2 * PAGE)}
    cycled(kept, storages)
    monkeypatch.setattr(host_memory, "available_nbytes", lambda **_: (PAGE, "the limit"))
    assert taken(kept, {**storages, "c": Storage(PAGE)})["c"].nbytes == PAGE


def test_what_is_asked_for_is_what_will_be_mapped(kept: PinnedMirror, mapped: Mapped, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(mirror, "_BLOCK", 1)
    monkeypatch.setattr(host_memory, "require", asked.append)
    taken(kept, {str(index): Storage(1) for index in range(10)})
    assert asked == [mapped.peak]


# Forks ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("read_only", [False, True])
def test_a_forked_child_that_offloads_uses_no_slot_of_its_parent(*, read_only: bool) -> None:
    script = f"""
import os
import torch
from torch_offload import Offloader
torch.set_num_threads(1)
model = torch.nn.Linear(64, 64)
weight = model.weight.detach().clone()
off = Offloader(model, device="cpu", read_only={read_only})
off.offload(); off.reload()
if os.fork() == 0:
    off.offload(); off.reload()
    print("child", torch.equal(model.weight, weight), flush=True)
    os._exit(0)
print("status", os.waitstatus_to_exitcode(os.wait()[1]))
off.offload(); off.reload()
print("parent", torch.equal(model.weight, weight))
"""
    assert output_of(script).splitlines() == ["child True", "status 0", "parent True"]
