"""Caches of libraries are dropped with an offload, once, and never while something captured may need them."""

from __future__ import annotations

import inspect
import sys
import types
import warnings
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from torch_offload import Offloader, PerParameterStrategy, Strategy, offloaded
from torch_offload.strategies import scratch


def test_ones_own_are_called_once_for_each_offload_and_first(device: str) -> None:
    model, cache, calls = nn.Linear(2, 2, device=device), {"logits": torch.ones(9, device=device)}, []

    def drop() -> None:
        calls.append(bool(model.weight.eq(model.weight).all()))
        cache.clear()

    other = nn.Linear(2, 2, device=device)
    pair = [PerParameterStrategy(each, scratch=[drop]) for each in (model, other)]
    off = Offloader(*pair, device=device)
    off.offload()
    assert calls == [True]
    assert not cache
    off.reload()
    assert calls == [True]
    with off.offloaded():
        assert calls == [True, True]
    with offloaded(model, scratch=[drop], device=device):
        assert len(calls) == 3
    with pytest.raises(TypeError, match=r"scratch has 5, which cannot be called.*cache\.clear"):
        Offloader(model, scratch=[5], device=device)


def test_one_that_fails_leaves_everything_resident(device: str) -> None:
    model = nn.Linear(2, 2, device=device)

    def fail() -> None:
        raise KeyError("cache")

    off = Offloader(model, scratch=[fail], device=device)
    with pytest.raises(KeyError):
        off.offload()
    model(torch.ones(1, 2, device=device))


def test_a_strategy_names_its_own(device: str) -> None:
    class Cached(PerParameterStrategy):
        def scratch(self) -> Any:
            return [self.target.cache.clear]

    model = nn.Linear(2, 2, device=device)
    model.cache = {1: 2}
    with offloaded(Cached(model), device=device):
        assert model.cache == {}
    assert Strategy.scratch(Cached(model)) == ()


class Layer(nn.Linear):
    """As TransformerEngine's layers keep fp8 copies of their weights (2.x, pytorch/module/base.py)."""

    def __init__(self, device: str) -> None:
        super().__init__(2, 2, device=device)
        self._fp8_workspaces = {"weight": torch.ones(2, device=device)}


Layer.__module__ = "transformer_engine.pytorch.module.linear"


@pytest.mark.parametrize("captured", ["", "cudagraph_manager", "cuda_graphs", "forward"])
def test_those_of_transformer_engine_go_unless_something_is_captured(
    device: str, captured: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = types.SimpleNamespace(_dummy_wgrads={(2, 2): torch.ones(2, 2, device=device)})
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch.module.base", base)
    model = nn.Sequential(Layer(device), nn.Linear(2, 2, device=device))

    def make_graphed_forward(x: torch.Tensor) -> torch.Tensor:
        return x

    values = {"cudagraph_manager": object(), "cuda_graphs": [object()], "forward": make_graphed_forward}
    if captured:
        vars(model[1])[captured] = values[captured]
    with offloaded(model, device=device):
        assert bool(model[0]._fp8_workspaces) is bool(base._dummy_wgrads) is bool(captured)


def test_a_plain_model_drops_nothing_of_others(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    base = types.SimpleNamespace(_dummy_wgrads={1: 2})
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch.module.base", base)
    with offloaded(nn.Linear(2, 2, device=device), device=device):
        assert base._dummy_wgrads == {1: 2}


def test_those_of_megatron_core(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("megatron.core")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core import parallel_state
        from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
        from megatron.core.transformer import cuda_graphs
        from megatron.core.transformer.moe import token_dispatcher
        from megatron.core.utils import GlobalMemoryBuffer
    buffer = GlobalMemoryBuffer()
    buffer.buffer["mpu"] = torch.ones(4, device=device)
    monkeypatch.setattr(parallel_state, "_GLOBAL_MEMORY_BUFFER", buffer)
    with torch.device(device):
        alone = mock.Mock(size=lambda: 1)
        rope = RotaryEmbedding(8, rotary_percent=1.0, use_cpu_initialization=device == "cpu", cp_group=alone)
    before = type(rope).forward.cache_info().currsize
    with mock.patch.object(torch.cuda, "current_device", return_value=device):
        table = rope(16)
    assert type(rope).forward.cache_info().currsize == before + 1
    source = inspect.getsource(token_dispatcher)
    for name in scratch._OF_DISPATCHERS:
        assert f"self.{name}" in source, name
    model = nn.Module()
    model.rope = rope
    model.token_dispatcher = dispatcher = object.__new__(token_dispatcher.MoEAllGatherTokenDispatcher)
    vars(dispatcher).update(probs=table, sizes=[1], kept=table)
    model.add_module("mine", nn.Linear(1, 1, device=device))
    model.mine.token_dispatcher = types.SimpleNamespace(probs=table)
    model.mine._fp8_workspaces = {"weight": table}
    monkeypatch.setattr(cuda_graphs._CudagraphGlobalRecord, "cudagraph_created", True)  # of another model
    with offloaded(model, device=device):
        assert type(rope).forward.cache_info().currsize == before + 1
        assert buffer.buffer
        assert dispatcher.probs is None
    dispatcher.probs = table
    monkeypatch.setattr(cuda_graphs._CudagraphGlobalRecord, "cudagraph_created", False)
    with offloaded(model, device=device):
        assert type(rope).forward.cache_info().currsize == 0
        assert not buffer.buffer
        assert dispatcher.probs is None
        assert dispatcher.kept is table
        assert model.mine.token_dispatcher.probs is model.mine._fp8_workspaces["weight"] is table  # somebody's own
    with mock.patch.object(torch.cuda, "current_device", return_value=device):
        assert torch.equal(rope(16), table)
