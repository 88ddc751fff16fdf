"""Megatron-core's DistributedDataParallel, whose flat buffers are put away for each rollout.

A two-layer policy is trained by real megatron-core, on a GPU or, without one, on the CPU. Around each rollout all of it is in
host memory: the flat buffers, the frozen embedding beside them, the optimizer's state.

    python3 -m pip install -c constraints.txt -e '.[megatron]'
    python3 examples/megatron_flat_buffers.py
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from unittest import mock

import torch
from torch import nn

with warnings.catch_warnings():  # megatron-core warns about itself when it is imported
    warnings.simplefilter("ignore")
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer import TransformerConfig

    VOCABULARY, WIDTH = 32, 64
    SHAPE = TransformerConfig(num_layers=1, hidden_size=WIDTH, num_attention_heads=1)

from torch_offload import FlatBufferStrategy, Offloader, OptimizerStrategy


@contextlib.contextmanager
def ranks() -> Iterator[torch.device]:
    """Megatron's process groups over the ranks that torchrun started, or over one alone. Gives the rank's device."""
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    store = None if "MASTER_ADDR" in os.environ else torch.distributed.HashStore()
    backend = "nccl" if device.type == "cuda" else "gloo"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of names in torch.distributed that megatron-core uses
        torch.distributed.init_process_group(backend, store=store, rank=rank, world_size=world_size)
        parallel_state.initialize_model_parallel()
        try:
            yield device
        finally:
            parallel_state.destroy_model_parallel()
            torch.distributed.destroy_process_group()


class Policy(nn.Module):
    """The next token from the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.embedding.weight.requires_grad_(False)  # lies outside of the flat buffers
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, VOCABULARY))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.layers(self.embedding(tokens))


def wrap(module: nn.Module, device: torch.device) -> DistributedDataParallel:
    """The module in Megatron's wrapper, with flat buffers for parameters and gradients on this device."""
    config = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
    with mock.patch.object(torch.cuda, "current_device", return_value=device):  # where the wrapper allocates; it knows no CPU
        return DistributedDataParallel(SHAPE, config, module.to(device))


def train_step(actor: DistributedDataParallel, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> float:
    """Learn to write the token that comes next in ``tokens``, int64 of shape (sequences, length). The loss."""
    actor.zero_grad_buffer()
    logits = actor(tokens[:, :-1])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    actor.finish_grad_sync()
    for parameter in actor.params_with_grad:
        parameter.grad = parameter.main_grad
    optimizer.step()
    optimizer.zero_grad()
    actor.start_param_sync()
    return loss.item()


def main() -> None:
    with ranks() as device:
        torch.manual_seed(0)
        actor = wrap(Policy(), device)
        optimizer = torch.optim.AdamW(actor.params_with_grad, lr=1e-2)
        off = Offloader(FlatBufferStrategy(actor, grads="discard"), OptimizerStrategy(optimizer))
        for step in range(5):
            starts = torch.randint(VOCABULARY, (16, 1), device=device)
            loss = train_step(actor, optimizer, (starts + torch.arange(8, device=device)) % VOCABULARY)
            with off.offloaded():
                print(f"step {step}: loss {loss:.4f}; {off.report.line()}")  # the rollout engine has the device here


if __name__ == "__main__":
    main()
