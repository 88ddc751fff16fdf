"""Snapshots: exact copies from wherever the bytes are, to wherever they belong."""

from __future__ import annotations

import gc
from collections.abc import Callable

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from test_parts import Pair
from torch import nn

from torch_offload import (
    IntegrityError,
    MirrorMismatchError,
    OffloadedTensorError,
    Offloader,
    OptimizerStrategy,
    PerParameterStrategy,
    TransitionError,
    offloaded,
    snapshot,
    testing,
)
from torch_offload.host_memory import PAGE
from torch_offload.tensors import byte_view, storage_of
from torch_offload.testing import Seam, is_away, specimens


def contents(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [byte_view(storage_of(each)).cpu().clone() for each in tensors]


def scramble(tensors: list[torch.Tensor]) -> None:
    for each in tensors:
        byte_view(storage_of(each)).fill_(171)


@given(data=st.data())
def test_what_was_kept_comes_back_from_and_to_wherever_it_is(device: str, data: st.DataObject) -> None:
    specimen = data.draw(specimens(device))
    tensors = [*specimen.module.parameters(), *specimen.module.buffers()]
    before = contents(tensors)
    off = Offloader(specimen.module, device=device)
    if data.draw(st.booleans(), label="offloaded when made"):
        off.offload()
    kept = snapshot(specimen.module, device=device)
    off.reload()
    assert kept.nbytes == sum({storage_of(each)._cdata: storage_of(each).nbytes() for each in tensors}.values())
    other = specimen.twin() if data.draw(st.booleans(), label="to another") else specimen
    into = [*other.module.parameters(), *other.module.buffers()]
    scramble(into)
    back = Offloader(other.module, device=device)
    if data.draw(st.booleans(), label="offloaded when copied"):
        back.offload()
    kept.copy_to(other.module, device=device)
    back.reload()
    for one, now, tensor in zip(before, contents(into), into, strict=True):
        if tensor.is_contiguous() and tensor.numel() * tensor.element_size() == len(one):
            assert torch.equal(one, now)  # nothing else lies there


def test_several_versions_hold_their_bytes_once_each(device: str) -> None:
    model = nn.Sequential(*(nn.Linear(64, 64, device=device) for _ in range(4)))
    nbytes = sum(each.nbytes for each in model.parameters())
    kept = []
    for version in range(3):
        with torch.no_grad():
            for each in model.parameters():
                each.fill_(version)
        kept.append(snapshot(model, device=device))
        assert nbytes <= kept[-1].host_nbytes <= nbytes + 2 * PAGE
    for version in (1, 0, 2):
        kept[version].copy_to(model, device=device)
        assert all(bool((each == version).all()) for each in model.parameters())
    kept[0].close()
    assert kept[0].host_nbytes == 0
    with pytest.raises(TransitionError, match=r"closed.*snapshot\(\)"):
        kept[0].copy_to(model, device=device)


def test_only_what_was_claimed_is_written(device: str) -> None:
    """A parameter that is a slice leaves the rest of its storage alone."""
    base = torch.zeros(10, device=device)
    model = nn.ParameterList([nn.Parameter(base[2:5])])
    kept = snapshot(model, device=device)
    for away in (False, True):
        base.fill_(1)
        off = Offloader(model, device=device)
        if away:
            off.offload()
        kept.copy_to(model, device=device)
        off.reload()
        assert base.tolist() == [1, 1, 0, 0, 0, 1, 1, 1, 1, 1]


def test_an_optimizer_with_its_host_tensors(device: str) -> None:
    model = nn.Linear(4, 4, device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 4, device=device)).sum().backward()
        optimizer.step()

    step()
    kept = snapshot(model, optimizer, device=device)
    step()
    wanted = [each.detach().cpu().clone() for each in model.parameters()]
    step()
    kept.copy_to(model, optimizer, device=device)
    step()
    assert all(torch.equal(each.cpu(), value) for each, value in zip(model.parameters(), wanted, strict=True))


@pytest.mark.parametrize("names", [("actor", "critic"), (None, None)])
def test_models_with_equal_names_keep_their_own_state_in_one_optimizer(
    device: str, names: tuple[str | None, str | None]
) -> None:
    models = [nn.Linear(2, 1, bias=False, device=device) for _ in range(2)]
    actor, critic = models

    def warmed(*order: tuple[nn.Module, float]) -> torch.optim.Optimizer:
        optimizer = torch.optim.Adam([each.weight for each in models])
        for model, scale in order:
            (scale * model(torch.ones(1, 2, device=device))).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return optimizer

    def state(optimizer: torch.optim.Optimizer) -> list[list[list[float]]]:
        return [optimizer.state[each.weight]["exp_avg"].tolist() for each in models]

    def targets(optimizer: torch.optim.Optimizer) -> list[object]:
        return [*(PerParameterStrategy(each, name=name) for each, name in zip(models, names, strict=True)), optimizer]

    first = warmed((critic, 100.0), (actor, 1.0))
    wanted = state(first)
    kept = snapshot(*targets(first), device=device)
    other = warmed((actor, 1.0), (critic, 1.0))
    assert state(other) != wanted
    kept.copy_to(*targets(other), device=device)
    assert state(other) == wanted
    kept.copy_to(*models, other, device=device)  # names are for messages
    if names[0]:
        with offloaded(*targets(other), device=device):
            for model, name in zip(models, names, strict=True):
                with pytest.raises(OffloadedTensorError, match=rf"'Adam\.{name}\.weight\.exp_avg'"):
                    other.state[model.weight]["exp_avg"] + 1


def test_parameters_of_equal_names_keep_their_own_state(device: str) -> None:
    weights = [nn.Parameter(torch.ones(2, device=device)) for _ in range(2)]

    def warmed(*order: int) -> torch.optim.Optimizer:
        optimizer = torch.optim.Adam([{"params": [("weight", each)]} for each in weights])
        for index in order:
            (weights[index] * (1 + 9 * index)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return optimizer

    def state(optimizer: torch.optim.Optimizer) -> list[list[float]]:
        return [optimizer.state[each]["exp_avg"].tolist() for each in weights]

    first, other = warmed(1, 0), warmed(0, 0, 1)
    assert state(first) != state(other)
    snapshot(first, device=device).copy_to(other, device=device)
    assert state(first) == state(other)


def test_what_does_not_fit_is_named_and_nothing_written(device: str) -> None:
    model = nn.Linear(4, 4, device=device)
    optimizer = torch.optim.AdamW(model.parameters())
    kept = snapshot(model, device=device)
    wanted = [each.detach().clone() for each in model.parameters()]
    cases = [
        (
            [nn.Linear(4, 5, device=device)],
            r"'weight' was torch\.float32 of shape \(4, 4\).*it is torch\.float32 of shape \(5, 4\)",
        ),
        ([nn.Linear(4, 4, dtype=torch.float64, device=device)], r"'weight' was torch\.float32 .*torch\.float64"),
        ([nn.Linear(4, 4, bias=False, device=device)], r"only the snapshot has 'bias'"),
        ([], "only the snapshot has 'bias', 'weight'"),
        ([nn.Sequential(model)], "only the snapshot has 'bias', 'weight'"),
    ]
    for targets, message in cases:
        with pytest.raises(MirrorMismatchError, match=message):
            kept.copy_to(*targets, device=device)
    kept.copy_to(model, OptimizerStrategy(optimizer), device=device)
    tied = nn.ParameterList([model.weight, model.weight])
    apart = nn.ParameterList([nn.Parameter(torch.full((4, 4), 7.0, device=device)) for _ in range(2)])
    with pytest.raises(MirrorMismatchError, match=r"'0', '1' shared memory when"):
        snapshot(tied, device=device).copy_to(apart, device=device)
    for away in (False, True):
        off = Offloader(tied, device=device)
        if away:
            off.offload()
        with pytest.raises(MirrorMismatchError, match=r"'0', '1' share memory in the target"):
            snapshot(apart, device=device).copy_to(tied, device=device)
        off.reload()
    with pytest.raises(ValueError, match=r"no target has a component 'optimizer'"):
        snapshot(model, components=["optimizer"], device=device)
    assert all(map(torch.equal, model.parameters(), wanted))  # tied to it as well


def test_components_are_chosen(device: str) -> None:
    model = nn.BatchNorm1d(4, device=device)
    model(torch.ones(3, 4, device=device)).sum().backward()
    assert snapshot(model, device=device).nbytes == 4 * 4 * 4 + 8  # weight, bias, mean, variance, and a count
    assert snapshot(model, components="params", device=device).nbytes == 2 * 4 * 4
    assert snapshot(model, components=["params", "grads"], device=device).nbytes == 4 * 4 * 4


def test_a_graph_over_the_old_values_raises(device: str) -> None:
    model = nn.Linear(3, 3, device=device)
    kept = snapshot(model, device=device)
    loss = model(torch.ones(1, 3, device=device, requires_grad=True)).sum()
    kept.copy_to(model, device=device)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_bytes_that_arrive_otherwise_are_noticed(device: str) -> None:
    model = nn.Linear(3, 3, device=device)
    kept = snapshot(model, device=device)
    faulty = testing.link(corrupt=lambda index, there: there[:1].add_(1) if index == 0 else None)
    with faulty, pytest.raises(IntegrityError, match=r"'weight'\. Call copy_to\(\) again"):
        kept.copy_to(model, device=device)
    kept.copy_to(model, device=device)


def test_a_discarded_gradient_cannot_be_copied_into(device: str) -> None:
    model = nn.Linear(3, 3, device=device)
    model(torch.ones(1, 3, device=device)).sum().backward()
    kept = snapshot(model, components=["params", "grads"], device=device)
    refused = pytest.raises(TransitionError, match=r"weight\.grad.*discarded.*reload\(\)")
    with offloaded(model, grads="discard", device=device), refused:
        kept.copy_to(model, device=device)


def test_a_snapshot_outlives_its_model_and_dies_with_its_name(device: str) -> None:
    model = nn.Linear(300, 300, device=device)
    kept = snapshot(model, device=device)
    wanted = model.weight.detach().cpu().clone()
    del model
    gc.collect()
    other = nn.Linear(300, 300, device=device)
    with offloaded(other, device=device):
        kept.copy_to(other, device=device)
        assert is_away(other.weight)
    assert torch.equal(other.weight.cpu(), wanted)


@pytest.mark.parametrize("seam", [Seam.HOST_ALLOCATION, Seam.COPY, Seam.CHECKSUM, Seam.SYNCHRONISE])
@pytest.mark.parametrize("away", [False, True])
def test_a_snapshot_that_fails_changes_nothing(device: str, seam: Seam, away: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4, device=device), nn.Linear(4, 4, device=device))
    wanted = contents(list(model.parameters()))
    off = Offloader(model, device=device)
    if away:
        off.offload()
    fired = 0
    for at in range(1, 20):
        with testing.failing(seam, at) as fault:
            try:
                kept = snapshot(model, device=device)
            except testing.InjectedError:
                fired += 1
        if not fault.fired:
            break
    assert fired > 0 or (away and seam is Seam.COPY)
    off.reload()
    assert all(map(torch.equal, contents(list(model.parameters())), wanted))
    scramble(list(model.parameters()))
    for at in range(1, 20):
        with testing.failing(seam, at) as fault:
            try:
                kept.copy_to(model, device=device)
            except testing.InjectedError:
                continue
        if not fault.fired:
            break
    assert all(map(torch.equal, contents(list(model.parameters())), wanted))
    off.close()


def two_views(device: str) -> nn.Module:
    base = torch.zeros(8, device=device)
    return nn.ParameterList([nn.Parameter(base[:4]), nn.Parameter(base[4:])])


GEOMETRIES: dict[str, Callable[[str], nn.Module]] = {
    "contiguous": lambda device: nn.Linear(3, 3, bias=False, device=device),
    "channels last": lambda device: nn.Conv2d(3, 3, 2, bias=False, device=device).to(memory_format=torch.channels_last),
    "two views": two_views,
}


@pytest.mark.parametrize("away", [False, True])
@pytest.mark.parametrize("which", GEOMETRIES)
def test_a_snapshot_that_went_bad_is_noticed(device: str, which: str, away: bool) -> None:
    model = GEOMETRIES[which](device)
    kept, another = snapshot(model, device=device), snapshot(model, device=device)
    wanted = contents(list(model.parameters()))
    scramble(list(model.parameters()))
    scrambled = contents(list(model.parameters()))
    kept._copies[0].slot.bytes()[:1] += 1
    off = Offloader(model, device=device)
    if away:
        off.offload()
    with pytest.raises(IntegrityError, match=r"'(weight|0)'.*snapshot"):
        kept.copy_to(model, device=device)
    off.reload()
    if away or which != "contiguous":  # that is compared after it has arrived
        assert all(map(torch.equal, contents(list(model.parameters())), scrambled))
    another.copy_to(model, device=device)
    assert all(map(torch.equal, contents(list(model.parameters())), wanted))
    off.close()


def test_a_mirror_that_could_not_be_written_can_be_reloaded(device: str) -> None:
    model = nn.Linear(3, 3, bias=False, device=device)
    kept = snapshot(model, device=device)
    scramble([model.weight])
    off = Offloader(model, device=device)
    off.offload()
    with testing.failing(Seam.COPY, 1), pytest.raises(testing.InjectedError):
        kept.copy_to(model, device=device)
    off.reload()
    assert bool((byte_view(storage_of(model.weight)) == 171).all())
    off.close()


def test_versions_are_moved(device: str) -> None:
    """That of a whole is another than that of the tensors with the memory, of which it has two here."""
    module = nn.Module()
    module.plain = nn.Parameter(torch.ones(3, device=device))
    module.whole = nn.Parameter(Pair(torch.ones(3, device=device), torch.ones(3, device=device)), requires_grad=False)
    kept, off = snapshot(module, device=device), Offloader(module, device=device)
    inside = module.whole.one
    for away in (False, True):
        before = [each._version for each in (module.plain, module.whole, inside)]
        if away:
            off.offload()
        kept.copy_to(module, device=device)
        off.reload()
        moved = [each._version - was for each, was in zip((module.plain, module.whole, inside), before, strict=True)]
        assert moved == [1, 1 if away else 2, 1]
