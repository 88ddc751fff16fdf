"""A Megatron actor with its distributed optimizer, as large as is asked for: what it leaves on the device, and how it trains.

    python tests/actor.py GIB [offload]

Prints a JSON object: losses of the last five steps, a digest of all state, and, with ``offload``, bytes moved and left.
"""

from __future__ import annotations

import json
import sys
from typing import Any
from unittest import mock

import mcore
import torch
from mcore import DistributedDataParallel, DistributedDataParallelConfig, OptimizerConfig, get_megatron_optimizer
from torch import nn

from torch_offload import Offloader, checksum
from torch_offload.tensors import byte_view, storage_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WIDTH = 4096 if DEVICE == "cuda" else 64
BYTES = 2 + 4 + 4 + 4 + 4  # of a parameter: bf16, its gradient, main parameter and two moments in fp32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, device=DEVICE, dtype=torch.bfloat16)
        self.linear = nn.Linear(WIDTH, WIDTH, device=DEVICE, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(self.norm(x))


def made(gib: float) -> tuple[Any, Any]:
    layers = max(1, int(gib * 2**30 / BYTES / WIDTH**2))
    torch.manual_seed(0)
    config = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
    with mock.patch.object(torch.cuda, "current_device", return_value=torch.device(DEVICE)):
        model = DistributedDataParallel(mcore.SHAPE, config, nn.Sequential(*(Block() for _ in range(layers))))
    settings = OptimizerConfig(optimizer="adam", lr=1e-3, bf16=True, use_distributed_optimizer=True)
    return model, get_megatron_optimizer(settings, [model])


def step(model: Any, optimizer: Any, number: int) -> float:
    model.zero_grad_buffer()
    optimizer.zero_grad()
    generator = torch.Generator(device=DEVICE).manual_seed(number)
    x = torch.randn(4, WIDTH, device=DEVICE, generator=generator).to(torch.bfloat16)
    loss = model(x).float().pow(2).mean()
    loss.backward()
    model.finish_grad_sync()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def digest(model: Any, optimizer: Any) -> int:
    tensors = [*model.parameters(), *(buffer.grad_data for buffer in model.buffers), *mcore.tensors_of(optimizer)]
    storages = {storage_of(each)._cdata: storage_of(each) for each in tensors if each.device.type == DEVICE}
    return hash(tuple(checksum.checksums([byte_view(each) for each in storages.values()])))


def free() -> int:
    """What the driver calls free; nothing is given back to it for that."""
    return torch.cuda.mem_get_info()[0] if DEVICE == "cuda" else 0


def main(gib: float, *, offloads: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    torch.use_deterministic_algorithms(True)
    with mcore.ranks(), mcore.on(DEVICE):
        small = made(0.01)
        step(*small, 0)
        if offloads:
            with Offloader(*small, device=DEVICE).offloaded():
                pass
        del small
        if DEVICE == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        empty = free()  # beside what libraries and kernels take
        reserved = torch.cuda.memory_reserved() if DEVICE == "cuda" else 0
        model, optimizer = made(gib)
        for number in range(2):
            step(model, optimizer, number)
        if offloads:
            off = Offloader(model, optimizer, device=DEVICE)
            reports = []
            for _ in range(2):
                reports.append(off.offload())
                found["left_nbytes"] = empty - free()
                found["reserved_nbytes"] = torch.cuda.memory_reserved() - reserved if DEVICE == "cuda" else 0
                found["left"] = [str(row) for row in reports[-1].left]
                off.reload()
            found |= {"nbytes": reports[-1].nbytes, "host_nbytes": off.host_nbytes}
        found["losses"] = [step(model, optimizer, number) for number in range(2, 7)]
        found["digest"] = digest(model, optimizer)
    return found


if __name__ == "__main__":
    print(json.dumps(main(float(sys.argv[1]), offloads="offload" in sys.argv)))
