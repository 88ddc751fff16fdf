"""How long the ways take, and how much host memory."""

from __future__ import annotations

import mmap
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from .ways import Way


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds(call: Callable[[], object]) -> float:
    """Wall time of one call, devices idle before and after."""
    synchronize()
    start = time.perf_counter()
    call()
    synchronize()
    return time.perf_counter() - start


def link_limit(device: torch.device, nbytes: int = 2**30) -> dict[str, float]:
    """GB/s of one large copy between pinned memory and the device, in each direction: the best of five."""
    host = torch.ones(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    there = torch.ones(nbytes, dtype=torch.uint8, device=device)
    best = {
        "offload": min(seconds(lambda: host.copy_(there, non_blocking=True)) for _ in range(5)),
        "reload": min(seconds(lambda: there.copy_(host, non_blocking=True)) for _ in range(5)),
    }
    return {direction: nbytes / time_s / 1e9 for direction, time_s in best.items()}


def warm_host_pages(nbytes: int) -> None:
    """Touch host memory and give it back: pages that a virtual machine never had come slowly, to whoever is first."""
    with mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as pages:
        for start in range(0, nbytes, mmap.PAGESIZE):
            pages[start] = 1


def resident_nbytes() -> int:
    """The resident set of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def device_nbytes() -> int:
    """What the driver has given this process of a GPU's memory."""
    return torch.cuda.memory_reserved() if torch.cuda.is_available() else 0


def compare(
    ways: Sequence[tuple[str, Way]], nbytes: int, *, empty: int, rounds: int = 2, cycles: int = 3
) -> dict[str, dict[str, Any]]:
    """Run every way in turn, in another order each round, each from nothing.

    Args:
        ways: each with its name.
        nbytes: what each moves.
        empty: what `device_nbytes` was before any of it was made.
        rounds: how often each begins anew, for the first offload.
        cycles: later offloads and reloads in each round.

    Returns:
        For each way the medians in seconds and their rates in GB/s (1e9 bytes); beside a GPU host bytes for one byte (growth of
        the resident set over a first offload; the least of all rounds, as whoever is first has CUDA load kernels once), and
        device bytes that were left.
    """
    beside_gpu = torch.cuda.is_available()
    times: dict[str, dict[str, list[float]]] = {name: {"first": [], "offload": [], "reload": []} for name, _ in ways}
    host: dict[str, list[float]] = {name: [] for name, _ in ways}
    left: dict[str, list[int]] = {name: [] for name, _ in ways}
    for number in range(rounds):
        for name, way in ways if number % 2 == 0 else ways[::-1]:
            before = resident_nbytes()
            times[name]["first"].append(seconds(way.offload))
            host[name].append((resident_nbytes() - before) / nbytes)
            left[name].append(device_nbytes() - empty)
            seconds(way.reload)
            for _ in range(cycles):
                times[name]["offload"].append(seconds(way.offload))
                times[name]["reload"].append(seconds(way.reload))
            way.close()
    return {
        name: {
            **{f"{what}_s": statistics.median(each) for what, each in times[name].items()},
            **{f"{what}_gb_per_s": nbytes / statistics.median(each) / 1e9 for what, each in times[name].items()},
            "host_bytes_per_byte": min(host[name]) if beside_gpu else None,
            "device_bytes_left": max(left[name]) if beside_gpu else None,
        }
        for name, _ in ways
    }
