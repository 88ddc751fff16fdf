"""Real megatron-core, on the CPU too: a small wrapped module, and one rank to run it."""

from __future__ import annotations

import contextlib
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.distributed import distributed_c10d

with warnings.catch_warnings():  # megatron-core warns about itself when it is imported
    warnings.simplefilter("ignore")
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, param_and_grad_buffer
    from megatron.core.transformer import TransformerConfig

    WIDTH = 8
    SHAPE = TransformerConfig(num_layers=1, hidden_size=WIDTH, num_attention_heads=1)

OVERLAPPING = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 100}
CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "distributed optimizer": {"use_distributed_optimizer": True},
    "overlapping": OVERLAPPING,
    "gradients in fp32": {"use_distributed_optimizer": True, "grad_reduce_in_fp32": True},
}


@contextlib.contextmanager
def ranks(rank: int = 0, world_size: int = 1, file: str | None = None) -> Iterator[None]:
    """Megatron's process groups: gloo, and NCCL beside a GPU."""
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        method = f"file://{file or Path(folder) / 'ranks'}"
        torch.distributed.init_process_group(backend, init_method=method, rank=rank, world_size=world_size)
        parallel_state.initialize_model_parallel()
        try:
            with mock.patch.object(param_and_grad_buffer, "_coalescing_manager", _prompt):
                yield
        finally:
            parallel_state.destroy_model_parallel()
            torch.distributed.destroy_process_group()


@contextlib.contextmanager
def _prompt(*args: Any, **keywords: Any) -> Iterator[Any]:
    """torch's coalescing of collectives, which gives the same handles but is over before it returns.

    With several of gloo's under way, torch 2.13 crashes now and then on a busy machine: 3 of 15 runs of 400 steps of Megatron's
    wrapper with ``overlap_param_gather``, without any offloading. (`in_flight` undoes it where NCCL runs them.)
    """
    with distributed_c10d._coalescing_manager(*args, **keywords) as manager:
        yield manager
    manager.wait()


def in_flight() -> contextlib.AbstractContextManager[Any]:
    """Collectives are under way when the call that starts them returns."""
    return mock.patch.object(param_and_grad_buffer, "_coalescing_manager", distributed_c10d._coalescing_manager)


class Block(nn.Module):
    """Dense and expert-parallel layers, a tie, a frozen parameter, a buffer that is not saved."""

    def __init__(self, device: str, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        with torch.device(device):
            self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH, dtype=dtype), nn.Linear(2 * WIDTH, WIDTH, dtype=dtype)
            self.norm, self.expert = nn.LayerNorm(WIDTH, dtype=dtype), nn.Linear(WIDTH, WIDTH, dtype=dtype)
            self.scale = nn.Parameter(torch.full((WIDTH,), 0.5, dtype=dtype), requires_grad=False)
            self.register_buffer("shift", torch.randn(WIDTH, dtype=dtype), persistent=False)
        self.tied = self.up
        for parameter in self.expert.parameters():
            parameter.allreduce = False  # Megatron's mark of an expert

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x + self.down(self.up(x).relu()))
        return self.expert(x) * self.scale + self.shift


def chunk(device: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **config: Any) -> DistributedDataParallel:
    """A `Block` in Megatron's wrapper."""
    torch.manual_seed(seed)
    block = Block(device, dtype)
    with mock.patch.object(torch.cuda, "current_device", return_value=torch.device(device)):
        return DistributedDataParallel(SHAPE, DistributedDataParallelConfig(**config), block)


def accumulate(model: DistributedDataParallel, step: int) -> float:
    """One micro-batch; the loss."""
    weight = model.module.scale
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step)).to(weight.device, weight.dtype)
    loss = model(x).pow(2).mean()
    loss.backward()
    return float(loss)


def train(model: DistributedDataParallel, optimizer: torch.optim.Optimizer, step: int) -> float:
    """One step of a torch optimizer over Megatron's main gradients; the loss."""
    model.zero_grad_buffer()
    loss = accumulate(model, step)
    finish(model, optimizer)
    return loss


def finish(model: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
    """Sync the gradients, step, and gather the parameters."""
    model.finish_grad_sync()
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for parameter in parameters:
        parameter.grad = parameter.main_grad.to(parameter.dtype)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if model.ddp_config.use_distributed_optimizer:
        model.start_param_sync()


def optimizer_of(model: DistributedDataParallel) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)


def state_of(model: DistributedDataParallel, optimizer: torch.optim.Optimizer | None = None) -> list[torch.Tensor]:
    """Copies of everything that training changes."""
    tensors = [*model.parameters(), *model.module.buffers()]
    tensors += [buffer.grad_data for buffer in [*model.buffers, *model.expert_parallel_buffers]]
    if optimizer is not None:
        tensors += [value for state in optimizer.state.values() for value in state.values()]
    return [tensor.detach().cpu().clone() for tensor in tensors]
