"""Optimizers: what is state, what it is called, and steps that are refused before they change anything."""

from __future__ import annotations

import collections
import dataclasses
import types

import pytest
import torch
from torch import nn
from torch.optim import optimizer as optimizer_module

from torch_offload import MirrorMismatchError, OffloadedTensorError, Offloader, OptimizerStrategy, offloaded
from torch_offload.testing import Portrait


@pytest.mark.parametrize("components", [["params"], ["grads"], ["optimizer"], None])
@pytest.mark.parametrize("fresh", [True, False])
def test_a_refused_step_changes_nothing(device: str, fresh: bool, components: list[str] | None) -> None:
    model, twin = (nn.Linear(3, 3, device=device) for _ in range(2))
    twin.load_state_dict(model.state_dict())
    optimizers = [torch.optim.AdamW(each.parameters(), weight_decay=0.5) for each in (model, twin)]
    for each, optimizer in zip((model, twin), optimizers, strict=True):
        each(torch.ones(1, 3, device=device)).sum().backward()
        if not fresh:
            optimizer.step()
    with (
        offloaded(model, optimizers[0], components=components, device=device),
        pytest.raises(OffloadedTensorError, match=r"step\(\).*reload"),
    ):
        optimizers[0].step()
    for optimizer in optimizers:
        optimizer.step()
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one, other)
    assert len(optimizer_module._global_optimizer_pre_hooks) == 1


def test_state_that_is_away_hangs_nothing_on_parameters(device: str) -> None:
    model = nn.Linear(3, 3, device=device)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3, device=device)).sum().backward()
    optimizer.step()
    with offloaded(model, optimizer, components=["optimizer"], device=device):
        assert model.weight._backward_hooks is None
        model(torch.ones(1, 3, device=device)).sum().backward()


def test_a_step_of_what_is_resident_is_not_refused(device: str) -> None:
    actor, critic = (nn.Linear(3, 3, device=device) for _ in range(2))
    optimizer = torch.optim.AdamW([*actor.parameters(), *critic.parameters()])
    actor(torch.ones(1, 3, device=device)).sum().backward()
    before = actor.weight.detach().clone()
    with offloaded(critic, device=device):
        optimizer.step()  # the critic has no gradients
    assert not torch.equal(actor.weight, before)


@dataclasses.dataclass
class History:
    last: torch.Tensor


class Slotted:
    __slots__ = ("__weakref__", "never", "rows")


class Slower(Slotted):
    __slots__ = "inner"

    def __getattr__(self, name: str) -> None:
        raise RuntimeError(f"{name} is not built yet")

    @property
    def rows(self) -> None:
        raise RuntimeError("rows is not built yet")


class Rows(list):
    """A list with an attribute."""


@dataclasses.dataclass
class Record(collections.OrderedDict):
    last: torch.Tensor

    def __post_init__(self) -> None:
        self["last"], self.cache = self.last, self.last * 2


def test_state_is_found_in_any_nesting(device: str) -> None:
    weight = nn.Parameter(torch.ones(3, device=device))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    state = optimizer.state[weight]
    made = [torch.full((100 + index,), float(index), device=device) for index in range(8)]
    state["deque"], state["record"], state["deep"] = collections.deque([made[0]]), History(made[1]), {"a": [(made[2],)]}
    state["plain"], state["set"] = types.SimpleNamespace(inner=made[3]), {made[4]}
    state["slots"], state["rows"] = Slower(), Rows([made[5]])
    state["slots"].inner, state["rows"].mean = made[6], made[7]
    Slotted.rows.__set__(state["slots"], Rows())
    state["mapping"], state["both"] = collections.UserDict(rows=made[0]), Record(made[1])
    made.append(state["both"].cache)
    state["parameter"], state["raw"], state["numbers"] = (
        types.SimpleNamespace(of=weight),
        memoryview(bytearray(9)),
        range(10**9),
    )
    state["optimizer"], state["module"] = optimizer, nn.Linear(2, 2, device=device)
    chain = state["chain"] = types.SimpleNamespace()
    for _ in range(3000):
        chain.next = types.SimpleNamespace(before=chain)
        chain = chain.next
    state["circle"] = [state["deep"]]
    state["deep"]["circle"] = state["circle"]
    portraits = [Portrait.of(tensor) for tensor in made]
    with offloaded(optimizer, device=device) as off:
        assert off.report.nbytes == 4 * (sum(range(100, 108)) + 101)
        claimed = [id(claim.tensor) for claim in OptimizerStrategy(optimizer).claims()]
        assert len(claimed) == len(set(claimed))
        with pytest.raises(OffloadedTensorError, match=r"param 0\.deque\.0"):
            made[0].sum()
    for portrait in portraits:
        portrait.check()


@pytest.mark.parametrize("listed", [False, True])
def test_one_optimizer_over_two_targets_with_equal_names(device: str, listed: bool) -> None:
    actor, critic = nn.Linear(3, 3, device=device), nn.Linear(3, 3, device=device)
    optimizer = torch.optim.AdamW([*actor.parameters(), *critic.parameters()])
    (actor(torch.ones(1, 3, device=device)) + critic(torch.ones(1, 3, device=device))).sum().backward()
    optimizer.step()
    targets = ([actor, critic], optimizer) if listed else (actor, critic, optimizer)
    portraits = [Portrait.of(value) for state in optimizer.state.values() for value in state.values()]
    off = Offloader(*targets, device=device)
    for _ in range(2):
        off.offload()
        off.reload()
    with offloaded(*targets, device=device):
        actor.weight = nn.Parameter(torch.zeros(3, 3, device=device))
        with pytest.raises(MirrorMismatchError):
            off.reload()
        off.close()
    for portrait in portraits:
        portrait.check()


def test_host_tensors_of_an_optimizer_are_not_worth_a_word() -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    steps = [state["step"] for state in optimizer.state.values()]
    off = Offloader(optimizer, device="cuda")
    assert off.offload().left == ()
    assert [state["step"] for state in optimizer.state.values()] == steps
    assert all(type(step) is torch.Tensor and step == 1 for step in steps)
    off.reload()
