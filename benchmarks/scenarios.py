"""What is moved. Each scenario gives the bytes it is about and the ways that are compared on it."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from unittest import mock

import torch
from torch import nn

from torch_offload import FlatBufferStrategy, MegatronOptimizerStrategy, PerParameterStrategy

from .ways import FreshTensors, MegatronCore, PerParameter, PinnedBuffer, TorchOffload, Way, collect, empty_cache

FINISHES = {"": collect, ", no gc.collect()": empty_cache}  # today's functions collect; how much of their time that is
Ways = tuple[int, list[tuple[str, Way]]]


def reference(device: torch.device, nbytes: int) -> Ways:
    """A frozen model of 168 equal parameters; every offload copies."""
    numel = nbytes // 168 // 4
    module = nn.ParameterList(nn.Parameter(torch.ones(numel, device=device), requires_grad=False) for _ in range(168))
    ways = [(TorchOffload.name, TorchOffload(module, strategies=[PerParameterStrategy]))]
    ways += [(f"{PerParameter.name}{note}", PerParameter(module, finish)) for note, finish in FINISHES.items()]
    return 168 * numel * 4, ways


def flat_buffer(device: torch.device, nbytes: int) -> Ways:
    """Megatron-core's wrapper: a buffer of parameters and one of gradients, in fp32, both kept; 160 parameters."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer import TransformerConfig

    width = int((nbytes / 8 / 160) ** 0.5)
    module = nn.Sequential(*(nn.Linear(width, width, bias=False, device=device) for _ in range(160)))
    with mock.patch.object(torch.cuda, "current_device", return_value=device):
        wrapper = DistributedDataParallel(
            TransformerConfig(num_layers=1, hidden_size=width, num_attention_heads=1),
            DistributedDataParallelConfig(use_distributed_optimizer=True),
            module,
        )
    flat = [data for buffer in wrapper.buffers for data in (buffer.param_data, buffer.grad_data)]
    ways = [(TorchOffload.name, TorchOffload(wrapper, strategies=[FlatBufferStrategy]))]
    ways += [(f"{PinnedBuffer.name}{note}", PinnedBuffer(flat, finish)) for note, finish in FINISHES.items()]
    return sum(each.nbytes for each in flat), ways


def megatron_actor(device: torch.device, nbytes: int) -> Ways:
    """Megatron-core's wrapper in bf16 and its distributed Adam after a step: 18 bytes a parameter, gradients dropped."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig

    if device.type == "cpu":
        raise LeftOutError("Megatron-core's own calls move what is on a GPU")
    width = 4096
    layers = max(1, nbytes // 18 // width**2)
    wrapper = DistributedDataParallel(
        TransformerConfig(num_layers=1, hidden_size=width, num_attention_heads=1),
        DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True),
        nn.Sequential(*(nn.Linear(width, width, bias=False, device=device, dtype=torch.bfloat16) for _ in range(layers))),
    )
    settings = OptimizerConfig(optimizer="adam", lr=1e-3, bf16=True, use_distributed_optimizer=True)
    optimizer = get_megatron_optimizer(settings, [wrapper])
    wrapper(torch.ones(1, width, device=device, dtype=torch.bfloat16)).sum().backward()
    wrapper.finish_grad_sync()
    optimizer.step()
    optimizer.zero_grad()
    discarding = functools.partial(FlatBufferStrategy, grads="discard")
    ways: list[tuple[str, Way]] = [
        (TorchOffload.name, TorchOffload(wrapper, optimizer, strategies=[discarding, MegatronOptimizerStrategy])),
        (FreshTensors.name, FreshTensors(wrapper, optimizer)),
        (MegatronCore.name, MegatronCore(wrapper, optimizer)),
    ]
    return layers * width**2 * 18, ways


class LeftOutError(Exception):
    """Why a scenario cannot run here."""


SCENARIOS: dict[str, Callable[[torch.device, int], Ways]] = {
    "flat buffer": flat_buffer,
    "reference model": reference,
    "Megatron actor": megatron_actor,
}
APART = {"Megatron actor": [TorchOffload.name, FreshTensors.name, MegatronCore.name]}  # each way in a process of its own


@contextlib.contextmanager
def one_rank() -> Iterator[str | None]:
    """Megatron's process groups, if it is there; otherwise why not."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from megatron.core import parallel_state
    except ImportError as error:
        yield f"{error}: python3 -m pip install -c constraints.txt -e '.[megatron]'"
        return
    backend = "nccl" if torch.cuda.is_available() else "gloo"  # gloo's coalesced collectives crash on tensors of a GPU
    torch.distributed.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    try:
        yield None
    finally:
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()
