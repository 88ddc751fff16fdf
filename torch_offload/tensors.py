"""What a tensor says of itself and of its storage, asked past every Python subclass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Storage = torch.UntypedStorage


def plainly(function: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
    """Call a function of torch past every `__torch_function__` of its arguments' classes.

    In one step: a `with` block that is interrupted between its last line and its exit would leave the mechanism off for good.
    """
    return torch._C._disabled_torch_function_impl(function, (), args, keywords)


def attribute(tensor: torch.Tensor, name: str) -> Any:
    """An attribute that torch gives every tensor, asked past every Python subclass."""
    return plainly(getattr(torch.Tensor, name).__get__, tensor)


def gradient_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The gradient of a tensor that keeps one; asking others for theirs would warn."""
    keeps = attribute(tensor, "is_leaf") or attribute(tensor, "retains_grad")
    found: torch.Tensor | None = attribute(tensor, "grad") if keeps else None
    return found


def storage_of(tensor: torch.Tensor) -> Storage:
    """The tensor's storage, asked past every Python subclass."""
    found: Storage = plainly(torch.Tensor.untyped_storage, tensor)
    return found


def address_of(tensor: torch.Tensor) -> int:
    """The address of the tensor's storage; 0 if it has no single one."""
    try:
        return int(storage_of(tensor)._cdata)
    except (NotImplementedError, RuntimeError):  # sparse, fake and functional tensors have no storage of their own
        return 0


def byte_view(storage: Storage) -> torch.Tensor:
    """A new uint8 tensor of shape ``(storage.nbytes(),)`` over the whole storage, on its device."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def has_memory(storage: Storage) -> bool:
    """Whether there is memory; storages of tensors that wrap others have none. A copy-on-write storage gets its own copy."""
    try:
        return storage.data_ptr() != 0
    except RuntimeError:  # torch guards invalid pointers
        return False
