"""FlatBufferStrategy on real megatron-core, in one rank."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import json
import os
import subprocess
import sys
import weakref
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from torch_offload import (
    FlatBufferStrategy,
    GradientsError,
    OffloadedTensorError,
    Offloader,
    OptimizerStrategy,
    PerParameterStrategy,
    Residency,
    UnsupportedTargetError,
    offloaded,
    storage,
    strategy_for,
    testing,
)
from torch_offload.strategies import flat_buffer, methods
from torch_offload.tensors import storage_of
from torch_offload.testing import is_away

pytest.importorskip("megatron.core")
import mcore
import mcore_matrix
from mcore import CONFIGS, OVERLAPPING, accumulate, chunk, finish, optimizer_of, state_of, train
from test_interrupts import cut, interrupted
from test_life import Life, live
from test_targets import check_contract

pytestmark = mcore.MARKS
DISTRIBUTED = {"use_distributed_optimizer": True}


def pair(device: str, **config: Any) -> list[tuple[Any, torch.optim.Optimizer]]:
    """Two equal models, each with its optimizer: one to offload, and its twin."""
    return [(model, optimizer_of(model)) for model in (chunk(device, **config) for _ in range(2))]


def flat(model: Any) -> list[torch.Tensor]:
    """The tensors of the flat buffers."""
    buffers = [*model.buffers, *model.expert_parallel_buffers]
    return [data for each in buffers for data in (each.param_data, each.grad_data) if data is not None]


def everything(model: Any) -> dict[int, torch.UntypedStorage]:
    """The storages of all tensors on the heap that are the model's: found without asking the strategy."""
    roots = [*flat(model), *model.parameters(), *nn.Module.buffers(model)]
    return {storage_of(tensor)._cdata: storage_of(tensor) for tensor in roots}


# What moves ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", CONFIGS)
def test_all_of_it_goes_once_and_comes_back(device: str, config: str) -> None:
    model = chunk(device, **CONFIGS[config])
    optimizer = optimizer_of(model)
    train(model, optimizer, 0)
    storages = everything(model)
    wanted = sum(each.nbytes() for each in storages.values())
    assert len(model.buffers) == len(model.expert_parallel_buffers) == 1
    assert storage_of(model.module.expert.weight)._cdata in storages
    off = Offloader(model, device=device)
    report = off.offload()
    assert report.nbytes == wanted
    assert not report.left
    assert all(each.nbytes() == 0 for each in storages.values())
    off.close()
    testing.assert_round_trip(model, device=device, extra=[*flat(model), *(p.main_grad for p in model.params_with_grad)])


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_training_goes_on_as_in_a_twin(device: str, config: str, dtype: torch.dtype) -> None:
    (model, optimizer), (twin, twins) = pair(device, dtype=dtype, **CONFIGS[config])
    begin = state_of(model)
    for step in range(5):
        assert train(model, optimizer, step) == train(twin, twins, step)
        with offloaded(model, optimizer, device=device):
            assert all(map(is_away, flat(model)))
    assert all(map(torch.equal, state_of(model, optimizer), state_of(twin, twins)))
    assert not all(map(torch.equal, state_of(model), begin))


@pytest.mark.parametrize("config", CONFIGS)
def test_an_open_accumulation_window_survives(device: str, config: str) -> None:
    (model, optimizer), (twin, twins) = pair(device, **CONFIGS[config])
    for each, at in ((model, optimizer), (twin, twins)):
        train(each, at, 0)
        each.zero_grad_buffer()
        with each.no_sync():
            accumulate(each, 1)
        if each is model:
            with offloaded(model, optimizer, device=device):
                pass
        accumulate(each, 2)
        finish(each, at)
    assert all(map(torch.equal, state_of(model, optimizer), state_of(twin, twins)))


def test_discarded_gradients_are_zeros_and_take_no_host_memory(device: str) -> None:
    model = chunk(device, **DISTRIBUTED)
    accumulate(model, 0)
    gradients = [buffer.grad_data for buffer in [*model.buffers, *model.expert_parallel_buffers]]
    assert all(bool(each.any()) for each in gradients)
    nbytes = sum(each.nbytes for each in gradients)
    off = Offloader(FlatBufferStrategy(model, grads="discard"), device=device)
    report = off.offload()
    assert report.nbytes - report.copied_nbytes == nbytes
    off.reload()
    assert not any(bool(each.any()) for each in gradients)
    off.close()


def test_refused_gradients_are_named(device: str) -> None:
    model = chunk(device, **DISTRIBUTED)
    accumulate(model, 0)
    off = Offloader(FlatBufferStrategy(model, grads="refuse", name="actor"), device=device)
    for _ in range(2):
        with pytest.raises(GradientsError, match=r"in 'actor\.buffers\.0\.grad_data', '\S+'\. Call.*zero_grad_buffer"):
            off.offload()
        assert not any(map(is_away, flat(model)))
    off.offload(["params", "buffers"])
    off.reload()
    model.zero_grad_buffer()
    model.expert_parallel_buffers[0].grad_data.view(torch.uint8)[3] = 128  # minus zero
    with pytest.raises(GradientsError, match=r"'actor\.expert_parallel_buffers\.0\.grad_data'"):
        off.offload()
    model.zero_grad_buffer()
    off.offload()
    off.offload()  # what is away is not looked at
    off.close()
    model.module.up.weight.main_grad = torch.ones(16, 8, device=device)  # as newer releases accumulate in fp32
    with pytest.raises(GradientsError, match=r"in 'actor\.module\.up\.weight\.main_grad'\. "):
        off.offload()


def test_several_chunks_are_one_target(device: str) -> None:
    """A virtual pipeline: a list of wrappers, on one device."""
    chunks = [chunk(device, seed=seed, **DISTRIBUTED) for seed in range(2)]
    wanted = sum(each.nbytes() for model in chunks for each in everything(model).values())
    for off in (
        Offloader(FlatBufferStrategy(chunks, name="actor"), device=device),
        Offloader(chunks, name="actor", device=device),
    ):
        assert off.offload().nbytes == wanted
        for index, model in enumerate(chunks):
            with pytest.raises(OffloadedTensorError, match=rf"'actor\[{index}\]\.module\.up\.weight'"):
                model.module.up.weight.sum()
        with offloaded(chunks[0], device=device):
            assert all(map(is_away, flat(chunks[0])))
        assert off.reload().nbytes == wanted
        off.close()


def test_reload_of_what_was_never_offloaded_does_nothing(device: str) -> None:
    model = chunk(device, **DISTRIBUTED)
    train(model, optimizer_of(model), 0)
    before = state_of(model)
    off = Offloader(model, device=device)
    assert off.reload().nbytes == 0
    assert all(map(torch.equal, state_of(model), before))
    assert set(off.residency.values()) == {Residency.RESIDENT}


def test_what_else_the_wrapper_keeps_goes_too(device: str) -> None:
    """As the buffers that newer releases gather into."""
    model = chunk(device, **DISTRIBUTED)
    held = [torch.ones(5, device=device), torch.ones(3, device=device), torch.ones(7, device=device)]
    model.bucket_groups[0].gathered = [held[0], [held[1]]]
    model.expert_parallel_bucket_groups[0].gathered = held[2]
    names = [claim.name for claim in FlatBufferStrategy(model).claims()]
    assert {"bucket_groups.0.gathered.0", "bucket_groups.0.gathered.1.0", "expert_parallel_bucket_groups.0.gathered"} <= {
        *names
    }
    with offloaded(model, device=device):
        assert all(map(is_away, held))
    assert [float(each.sum()) for each in held] == [5, 3, 7]


def test_the_views_that_the_wrapper_keeps_need_no_look_at_the_heap(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = chunk(device, **OVERLAPPING)
    train(model, optimizer_of(model), 0)
    monkeypatch.setattr(storage, "_look", lambda _: pytest.fail("somebody was unknown"))
    with offloaded(model, device=device):
        assert all(map(is_away, flat(model)))


def test_without_a_distributed_optimizer_the_parameters_lie_outside_the_buffers(device: str) -> None:
    model = chunk(device)
    assert all(buffer.param_data is None for buffer in model.buffers)
    with offloaded(model, device=device):
        assert all(map(is_away, model.parameters()))


def test_collectives_under_way_are_waited_for(device: str) -> None:
    """Between the step and the next forward the gathers are in flight, and so are the reductions before the step."""
    with mcore.in_flight() if device == "cuda" else contextlib.nullcontext():
        run_with_collectives_under_way(device)


def run_with_collectives_under_way(device: str) -> None:
    (model, optimizer), (twin, twins) = pair(device, **OVERLAPPING)
    for step in range(4):
        for each, at in ((model, optimizer), (twin, twins)):
            each.zero_grad_buffer()
            accumulate(each, step)
            if each is model and step > 1:  # from the second batch on the backward starts the reductions
                assert all(group.grad_reduce_handle is not None for group in model.bucket_groups)
                with offloaded(model, optimizer, device=device) as off:
                    assert not off.report.left
            finish(each, at)
        assert all(group.param_gather_handle is not None for group in model.bucket_groups)
        with offloaded(model, optimizer, device=device) as off:
            assert not off.report.left
            assert all(map(is_away, flat(model)))
    for each in (model, twin):
        each.start_param_sync(force_sync=True)
    assert all(map(torch.equal, state_of(model, optimizer), state_of(twin, twins)))


def test_what_was_waited_for_is_not_waited_for_again(device: str) -> None:
    """A reduction that is over would write its result where memory may be away by then."""
    (model, optimizer), (twin, twins) = pair(device, **OVERLAPPING)
    for each, at in ((model, optimizer), (twin, twins)):
        train(each, at, 0)
        each.zero_grad_buffer()
        accumulate(each, 1)
    off = Offloader(model, device=device)
    off.offload(["grads"])
    off.offload(["params"])
    with offloaded(model, device=device), off.resident(["params", "buffers"]):
        pass
    off.offload()
    off.reload()
    for each, at in ((model, optimizer), (twin, twins)):
        finish(each, at)
    assert all(map(torch.equal, state_of(model, optimizer), state_of(twin, twins)))
    model.zero_grad_buffer()
    accumulate(model, 2)
    with offloaded(model, grads="discard", device=device):
        pass
    model.finish_grad_sync()
    assert not any(bool(buffer.grad_data.any()) for buffer in [*model.buffers, *model.expert_parallel_buffers])


class Handle:
    """Stands for a collective that is over when it is waited for, and writes its result then."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data, self.waits = data, 0

    def wait(self) -> None:
        self.data.fill_(7)
        self.waits += 1


@pytest.mark.parametrize("which", ["param", "grad"])
def test_the_result_of_a_collective_is_moved(device: str, which: str) -> None:
    model = chunk(device, **DISTRIBUTED)
    data = getattr(model.buffers[0], f"{which}_data")
    handle = Handle(data)
    setattr(model.bucket_groups[0], "param_gather_handle" if which == "param" else "grad_reduce_handle", handle)
    off = Offloader(model, device=device)
    off.offload()
    off.offload()
    off.reload()
    assert handle.waits == 1
    assert bool((data == 7).all())
    off.close()


def test_gradients_that_a_gather_fills_with_parameters_are_kept(device: str) -> None:
    """Without a parameter buffer, a layer-wise optimizer receives parameters where gradients were."""
    model = chunk(device)
    data = model.buffers[0].grad_data
    model.bucket_groups[0].param_gather_handle = Handle(data)
    with offloaded(model, grads="discard", device=device):
        pass
    assert bool((data == 7).all())
    model.bucket_groups[0].param_gather_handle = None
    with offloaded(model, grads="discard", device=device):
        pass
    assert not bool(data.any())


def test_a_weight_sync_needs_the_parameters_alone(device: str) -> None:
    model = chunk(device, **OVERLAPPING)
    optimizer = optimizer_of(model)
    train(model, optimizer, 0)
    off = Offloader(model, device=device)
    off.offload()
    with off.resident(["params", "buffers"]):
        model.start_param_sync(force_sync=True)
        values = {name: tensor.clone() for name, tensor in model.module.state_dict().items()}
        with pytest.raises(OffloadedTensorError, match=r"backward\(\) would accumulate into '.*main_grad'"):
            accumulate(model, 1)
        assert all(parameter.grad is None for parameter in model.parameters())
    assert all(map(is_away, flat(model)))
    off.close()
    assert all(torch.equal(tensor, values[name]) for name, tensor in model.module.state_dict().items())
    train(model, optimizer, 1)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("read_only", [False, True])
def test_the_contract(device: str, config: str, read_only: bool) -> None:
    model = chunk(device, **CONFIGS[config])
    accumulate(model, 0)
    check_contract(FlatBufferStrategy(model, read_only=read_only), device)


class LifeOfAWrapper(Life):
    config: dict[str, Any]

    def build(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = chunk(self.device, **self.config)
        return model, optimizer_of(model)

    def layer(self) -> nn.Module:
        return self.model.module.up

    def loss(self, model: Any) -> torch.Tensor:
        return model(torch.ones(2, mcore.WIDTH, device=self.device)).pow(2).sum()

    def take_step(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        finish(model, optimizer)

    def zero(self, model: Any, _optimizer: torch.optim.Optimizer, *, to_none: bool) -> None:  # noqa: ARG002
        if self.exact and "grads" not in self.away:
            model.zero_grad_buffer()

    def check_ties(self) -> None:
        assert self.model.module.tied is self.model.module.up
        for parameter in self.model.params_with_grad:
            assert storage_of(parameter.main_grad) in map(storage_of, flat(self.model))

    def tensors(self, *, twin: bool = False) -> dict[str, torch.Tensor]:
        model = self.twin if twin else self.model
        found = super().tensors(twin=twin)
        found |= {f"{name}.main.grad": p.main_grad for name, p in model.named_parameters() if hasattr(p, "main_grad")}
        buffers = [*model.buffers, *model.expert_parallel_buffers]
        found |= {f"flat{index}.grad": each.grad_data for index, each in enumerate(buffers)}
        return found | {f"flat{index}": each.param_data for index, each in enumerate(buffers) if each.param_data is not None}

    def offload_a_part(self) -> None:
        """Refused: what lies in flat buffers goes with its wrapper."""

    offload_a_part_first = reload_a_part = add_a_parameter = offload_a_part


@pytest.mark.parametrize("config", ["plain", "distributed optimizer"])
def test_a_wrappers_life(device: str, config: str) -> None:
    live(type("LifeOfAWrapper", (LifeOfAWrapper,), {"config": CONFIGS[config]}), device, lives=50)


# Shared storages -------------------------------------------------------------------------------------------------------


class Shared(nn.Module):
    """Stands for a wrapper of MXFP8 parameters (Megatron-core makes them on a GPU with TransformerEngine only): one buffer that
    holds gradients, and parameters while they are gathered."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, device=device))
        shared = torch.randn(64, device=device)
        self.weight.main_grad = shared[:64]
        self.buffer = SimpleNamespace(
            shared_buffer=shared, grad_data=shared, param_data=shared[:32].view(torch.bfloat16), buckets=[]
        )
        vars(self)["buffers"], self.expert_parallel_buffers = [self.buffer], []
        self.bucket_groups, self.expert_parallel_bucket_groups = [], []

    def disable_forward_pre_hook(self) -> None: ...

    def zero_grad_buffer(self) -> None:
        self.buffer.grad_data.zero_()


def test_one_storage_for_parameters_and_gradients_goes_with_both_and_keeps_its_bytes(device: str) -> None:
    model = Shared(device)
    before = model.buffer.shared_buffer.clone()
    off = Offloader(FlatBufferStrategy(model, grads="discard"), device=device)
    report = off.offload("grads")
    assert not is_away(model.buffer.grad_data)
    assert [(row.name, "params" in row.reason) for row in report.left] == [("Shared.buffers.0.param_data", True)]
    off.offload("params")
    assert is_away(model.buffer.grad_data)
    off.reload()
    assert torch.equal(model.buffer.shared_buffer, before)  # the lossless claim wins
    off.close()


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_shards_of_an_optimizer_stay_views_of_the_flat_buffer(device: str, kind: type[torch.optim.Optimizer]) -> None:
    """As Megatron-core's distributed optimizer makes them of fp32 parameters."""
    model = chunk(device, **DISTRIBUTED)
    buffer = model.buffers[0]
    shard = nn.Parameter(buffer.param_data[5:300])
    shard.grad = buffer.grad_data[5:300]
    optimizer = kind([shard], lr=0.1)
    off = Offloader(FlatBufferStrategy(model), OptimizerStrategy(optimizer), device=device)
    assert not off.offload().left  # also before there is any state
    off.reload()
    for step in range(3):
        model.zero_grad_buffer()
        accumulate(model, step)
        optimizer.step()
        report = off.offload()
        assert not report.left
        with pytest.raises(OffloadedTensorError, match=r"buffers\.0\.param_data"):
            shard.sum()
        with pytest.raises(OffloadedTensorError, match="step"):
            optimizer.step()
        off.reload()
    before = buffer.param_data.clone()
    accumulate(model, 9)
    optimizer.step()
    assert storage_of(shard) is storage_of(buffer.param_data)
    assert not torch.equal(buffer.param_data[5:300], before[5:300])
    assert torch.equal(buffer.param_data[:5], before[:5])
    off.close()


# What is refused -------------------------------------------------------------------------------------------------------


def test_what_is_no_wrapper_is_refused() -> None:
    for target in (nn.Linear(1, 1), "actor", None, [nn.Linear(1, 1)], nn.ModuleList([chunk("cpu")])):
        with pytest.raises(UnsupportedTargetError, match=r"DistributedDataParallel, or a list.*Pass the wrapper itself"):
            FlatBufferStrategy(target)


def test_what_is_in_a_wrapper_is_refused_and_names_it(device: str) -> None:
    """Its parameters alone would leave the gradients on the device, and collectives over them half done."""
    model = chunk(device, **DISTRIBUTED)
    for inside in (model.module, model.module.up, nn.ModuleList([model.module])):
        with pytest.raises(UnsupportedTargetError, match=r"weight' has its gradient in a main_grad.*Pass that wrapper"):
            Offloader(inside, device=device).offload()
    with pytest.raises(UnsupportedTargetError, match="main_grad"):
        Offloader(PerParameterStrategy(model), device=device).offload()
    assert not any(map(is_away, flat(model)))
    train(model, optimizer_of(model), 0)


def test_a_wrapper_inside_of_another_module_is_refused(device: str) -> None:
    with pytest.raises(UnsupportedTargetError, match=r"megatron\.core\.distributed\.DistributedDataParallel at 'inner'"):
        strategy_for(nn.ModuleDict({"inner": chunk(device)}))


def test_buffers_that_nccl_knows_are_refused_with_the_reason(device: str) -> None:
    model = chunk(device, **DISTRIBUTED)
    model.expert_parallel_buffers[0].nccl_ub = True
    with pytest.raises(UnsupportedTargetError, match=r"expert_parallel_buffers\.0 lives in an NCCL memory pool.*nccl_ub=False"):
        offloaded(model, device=device)


def test_every_method_gives_a_named_error_or_the_right_value(device: str) -> None:
    done = subprocess.run(
        [sys.executable, mcore_matrix.__file__, device],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
    )
    assert done.returncode == 0, f"ended with {done.returncode} in {done.stderr.splitlines()[-1:]}"
    outcomes = json.loads(done.stdout)
    each_config = len(mcore_matrix.ROWS) * len(mcore_matrix.AWAY) - len(mcore_matrix.KNOWN_LIMITS)
    assert len(outcomes) == each_config * len(mcore_matrix.CONFIGS)
    assert {row: each for row, each in outcomes.items() if each not in ("refused", "right")} == {}
    assert outcomes["m(x) | plain | all away"] == "refused"
    assert outcomes["m.start_param_sync(force_sync=True) | overlapping | grads away"] == "right"
    assert outcomes["m.start_grad_sync() | overlapping | grads away"] == "refused"


def test_the_matrix_has_every_method(device: str) -> None:
    model = chunk(device, **DISTRIBUTED)
    kinds = {type(model): mcore_matrix.WRAPPER, type(model.buffers[0]): mcore_matrix.BUFFER}
    kinds |= {type(model.bucket_groups[0]): mcore_matrix.GROUP, type(model.buffers[0].buckets[0]): {}}
    for kind, rows in kinds.items():
        assert mcore_matrix.methods(kind) == set(rows), kind


def test_nothing_is_hung_on_the_wrapper_while_resident(device: str) -> None:
    model = chunk(device, **OVERLAPPING)
    owners = [model, *model.bucket_groups, *model.buffers, *model.buffers[0].buckets, *model.params_with_grad]
    train(model, optimizer_of(model), 0)
    model.start_param_sync(force_sync=True)
    before = [dict(vars(owner)) for owner in owners]
    with offloaded(model, device=device):
        assert [dict(vars(owner)) for owner in owners] != before
    assert [dict(vars(owner)) for owner in owners] == before
    assert {type(data) for data in flat(model)} == {torch.Tensor}


def test_somebodys_own_methods_are_put_back(device: str) -> None:
    model = chunk(device, **DISTRIBUTED)
    calls = []
    model.zero_grad_buffer = lambda: calls.append(1)
    own = model.zero_grad_buffer
    with offloaded(model, device=device), pytest.raises(OffloadedTensorError, match=r"zero_grad_buffer\(\)"):
        model.zero_grad_buffer()
    assert model.zero_grad_buffer is own
    model.zero_grad_buffer()
    assert calls == [1]
    del model.zero_grad_buffer
    with offloaded(model, device=device):
        model.zero_grad_buffer = own
    assert model.zero_grad_buffer is own
    assert "disable_forward_pre_hook" not in vars(model)


@pytest.mark.usefixtures("_after_cuts")
@pytest.mark.parametrize("within", [flat_buffer, methods])
def test_an_interruption_leaves_no_method_exchanged(device: str, within: ModuleType) -> None:
    model = Shared(device)
    before, struck = dict(vars(model)), 0
    for at in itertools.count(1):
        off = Offloader(FlatBufferStrategy(model), device=device)
        if not interrupted(at, lambda off=off: (off.offload(), off.reload()), cut, within=within.__file__):
            break
        struck += 1
        off.offload()
        off.close()
        assert vars(model) == before
    assert struck > 100
    off.close()


def test_a_model_with_a_method_of_somebodys_own_dies_while_offloaded(device: str) -> None:
    model = Shared(device)
    model.zero_grad_buffer = functools.partial(Shared.zero_grad_buffer, model)
    off = Offloader(FlatBufferStrategy(model), device=device)
    off.offload()
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert off.host_nbytes == 0
