"""Host memory of exactly the size that is asked for, page-locked where there is a device to lock it for.

torch's own pinned allocator rounds blocks up to powers of two and keeps what is freed, so mirrors do not use it where they
can avoid it: pages come from an anonymous private mapping, are touched by several threads (one thread reaches a fifth of
the speed) and registered with the driver.

[Note: retiring pinned pages]
Pinned pages must be unregistered before they are unmapped, and an unregistration breaks a graph capture that runs on any
stream. A finalizer may run in any thread at any moment, so it only appends to a queue; `drain` does the work at the start
of the next transition. At interpreter exit there is no next one: then the finalizer does it itself. A forked child owns
neither the pages (MADV_DONTFORK) nor the driver's context, and may have pages of its own at their addresses: it never unmaps.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import ctypes
import gc
import mmap
import os
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from . import device as devices
from .errors import HostMemoryError, gib

PAGE = mmap.PAGESIZE
_TOUCH = 8 * 2**20  # bytes for one thread at a time: several of them share a block of small storages

_buffers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_retired: collections.deque[tuple[int, Any]] = collections.deque()
_exiting = False


class PageableMirrorWarning(RuntimeWarning):
    """The driver refused to page-lock a mirror, so its copies run at a fraction of the link's speed."""


class HostBlock:
    """``nbytes`` bytes of host memory, given back to the operating system when the last tensor over them is gone.

    Args:
        nbytes: size in bytes, at least 1; the mapping is rounded up to whole pages.
        device: the accelerator to page-lock for, or the CPU for plain memory.

    Raises:
        HostMemoryError: the operating system refuses the mapping.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.nbytes = pages(nbytes)
        self.pinned = False
        self.exact = True
        registers = devices.registers_host_memory(device)
        self._buffer: Any = None if registers or device.type == "cpu" else _torch_pinned(self.nbytes)
        if self._buffer is not None:
            self.pinned, self.exact = True, False
        else:
            self._buffer = map_pages(self.nbytes)
        _buffers[id(self._buffer)] = self._buffer
        if registers:
            self._pin()
        elif device.type != "cpu" and not self.pinned:
            _warn_pageable(self.nbytes)

    def _pin(self) -> None:
        pointer = self.tensor(0, self.nbytes).data_ptr()
        touch(self._buffer, pointer, self.nbytes)
        self.pinned = devices.register_host(pointer, self.nbytes)
        if self.pinned:
            weakref.finalize(self, _retire, os.getpid(), pointer, self._buffer)
        else:
            _warn_pageable(self.nbytes)

    def tensor(self, offset: int, nbytes: int) -> torch.Tensor:
        """A uint8 tensor of shape ``(nbytes,)`` on a host storage of exactly that size, sharing the block's memory."""
        return torch.frombuffer(self._buffer, dtype=torch.uint8, offset=offset, count=nbytes)


def map_pages(nbytes: int) -> mmap.mmap:
    """Anonymous private pages (huge ones where the kernel has them), kept out of forked children and core dumps."""
    try:
        mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise HostMemoryError(
            f"the operating system refuses {gib(nbytes)} of host memory for the mirror ({error}). Raise the limit of the "
            "process (ulimit -v), or offload fewer components"
        ) from error
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK", "MADV_DONTDUMP"):
        if hasattr(mmap, advice):
            with contextlib.suppress(OSError):  # a kernel built without it; nothing depends on it
                mapping.madvise(getattr(mmap, advice))
    return mapping


def touch(pages: Any, pointer: int, nbytes: int) -> None:
    """Make the operating system supply every page now, by several threads at once.

    The garbage collector rests meanwhile, in the whole process: in one of the threads it would run finalizers, which may wait
    for whoever waits here.
    """

    def zero(offset: int) -> None:
        assert pages is not None  # held here: an interrupted caller must not unmap under this thread
        ctypes.memset(pointer + offset, 0, min(_TOUCH, nbytes - offset))

    offsets = range(0, nbytes, _TOUCH)
    workers = min(len(offsets), len(os.sched_getaffinity(0)), 16)
    collects = gc.isenabled()
    gc.disable()
    try:
        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(zero, offsets))
    except RuntimeError:  # no new threads while the interpreter shuts down
        for offset in offsets:
            zero(offset)
    finally:
        if collects:
            gc.enable()


def _torch_pinned(nbytes: int) -> Any:
    """Memory from torch's own pinned allocator, as a buffer; None where it refuses."""
    try:
        tensor = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    except RuntimeError:
        return None
    buffer: Any = (ctypes.c_ubyte * nbytes).from_address(tensor.data_ptr())
    buffer._owner = tensor
    return buffer


def _warn_pageable(nbytes: int) -> None:
    warnings.warn(
        f"the driver refused to page-lock {gib(nbytes)} of host memory; the mirror is pageable and copies through it run at "
        "about a quarter of the link's speed or less. Raise the limit on locked memory (ulimit -l) or free pinned memory, then "
        "call close() to build the mirror anew",
        PageableMirrorWarning,
        stacklevel=2,
    )


def _retire(pid: int, pointer: int, buffer: Any) -> None:
    """Finalizer of a pinned block. See [Note: retiring pinned pages]."""
    if pid != os.getpid():
        return
    if _exiting:
        devices.unregister_host(pointer)
    else:
        _retired.append((pointer, buffer))


def drain() -> None:
    """Unregister and unmap the pinned blocks that died since the last call, unless the current stream is capturing."""
    while _retired and not devices.is_capturing(torch.device("cuda")):
        pointer, _buffer = _retired.popleft()
        devices.unregister_host(pointer)


def _disown() -> None:
    """In a forked child: let nothing unmap the parent's pages, by keeping their buffers for good."""
    for buffer in [*_buffers.values(), *(buffer for _, buffer in _retired)]:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(buffer))
    _retired.clear()


os.register_at_fork(after_in_child=_disown)


@atexit.register
def _exit() -> None:
    global _exiting
    _exiting = True
    drain()


def trim_host_memory() -> int:
    """Have memory that nobody uses returned to the operating system: what the C library keeps after a checkpoint was written,
    what torch's pinned allocator caches, and retired mirrors. Collects garbage first.

    Returns:
        By how many bytes the resident set of this process fell; 0 where that cannot be read.
    """
    before = _resident_nbytes()
    gc.collect()
    drain()
    for owner, name in ((torch.accelerator, "empty_host_cache"), (torch._C, "_host_emptyCache")):  # the first from torch 2.12
        if torch.accelerator.is_available() and hasattr(owner, name):
            getattr(owner, name)()
            break
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)
    return max(0, before - _resident_nbytes())


def _resident_nbytes() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE
    except (OSError, ValueError):
        return 0


# How much may be taken -----------------------------------------------------------------------------------------------


def pages(nbytes: int) -> int:
    """``nbytes`` rounded up to whole pages."""
    return -(-nbytes // PAGE) * PAGE


def require(nbytes: int, *, root: str | Path = "/") -> None:
    """Raise unless ``nbytes`` more bytes of host memory can be taken.

    Touching pages past a container's limit is a SIGKILL and no exception, so this is asked before anything is touched.

    Raises:
        HostMemoryError: more is needed than `available_nbytes` says.
    """
    available, source = available_nbytes(root=root)
    if nbytes > available:
        raise HostMemoryError(
            f"the mirror needs {gib(nbytes)} of host memory ({nbytes} bytes) and {source} leaves {gib(available)}. Nothing "
            'was moved. Offload fewer components (components=...), discard gradients (grads="discard"), or raise the limit'
        )


def available_nbytes(*, root: str | Path = "/") -> tuple[int, str]:
    """Bytes of host memory that this process can still take, and the limit that says so.

    The least of MemAvailable and, for each control group from the process's own up to the root, its limit less its use;
    page cache counts as free, since the kernel reclaims it. Files as described in the Linux kernel's
    Documentation/admin-guide/cgroup-v1/memory.rst and cgroup-v2.rst.

    Args:
        root: where ``proc`` and ``sys`` are found; tests lay fake trees.
    """
    base = Path(root)
    found = [_meminfo(base)]
    for line in _read(base / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            found += _groups(base / "sys/fs/cgroup", path, "memory.max", "memory.current", "")
        elif "memory" in controllers.split(","):
            found += _groups(base / "sys/fs/cgroup/memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
    return min(found)


def _meminfo(base: Path) -> tuple[int, str]:
    fields = dict(line.split(":", 1) for line in _read(base / "proc/meminfo").splitlines() if ":" in line)
    kib = fields.get("MemAvailable", "").split()
    return (int(kib[0]) * 1024, "MemAvailable") if kib else (2**63 - 1, "no limit")


def _groups(mount: Path, path: str, limit: str, used: str, prefix: str) -> list[tuple[int, str]]:
    """What each group on the way from ``path`` up to the mount leaves; groups outside our namespace have no files here."""
    found = []
    group = mount / path.strip("/")
    for directory in (group, *group.parents):
        most, current = _read(directory / limit).strip(), _read(directory / used).strip()
        if most.isdigit() and current.isdigit():
            stat = dict(line.split(" ", 1) for line in _read(directory / "memory.stat").splitlines())
            cache = sum(int(stat.get(f"{prefix}{kind}_file", 0)) for kind in ("inactive", "active"))
            found.append((max(0, int(most) - int(current) + cache), str(directory / limit)))
        if directory == mount:
            break
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
