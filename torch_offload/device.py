"""The few calls that differ between CUDA/HIP, other accelerators and the CPU. Nothing here knows about offloading."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from .errors import TransitionError

CPU = torch.device("cpu")
_PORTABLE = 1  # cudaHostRegisterPortable


def resolve(device: torch.device | str | int | None) -> torch.device:
    """The device a target is offloaded from: the one given, else the current accelerator, else the CPU.

    A device without an index stands for every device of its type.

    Raises:
        ValueError: that is no device with memory.
    """
    if device is None:
        found = torch.accelerator.current_accelerator(check_available=True)
        return CPU if found is None else torch.device(found.type)
    try:
        given = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device={device!r} is no device: {error}") from error
    if given.type == "meta":
        raise ValueError("device='meta' has no memory to free. Pass the device that the targets are on")
    return given


def covers(device: torch.device, other: torch.device) -> bool:
    """Whether memory on ``other`` belongs to ``device``, as `resolve` gave it."""
    return device.type == other.type and (device.index is None or device.index == other.index)


def accelerators(devices: Iterable[torch.device]) -> list[torch.device]:
    """The devices that have memory of their own, each once."""
    return sorted({d for d in devices if d.type not in ("cpu", "meta")}, key=str)


def synchronize(devices: Iterable[torch.device]) -> None:
    """Wait for all streams of these devices.

    Raises:
        TransitionError: a stream other than the current one is capturing a graph, and this call broke the capture.
    """
    for device in accelerators(devices):
        with naming_captures():
            torch.accelerator.synchronize(device)


@contextlib.contextmanager
def naming_captures() -> Iterator[None]:
    """Say what is wrong if a call in the block fails because another thread captures.

    Raises:
        TransitionError: in place of torch's own error.
    """
    try:
        yield
    except RuntimeError as error:
        if "capturing" not in str(error):
            raise
        raise TransitionError(
            "another thread is capturing a CUDA graph. Nothing was moved, but waiting for the device or allocating on it broke "
            "that capture: record it again, and offload or reload before or after it"
        ) from error


def empty_cache(devices: Iterable[torch.device]) -> None:
    """Give wholly free segments back to the driver."""
    if accelerators(devices):
        torch.accelerator.empty_cache()


def allocated_nbytes(devices: Iterable[torch.device]) -> int | None:
    """Bytes that tensors hold on these devices, from the caching allocator; None where there is none (the CPU)."""
    found = accelerators(devices)
    return sum(torch.accelerator.memory_allocated(d) for d in found) if found else None


def reserved_nbytes(devices: Iterable[torch.device]) -> int | None:
    """Bytes that the caching allocator holds from the driver; None where there is none (the CPU)."""
    found = accelerators(devices)
    return sum(torch.accelerator.memory_reserved(d) for d in found) if found else None


def driver_free_nbytes(devices: Iterable[torch.device]) -> int | None:
    """Bytes that the driver calls free. Other processes move this number. None on the CPU."""
    found = [d for d in accelerators(devices) if d.type == "cuda"]
    return sum(torch.cuda.mem_get_info(d)[0] for d in found) if found else None


def default_stream(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """A context in which the default stream of a CUDA/HIP device is current; elsewhere nothing changes."""
    return torch.cuda.stream(torch.cuda.default_stream(device)) if device.type == "cuda" else contextlib.nullcontext()


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether a device, or the CPU's allocator, had no room."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def is_capturing(device: torch.device) -> bool:
    """Whether the current stream of this thread records a graph; a wait or an allocation would break that capture."""
    return device.type == "cuda" and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]


def registers_host_memory(device: torch.device) -> bool:
    """Whether memory of our own can be page-locked for this device (CUDA and HIP)."""
    return device.type == "cuda"


def register_host(pointer: int, nbytes: int) -> bool:
    """Page-lock ``nbytes`` bytes at ``pointer`` for every CUDA/HIP context of the process; False where the driver refuses."""
    return _succeeded(_runtime().cudaHostRegister(pointer, nbytes, _PORTABLE))


def unregister_host(pointer: int) -> None:
    """Undo `register_host`. Must come before the memory is unmapped, and breaks a capture on any stream."""
    _succeeded(_runtime().cudaHostUnregister(pointer))


def _succeeded(code: Any) -> bool:
    """A refused call leaves an error behind that the next kernel launch would report as its own (seen with CUDA 13 on an
    H200), so one launch is spent on it."""
    if int(code) == 0:
        return True
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")
    return False


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
