"""peft: adapters over a frozen base, as two targets."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from torch_offload import OffloadedTensorError, Offloader, PerParameterStrategy
from torch_offload.testing import is_away

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    peft = pytest.importorskip("peft")

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


def adapted(device: str) -> tuple[nn.Module, nn.Module]:
    """A base, and a model with adapters around it."""
    torch.manual_seed(0)
    base = Base().to(device)
    return base, peft.get_peft_model(base, peft.LoraConfig(target_modules=["up", "down"], r=2, init_lora_weights=False))


def split(model: nn.Module) -> tuple[nn.ParameterList, nn.ParameterList]:
    """The adapters, and the frozen base."""
    adapters = [each for name, each in model.named_parameters() if "lora_" in name]
    frozen = [each for name, each in model.named_parameters() if "lora_" not in name]
    return nn.ParameterList(adapters), nn.ParameterList(frozen)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> float:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed)).to(next(model.parameters()).device)
    loss = model(x).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def test_base_and_adapters_come_back_apart_and_the_base_is_copied_once(device: str) -> None:
    (_, model), (_, twin) = adapted(device), adapted(device)
    optimizer, its = (torch.optim.AdamW([p for p in each.parameters() if p.requires_grad], lr=0.05) for each in (model, twin))
    adapters, frozen = split(model)
    base = Offloader(PerParameterStrategy(frozen, read_only=True, name="base"), device=device)
    trained = Offloader(PerParameterStrategy(adapters, name="adapters"), optimizer, device=device)
    for cycle in range(3):
        assert step(model, optimizer, cycle) == step(twin, its, cycle)
        trained.offload()
        assert base.offload().copied_nbytes == (0 if cycle else sum(each.nbytes for each in frozen))
        assert not base.report.left
        assert all(map(is_away, model.parameters()))
        with pytest.raises(OffloadedTensorError, match=r"'(base|adapters)\."):
            model(torch.ones(1, 8, device=device))
        trained.reload()  # to export the adapters
        assert not any(map(is_away, adapters))
        assert all(map(is_away, frozen))
        state = peft.get_peft_model_state_dict(model)
        wanted = peft.get_peft_model_state_dict(twin)
        assert all(torch.equal(state[name].cpu(), wanted[name].cpu()) for name in wanted)
        base.reload()
    assert all(map(torch.equal, model.parameters(), twin.parameters()))


def test_the_whole_model_with_adapters_attached_merged_and_removed_between_cycles(device: str) -> None:
    base, model = adapted(device)
    off = Offloader(model, device=device)
    x = torch.ones(2, 8, device=device)

    def cycle() -> None:
        wanted = model(x).detach()
        report = off.offload()
        assert not report.left
        assert all(map(is_away, model.parameters()))
        off.reload()
        assert torch.equal(model(x), wanted)

    cycle()
    model.add_adapter("second", peft.LoraConfig(target_modules=["up"], r=4, init_lora_weights=False))
    cycle()
    model.set_adapter("second")
    cycle()
    model.merge_adapter()
    cycle()
    model.unmerge_adapter()
    model.delete_adapter("second")
    model.set_adapter("default")
    cycle()
    merged = model.merge_and_unload()
    assert merged is base
    with torch.no_grad():
        wanted = base(x).detach()
    whole = Offloader(base, device=device)
    assert not whole.offload().left
    whole.reload()
    assert torch.equal(base(x), wanted)
    whole.close()


def test_adapters_over_a_quantised_base(device: str) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes", exc_type=ImportError)
    base = Base()
    base.up = bitsandbytes.nn.Linear4bit(64, 64, quant_type="nf4", compute_dtype=torch.float32)
    base.down = nn.Linear(64, 64)
    base = base.to(device)
    model = peft.get_peft_model(base, peft.LoraConfig(target_modules=["up", "down"], r=2, init_lora_weights=False))
    x = torch.ones(2, 64, device=device)
    wanted = model(x).detach()
    off = Offloader(model, device=device)
    for _ in range(2):
        assert not off.offload().left
        assert is_away(base.up.weight.quant_state.absmax)
        saved = {name: each.cpu() for name, each in peft.get_peft_model_state_dict(model).items()}
        off.reload()
        assert saved
        assert torch.equal(model(x), wanted)
    off.close()
