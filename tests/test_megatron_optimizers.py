"""MegatronOptimizerStrategy on the optimizers that real megatron-core makes, in one rank."""

from __future__ import annotations

import copy
import gc
import io
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from torch_offload import (
    FlatBufferStrategy,
    MegatronOptimizerStrategy,
    OffloadedTensorError,
    Offloader,
    UnsupportedTargetError,
    offloaded,
    strategy_for,
)
from torch_offload.tensors import storage_of
from torch_offload.testing import Portrait, is_away

pytest.importorskip("megatron.core")
import mcore
from fresh import actor
from mcore import PRECISIONS, megatron_step, tensors_of, with_optimizer
from test_megatron import flat
from test_targets import check_contract

pytestmark = mcore.MARKS


@pytest.fixture(autouse=True)
def _on(device: str) -> Iterator[None]:
    with mcore.on(device):
        yield


def on_device(tensors: list[torch.Tensor], device: str) -> dict[int, torch.UntypedStorage]:
    """The storages of those that are on the device."""
    return {storage_of(each)._cdata: storage_of(each) for each in tensors if each.device.type == device}


def rows(optimizer: Any) -> list[Any]:
    """What the optimizers refer to, by identity."""
    inner = [each.optimizer for each in optimizer.chained_optimizers]
    every = [one for each in inner for one in (each, *getattr(each, "sub_optimizers", ()))]
    return [
        [(key, id(value)) for each in (optimizer, *optimizer.chained_optimizers) for key, value in vars(each).items()],
        [(id(key), name, id(value)) for one in every for key, state in one.state.items() for name, value in state.items()],
        [(id(each), *map(id, vars(each).values())) for each in every],
    ]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_contract(device: str, precision: str) -> None:
    model, optimizer = with_optimizer(device, precision)
    megatron_step(model, optimizer, 0)
    check_contract(MegatronOptimizerStrategy(optimizer), device)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_all_of_it_goes_and_the_model_stays(device: str, precision: str) -> None:
    model, optimizer = with_optimizer(device, precision)
    megatron_step(model, optimizer, 0)
    storages = on_device(tensors_of(optimizer), device)
    wanted = sum(each.nbytes() for each in storages.values())
    portraits = [Portrait.of(each) for each in tensors_of(optimizer)]
    before = rows(optimizer)
    off = Offloader(optimizer, device=device)
    report = off.offload()
    assert report.nbytes == wanted > 1000
    assert not report.left
    assert not any(each.nbytes() for each in storages.values())
    assert not any(map(is_away, [*flat(model), *model.parameters()]))
    model.zero_grad_buffer()
    mcore.accumulate(model, 1)  # the model trains on meanwhile
    off.reload()
    for portrait in portraits:
        portrait.check()
    assert rows(optimizer) == before
    off.close()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_training_goes_on_as_if_nothing_had_happened(device: str, precision: str) -> None:
    (model, optimizer), (twin, its) = [with_optimizer(device, precision) for _ in range(2)]
    start = mcore.state_of(model)
    off = Offloader(model, optimizer, device=device)
    for step in range(4):
        for components in (None, ["optimizer"], ["params", "grads"]):
            assert not off.offload(components).left
            off.reload()
        assert megatron_step(model, optimizer, step) == megatron_step(twin, its, step)
    assert all(map(torch.equal, mcore.state_of(model), mcore.state_of(twin)))
    assert all(map(torch.equal, tensors_of(optimizer), tensors_of(its)))
    assert not all(map(torch.equal, mcore.state_of(model), start))
    off.close()


def test_a_step_after_a_cycle_reaches_the_model(device: str) -> None:
    """Its shards stay views of the flat buffer."""
    model, optimizer = with_optimizer(device, "distributed fp32")
    megatron_step(model, optimizer, 0)
    shards = [shard for each in optimizer.chained_optimizers for group in each.shard_fp32_groups for shard in group]
    with offloaded(model, optimizer, device=device):
        for shard in shards:
            with pytest.raises(OffloadedTensorError, match="param_data"):
                shard + 1
    assert {storage_of(each)._cdata for each in shards} == {storage_of(b.param_data)._cdata for b in [
        *model.buffers, *model.expert_parallel_buffers]}  # fmt: skip
    with torch.no_grad():
        shards[0].fill_(7.0)
    assert any(bool((parameter == 7.0).any()) for parameter in model.parameters())


@pytest.mark.parametrize("precision", PRECISIONS)
def test_looking_creates_no_state(device: str, precision: str) -> None:
    model, optimizer = with_optimizer(device, precision)
    before = rows(optimizer)
    off = Offloader(model, optimizer, device=device)
    off.offload()
    off.reload()
    assert rows(optimizer) == before
    assert all(not each.optimizer.state for each in optimizer.chained_optimizers)
    off.close()


def test_state_under_any_key_goes(device: str) -> None:
    """As a master parameter that a fused optimizer keeps, or the momentum of Muon."""
    model, optimizer = with_optimizer(device, "distributed bf16")
    megatron_step(model, optimizer, 0)
    inner = optimizer.chained_optimizers[0].optimizer
    main = inner.param_groups[0]["params"][0]
    extra = [torch.ones(9, device=device) for _ in range(4)]
    inner.state[main] |= {"master_param": extra[0], "momentum_buffer": extra[1], "own": {"deep": [extra[2]]}}
    main.decoupled_grad = extra[3]
    off = Offloader(model, optimizer, device=device, name="actor")
    off.offload()
    assert all(map(is_away, extra))
    with pytest.raises(OffloadedTensorError, match=r"'actor\.module\.\w+\.\w+\.master_param'"):
        extra[0].sum()
    off.reload()
    assert all(bool((each == 1).all()) for each in extra)
    off.close()


def test_names_are_those_of_the_models_parameters(device: str) -> None:
    model, optimizer = with_optimizer(device, "distributed bf16")
    megatron_step(model, optimizer, 0)
    main = model.module.up.weight.main_param
    state = optimizer.chained_optimizers[0].optimizer.state[main]
    names = {id(main): "main_param", id(main.grad): "main_param.grad", id(state["exp_avg"]): "exp_avg"}
    off = Offloader(FlatBufferStrategy(model, name="actor"), MegatronOptimizerStrategy(optimizer, name="adam"), device=device)
    off.offload()
    for tensor in (main, main.grad, state["exp_avg"]):
        with pytest.raises(OffloadedTensorError, match=rf"'adam\.module\.up\.weight\.{names[id(tensor)]}'"):
            tensor.sum()
    off.close()


def test_stubs_and_empty_chains_are_nothing_to_do(device: str) -> None:
    from megatron.core.optimizer import ChainedOptimizer, FP32Optimizer, OptimizerConfig

    with pytest.warns(UserWarning, match="no optimizer"):
        stub = FP32Optimizer(None, OptimizerConfig(), lambda *_: None)
    del stub._scale
    for nothing in (stub, ChainedOptimizer([stub]), ChainedOptimizer([])):
        assert Offloader(nothing, device=device).offload().nbytes == 0


@pytest.mark.parametrize("precision", PRECISIONS)
def test_calls_raise_by_name_before_they_change_anything(device: str, precision: str) -> None:
    (model, optimizer), (twin, its) = [with_optimizer(device, precision) for _ in range(2)]
    for each in ((model, optimizer), (twin, its)):
        megatron_step(*each, 0)
    saved = copy.deepcopy(optimizer.state_dict())
    calls = {
        "step()": lambda each: each.step(),
        "prepare_grads()": lambda each: each.prepare_grads(),
        "step_with_ready_grads()": lambda each: each.step_with_ready_grads(),
        "load_state_dict()": lambda each: each.load_state_dict(saved),
        "reload_model_params()": lambda each: each.reload_model_params(),
        "offload_to_cpu()": lambda each: each.offload_to_cpu(),
        "restore_from_cpu()": lambda each: each.restore_from_cpu(),
    }
    for components in (None, ["optimizer"]):
        with offloaded(model, optimizer, components=components, device=device):
            for name, call in calls.items():
                for each in (optimizer, optimizer.chained_optimizers[0]):
                    with pytest.raises(OffloadedTensorError) as caught:
                        call(each)
                    assert str(caught.value).startswith(name)
                    assert "reload()" in str(caught.value)
            for inner in (each.optimizer for each in optimizer.chained_optimizers):
                with pytest.raises(OffloadedTensorError, match="step"):
                    inner.step()
    assert not {*calls} & {f"{name}()" for name in vars(optimizer)}
    for step in range(1, 3):
        assert megatron_step(model, optimizer, step) == megatron_step(twin, its, step)
    assert all(map(torch.equal, tensors_of(optimizer), tensors_of(its)))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("both", [False, True])
def test_a_step_over_parameters_that_are_away_is_refused_before_it_counts(device: str, precision: str, both: bool) -> None:
    (model, optimizer), (twin, its) = [with_optimizer(device, precision) for _ in range(2)]
    for each, one in ((model, optimizer), (twin, its)):
        megatron_step(each, one, 0)
        each.zero_grad_buffer()
        one.zero_grad()
        mcore.accumulate(each, 1)
        each.finish_grad_sync()
    off = Offloader(model, *([optimizer] if both else []), device=device)
    off.offload(["params"])
    for _ in range(2):
        with pytest.raises(OffloadedTensorError, match=r"'DistributedDataParallel\.\S+', which is offloaded. Call reload"):
            optimizer.step()
    off.reload()
    optimizer.step()
    its.step()
    assert all(map(torch.equal, tensors_of(optimizer), tensors_of(its)))
    assert all(map(torch.equal, mcore.state_of(model), mcore.state_of(twin)))
    off.close()


@pytest.mark.parametrize("precision", [each for each in PRECISIONS if each != "hybrid"])
def test_a_state_dict_of_what_is_away_is_saved_from_the_mirror(device: str, precision: str) -> None:
    model, optimizer = with_optimizer(device, precision)
    megatron_step(model, optimizer, 0)

    def saved() -> dict[str, Any]:
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        return torch.load(file, weights_only=False, map_location="cpu")

    before = saved()
    with offloaded(model, optimizer, device=device):
        while_away = saved()
    torch.testing.assert_close(while_away, before, rtol=0, atol=0)


def test_two_state_dicts_of_a_hybrid_optimizer_stay_the_same_objects(device: str) -> None:
    model, optimizer = with_optimizer(device, "hybrid")
    megatron_step(model, optimizer, 0)
    hybrid = optimizer.chained_optimizers[0].optimizer
    assert hybrid.sub_optimizers
    pairs = [(hybrid.state[hybrid.inner_param_to_orig_param[key]], state) for one in hybrid.sub_optimizers
             for key, state in one.state.items()]  # fmt: skip
    host = [each for each in tensors_of(optimizer) if each.device.type == "cpu" != device]
    with offloaded(model, optimizer, device=device):
        assert not any(map(is_away, host))
    assert pairs
    assert all(one is other for one, other in pairs)
    megatron_step(model, optimizer, 1)


def test_what_is_no_megatron_optimizer_is_refused(device: str) -> None:
    model, optimizer = with_optimizer(device, "distributed bf16")
    for wrong in (optimizer.chained_optimizers[0].optimizer, model, "adam", None):
        with pytest.raises(UnsupportedTargetError, match=r"takes an optimizer of megatron\.core\.optimizer, not a"):
            MegatronOptimizerStrategy(wrong)
    assert type(strategy_for(optimizer)) is MegatronOptimizerStrategy
    first = optimizer.chained_optimizers[0]
    first.ddp_config = copy.copy(first.ddp_config)
    first.ddp_config.use_megatron_fsdp = True
    with pytest.raises(UnsupportedTargetError, match="use_megatron_fsdp=True"):
        Offloader(optimizer, device=device)


def test_an_optimizer_dies_as_usual_while_it_is_away(device: str) -> None:
    model, optimizer = with_optimizer(device, "bf16")
    megatron_step(model, optimizer, 0)
    off = Offloader(optimizer, device=device)
    off.offload()
    del optimizer, model
    gc.collect()
    assert off.offload().targets == ("ChainedOptimizer (gone)",)
    assert off.host_nbytes == 0


def to_host(each: Any) -> Any:
    """Megatron-core looks at the storages of what is on the CPU."""
    from megatron.core.dist_checkpointing import ShardedTensor

    if isinstance(each, ShardedTensor):
        each.data = each.data.cpu()
    return each.cpu() if isinstance(each, torch.Tensor) else each


def checkpoint(model: Any, optimizer: Any) -> dict[str, Any]:
    """The sharded state that Megatron-core's checkpoints are made of."""
    from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

    metadata = {"distrib_optim_sharding_type": "dp_reshardable"}
    sharded = make_sharded_tensors_for_checkpoint(model.state_dict(keep_vars=True), "", {})
    torch.use_deterministic_algorithms(True)  # so that padding, which nobody writes, is NaN
    try:
        return {"model": sharded, "optimizer": optimizer.sharded_state_dict(dict(sharded), metadata=metadata)}
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("precision", ["bf16", "distributed bf16", "distributed fp32"])
def test_dist_checkpointing_saves_what_is_away(device: str, precision: str, tmp_path: Path) -> None:
    pytest.importorskip("psutil")  # without it megatron-core's writers end, and it waits for them for ever
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace

    model, optimizer = with_optimizer(device, precision)
    megatron_step(model, optimizer, 0)
    early = checkpoint(model, optimizer)  # on the CPU, the steps of what is resident are compared with each other
    for folder in ("resident", "offloaded"):
        (tmp_path / folder).mkdir()
    dist_checkpointing.save(checkpoint(model, optimizer), str(tmp_path / "resident"))
    off = Offloader(model, optimizer, device=device)
    off.offload()
    away = early if device == "cpu" and precision == "bf16" else checkpoint(model, optimizer)
    dist_checkpointing.save(dict_list_map_inplace(to_host, away) if device == "cpu" else away, str(tmp_path / "offloaded"))
    assert all(map(is_away, model.parameters()))
    off.close()
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _LOAD, str(tmp_path), str(sum(1 for _ in model.parameters()))],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


_LOAD = """
import sys, torch
from unittest import mock
from megatron.core import dist_checkpointing
from torch.utils._pytree import tree_flatten
if __name__ == "__main__":
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    with mock.patch.object(torch.cuda, "current_device", return_value="cpu"):
        one, two = (dist_checkpointing.load_plain_tensors(f"{sys.argv[1]}/{name}") for name in ("resident", "offloaded"))
    (one, tree), (two, other) = tree_flatten(one), tree_flatten(two)
    assert tree == other and len(one) > int(sys.argv[2]), len(one)
    for a, b in zip(one, two):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True) if isinstance(a, torch.Tensor) else None
    assert any(bool(each.any()) for each in one if isinstance(each, torch.Tensor))
"""


def test_a_small_actor_in_a_process_of_its_own_trains_on_as_its_twin() -> None:
    """The large one needs a GPU."""
    twin, found = actor("0.0005", device="cpu"), actor("0.0005", "offload", device="cpu")
    assert found["left"] == []
    assert found["losses"] == twin["losses"]
    assert found["digest"] == twin["digest"]
