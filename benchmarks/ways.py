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

    def __init__(self, *targets: Any, strategies: Sequence[Callable[[Any], Strategy]]) -> None:
        self._targets = targets  # an Offloader holds them weakly
        self._off = Offloader(*(strategy(target) for strategy, target in zip(strategies, targets, strict=True)))
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


class MegatronCore:
    """Megatron-core's own calls, of its optimizer and of its wrapper's buffers; gradients are dropped."""

    name = "Megatron-core's offload_to_cpu()"

    def __init__(self, wrapper: Any, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._buffers = [*wrapper.buffers, *wrapper.expert_parallel_buffers]

    def offload(self) -> None:
        self._optimizer.offload_to_cpu()
        for buffer in self._buffers:
            buffer.offload_to_cpu()
        collect()

    def reload(self) -> None:
        for buffer in self._buffers:
            buffer.reload_from_cpu()
        self._optimizer.restore_from_cpu()

    def close(self) -> None:
        for buffer in self._buffers:
            buffer.param_data_cpu = None
        free_pinned()


class FreshTensors:
    """As verl does it: a fresh host tensor for the flat buffer, each main parameter and each moment; gradients are dropped."""

    name = "a fresh host tensor each"

    def __init__(self, wrapper: Any, optimizer: Any) -> None:
        self._buffers = [*wrapper.buffers, *wrapper.expert_parallel_buffers]
        self._optimizers = optimizer.chained_optimizers
        self._device = self._buffers[0].param_data.device
        self._host: list[torch.Tensor] = []
        self._sizes: list[int] = []

    def offload(self) -> None:
        self._host = [buffer.param_data.data.cpu().pin_memory() for buffer in self._buffers]
        self._sizes = [buffer.grad_data.untyped_storage().nbytes() for buffer in self._buffers]
        for buffer in self._buffers:
            buffer.param_data.untyped_storage().resize_(0)
            buffer.grad_data.untyped_storage().resize_(0)
        self._move(torch.device("cpu"))
        collect()

    def reload(self) -> None:
        for buffer, host, nbytes in zip(self._buffers, self._host, self._sizes, strict=True):
            buffer.grad_data.untyped_storage().resize_(nbytes)
            buffer.grad_data.zero_()
            buffer.param_data.untyped_storage().resize_(host.untyped_storage().nbytes())
            buffer.param_data.copy_(host, non_blocking=True)
        self._move(self._device)
        collect()

    def _move(self, device: torch.device) -> None:
        for each in self._optimizers:
            for group in each.shard_fp32_from_float16_groups:
                for main in group:
                    main.data = main.data.to(device, non_blocking=True)
            for state in each.optimizer.state.values():
                for key in ("exp_avg", "exp_avg_sq"):
                    state[key] = state[key].to(device, non_blocking=True)

    def close(self) -> None:
        self._host.clear()
        free_pinned()
