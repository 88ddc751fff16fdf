"""What training frameworks do today, with the calls of an Offloader that the loop needs: for comparison.

Each tensor's memory is exchanged for a new tensor on the other side, one by one, and the caches are emptied afterwards. The
tensors that ``.to("cpu", non_blocking=True)`` returns are pinned, by torch's own allocator: it rounds each up to a power of two
and keeps what is freed. Nothing is verified, ties and views come apart, and what is used while it is away computes on the CPU
or fails far from the cause.

Where the CPU is the device that ``.to`` would do nothing. There a clone stands for the host's copy, and an empty tensor for
what the device is left with.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import time
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch

COMPONENTS = ("params", "grads", "buffers", "optimizer")


@dataclasses.dataclass(frozen=True)
class Moved:
    """What a move was."""

    direction: str
    nbytes: int
    time_s: float

    def line(self) -> str:
        return f"{self.direction} {self.nbytes / 2**20:.2f} MiB, {self.time_s:.3f} s"


class TodaysWay:
    """Stands in for an Offloader. Targets are modules and optimizers, or strategies over one, of which it takes the target."""

    def __init__(self, *targets: Any, device: torch.device | str) -> None:
        self._targets = [getattr(target, "target", target) for target in targets]
        self._device = torch.device(device)
        self._away: set[str] = set()
        self._clones: dict[int, torch.Tensor] = {}  # by the tensor's id, where the CPU is the device
        self.report: Moved | None = None

    def offload(self, components: Iterable[str] | None = None) -> Moved:
        return self._change("offload", self._chosen(components) - self._away)

    def reload(self, components: Iterable[str] | None = None) -> Moved:
        return self._change("reload", self._chosen(components) & self._away)

    @contextlib.contextmanager
    def offloaded(self, components: Iterable[str] | None = None) -> Iterator[TodaysWay]:
        with self._entry_state():
            self.offload(components)
            yield self

    @contextlib.contextmanager
    def resident(self, components: Iterable[str] | None = None) -> Iterator[TodaysWay]:
        with self._entry_state():
            self.reload(components)
            yield self

    @property
    def host_nbytes(self) -> int:
        """What stands for the host's copies where the CPU is the device."""
        return sum(clone.nbytes for clone in self._clones.values())

    def _chosen(self, components: Iterable[str] | None) -> set[str]:
        return set(COMPONENTS if components is None else components)

    @contextlib.contextmanager
    def _entry_state(self) -> Iterator[None]:
        before = set(self._away)
        try:
            yield
        finally:
            if before - self._away:
                self.offload(before - self._away)
            if self._away - before:
                self.reload(self._away - before)

    def _change(self, direction: str, components: set[str]) -> Moved:
        start_s = time.perf_counter()
        tensors = [tensor for target in self._targets for tensor in tensors_of(target, components)]
        nbytes = 0
        for tensor in tensors:
            if direction == "offload":
                nbytes += tensor.nbytes
                self._to_host(tensor)
            else:
                self._to_device(tensor)
                nbytes += tensor.nbytes
        self._away ^= components
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        if direction == "offload":
            gc.collect()
            if self._device.type != "cpu":
                torch.accelerator.empty_cache()
        self.report = Moved(direction, nbytes, time.perf_counter() - start_s)
        return self.report

    def _to_host(self, tensor: torch.Tensor) -> None:
        if self._device.type == "cpu":
            self._clones[id(tensor)] = tensor.detach().clone()
            tensor.data = tensor.new_empty(0)
        else:
            tensor.data = tensor.data.to("cpu", non_blocking=True)

    def _to_device(self, tensor: torch.Tensor) -> None:
        if self._device.type == "cpu":
            tensor.data = self._clones.pop(id(tensor)).clone()
        else:
            tensor.data = tensor.data.to(self._device, non_blocking=True)


def tensors_of(target: Any, components: Collection[str] = COMPONENTS) -> Iterator[torch.Tensor]:
    """The tensors of a module or an optimizer that belong to these components."""
    if isinstance(target, torch.optim.Optimizer):
        if "optimizer" in components:
            values = (value for state in target.state.values() for value in state.values())
            yield from (value for value in values if isinstance(value, torch.Tensor) and value.dim())  # steps are on the host
        return
    if "params" in components:
        yield from target.parameters()
    if "grads" in components:
        yield from (parameter.grad for parameter in target.parameters() if parameter.grad is not None)
    if "buffers" in components:
        yield from target.buffers()
