"""Modules under FSDP2, on real ranks. As a script: what must hold on every rank of several.

torchrun --nproc-per-node 2 tests/fsdp2.py cpu
"""

from __future__ import annotations

import contextlib
import copy
import io
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from torch_offload import OffloadedTensorError, Offloader
from torch_offload.parts import parts_of
from torch_offload.tensors import Storage, storage_of
from torch_offload.testing import is_away

WIDTH = 7
CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "mixed precision": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
    "unsharded after forward": {"reshard_after_forward": False},
}


class Net(nn.Module):
    """Uneven shards, a tie, a frozen parameter, a buffer that is not saved, a parameter that is too small for all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.wide, self.narrow = nn.Linear(WIDTH, 5), nn.Linear(5, WIDTH)
        self.scale = nn.Parameter(torch.ones(1))
        self.frozen = nn.Parameter(torch.full((3, WIDTH), 0.1), requires_grad=False)
        self.register_buffer("shift", torch.randn(WIDTH), persistent=False)
        self.again = self.blocks[1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x).relu()
        return self.again(self.narrow(self.wide(x))) * self.scale + self.frozen.sum() + self.shift


@contextlib.contextmanager
def ranks(device: str, **how: Any) -> Iterator[None]:
    """A default process group: gloo, and NCCL on a GPU."""
    torch.distributed.init_process_group("nccl" if device == "cuda" else "gloo", **how)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def sharded(device: str, config: str, *, seed: int = 0) -> Net:
    """A `Net`, wrapped block by block and at its root, beside the mesh of all ranks."""
    torch.manual_seed(seed)
    net = Net().to(device)
    mesh = torch.distributed.init_device_mesh(device, (torch.distributed.get_world_size(),))
    for block in net.blocks:
        fully_shard(block, mesh=mesh, **CONFIGS[config])
    return fully_shard(net, mesh=mesh, **CONFIGS[config])


def accumulate(net: nn.Module, step: int) -> float:
    rank = torch.distributed.get_rank()
    device = next(net.parameters()).device
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank)).to(device)
    loss = net(x).float().pow(2).mean()
    loss.backward()
    return float(loss.detach())


def train(net: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> float:
    loss = accumulate(net, step)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def optimizer_of(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([each for each in net.parameters() if each.requires_grad], lr=0.05)


def locals_of(tensors: Any) -> list[torch.Tensor]:
    return [part.tensor.detach() for tensor in tensors for part in parts_of(tensor)]


def state_of(net: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Copies of everything that training changes, as this rank has it."""
    reshard(net)
    state = [value for each in optimizer.state.values() for value in each.values()]
    grads = [each.grad for each in net.parameters() if each.grad is not None]
    return [each.cpu().clone() for each in locals_of([*net.parameters(), *net.buffers(), *grads, *state])]


def reshard(net: nn.Module) -> None:
    for part in net.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def storages_of(net: nn.Module, optimizer: torch.optim.Optimizer) -> list[Storage]:
    """The storages of all that is the model's and the optimizer's on their device, padding included."""
    reshard(net)
    tensors = [*locals_of([*net.parameters(), *net.buffers()])]
    tensors += locals_of(each.grad for each in net.parameters() if each.grad is not None)
    tensors += locals_of(value for each in optimizer.state.values() for value in each.values())
    device = next(net.parameters()).device  # beside a GPU, an optimizer counts its steps in host memory
    return list({storage_of(each)._cdata: storage_of(each) for each in tensors if each.device == device}.values())


def check(device: str, config: str) -> None:
    """On this rank: all of it goes, raises by name, is saved, comes back and trains on as a twin that never moved."""
    net, twin = sharded(device, config), sharded(device, config)
    optimizer, its = optimizer_of(net), optimizer_of(twin)
    assert train(net, optimizer, 0) == train(twin, its, 0)
    start = state_of(twin, its)
    assert accumulate(net, 1) == accumulate(twin, 1)
    off = Offloader(net, optimizer, device=device, name="actor")
    for cycle in range(3):
        storages = storages_of(net, optimizer)
        wanted = sum(each.nbytes() for each in storages)
        report = off.offload()
        assert not report.left, report.left
        assert report.nbytes == wanted, (report.nbytes, wanted)
        assert not any(each.nbytes() for each in storages)
        with pytest.raises(OffloadedTensorError, match=r"'actor\.[\w.]+'.*reload"):
            net(torch.ones(2, WIDTH, device=device))
        file = io.BytesIO()
        torch.save(net.state_dict(), file)
        off.reload(["params", "buffers"])
        with torch.no_grad():
            net(torch.ones(2, WIDTH, device=device))  # log-probabilities, gradients away
        off.reload()
        file.seek(0)
        saved = torch.load(file, weights_only=False)
        reshard(net)
        assert all(map(torch.equal, locals_of(saved.values()), [each.cpu() for each in locals_of(net.state_dict().values())]))
        assert accumulate(net, 2 + cycle) == accumulate(twin, 2 + cycle)  # on top of gradients that were away
        assert train(net, optimizer, 5 + cycle) == train(twin, its, 5 + cycle)
        assert accumulate(net, 8 + cycle) == accumulate(twin, 8 + cycle)
    ours, theirs = state_of(net, optimizer), state_of(twin, its)
    assert len(ours) == len(theirs)
    assert all(map(torch.equal, ours, theirs))
    assert not all(map(torch.equal, ours, start))
    other = copy.deepcopy({name: each.detach().clone() for name, each in twin.state_dict().items()})
    off.offload()
    net.load_state_dict({name: each * 2 for name, each in other.items()})
    assert all(map(is_away, net.parameters()))
    off.reload()
    assert all(
        torch.equal(one, 2 * two) for one, two in zip(locals_of(net.parameters()), locals_of(twin.parameters()), strict=True)
    )
    handle = net.unshard(async_op=True)  # gathers what is about to be replaced
    off.offload()
    net.load_state_dict(other)
    off.reload()
    handle.wait()
    assert accumulate(net, 20) == accumulate(twin, 20)
    off.close()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with ranks(sys.argv[1]):
        for name in CONFIGS:
            check(sys.argv[1], name)
    print("as if nothing had moved")
