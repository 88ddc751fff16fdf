"""The ways to move memory that are compared. Each has `offload`, `reload` and `close`, which gives its host memory back.

The peers do what training frameworks do today, in as few lines as that takes.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from torch_offload import Offloader, Strategy


class Way(Protocol):
    def offload(self) -> object: ...

    def reload(self) -> object: ...

    def close(self) -> None: ...


class TorchOffload:
    """This package, checksums and all."""

    name = "torch_offload"

    def __init__(self, target: Any, strategy: Callable[[Any], Strategy]) -> None:
        self._target = target  # an Offloader holds it weakly
        self._off = Offloader(strategy(target))
        self.reload, self.close = self._off.reload, self._off.close

    def offload(self) -> None:
        report = self._off.offload()
        if report.left or not report.nbytes:
            raise RuntimeError(f"not everything was moved:\n{report}")


class PinnedBuffer:
    """One persistent host tensor of torch's pinned allocator for each flat buffer."""

    name = "pin_memory=True buffers"

    def __init__(self, tensors: Sequence[torch.Tensor], finish: Callable[[], None]) -> None:
        self._tensors, self._finish = tensors, finish
        self._sizes = [tensor.untyped_storage().nbytes() for tensor in tensors]
        self._host: list[torch.Tensor] = []

    def offload(self) -> None:
        if not self._host:
            self._host = [torch.empty_like(each, device="cpu", pin_memory=torch.cuda.is_available()) for each in self._tensors]
        for tensor, host in zip(self._tensors, self._host, strict=True):
            host.copy_(tensor)
            tensor.untyped_storage().resize_(0)
        self._finish()

    def reload(self) -> None:
        for tensor, host, nbytes in zip(self._tensors, self._host, self._sizes, strict=True):
            tensor.untyped_storage().resize_(nbytes)
            tensor.copy_(host)
        self._finish()

    def close(self) -> None:
        self._host.clear()
        free_pinned()


class PerParameter:
    """Every parameter's data replaced by ``.to("cpu")`` of it, and back."""

    name = 'per-parameter .to("cpu")'

    def __init__(self, module: torch.nn.Module, finish: Callable[[], None]) -> None:
        self._module, self._finish = module, finish
        self._device = next(module.parameters()).device

    def offload(self) -> None:
        for parameter in self._module.parameters():
            parameter.data = parameter.data.to("cpu") if self._device.type != "cpu" else parameter.data.clone()
        self._finish()

    def reload(self) -> None:
        for parameter in self._module.parameters():
            parameter.data = parameter.data.to(self._device) if self._device.type != "cpu" else parameter.data.clone()
        self._finish()

    def close(self) -> None:
        free_pinned()


def collect() -> None:
    """What the functions of today end with."""
    gc.collect()
    empty_cache()


def empty_cache() -> None:
    """The least that has to be done for the driver to have the memory."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def free_pinned() -> None:
    """Give what torch's pinned allocator keeps back to the operating system."""
    gc.collect()
    if torch.cuda.is_available():
        torch._C._host_emptyCache()
