"""How much may be taken, exact blocks, and the life of page-locked memory, with a fake driver."""

from __future__ import annotations

import ctypes
import io
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fresh import MEMORY, output_of
from hypothesis import given
from hypothesis import strategies as st

from torch_offload import HostMemoryError, PageableMirrorWarning, host_memory
from torch_offload import device as devices
from torch_offload.host_memory import PAGE, HostBlock, available_nbytes, drain, require, touch
from torch_offload.mirror import Need, PinnedMirror, take

CUDA = torch.device("cuda")
CPU = torch.device("cpu")
MIB = 2**20
UNLIMITED_V1 = 2**63 - PAGE  # what version 1 shows for "no limit"


def lines_of(script: str, *, first: str = "") -> list[str]:
    """What a script prints that runs in an interpreter of its own after ``first`` and PRELUDE."""
    return output_of(first + PRELUDE + script).splitlines()


PRELUDE = (
    MEMORY
    + """
import os, resource, sys
import torch
from torch_offload import HostMemoryError, device, host_memory
from torch_offload.host_memory import HostBlock
torch.set_num_threads(1)

def pretend():
    def register(pointer, nbytes):
        print("register", os.getpid(), pointer, nbytes, flush=True)
        return True
    device.register_host = register
    device.unregister_host = lambda pointer: print("unregister", os.getpid(), pointer, flush=True)
    device.registers_host_memory = lambda _: True
"""
)

# How much may be taken -----------------------------------------------------------------------------------------------


class Machine:
    """A fake ``/proc`` and ``/sys``. Sizes in bytes."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, path: str, text: str) -> str:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return str(file)

    def memory(self, nbytes: int) -> None:
        total = nbytes // 1024 * 2
        self.write(
            "proc/meminfo",
            f"MemTotal: {total:>12} kB\nMemFree: 12 kB\nMemAvailable: {nbytes // 1024:>8} kB\nHugePages_Total: 0\n",
        )

    def groups(self, *lines: str) -> None:
        self.write("proc/self/cgroup", "".join(f"{line}\n" for line in lines))

    def v2(self, group: str, limit: int | str, used: int, *, inactive: int = 0, active: int = 0) -> str:
        """A group of version 2; returns the file that limits it."""
        base = f"sys/fs/cgroup{group}"
        self.write(f"{base}/memory.current", f"{used}\n")
        self.write(f"{base}/memory.stat", f"anon 5\nfile 77\ninactive_file {inactive}\nactive_file {active}\nslab 3\n")
        return self.write(f"{base}/memory.max", f"{limit}\n")

    def v1(self, group: str, limit: int, used: int, *, inactive: int = 0, active: int = 0) -> str:
        """A group of version 1; returns the file that limits it. Its own part of the cache is told apart from the total."""
        base = f"sys/fs/cgroup/memory{group}"
        own = f"cache 99\ninactive_file {inactive // 2}\nactive_file {active // 2}\n"
        self.write(f"{base}/memory.usage_in_bytes", f"{used}\n")
        self.write(f"{base}/memory.stat", own + f"total_inactive_file {inactive}\ntotal_active_file {active}\n")
        return self.write(f"{base}/memory.limit_in_bytes", f"{limit}\n")

    def available(self) -> tuple[int, str]:
        return available_nbytes(root=self.root)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    machine = Machine(tmp_path)
    machine.memory(2**40)
    return machine


def test_v2_the_limit_of_the_own_group_counts(machine: Machine) -> None:
    machine.groups("0::/pod/worker")
    limit = machine.v2("/pod/worker", 1000, 400)
    assert machine.available() == (600, limit)


def test_v2_the_limit_of_an_ancestor_counts(machine: Machine) -> None:
    machine.groups("0::/slice/pod/worker")
    machine.v2("/slice/pod/worker", "max", 100)
    limit = machine.v2("/slice", 1000, 900)
    assert machine.available() == (100, limit)


def test_v2_the_tightest_of_several_groups_counts(machine: Machine) -> None:
    machine.groups("0::/slice/pod/worker")
    machine.v2("/slice/pod/worker", 1000, 100)
    limit = machine.v2("/slice/pod", 2000, 1900)
    machine.v2("/slice", 5000, 1900)
    assert machine.available() == (100, limit)


def test_v2_the_root_of_a_namespace_counts(machine: Machine) -> None:
    machine.groups("0::/")
    limit = machine.v2("", 1000, 250)
    assert machine.available() == (750, limit)


def test_v2_max_is_no_limit(machine: Machine) -> None:
    machine.groups("0::/pod")
    machine.v2("/pod", "max", 2**39)
    assert machine.available() == (2**40, "MemAvailable")


def test_v2_page_cache_is_reclaimable(machine: Machine) -> None:
    machine.groups("0::/pod")
    machine.v2("/pod", 10_000, 9_000, inactive=2_000, active=3_000)
    assert machine.available()[0] == 6_000


def test_v1_the_limit_of_the_own_group_counts(machine: Machine) -> None:
    machine.groups("5:cpu,cpuacct:/elsewhere", "4:memory:/pod/worker", "1:name=systemd:/elsewhere")
    limit = machine.v1("/pod/worker", 1000, 400)
    machine.v1("/elsewhere", 10, 10)
    assert machine.available() == (600, limit)


def test_v1_the_limit_of_an_ancestor_counts(machine: Machine) -> None:
    machine.groups("4:memory:/slice/pod/worker")
    machine.v1("/slice/pod/worker", UNLIMITED_V1, 100)
    limit = machine.v1("/slice", 1000, 900)
    assert machine.available() == (100, limit)


def test_v1_unlimited_is_no_limit(machine: Machine) -> None:
    machine.groups("4:memory:/pod")
    machine.v1("/pod", UNLIMITED_V1, 2**39)
    assert machine.available() == (2**40, "MemAvailable")


def test_v1_page_cache_of_the_whole_subtree_is_reclaimable(machine: Machine) -> None:
    machine.groups("4:memory:/pod")
    machine.v1("/pod", 10_000, 9_000, inactive=2_000, active=3_000)
    assert machine.available()[0] == 6_000


def test_v1_a_controller_that_shares_its_hierarchy_is_found(machine: Machine) -> None:
    machine.groups("4:hugetlb,memory:/pod")
    limit = machine.v1("/pod", 1000, 400)
    assert machine.available() == (600, limit)


@pytest.mark.parametrize(("v1_used", "v2_used", "tighter"), [(900, 400, "v1"), (400, 900, "v2")])
def test_in_a_hybrid_hierarchy_the_tighter_version_counts(machine: Machine, v1_used: int, v2_used: int, tighter: str) -> None:
    machine.groups("4:memory:/pod", "0::/unit")
    limits = {"v1": machine.v1("/pod", 1000, v1_used), "v2": machine.v2("/unit", 1000, v2_used)}
    assert machine.available() == (100, limits[tighter])


def test_in_a_hybrid_hierarchy_without_v2_memory_files_v1_counts(machine: Machine) -> None:
    machine.groups("4:memory:/pod", "0::/")
    machine.write("sys/fs/cgroup/unified/cgroup.procs", "1\n")
    limit = machine.v1("/pod", 1000, 400)
    assert machine.available() == (600, limit)


@pytest.mark.parametrize("path", ["/docker/0123abcd", "/../0123abcd", "/../../kubepods/pod7"])
def test_a_group_outside_the_namespace_falls_back_to_what_is_mounted(machine: Machine, path: str) -> None:
    machine.groups(f"4:memory:{path}", f"0::{path}")
    v1, v2 = machine.v1("", 1000, 400), machine.v2("", 1000, 500)
    assert machine.available() == (500, v2)
    Path(v2).unlink()
    assert machine.available() == (600, v1)


def test_a_path_with_colons_is_one_path(machine: Machine) -> None:
    machine.groups("0::/pod:7:worker")
    limit = machine.v2("/pod:7:worker", 1000, 400)
    assert machine.available() == (600, limit)


def test_what_the_machine_has_left_counts_if_it_is_less(machine: Machine) -> None:
    machine.memory(2**20)
    machine.groups("0::/pod")
    machine.v2("/pod", 2**30, 0)
    assert machine.available() == (2**20, "MemAvailable")


def test_a_group_beyond_its_limit_leaves_nothing(machine: Machine) -> None:
    machine.groups("0::/pod")
    machine.v2("/pod", 1000, 1200)
    assert machine.available()[0] == 0


def test_without_any_file_there_is_no_limit(tmp_path: Path) -> None:
    nbytes, source = available_nbytes(root=tmp_path)
    assert nbytes >= 2**60
    assert source == "no limit"
    require(2**60, root=tmp_path)


@pytest.mark.parametrize("missing", ["memory.max", "memory.current"])
def test_a_group_with_a_missing_file_is_passed_over(machine: Machine, missing: str) -> None:
    machine.groups("0::/pod/worker")
    limit = machine.v2("/pod/worker", 1000, 900)
    above = machine.v2("/pod", 1000, 400)
    Path(limit).with_name(missing).unlink()
    assert machine.available() == (600, above)


def test_without_statistics_no_cache_is_assumed(machine: Machine) -> None:
    machine.groups("0::/pod")
    limit = machine.v2("/pod", 1000, 400, inactive=100, active=100)
    Path(limit).with_name("memory.stat").unlink()
    assert machine.available() == (600, limit)


sizes = st.integers(0, 2**50)


@given(st.lists(st.tuples(sizes | st.just("max"), sizes, sizes), min_size=1, max_size=5), st.booleans())
def test_the_least_of_the_chain_counts(
    tmp_path_factory: pytest.TempPathFactory, chain: list[tuple[int | str, int, int]], is_v2: bool
) -> None:
    machine = Machine(tmp_path_factory.mktemp("root"))
    machine.memory(2**45)
    group, expected = "", [2**45]
    for depth, (limit, used, cache) in enumerate(chain):
        if is_v2:
            machine.v2(group, limit, used, inactive=cache)
        else:
            machine.v1(group, UNLIMITED_V1 if limit == "max" else int(limit), used, inactive=cache)
        if limit != "max":
            expected.append(max(0, int(limit) - used + cache))
        group += f"/{depth}"
    machine.groups(f"0::{group}" if is_v2 else f"4:memory:{group}")
    assert machine.available()[0] == min(expected)


def test_this_machine_has_some_memory_and_not_more_than_there_is() -> None:
    nbytes, source = available_nbytes()
    assert 0 < nbytes < os.sysconf("SC_PHYS_PAGES") * PAGE
    assert source == "MemAvailable" or Path(source).exists()


def test_require_names_what_is_needed_what_is_there_and_who_says_so(machine: Machine) -> None:
    machine.groups("0::/pod")
    limit = machine.v2("/pod", 3 * MIB, MIB)
    require(2 * MIB, root=machine.root)
    with pytest.raises(HostMemoryError) as caught:
        require(2 * MIB + 1, root=machine.root)
    for part in ("2.00 MiB of host memory (2097153 bytes)", f"{limit} leaves 2.00 MiB", "Nothing was moved", "components="):
        assert part in str(caught.value)


def test_memory_that_is_not_there_is_refused_before_any_is_taken(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.memory(MIB)
    monkeypatch.setattr(host_memory, "available_nbytes", lambda *, root: available_nbytes(root=machine.root))  # noqa: ARG005
    taken: list[int] = []
    monkeypatch.setattr(host_memory, "map_pages", taken.append)
    first, second = (torch.UntypedStorage(nbytes) for nbytes in (MIB, 1))
    with pytest.raises(HostMemoryError, match=r"MemAvailable leaves 1\.00 MiB"):
        take([(PinnedMirror(CPU), [Need(first, MIB, "first")]), (PinnedMirror(CPU), [Need(second, 1, "second")])])
    assert not taken


# Blocks --------------------------------------------------------------------------------------------------------------


class Mappings:
    """The page mappings that were made, and those that still exist."""

    def __init__(self) -> None:
        self._made: list[tuple[int, weakref.ref[mmap.mmap]]] = []

    def add(self, pages: mmap.mmap) -> None:
        self._made.append((len(pages), weakref.ref(pages)))

    @property
    def made(self) -> list[int]:
        return [nbytes for nbytes, _ in self._made]

    @property
    def alive(self) -> list[int]:
        return [nbytes for nbytes, pages in self._made if pages() is not None]


@pytest.fixture
def mappings(monkeypatch: pytest.MonkeyPatch) -> Mappings:
    found = Mappings()
    original = host_memory.map_pages

    def map_pages(nbytes: int) -> mmap.mmap:
        pages = original(nbytes)
        found.add(pages)
        return pages

    monkeypatch.setattr(host_memory, "map_pages", map_pages)
    return found


@pytest.mark.parametrize("nbytes", [1, PAGE - 1, PAGE, PAGE + 1, 5 * MIB + 1])
def test_a_block_is_as_large_as_its_pages_and_no_larger(mappings: Mappings, nbytes: int) -> None:
    block = HostBlock(nbytes, CPU)
    assert mappings.made == [-(-nbytes // PAGE) * PAGE]
    assert block.nbytes == mappings.made[0]


def test_pages_are_private_huge_where_possible_and_kept_out_of_forks_and_core_dumps() -> None:
    block = HostBlock(4 * MIB, CPU)
    flags = smaps_flags(block.tensor(0, 1).data_ptr())
    assert not flags & {"sh", "ms"}
    assert {"dd", "rd", "wr"} <= flags
    assert flags & {"dc", "wf"}
    assert "hg" in flags or not Path("/sys/kernel/mm/transparent_hugepage").exists()


def smaps_flags(pointer: int) -> set[str]:
    """The kernel's flags of the mapping around an address; see Documentation/filesystems/proc.rst."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split(" ", 1)[0]
        if "-" in head and not head.endswith(":"):
            start, end = (int(number, 16) for number in head.split("-"))
            inside = start <= pointer < end
        elif inside and line.startswith("VmFlags:"):
            return set(line.split()[1:])
    raise LookupError(hex(pointer))


@given(st.integers(0, 3 * PAGE), st.integers(1, 3 * PAGE))
def test_a_tensor_is_on_a_storage_of_exactly_its_size_at_its_offset(offset: int, nbytes: int) -> None:
    block = HostBlock(6 * PAGE + 1, CPU)
    whole = block.tensor(0, block.nbytes)
    tensor = block.tensor(offset, nbytes)
    assert (tensor.shape, tensor.dtype, tensor.storage_offset()) == ((nbytes,), torch.uint8, 0)
    assert tensor.untyped_storage().nbytes() == nbytes
    assert tensor.data_ptr() == whole.data_ptr() + offset
    tensor.fill_(7)
    assert int(whole.sum(dtype=torch.int64)) == 7 * nbytes
    assert bool((whole[offset : offset + nbytes] == 7).all())


def test_a_saved_tensor_is_as_large_as_itself() -> None:
    tensor = HostBlock(8 * MIB, CPU).tensor(MIB, 100_000)
    file = io.BytesIO()
    torch.save(tensor, file)
    assert 100_000 <= file.tell() < 100_000 + PAGE


def test_fresh_memory_is_zero() -> None:
    assert not HostBlock(3 * PAGE, CPU).tensor(0, 3 * PAGE).any()


def test_memory_goes_back_to_the_operating_system_with_the_last_tensor() -> None:
    lines = lines_of("""
nbytes = 256 * 2**20
before = rss()
block = HostBlock(nbytes, torch.device("cpu"))
first, second = block.tensor(0, 64), block.tensor(64, nbytes - 64)
mapped = rss()
second.fill_(1); first.fill_(1)
filled = rss()
del block, second
held = rss()
del first
print(nbytes, *(value - before for value in (mapped, filled, held, rss())))
""")
    nbytes, mapped, filled, held, after = map(int, lines[0].split())
    slack = nbytes // 50
    assert mapped < slack
    assert abs(filled - nbytes) < slack
    assert abs(held - nbytes) < slack
    assert after < slack


def test_page_locked_memory_costs_its_size_and_not_the_next_power_of_two() -> None:
    lines = lines_of("""
pretend()
nbytes = 130 * 2**20 + 1
warm = HostBlock(2**20, torch.device("cuda"))
before = rss()
block = HostBlock(nbytes, torch.device("cuda"))
print("grew", rss() - before)
""")
    (grew,) = (int(line.split()[1]) for line in lines if line.startswith("grew"))
    assert 130 * MIB <= grew <= 1.01 * (130 * MIB + 1)


def test_a_refused_mapping_is_a_host_memory_error() -> None:
    lines = lines_of("""
resource.setrlimit(resource.RLIMIT_AS, (status("VmSize") + 100 * 2**20,) * 2)
try:
    HostBlock(200 * 2**20, torch.device("cpu"))
except HostMemoryError as error:
    print(type(error.__cause__).__name__, "|", error)
HostBlock(50 * 2**20, torch.device("cpu"))
print("a smaller one fits")
""")
    assert lines[0].startswith("OSError | ")
    assert "200.00 MiB of host memory" in lines[0]
    assert "ulimit -v" in lines[0]
    assert lines[1:] == ["a smaller one fits"]


# Page-locked blocks, with a fake driver ------------------------------------------------------------------------------


class Driver:
    """Registers what it is given, or refuses the calls named in ``refuse`` (counted from 1)."""

    def __init__(self) -> None:
        self.registered: list[tuple[int, int]] = []
        self.unregistered: list[int] = []
        self.resident: list[bool] = []  # at each registration, whether every page was there
        self.mapped: list[bool] = []  # at each end of a registration, whether the memory still was
        self.refuse: set[int] = set()
        self._sizes: dict[int, int] = {}

    def register(self, pointer: int, nbytes: int) -> bool:
        self.registered.append((pointer, nbytes))
        self.resident.append(all(in_core(pointer, nbytes)))
        self._sizes[pointer] = nbytes
        return len(self.registered) not in self.refuse

    def unregister(self, pointer: int) -> None:
        self.unregistered.append(pointer)
        self.mapped.append(len(in_core(pointer, self._sizes[pointer])) * PAGE == self._sizes[pointer])


def in_core(pointer: int, nbytes: int) -> list[bool]:
    """For each page whether it is in memory; nothing if the range is not mapped."""
    pages = (ctypes.c_ubyte * -(-nbytes // PAGE))()
    mincore = ctypes.CDLL(None, use_errno=True).mincore
    mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    return [bool(page & 1) for page in pages] if mincore(pointer, nbytes, pages) == 0 else []


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    fake = Driver()
    monkeypatch.setattr(devices, "registers_host_memory", lambda device: device.type == "cuda")
    monkeypatch.setattr(devices, "register_host", fake.register)
    monkeypatch.setattr(devices, "unregister_host", fake.unregister)
    yield fake
    drain()


def test_every_page_is_there_before_the_one_registration(driver: Driver) -> None:
    block = HostBlock(5 * MIB + 1, CUDA)
    assert driver.registered == [(block.tensor(0, 1).data_ptr(), block.nbytes)]
    assert driver.resident == [True]
    assert block.pinned


def test_plain_memory_is_neither_touched_nor_registered(driver: Driver) -> None:
    block = HostBlock(5 * MIB, CPU)
    assert not any(in_core(block.tensor(0, 1).data_ptr(), block.nbytes))
    assert not driver.registered
    assert not block.pinned


def test_a_dead_block_is_unregistered_by_the_next_drain_and_never_before(driver: Driver) -> None:
    block = HostBlock(MIB, CUDA)
    pointer = block.tensor(0, 1).data_ptr()
    drain()
    assert not driver.unregistered
    del block
    assert not driver.unregistered
    drain()
    assert driver.unregistered == [pointer]
    drain()
    assert driver.unregistered == [pointer]


def test_memory_is_unregistered_before_it_is_unmapped(driver: Driver, mappings: Mappings) -> None:
    block = HostBlock(MIB, CUDA)
    del block
    assert mappings.alive == [MIB]
    drain()
    assert driver.mapped == [True]
    assert mappings.alive == []


def test_a_tensor_may_outlive_the_registration(driver: Driver, mappings: Mappings) -> None:
    tensor = HostBlock(MIB, CUDA).tensor(0, MIB).fill_(3)
    drain()
    assert len(driver.unregistered) == 1
    assert int(tensor.sum(dtype=torch.int64)) == 3 * MIB
    assert mappings.alive == [MIB]
    del tensor
    assert mappings.alive == []


def test_blocks_that_die_in_another_thread_wait_for_the_drain(driver: Driver) -> None:
    blocks = [HostBlock(MIB, CUDA) for _ in range(3)]
    thread = threading.Thread(target=blocks.clear)
    thread.start()
    thread.join()
    assert not driver.unregistered
    drain()
    assert sorted(driver.unregistered) == sorted(pointer for pointer, _ in driver.registered)


def test_a_refused_registration_means_pageable_memory_and_a_warning(driver: Driver, mappings: Mappings) -> None:
    driver.refuse = {1}
    with pytest.warns(PageableMirrorWarning, match=r"1\.00 MiB.*quarter of the link.*ulimit -l.*close\(\)"):
        block = HostBlock(MIB, CUDA)
    assert not block.pinned
    assert int(block.tensor(0, MIB).fill_(1).sum(dtype=torch.int64)) == MIB
    del block
    assert mappings.alive == []
    drain()
    assert not driver.unregistered


@pytest.mark.parametrize("refused", [1, 2, 3])
def test_whichever_registration_is_refused_the_mirror_is_whole(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, refused: int
) -> None:
    monkeypatch.setattr("torch_offload.mirror._BLOCK", 1)
    driver.refuse = {refused}
    mirror = PinnedMirror(CUDA)
    storages = [torch.UntypedStorage(PAGE) for _ in range(3)]
    with pytest.warns(PageableMirrorWarning):
        [slots] = take([(mirror, [Need(storage, PAGE, "weight") for storage in storages])])
    assert [slot.nbytes for slot in slots] == [PAGE] * 3
    assert [slot.block.pinned for slot in slots] == [number != refused for number in (1, 2, 3)]
    assert not mirror.pinned


def test_a_warning_made_an_error_loses_no_memory(driver: Driver, mappings: Mappings) -> None:
    driver.refuse = {1}
    with pytest.raises(PageableMirrorWarning):
        HostBlock(MIB, CUDA)
    assert mappings.alive == []
    drain()
    assert not driver.unregistered


def test_the_exit_unregisters_what_lives_and_what_has_died() -> None:
    lines = lines_of("""
pretend()
living, dying = (HostBlock(2**20, torch.device("cuda")) for _ in range(2))
del dying
print("end")
""")
    registered = [line.removeprefix("register ").split()[:2] for line in lines if line.startswith("register")]
    unregistered = [line.removeprefix("unregister ").split() for line in lines[lines.index("end") + 1 :]]
    assert len(registered) == 2
    assert sorted(unregistered) == sorted(registered)


def test_the_exit_unregisters_also_where_finalizers_ran_before_the_package() -> None:
    lines = lines_of(
        "pretend()\nblock = HostBlock(2**20, torch.device('cuda'))",
        first="import weakref\nweakref.finalize({1}.__class__, print, 'foreign')\n",
    )
    assert sorted(line.split()[0] for line in lines) == ["foreign", "register", "unregister"]


def test_a_forked_child_unregisters_nothing() -> None:
    lines = lines_of("""
pretend()
living, dying, queued = (HostBlock(2**20, torch.device("cuda")) for _ in range(3))
print("parent", os.getpid(), flush=True)
del queued
if os.fork() == 0:
    del dying
    host_memory.drain()
    sys.exit()  # with everything that runs at the exit of an interpreter
os.wait()
print("child is gone", flush=True)
del dying
host_memory.drain()
""")
    parent = next(line.split()[1] for line in lines if line.startswith("parent"))
    gone = lines.index("child is gone")
    assert not [line for line in lines[:gone] if line.startswith("unregister")]
    unregistered = [line.split()[1:] for line in lines[gone + 1 :]]
    assert [pid for pid, _ in unregistered] == [parent] * 3
    assert len({pointer for _, pointer in unregistered}) == 3


def test_a_forked_child_that_drops_a_block_unmaps_nothing_of_its_own() -> None:
    lines = lines_of("""
blocks = [HostBlock(64 * 2**20, torch.device("cpu"))]
if os.fork() == 0:
    own = [torch.ones(2**24, dtype=torch.uint8) for _ in range(8)]  # may well lie where the parent's block does
    blocks.clear()
    print("child reads", sum(int(each.sum()) for each in own), flush=True)
    os._exit(0)
print("status", os.waitstatus_to_exitcode(os.wait()[1]))
""")
    assert lines == [f"child reads {8 * 2**24}", "status 0"]


class Runtime:
    """The CUDA runtime, answering with a status."""

    def __init__(self, status: int) -> None:
        self.status = status
        self.calls: list[tuple[int, ...]] = []

    def cudaHostRegister(self, *arguments: int) -> int:  # noqa: N802
        self.calls.append(arguments)
        return self.status


@pytest.mark.parametrize(("status", "accepted", "launches"), [(0, True, 0), (2, False, 1), (712, False, 1)])
def test_a_refusal_is_told_by_the_status_and_its_stale_error_is_spent_on_a_launch(
    monkeypatch: pytest.MonkeyPatch, status: int, accepted: bool, launches: int
) -> None:
    runtime, launched = Runtime(status), []

    def zeros(*_arguments: int, device: str) -> None:
        launched.append(device)
        raise RuntimeError("CUDA error: the stale one")

    monkeypatch.setattr(devices, "_runtime", lambda: runtime)
    monkeypatch.setattr(torch, "zeros", zeros)
    assert devices.register_host(PAGE, MIB) is accepted
    assert [call[:2] for call in runtime.calls] == [(PAGE, MIB)]
    assert launched == ["cuda"] * launches


@pytest.mark.gpu
def test_a_real_driver_page_locks_every_tensor_of_a_block() -> None:
    block = HostBlock(5 * MIB + 1, CUDA)
    assert block.pinned
    assert block.tensor(64, 5 * MIB).is_pinned()


@pytest.mark.gpu
def test_the_kernel_after_a_really_refused_registration_works() -> None:
    block = HostBlock(MIB, CUDA)
    assert not devices.register_host(block.tensor(0, 1).data_ptr(), MIB)
    assert float(torch.ones(3, device="cuda").sum()) == 3


# Touching ------------------------------------------------------------------------------------------------------------


def mapped_by(call: Callable[[Any, int, int], None], nbytes: int) -> list[bool]:
    """Which pages of a fresh mapping are there after a call."""
    pages = host_memory.map_pages(nbytes)
    tensor = torch.frombuffer(pages, dtype=torch.uint8)
    assert not any(in_core(tensor.data_ptr(), nbytes))
    call(pages, tensor.data_ptr(), nbytes)
    return in_core(tensor.data_ptr(), nbytes)


@pytest.mark.parametrize("npages", [1, 2, 3, 7, 100])
def test_touching_supplies_every_page(monkeypatch: pytest.MonkeyPatch, npages: int) -> None:
    monkeypatch.setattr(host_memory, "_TOUCH", 3 * PAGE)
    assert mapped_by(touch, npages * PAGE) == [True] * npages


@pytest.mark.parametrize("started", [0, 1, 2])
def test_touching_supplies_every_page_where_no_more_threads_can_be_started(
    monkeypatch: pytest.MonkeyPatch, started: int
) -> None:
    monkeypatch.setattr(host_memory, "_TOUCH", 3 * PAGE)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    original, starts = threading.Thread.start, []

    def start(thread: threading.Thread) -> None:
        starts.append(thread)
        if len(starts) > started:
            raise RuntimeError("can't start new thread")
        original(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    assert mapped_by(touch, 100 * PAGE) == [True] * 100
    assert len(starts) > 0


def test_touching_works_at_the_exit_of_the_interpreter() -> None:
    lines = lines_of("""
import atexit
pretend()
atexit.register(lambda: print("late", HostBlock(2**20, torch.device("cuda")).pinned))
""")
    assert "late True" in lines


def test_an_interrupted_touch_waits_for_its_threads_before_it_lets_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "_TOUCH", PAGE)
    running, memset = [], ctypes.memset

    def slow(pointer: int, value: int, nbytes: int) -> None:
        running.append(pointer)
        if len(running) == 1:
            raise KeyboardInterrupt
        memset(pointer, value, nbytes)
        running.remove(pointer)

    monkeypatch.setattr(ctypes, "memset", slow)
    pages = host_memory.map_pages(8 * PAGE)
    with pytest.raises(KeyboardInterrupt):
        touch(pages, torch.frombuffer(pages, dtype=torch.uint8).data_ptr(), 8 * PAGE)
    assert len(running) == 1  # the one that raised
    assert not [thread for thread in threading.enumerate() if "ThreadPoolExecutor" in thread.name]


# Other accelerators --------------------------------------------------------------------------------------------------


@pytest.fixture
def pinned_by_torch(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[torch.Tensor]]:
    """torch's pinned allocator, without an accelerator to pin for. Gives what it handed out."""
    handed_out: list[weakref.ref[torch.Tensor]] = []
    original = torch.empty

    def empty(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        tensor = original(*args, **kwargs)
        if pin_memory:
            handed_out.append(weakref.ref(tensor.untyped_storage()))
        return tensor

    monkeypatch.setattr(torch, "empty", empty)
    return handed_out


def test_other_accelerators_use_the_pinned_allocator_of_torch(
    driver: Driver, mappings: Mappings, pinned_by_torch: list[weakref.ref[torch.Tensor]]
) -> None:
    block = HostBlock(PAGE + 1, torch.device("xpu"))
    assert (block.pinned, block.exact, block.nbytes) == (True, False, 2 * PAGE)
    assert len(pinned_by_torch) == 1
    assert not driver.registered
    assert not mappings.made


def test_memory_of_that_allocator_lives_as_long_as_the_last_tensor(pinned_by_torch: list[weakref.ref[torch.Tensor]]) -> None:
    block = HostBlock(PAGE, torch.device("xpu"))
    (storage,) = pinned_by_torch
    tensor = block.tensor(8, 16).fill_(1)
    assert tensor.untyped_storage().nbytes() == 16
    assert tensor.data_ptr() == storage().data_ptr() + 8
    del block
    assert storage() is not None
    del tensor
    assert storage() is None


def test_where_that_allocator_refuses_memory_is_pageable_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    original = torch.empty

    def empty(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        if pin_memory:
            raise RuntimeError("the driver refuses")
        return original(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", empty)
    with pytest.warns(PageableMirrorWarning):
        block = HostBlock(PAGE, torch.device("xpu"))
    assert not block.pinned
    assert int(block.tensor(0, PAGE).fill_(1).sum(dtype=torch.int64)) == PAGE
