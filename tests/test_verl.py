"""The functions that verl calls, in verl's own sequences, on real Megatron and FSDP2."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from torch_offload import OffloadedTensorError, UnsupportedTargetError
from torch_offload.compat import verl
from torch_offload.tensors import storage_of
from torch_offload.testing import is_away

pytest.importorskip("megatron.core")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import fsdp2
import mcore
from mcore import PRECISIONS, accumulate, chunk, megatron_step, state_of, tensors_of, with_optimizer
from test_megatron import flat

pytestmark = mcore.MARKS


@pytest.fixture(autouse=True)
def _on(device: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(verl, "DEVICE", device)
    with mcore.on(device):
        yield


def is_put_away(model: Any) -> bool:
    return all(map(is_away, [*flat(model), *model.parameters(), *nn.Module.buffers(model)]))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_load_for_the_phase_and_offload_after_it(device: str, precision: str) -> None:
    (model, optimizer), (twin, its) = [with_optimizer(device, precision) for _ in range(2)]
    verl.load_megatron_model_to_gpu([model])  # before anything was offloaded
    verl.offload_megatron_model_to_cpu([model])
    verl.offload_megatron_optimizer(optimizer)
    for step in range(3):
        verl.load_megatron_model_to_gpu([model], load_grad=True)
        verl.load_megatron_optimizer(optimizer)
        assert megatron_step(model, optimizer, step) == megatron_step(twin, its, step)
        verl.offload_megatron_model_to_cpu([model])
        verl.offload_megatron_optimizer(optimizer)
        assert is_put_away(model)
        assert all(map(is_away, (each for each in tensors_of(optimizer) if each.device.type == device)))
        verl.load_megatron_model_to_gpu([model], load_grad=False)  # log-probabilities, or an export
        assert all(is_away(buffer.grad_data) for buffer in [*model.buffers, *model.expert_parallel_buffers])
        with torch.no_grad():
            x = torch.ones(1, mcore.WIDTH, device=device, dtype=model.module.scale.dtype)
            assert torch.equal(model(x), twin(x))
        with pytest.raises(OffloadedTensorError, match="grad"):
            accumulate(model, 9)
        verl.offload_megatron_model_to_cpu([model])
        verl.offload_megatron_model_to_cpu([model])
    verl.load_megatron_model_to_gpu([model])
    verl.load_megatron_optimizer(optimizer)
    twin.zero_grad_buffer()
    assert all(map(torch.equal, state_of(model), state_of(twin)))
    assert all(map(torch.equal, tensors_of(optimizer), tensors_of(its)))


def test_gradients_are_dropped_with_an_offload_and_never_else(device: str) -> None:
    model = chunk(device, use_distributed_optimizer=True)
    accumulate(model, 0)
    before = model.buffers[0].grad_data.clone()
    verl.load_megatron_model_to_gpu([model], load_grad=True)
    assert torch.equal(model.buffers[0].grad_data, before)
    verl.offload_megatron_model_to_cpu([model])
    verl.load_megatron_model_to_gpu([model], load_grad=True)
    assert before.any()
    assert not model.buffers[0].grad_data.any()


def test_frozen_parameters_can_stay_away(device: str) -> None:
    model = chunk(device, use_distributed_optimizer=True)
    verl.offload_megatron_model_to_cpu([model])
    verl.load_megatron_model_to_gpu([model], load_grad=False, load_frozen_params=False)
    assert {name for name, each in model.named_parameters() if is_away(each)} == {"module.scale"}
    verl.load_megatron_model_to_gpu([model])
    assert not any(map(is_away, model.parameters()))


def test_main_parameters_by_themselves(device: str) -> None:
    model, optimizer = with_optimizer(device, "distributed bf16")
    megatron_step(model, optimizer, 0)
    mains = [each for one in optimizer.chained_optimizers for group in one.shard_fp32_from_float16_groups for each in group]
    rest = [each for each in tensors_of(optimizer) if each.device.type == device and all(each is not main for main in mains)]
    verl.offload_megatron_copy_params(optimizer)
    assert mains
    assert all(map(is_away, mains))
    assert not any(map(is_away, rest))
    verl.offload_megatron_optimizer(optimizer)
    assert all(map(is_away, rest))
    verl.load_megatron_copy_params(optimizer)
    assert not any(map(is_away, mains))
    verl.load_megatron_optimizer(optimizer)
    assert not any(map(is_away, tensors_of(optimizer)))
    verl.offload_megatron_optimizer(None)


def test_a_reference_without_a_wrapper(device: str) -> None:
    model = mcore.Block(device)
    model.up.weight.grad = torch.ones_like(model.up.weight)
    wanted = [each.detach().clone() for each in model.parameters()]
    verl.offload_megatron_model_to_cpu([model])
    assert all(map(is_away, [*model.parameters(), model.up.weight.grad, model.shift]))
    verl.load_megatron_model_to_gpu([model])
    assert all(map(torch.equal, model.parameters(), wanted))
    assert model.up.weight.grad.eq(1).all()  # only a wrapper's gradients are dropped


@pytest.mark.parametrize("away", [False, True])
def test_copy_step_restore(device: str, away: bool) -> None:
    models = [with_optimizer(device, "distributed bf16"), with_optimizer(device, "distributed bf16", seed=1)]
    chunks = [model for model, _ in models] + [mcore.Block(device)]
    wanted = [state_of(model)[: len(list(model.parameters()))] for model, _ in models]
    bare = [each.detach().cpu().clone() for each in chunks[-1].parameters()]
    kept = verl.copy_megatron_model_to_cpu(chunks)
    assert kept.nbytes == sum({storage_of(p)._cdata: storage_of(p).nbytes() for c in chunks for p in c.parameters()}.values())
    chunks[-1].up.weight.requires_grad_(False)  # roles change
    for step in range(2):
        for model, optimizer in models:
            megatron_step(model, optimizer, step)
        assert not all(map(torch.equal, wanted[0], state_of(models[0][0])))
        with torch.no_grad():
            for each in chunks[-1].parameters():
                each.zero_()
        if away:
            verl.offload_megatron_model_to_cpu(chunks)
        verl.restore_megatron_model_from_cpu(chunks, kept)
        verl.load_megatron_model_to_gpu(chunks)
        for (model, _), values in zip(models, wanted, strict=True):
            assert all(map(torch.equal, state_of(model), values))
        assert all(map(torch.equal, [each.cpu() for each in chunks[-1].parameters()], bare))


def test_a_module_under_fsdp2(device: str) -> None:
    net = fsdp2.sharded(device, "plain")
    optimizer = fsdp2.optimizer_of(net)
    verl.offload_fsdp_optimizer(optimizer)
    fsdp2.train(net, optimizer, 0)
    wanted = [each.cpu().clone() for each in fsdp2.locals_of(net.state_dict().values())]
    verl.offload_fsdp_model_to_cpu(net)
    verl.offload_fsdp_optimizer(optimizer)
    storages = fsdp2.storages_of(net, optimizer)
    assert not any(each.nbytes() for each in storages if each.device.type == device)
    lazily = net.state_dict()  # as verl streams weights to the rollout engine, long after the dict was made
    streamed = [each.to(device) if device != "cpu" else each.clone() for each in lazily.values()]
    assert all(map(torch.equal, [each.cpu() for each in fsdp2.locals_of(streamed)], wanted))
    assert all(map(is_away, net.parameters()))
    verl.load_fsdp_model_to_gpu(net)
    verl.load_fsdp_optimizer(optimizer, 0)
    fsdp2.train(net, optimizer, 1)


def test_fsdp1_is_refused() -> None:
    with pytest.raises(UnsupportedTargetError, match="fully_shard"):
        verl.offload_fsdp_model_to_cpu(nn.Linear(2, 2))
