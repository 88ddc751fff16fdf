"""Gradients that views, flat buffers and leaves outside share: freed with a barrier, or left and named."""

from __future__ import annotations

import gc
import warnings

import pytest
import torch
from torch import nn

from torch_offload import Claim, OffloadedTensorError, Offloader, PerParameterStrategy, Strategy, offloaded, serving, storage
from torch_offload.tensors import storage_of
from torch_offload.testing import is_away


def looks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One item for each look at the heap."""
    found: list[int] = []
    look = storage._look
    monkeypatch.setattr(storage, "_look", lambda cases: (found.append(1), look(cases)))
    return found


@pytest.mark.parametrize("build_first", [False, True])
def test_a_backward_between_prepare_and_commit_is_refused(device: str, build_first: bool) -> None:
    model, x = nn.Linear(3, 3, bias=False, device=device), torch.ones(1, 3, device=device)
    model(x).sum().backward()
    loss = model(x).sum() if build_first else None
    off = Offloader(model, shared="free", device=device)
    for finish in ("abandon", "commit"):
        prepared = off.prepare("grads")
        with pytest.raises(OffloadedTensorError, match=r"accumulate into 'Linear\.weight\.grad', which a prepared"):
            (model(x).sum() if loss is None else loss).backward(retain_graph=True)
        getattr(prepared, finish)()
    off.reload()
    assert model.weight.grad.eq(1).all()
    (model(x).sum() if loss is None else loss).backward()
    assert model.weight.grad.eq(2).all()


def test_hooks_are_set_before_a_class_could_be_asked(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(3, 3, device=device), nn.Linear(3, 3, device=device))
    model(torch.ones(1, 3, device=device)).sum().backward()
    asked: list[object] = []
    is_metadata = serving.is_metadata
    monkeypatch.setattr(serving, "is_metadata", lambda func, args: (asked.append(func), is_metadata(func, args))[1])
    off = Offloader(model, device=device)
    off.offload()
    assert asked == []
    assert model[0].weight.is_leaf  # asks
    assert len(asked) == 1
    off.reload()


def test_what_a_refused_backward_has_added_can_be_dropped(device: str) -> None:
    first, last = (nn.Linear(3, 3, bias=False, device=device) for _ in range(2))

    def step() -> None:
        last(first(torch.ones(1, 3, device=device))).sum().backward()

    step()
    wanted = [first.weight.grad.clone(), last.weight.grad.clone()]
    with offloaded(first, components=["grads"], device=device), pytest.raises(OffloadedTensorError, match="accumulate into"):
        step()
    assert last.weight.grad.eq(2 * wanted[1]).all()
    for model in (first, last):
        model.zero_grad()
    step()
    assert all(map(torch.equal, [first.weight.grad, last.weight.grad], wanted))


def test_another_transition_leaves_the_hooks_that_are_needed(device: str) -> None:
    model, other = (nn.Linear(3, 3, bias=False, device=device) for _ in range(2))
    model(torch.ones(1, 3, device=device)).sum().backward()
    with offloaded(model, components=["grads"], device=device):
        with offloaded(other, device=device):
            pass
        with pytest.raises(OffloadedTensorError, match=r"accumulate into 'Linear\.weight\.grad'"):
            model(torch.ones(1, 3, device=device)).sum().backward()
    assert model.weight.grad.eq(1).all()


def test_a_leaf_outside_that_was_remembered_may_die(device: str) -> None:
    model, other = (nn.Linear(3, 3, bias=False, device=device) for _ in range(2))
    model(torch.ones(1, 3, device=device)).sum().backward()
    other.weight._grad = model.weight.grad
    alias = model.weight.grad.view(-1)  # to be remembered with it
    off = Offloader(model, device=device)
    assert [row.name for row in off.offload().left] == ["Linear.weight.grad"]
    off.reload()
    del other
    gc.collect()
    assert not off.offload().left
    assert is_away(alias)
    off.reload()
    assert alias.eq(1).all()


def test_a_gradient_that_a_leaf_outside_has_too_is_left(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, other = (nn.Linear(3, 3, bias=False, device=device) for _ in range(2))
    model(torch.ones(1, 3, device=device)).sum().backward()
    other.weight._grad = model.weight.grad  # the same tensor object
    off, seen = Offloader(model, device=device), looks(monkeypatch)
    for _ in range(2):
        (row,) = off.offload().left
        assert row.name == "Linear.weight.grad"
        assert "the gradient of a Parameter" in row.reason
        other(torch.ones(1, 3, device=device)).sum().backward()
        off.reload()
    assert model.weight.grad.eq(3).all()
    assert len(seen) == 1
    with (
        offloaded(PerParameterStrategy(model, shared="free"), device=device),
        pytest.raises(OffloadedTensorError, match=r"accumulate into 'Linear\.weight\.grad'"),
    ):
        other(torch.ones(1, 3, device=device)).sum().backward()
    other(torch.ones(1, 3, device=device)).sum().backward()
    assert model.weight.grad.eq(4).all()


class Flat(Strategy):
    """A flat gradient buffer, whose views the strategy calls aliases."""

    components = ("grads",)

    def claims(self):
        yield Claim(tensor=self.target.flat, name="flat", component="grads")

    def aliases(self):
        return [parameter.grad for parameter in self.target.parameters()]


def test_views_of_a_flat_buffer_that_are_gradients_get_their_barriers(device: str) -> None:
    model = nn.Linear(3, 3, device=device)
    model.flat = torch.zeros(12, device=device)
    model.weight.grad, model.bias.grad = model.flat[:9].view(3, 3), model.flat[9:]
    with offloaded(Flat(model), device=device) as off:  # whose parameters nobody claims
        assert [row.name for row in off.report.left] == ["Linear.flat"]
        model(torch.ones(1, 3, device=device)).sum().backward()
    assert model.flat.eq(1).all()
    with offloaded(Flat(model), model, components=["grads"], device=device) as off:
        assert off.report.left == ()
        with pytest.raises(OffloadedTensorError, match="accumulate into"):
            model(torch.ones(1, 3, device=device)).sum().backward()
    model(torch.ones(1, 3, device=device)).sum().backward()
    assert model.flat.eq(2).all()


def test_views_that_are_known_cost_no_look(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(3, 3, device=device)
    model.register_buffer("flat", torch.zeros(24, device=device))
    model.register_buffer("whole", model.flat.view(4, 6))
    model.register_buffer("part", model.whole[1:])
    model.register_buffer("detached", model.flat.detach()[2:])
    model.weight.grad, model.bias.grad = model.flat[:9].view(3, 3), model.flat[9:12]
    seen = looks(monkeypatch)
    for _ in range(2):
        with offloaded(model, device=device) as off:
            assert off.report.left == ()
    del model.part, model.detached
    kept = model.weight.grad.view(-1)
    for _ in range(3):
        with offloaded(model, device=device) as off:
            assert off.report.left == ()
    assert len(seen) == 1  # for the view that is kept
    del kept


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
def test_a_gradient_with_a_graph_that_a_leaf_outside_has_too_is_left(device: str) -> None:
    model, other = (nn.Linear(3, 3, bias=False, device=device) for _ in range(2))
    model(torch.ones(1, 3, device=device)).pow(2).sum().backward(create_graph=True)
    other.weight.grad = model.weight.grad
    off = Offloader(model, device=device)
    assert [row.name for row in off.offload("grads").left] == ["Linear.weight.grad"]
    with torch.no_grad():
        other.weight.grad.add_(1)
    off.reload()
    model.weight.grad = other.weight.grad = None


def test_a_leaf_in_a_sparse_layout_with_a_strided_gradient(device: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        weight = nn.Parameter(torch.eye(3, device=device).to_sparse_csr())
    model = nn.ParameterList([weight])

    class Strided(torch.autograd.Function):
        @staticmethod
        def forward(ctx, weight):  # noqa: ARG004
            return torch.ones(1, device=device)

        @staticmethod
        def backward(ctx, incoming):  # noqa: ARG004
            return torch.ones(3, 3, device=device)

    Strided.apply(weight).sum().backward()
    with offloaded(model, device=device) as off:
        assert not off.report.left
        assert is_away(weight)
        assert is_away(weight.grad)
    assert weight.grad.eq(1).all()


def test_a_remembered_alias_that_became_a_gradient_is_looked_for_again(device: str) -> None:
    model = nn.Linear(3, 3, bias=False, device=device)
    alias = model.weight.detach()
    off = Offloader(model, device=device)
    assert off.offload().left == ()
    off.reload()
    leaf = nn.Parameter(torch.ones(3, 3, device=device))
    leaf.grad = alias
    assert [row.name for row in off.offload().left] == ["Linear.weight"]
    leaf.sum().backward()
    off.reload()


def test_a_buffer_that_is_the_gradient_of_something_outside_is_left(device: str) -> None:
    model = nn.Module()
    model.register_buffer("sum", torch.zeros(3, device=device))
    leaf = nn.Parameter(torch.ones(3, device=device))
    leaf.grad = model.sum
    hidden = leaf * 2
    hidden.retain_grad()
    hidden.sum().backward()
    model.register_buffer("kept", hidden.grad)
    with offloaded(model, device=device) as off:
        assert {row.name for row in off.report.left} == {"Module.sum", "Module.kept"}
        leaf.sum().backward()
    assert model.sum.eq(3).all()


def test_a_gradient_buffer_that_a_module_outside_shares_is_left(device: str) -> None:
    inside, outside = nn.Linear(2, 2, bias=False, device=device), nn.Linear(2, 2, bias=False, device=device)
    flat = torch.zeros(8, device=device)
    inside.weight.grad, outside.weight.grad = flat[:4].view(2, 2), flat[4:].view(2, 2)
    del flat
    with offloaded(inside, device=device) as off:
        (row,) = off.report.left
        assert row.name == "Linear.weight.grad"
        assert "the gradient of a Parameter" in row.reason
        outside(torch.ones(1, 2, device=device)).sum().backward()
    assert outside.weight.grad.sum() != 0


def test_a_frozen_parameter_that_is_trained_again_while_its_gradient_is_away(device: str) -> None:
    model = nn.Linear(2, 2, device=device)
    model(torch.ones(1, 2, device=device)).sum().backward()
    model.requires_grad_(False)
    off = Offloader(model, device=device)
    off.offload("grads")
    assert not model.weight.requires_grad
    model.requires_grad_(True)
    with pytest.raises(OffloadedTensorError, match=r"Linear\.\w+\.grad"):
        model(torch.ones(1, 2, device=device)).sum().backward()
    off.reload()
    assert model.weight._backward_hooks is None


def test_a_gradient_that_was_replaced_leaves_no_hook(device: str) -> None:
    model = nn.Linear(2, 2, bias=False, device=device)
    model(torch.ones(1, 2, device=device)).sum().backward()
    off = Offloader(model, device=device)
    off.offload("grads")
    kept, model.weight.grad = model.weight.grad, None
    off.reload()
    assert model.weight._backward_hooks is None
    with pytest.raises(OffloadedTensorError, match=r"Linear\.weight\.grad"):
        kept.sum()
    storage_of(kept)
    from torch_offload import reload

    reload(kept)
    assert kept.eq(1).all()


def test_what_gradients_left_is_given_up_when_they_stay_away_from_an_offload(device: str) -> None:
    model = nn.Linear(512, 512, bias=False, device=device)
    model(torch.ones(1, 512, device=device)).sum().backward()
    off = Offloader(model, device=device)
    off.offload()
    off.reload()
    model.zero_grad()
    off.offload("params")
    off.reload()
    assert off.host_nbytes == 2 * 512 * 512 * 4  # they may come again
    off.offload()
    assert off.host_nbytes == 512 * 512 * 4
    off.reload()
