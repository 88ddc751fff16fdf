"""Real megatron-core, on the CPU too: a small wrapped module, and one rank to run it."""

from __future__ import annotations

import contextlib
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed import distributed_c10d
from torch.overrides import TorchFunctionMode

with warnings.catch_warnings():  # megatron-core warns about itself when it is imported
    warnings.simplefilter("ignore")
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, param_and_grad_buffer
    from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig

    WIDTH = 8
    SHAPE = TransformerConfig(num_layers=1, hidden_size=WIDTH, num_attention_heads=1)

MARKS = [  # of a test module that runs Megatron-core
    pytest.mark.usefixtures("_megatron_rank"),
    pytest.mark.filterwarnings("ignore:`torch.distributed:FutureWarning"),  # of names that it uses
    pytest.mark.filterwarnings("ignore:The next bucket's parameter all-gather:UserWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),  # its fp32 shards
]
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
    return float(loss.detach())


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


# Megatron-core's own optimizers -----------------------------------------------------------------------------------------

PRECISIONS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {  # of the model, and what else its optimizer is made with
    "fp32": (torch.float32, {}),
    "bf16": (torch.bfloat16, {}),
    "fp16": (torch.float16, {}),
    "distributed fp32": (torch.float32, {"use_distributed_optimizer": True}),
    "distributed bf16": (torch.bfloat16, {"use_distributed_optimizer": True}),
    "hybrid": (torch.bfloat16, {"use_distributed_optimizer": True, "optimizer_cpu_offload": True}),
}


class _CudaIsCpu(TorchFunctionMode):
    """What Megatron-core makes on a GPU is made on the CPU, and says that it is on a GPU where that is asked for by name."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if func in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        if func == torch.Tensor.is_cuda.__get__:
            return True
        found = func(*args, **kwargs)
        return found.replace("torch.", "torch.cuda.") if func is torch.Tensor.type and len(args) == 1 else found


@contextlib.contextmanager
def on(device: str) -> Iterator[None]:
    """Megatron-core's optimizers run on this device."""
    if device != "cpu":
        yield
        return
    stream = mock.MagicMock()
    with (
        _CudaIsCpu(),
        mock.patch.object(torch.cuda, "current_device", return_value="cpu"),
        mock.patch.object(torch.cuda, "current_stream", return_value=stream),
        mock.patch.object(torch.cuda, "Stream", return_value=stream),
        mock.patch.object(torch.cuda, "stream", return_value=contextlib.nullcontext()),
        mock.patch.object(torch.cuda, "synchronize"),
    ):
        yield


def with_optimizer(device: str, precision: str, *, seed: int = 0) -> tuple[DistributedDataParallel, MegatronOptimizer]:
    """A model in Megatron's wrapper, and the optimizer that Megatron makes for it: a chain of a dense and an expert one."""
    dtype, extra = PRECISIONS[precision]
    distributed = extra.get("use_distributed_optimizer", False)
    model = chunk(device, seed=seed, dtype=dtype, use_distributed_optimizer=distributed)
    if device == "cpu":
        extra = extra | {"optimizer_offload_fraction": 0.0}  # there is one kind of memory
    kinds = {"bf16": dtype is torch.bfloat16, "fp16": dtype is torch.float16, "initial_loss_scale": 8.0}
    return model, get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=0.05, **kinds, **extra), [model])


def megatron_step(model: DistributedDataParallel, optimizer: MegatronOptimizer, step: int) -> float:
    """One step as Megatron's training loop takes it; the loss. Main gradients are left behind."""
    model.zero_grad_buffer()
    optimizer.zero_grad()
    loss = accumulate(model, step)
    model.finish_grad_sync()
    optimizer.step()
    return loss


def tensors_of(optimizer: MegatronOptimizer) -> list[torch.Tensor]:
    """Every tensor that is the optimizer's and not the model's: found by what Megatron calls them."""
    found: list[Any] = []
    for each in optimizer.chained_optimizers:
        found += [getattr(each, name, None) for name in ("_scale", "_scale_one", "found_inf", "_dummy_overflow_buf")]
        scaler = getattr(each, "grad_scaler", None)
        found += [] if scaler is None else list(vars(scaler).values())
        inner = each.optimizer
        for one in (inner, *getattr(inner, "sub_optimizers", ())):
            found += [value for state in one.state.values() for value in state.values()]
        for name in ("fp32_from_float16_groups", "shard_fp32_from_float16_groups"):
            found += [main for group in getattr(each, name, ()) for main in group]
        copies = [*getattr(inner, "param_to_fp32_param", {}).values()]
        found += [*copies, *getattr(inner, "cpu_copy_map_grad", {}).values()]
    tensors = [each for each in found if isinstance(each, torch.Tensor)]
    tensors += [each.grad for each in tensors if each.is_leaf and each.grad is not None]
    return list({id(each): each for each in tensors}.values())
