"""The checker against a plain model: free the storage for real and look who noticed."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from hypothesis import event, given
from hypothesis import strategies as st
from torch import nn

from torch_offload import OffloadedTensorError, Offloader, SharedStorageError, offloaded, storage, testing
from torch_offload.storage import Holding, check_exclusive, is_exclusive
from torch_offload.tensors import byte_view, storage_of


def noticed(tensor: torch.Tensor, others: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The other tensor objects whose memory goes away when the tensor's storage is freed, and those whose gradient's does."""
    held = storage_of(tensor)
    nbytes, content = held.nbytes(), byte_view(held).clone()
    held.resize_(0)
    emptied = [other for other in others if storage_of(other).nbytes() == 0 and storage_of(other) is held]
    leaves = [other for other in others if any(other.grad is each for each in emptied)]
    held.resize_(nbytes)
    byte_view(held).copy_(content)
    return [other for other in emptied if other is not tensor], leaves


@given(data=st.data())
def test_the_verdict_is_what_freeing_shows(device: str, data: st.DataObject) -> None:
    specimen = data.draw(testing.specimens(device))
    everything = [*specimen.tensors(), *specimen.aliases]
    tensor = data.draw(st.sampled_from(everything)) if everything else None
    if tensor is None or storage_of(tensor).nbytes() == 0:
        return
    known = data.draw(st.one_of(st.just(specimen.tensors()), st.lists(st.sampled_from(everything), max_size=4)))
    hurt, leaves = ([each for each in some if not any(each is one for one in known)] for some in noticed(tensor, everything))
    owned = {id(each) for each in [*specimen.module.parameters(), *specimen.module.buffers()]}
    wanted = Holding.ALIASED if hurt else Holding.EXCLUSIVE
    if leaves or any(id(other) in owned for other in hurt):
        wanted = Holding.IN_USE
    event(f"{wanted.value}{' by a leaf' if leaves else ''}")
    del hurt, leaves
    for _ in range(2):  # the second time from what was remembered
        verdict = is_exclusive(tensor, known)
        assert verdict.holding is wanted, f"{verdict} and not {wanted}"
        assert bool(verdict) == (wanted is Holding.EXCLUSIVE)
        assert bool(verdict.reasons) == (wanted is not Holding.EXCLUSIVE)
        del verdict  # it refers to the aliases, which makes one of a base that only its views held


@given(data=st.data())
def test_a_holder_without_a_name_is_held(device: str, data: st.DataObject) -> None:
    """The model: drop every Python name, and see whether the storage lives on."""
    weight = torch.randn(4, 4, device=device)
    inputs = torch.ones(2, 4, device=device, requires_grad=True)
    builds = [
        lambda w: nn.functional.linear(inputs, w),
        lambda w: nn.functional.linear(inputs, w).sum() + nn.functional.linear(inputs, w).mean(),
        lambda w: w + 1,
        lambda w: inputs + w[:2],
    ]
    build = data.draw(st.sampled_from(builds))
    kept = build(weight)
    verdict = is_exclusive(weight)
    reference = weakref.ref(storage_of(weight))
    event(str(verdict.holding.value))
    seen_by_count = verdict.holding is Holding.HELD
    del weight, verdict
    gc.collect()
    assert (reference() is not None) == seen_by_count
    del kept


def test_a_backward_that_failed_is_no_holder(device: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(device)
    hook = model[1].bias.register_hook(lambda _: 1 / 0)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            model(torch.ones(2, 4, device=device, requires_grad=True)).sum().backward()
        with torch.no_grad(), offloaded(model, device=device) as off:
            assert not off.report.left
    hook.remove()
    model(torch.ones(2, 4, device=device)).sum().backward()


TIES = {
    "by object": lambda w: w,
    "by .data": lambda w: w.data,
    "by detach": lambda w: w.detach(),
    "by view": lambda w: w.view(-1),
    "by a slice": lambda w: w.detach()[1:],
    "as bytes": lambda w: w.detach().view(torch.uint8),
    "expanded": lambda w: w.detach()[None].expand(2, -1, -1),
    "second Parameter": lambda w: nn.Parameter(w.data),
}


@pytest.mark.parametrize("tie", TIES)
def test_ties(device: str, tie: str) -> None:
    weight = nn.Parameter(torch.randn(3, 3, device=device))
    other = TIES[tie](weight)
    expected = Holding.EXCLUSIVE if other is weight else Holding.ALIASED
    assert is_exclusive(weight).holding is expected
    assert is_exclusive(weight, known=[other])
    assert storage_of(other) is storage_of(weight)
    del other
    assert is_exclusive(weight)


def test_a_padded_shard_that_nobody_else_holds_is_exclusive(device: str) -> None:
    shard = torch.empty(16, device=device)[:13]
    assert is_exclusive(shard)
    whole = shard._base
    verdict = is_exclusive(shard)
    assert verdict.holding is Holding.ALIASED
    assert verdict.aliases[0] is whole


def test_a_parameter_of_a_module_outside_is_in_use_and_named(device: str) -> None:
    inside, outside = nn.Linear(2, 2, device=device), nn.Linear(2, 2, device=device)
    outside.weight = nn.Parameter(inside.weight.data)
    verdict = is_exclusive(inside.weight)
    assert verdict.holding is Holding.IN_USE
    assert "'Linear.weight'" in str(verdict)
    with pytest.raises(SharedStorageError, match=r"\(2, 2\).*Linear\.weight.*target"):
        check_exclusive(inside.weight)
    check_exclusive(inside.weight, known=[outside.weight])


def test_memory_that_is_not_torchs_own_is_not_resizable() -> None:
    backing = bytearray(16)
    numpy = pytest.importorskip("numpy")
    for tensor in (
        torch.frombuffer(backing, dtype=torch.float32),
        torch.from_numpy(numpy.ones(3)),
        torch.from_dlpack(torch.ones(3)),
        torch.ones(3).share_memory_(),
    ):
        verdict = is_exclusive(tensor)
        assert verdict.holding is Holding.NOT_RESIZABLE
        assert verdict.reasons


def test_a_graph_waiting_for_the_collector_is_no_holder(device: str) -> None:
    weight = nn.Parameter(torch.randn(4, 4, device=device))
    inputs = torch.ones(2, 4, device=device, requires_grad=True)
    gc.disable()
    try:
        for _ in range(3):  # what was found of one graph says nothing of the next
            cycle = [nn.functional.linear(inputs, weight)]
            cycle.append(cycle)
            assert is_exclusive(weight).holding is Holding.HELD
            del cycle
            assert is_exclusive(weight)
    finally:
        gc.enable()


def test_without_the_private_counter_nothing_is_called_exclusive(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = nn.Parameter(torch.randn(4, 4, device=device))
    monkeypatch.delattr(torch._C, "_storage_Use_Count")
    verdict = is_exclusive(weight)
    assert verdict.holding is Holding.HELD
    assert "does not count" in str(verdict)
    alias = weight.detach()
    assert [each is alias for each in is_exclusive(weight).aliases] == [True]


def test_the_heap_is_looked_at_only_when_the_number_is_new(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []
    look = storage._look
    monkeypatch.setattr(storage, "_look", lambda cases: (looks.append(1), look(cases)))
    weight = nn.Parameter(torch.randn(4, 4, device=device))
    assert is_exclusive(weight)
    assert not looks
    alias = weight.detach()
    for _ in range(3):
        assert is_exclusive(weight).holding is Holding.ALIASED
    assert len(looks) == 1
    alias = weight.detach()  # the number is the same, the holder is another  # noqa: F841
    assert is_exclusive(weight).holding is Holding.ALIASED
    assert len(looks) == 2


def test_what_was_found_of_dead_storages_is_forgotten(device: str) -> None:
    for _ in range(5):
        weight = nn.Parameter(torch.randn(4, 4, device=device))
        alias = weight.detach()
        assert is_exclusive(weight).holding is Holding.ALIASED
        assert len([past for past in storage._seen.values() if past.storage() is None]) <= 1
        assert any(past.storage() is storage_of(weight) for past in storage._seen.values())
        del weight, alias


def test_looking_asks_no_foreign_class_and_keeps_nothing_alive(device: str) -> None:
    class Rude:
        @property
        def __class__(self) -> type:
            raise AssertionError("asked")

    rude = Rude()
    weight = nn.Parameter(torch.randn(4, 4, device=device))
    alias = weight.detach()
    assert is_exclusive(weight).holding is Holding.ALIASED
    reference = weakref.ref(storage_of(weight))
    del weight, alias
    assert reference() is None
    del rude


@given(data=st.data())
def test_the_four_verbs(device: str, data: st.DataObject) -> None:
    nbytes = data.draw(st.integers(1, 10_000))
    tensor = torch.randint(0, 255, (nbytes,), dtype=torch.uint8, device=device)
    held, content, version = storage_of(tensor), tensor.cpu(), tensor._version
    storage.give_up(held)
    assert held.nbytes() == 0
    staged = storage.stage(held, nbytes)
    assert staged.shape == (nbytes,)
    assert staged.dtype is torch.uint8
    assert staged.device == tensor.device
    storage.abandon(held)
    assert held.nbytes() == 0
    storage.stage(held, nbytes).copy_(content)
    storage.publish(held)
    assert torch.equal(tensor.cpu(), content)
    assert tensor._version == version


def test_a_remembered_alias_that_was_re_pointed_is_looked_for_again() -> None:
    weight = nn.Parameter(torch.ones(3))
    holder, alias = nn.ParameterList([weight]), weight.detach()
    with offloaded(holder, device="cpu") as off:
        assert off.report.left == ()
    alias.data = torch.zeros(3)
    held = nn.functional.linear(torch.ones(2, 3, requires_grad=True), weight.data[None])
    with offloaded(holder, device="cpu") as off:
        assert [row.name for row in off.report.left] == ["ParameterList.0"]
        assert type(alias) is torch.Tensor
    held.sum().backward()


def test_an_alias_that_no_module_owns_any_more_is_an_alias(device: str) -> None:
    model, other = nn.Linear(3, 3, device=device), nn.Module()
    alias = model.weight.detach()
    other.register_buffer("alias", alias)
    off = Offloader(model, device=device)
    for _ in range(2):
        assert ["'Module.alias'" in row.reason for row in off.offload().left] == [True]
        off.reload()
    del other.alias
    assert off.offload().left == ()
    with pytest.raises(OffloadedTensorError):
        alias.sum()
    off.reload()


def test_a_stale_view_somewhere_in_the_process_is_passed_over(device: str) -> None:
    root = torch.ones(3, requires_grad=True) * 1
    stale = root.unbind(0)
    root.mul_(2)
    with pytest.raises(RuntimeError, match="Output 0 of Unbind"):
        stale[0].is_leaf  # noqa: B018
    model = nn.Linear(4, 4, device=device)
    alias = model.weight.view(-1)
    assert is_exclusive(model.weight).aliases[0] is alias
