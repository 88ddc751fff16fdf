"""The errors of torch_offload.

    OffloadError(RuntimeError)
     ├── OffloadedTensorError     an offloaded tensor was used; the message names it and the call that brings it back
     ├── SharedStorageError       a storage has holders that `shared="raise"` does not accept
     ├── GradientsError           gradients are present under `grads="refuse"`
     ├── UnsupportedTargetError   the target cannot be offloaded whole: wrong type, meta tensors, a foreign wrapper
     ├── MirrorMismatchError      a known name stands for other memory than it did
     ├── HostMemoryError          the host cannot hold the mirror; raised before anything is touched
     ├── DeviceMemoryError        the device cannot hold the reload; everything stays offloaded
     ├── IntegrityError           bytes that came back are not the bytes that left; the mirror is kept
     └── TransitionError          the call cannot run now: capturing stream, other thread, prepared transition, fork

Every message says what happened, to which tensors, the values seen, and the call that repairs it. Code of other projects
sometimes wraps these errors (`load_state_dict` in a RuntimeError, dynamo in its own); the sentence survives inside.
"""

from __future__ import annotations

from collections.abc import Iterable


class OffloadError(RuntimeError):
    """Base of every error that torch_offload raises on purpose."""


class OffloadedTensorError(OffloadError):
    """An operation needs the memory of a tensor that is offloaded."""


class SharedStorageError(OffloadError):
    """A storage is held by somebody the caller did not name."""


class GradientsError(OffloadError):
    """A gradient is present although the policy is ``grads="refuse"``."""


class UnsupportedTargetError(OffloadError, TypeError):
    """The target cannot be offloaded whole, so nothing of it was touched."""


class MirrorMismatchError(OffloadError):
    """A known name stands for memory of another size or dtype, or was re-pointed while offloaded."""


class HostMemoryError(OffloadError, MemoryError):
    """The host cannot hold the mirror. Raised before any storage was touched."""


class DeviceMemoryError(OffloadError, MemoryError):
    """The device cannot hold what is to come back. Everything stays offloaded; retry after freeing memory."""


class IntegrityError(OffloadError):
    """Reloaded bytes differ from the bytes that were offloaded. The mirror is kept."""


class TransitionError(OffloadError):
    """A transition cannot run at this moment."""


def listed(names: Iterable[str], *, most: int = 5) -> str:
    """Names for a message: ``'a', 'b' and 3 more``."""
    every = list(names)
    shown = ", ".join(repr(name) for name in every[:most])
    return shown if len(every) <= most else f"{shown} and {len(every) - most} more"


def gib(nbytes: float) -> str:
    """A byte count for a message, in the unit a person would choose (1 GiB = 2**30 bytes)."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(nbytes) >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{int(nbytes)} bytes"
