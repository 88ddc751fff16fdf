"""What is moved. Each scenario gives the bytes it is about and the ways that are compared on it."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from unittest import mock

import torch
from torch import nn

from torch_offload import FlatBufferStrategy, PerParameterStrategy

from .ways import PerParameter, PinnedBuffer, TorchOffload, Way, collect, empty_cache

FINISHES = {"": collect, ", no gc.collect()": empty_cache}  # today's functions collect; how much of their time that is
Ways = tuple[int, list[tuple[str, Way]]]


def reference(device: torch.device, nbytes: int) -> Ways:
    """A frozen model of 168 equal parameters; every offload copies."""
    numel = nbytes // 168 // 4
    module = nn.ParameterList(nn.Parameter(torch.ones(numel, device=device), requires_grad=False) for _ in range(168))
    ways = [(TorchOffload.name, TorchOffload(module, PerParameterStrategy))]
    ways += [(f"{PerParameter.name}{note}", PerParameter(module, finish)) for note, finish in FINISHES.items()]
    return 168 * numel * 4, ways


def flat_buffer(device: torch.device, nbytes: int) -> Ways:
    """Megatron-core's wrapper: a buffer of parameters and one of gradients, in fp32, both kept."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer import TransformerConfig

    width = 1024
    layers = max(1, nbytes // 8 // width**2)
    module = nn.Sequential(*(nn.Linear(width, width, bias=False, device=device) for _ in range(layers)))
    with mock.patch.object(torch.cuda, "current_device", return_value=device):
        wrapper = DistributedDataParallel(
            TransformerConfig(num_layers=1, hidden_size=width, num_attention_heads=1),
            DistributedDataParallelConfig(use_distributed_optimizer=True),
            module,
        )
    flat = [data for buffer in wrapper.buffers for data in (buffer.param_data, buffer.grad_data)]
    ways = [(TorchOffload.name, TorchOffload(wrapper, FlatBufferStrategy))]
    ways += [(f"{PinnedBuffer.name}{note}", PinnedBuffer(flat, finish)) for note, finish in FINISHES.items()]
    return sum(each.nbytes for each in flat), ways


SCENARIOS: dict[str, Callable[[torch.device, int], Ways]] = {"flat buffer": flat_buffer, "reference model": reference}


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
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    try:
        yield None
    finally:
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()
