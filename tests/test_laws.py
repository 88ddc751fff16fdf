"""The promises, one law per test, over generated modules. Expected bytes are the test's own sums."""

from __future__ import annotations

import gc
import io
import weakref

import pytest
import torch
from hypothesis import event, given, reject
from hypothesis import strategies as st
from torch import nn

from torch_offload import OffloadedTensorError, Offloader, PerParameterStrategy, Residency, offloaded, resident, testing
from torch_offload.host_memory import PAGE
from torch_offload.tensors import byte_view, storage_of
from torch_offload.testing import Portrait, Specimen


def drawn(data: st.DataObject, device: str) -> Specimen:
    specimen = data.draw(testing.specimens(device))
    for kind in specimen.kinds & {"tie", "slice", "alias"}:
        event(kind)
    return specimen


@given(data=st.data())
def test_bytes_and_identity_survive(device: str, data: st.DataObject) -> None:
    specimen = drawn(data, device)
    portraits = [Portrait.of(tensor) for tensor in [*specimen.tensors(), *specimen.aliases]]
    off = Offloader(specimen.module, device=device)
    for _ in range(3):
        off.offload()
        off.reload()
        for portrait in portraits:
            portrait.check()


@given(data=st.data())
def test_exactly_the_distinct_storages_are_freed(device: str, data: st.DataObject) -> None:
    specimen = drawn(data, device)
    wanted = specimen.nbytes()
    report = Offloader(specimen.module, device=device).offload()
    assert report.nbytes == wanted
    assert report.left == ()
    assert specimen.nbytes() == 0
    if device == "cuda" and wanted:
        assert report.measured_nbytes >= wanted
        assert report.exported_nbytes == 0


@given(data=st.data())
def test_host_memory_is_the_sum_of_the_distinct_storages(device: str, data: st.DataObject) -> None:
    specimen = drawn(data, device)
    wanted, storages = specimen.nbytes(), len({storage_of(tensor)._cdata for tensor in specimen.tensors()})
    most = wanted + 16 * storages + len(COMPONENTS) * PAGE
    off = Offloader(specimen.module, device=device)
    for _ in range(3):
        off.offload()
        assert wanted <= off.host_nbytes <= most
        off.reload()
        assert off.host_nbytes <= most
    off.close()
    assert off.host_nbytes == 0


@given(data=st.data())
def test_every_tensor_and_alias_refuses_by_name(device: str, data: st.DataObject) -> None:
    specimen = drawn(data, device)
    claimed = {storage_of(tensor)._cdata for tensor in specimen.tensors() if storage_of(tensor).nbytes()}
    affected = [t for t in [*specimen.tensors(), *specimen.aliases] if storage_of(t)._cdata in claimed]
    off = Offloader(specimen.module, device=device)
    off.offload()
    for tensor in affected:
        for use in (torch.Tensor.sum, torch.Tensor.contiguous, lambda t: t.view(-1), lambda t: t[...], torch.Tensor.data_ptr):
            with pytest.raises(OffloadedTensorError, match=r"'Module\.part.*reload"):
                use(tensor)
        assert "Module.part" in repr(tensor)
    off.reload()
    for tensor in affected:
        assert tensor.clone().shape == tensor.shape


@given(data=st.data())
def test_host_reads_give_the_values(device: str, data: st.DataObject) -> None:
    specimen = drawn(data, device)
    tensors = [*specimen.tensors(), *specimen.aliases]
    wanted = [tensor.detach().cpu().clone() for tensor in tensors]
    with offloaded(specimen.module, device=device):
        for tensor, value in zip(tensors, wanted, strict=True):
            for read in (tensor.detach().cpu(), tensor.detach().to(device), tensor.detach().clone()):
                assert read.dtype == value.dtype
                assert read.shape == value.shape
                torch.testing.assert_close(read.cpu(), value, rtol=0, atol=0, equal_nan=True)  # conj() may change a NaN's sign
            assert storage_of(read) is not storage_of(tensor)


@given(data=st.data())
def test_what_is_saved_while_offloaded_loads_equal(device: str, data: st.DataObject) -> None:
    specimen = drawn(data, device)
    resident_file, offloaded_file = io.BytesIO(), io.BytesIO()
    try:
        torch.save(specimen.module.state_dict(), resident_file)
    except RuntimeError:  # torch does not save one storage under two dtypes
        reject()
    with offloaded(specimen.module, device=device):
        torch.save(specimen.module.state_dict(), offloaded_file)
    assert len(offloaded_file.getvalue()) <= len(resident_file.getvalue()) + 256
    one, other = (torch.load(io.BytesIO(each.getvalue()), map_location="cpu") for each in (resident_file, offloaded_file))
    assert list(one) == list(other)
    for name, tensor in one.items():
        assert torch.equal(_bits(tensor), _bits(other[name]))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat([tensor.detach().resolve_conj().reshape(-1)]).view(torch.uint8)  # cat: strides of one


def overlaps(tensor: torch.Tensor) -> bool:
    """Whether two elements are one: what is written then depends on an order that devices do not promise."""
    places = torch.arange(storage_of(tensor).nbytes() // tensor.element_size())
    places = places.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
    return places.unique().numel() < places.numel()


@given(data=st.data())
def test_loading_while_offloaded_lands_after_the_reload(device: str, data: st.DataObject) -> None:
    specimen = drawn(data, device)
    twin = specimen.twin()  # which is resident when it is loaded
    values = {
        name: torch.arange(tensor.numel()).view(tensor.shape).to(tensor.dtype)
        for name, tensor in specimen.module.state_dict().items()
        if not overlaps(tensor) and not tensor.is_inference()
    }
    with offloaded(specimen.module, device=device):
        specimen.module.load_state_dict(values, strict=False)
    twin.module.load_state_dict(values, strict=False)
    for one, other in zip(specimen.tensors(), twin.tensors(), strict=True):
        assert torch.equal(*(byte_view(storage_of(tensor)) for tensor in (one, other)))


@given(data=st.data())
def test_discarded_gradients_come_back_as_zeros_and_nothing_else_does(device: str, data: st.DataObject) -> None:
    specimen = drawn(data, device)
    kept = {storage_of(t)._cdata for t in [*specimen.module.parameters(), *specimen.module.buffers()]}
    gradients = [p.grad for p in specimen.module.parameters() if p.grad is not None]
    portraits = [Portrait.of(tensor) for tensor in [*specimen.module.parameters(), *specimen.module.buffers()]]
    copied = {each._cdata: each.nbytes() for t in specimen.tensors() if (each := storage_of(t))._cdata in kept}
    with offloaded(specimen.module, device=device, grads="discard") as off:
        assert off.report.copied_nbytes == sum(copied.values())
    for gradient in gradients:
        if storage_of(gradient)._cdata not in kept:
            assert not gradient.any()
    for portrait in portraits:
        portrait.check()


@given(data=st.data())
def test_nothing_is_held(device: str, data: st.DataObject) -> None:
    specimen = drawn(data, device)
    storages = [weakref.ref(storage_of(tensor)) for tensor in specimen.tensors()]
    off = Offloader(specimen.module, device=device)
    if data.draw(st.booleans()):
        off.offload()
    specimen.module = None
    specimen.aliases.clear()
    gc.collect()
    assert all(reference() is None for reference in storages)
    assert off.host_nbytes == 0


def traces(specimen: Specimen, optimizer: torch.optim.Optimizer) -> list[object]:
    """Everything that could be hung on a module, a tensor or an optimizer."""
    found: list[object] = [set(optimizer.state_dict())]
    found += [
        {key: len(value) if hasattr(value, "__len__") else type(value) for key, value in vars(owner).items()}
        for owner in [*specimen.module.modules(), optimizer]
    ]
    found += [(key, list(state)) for key, state in optimizer.state.items()]
    for tensor in [*specimen.tensors(), *specimen.aliases]:
        hooks = [each if each is None else dict(each) for each in (tensor._backward_hooks, tensor._post_accumulate_grad_hooks)]
        found.append((type(tensor), dict(vars(tensor)), hooks))
    return found


@given(data=st.data())
def test_nothing_is_hung_on_anybody_while_resident(device: str, data: st.DataObject) -> None:
    specimen = drawn(data, device)
    trained = [p for p in specimen.module.parameters() if p.requires_grad] or [nn.Parameter(torch.ones(1, device=device))]
    optimizer = torch.optim.SGD(trained, momentum=0.9)
    for parameter in trained:
        optimizer.state[parameter]["momentum_buffer"] = torch.ones_like(parameter)
    off = Offloader(specimen.module, optimizer, device=device)
    before = traces(specimen, optimizer)
    for components in data.draw(st.lists(st.sets(st.sampled_from([*COMPONENTS, "optimizer"]), min_size=1), max_size=3)):
        off.offload(components)
    off.reload()
    assert traces(specimen, optimizer) == before


COMPONENTS = ("params", "grads", "buffers")
CALLS = st.lists(
    st.tuples(
        st.sampled_from(["offload", "reload", "offloaded", "resident", "leave"]),
        st.sets(st.sampled_from(COMPONENTS), min_size=1),
    ),
    max_size=8,
)


@given(data=st.data(), calls=CALLS)
def test_a_storage_is_away_exactly_when_all_that_claim_it_are(device: str, data: st.DataObject, calls) -> None:
    specimen = drawn(data, device)
    claims: dict[int, tuple[torch.UntypedStorage, set[str]]] = {}
    for component, tensors in (
        ("params", list(specimen.module.parameters())),
        ("grads", [p.grad for p in specimen.module.parameters() if p.grad is not None]),
        ("buffers", list(specimen.module.buffers())),
    ):
        for tensor in tensors:
            if storage_of(tensor).nbytes():
                claims.setdefault(storage_of(tensor)._cdata, (storage_of(tensor), set()))[1].add(component)
    portraits = [Portrait.of(tensor) for tensor in specimen.tensors()]
    off, away, entered = Offloader(specimen.module, device=device), set(), []
    for call, components in calls:
        if call == "offload":
            off.offload(components)
            away |= components
        elif call == "reload":
            off.reload(components)
            away -= components
        elif call == "leave":
            if entered:
                context, away = entered.pop()
                context.__exit__(None, None, None)
        else:
            context = getattr(off, call)(components)
            context.__enter__()
            entered.append((context, set(away)))
            away = away | components if call == "offloaded" else away - components
        for storage, claimants in claims.values():
            assert (storage.nbytes() == 0) == (claimants <= away)
    while entered:
        entered.pop()[0].__exit__(None, None, None)
    off.reload()
    for portrait in portraits:
        portrait.check()


@given(data=st.data())
def test_entry_state_is_restored_after_an_exception(device: str, data: st.DataObject) -> None:
    specimen = drawn(data, device)
    off = Offloader(specimen.module, device=device)
    before = data.draw(st.sets(st.sampled_from(COMPONENTS)))
    if before:
        off.offload(before)
    entry = off.residency
    context = data.draw(st.sampled_from([offloaded, resident]))
    with pytest.raises(ZeroDivisionError), context(specimen.module, device=device):
        raise ZeroDivisionError
    assert off.residency == entry
    off.reload()
    assert set(off.residency.values()) == {Residency.RESIDENT}


def test_a_graph_built_before_runs_backward_after(device: str) -> None:
    def graph() -> tuple[nn.Module, torch.Tensor]:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 6)).to(device)
        model[3].weight = model[0].weight
        return model, (model(torch.ones(2, 6, device=device)) * model[0].weight.sum()).pow(2).mean()

    model, loss = graph()
    twin, twin_loss = graph()
    with offloaded(PerParameterStrategy(model, shared="free"), device=device) as off:
        assert off.residency["params"] is Residency.OFFLOADED
        with pytest.raises(RuntimeError):
            loss.backward(retain_graph=True)
    loss.backward()
    twin_loss.backward()
    assert model[0].weight.grad is not None
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_by_default_a_weight_that_a_graph_holds_is_left_and_named(device: str) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)).to(device)
    held = model(torch.ones(2, 6, device=device))
    with offloaded(model, device=device) as off:
        assert [row.name for row in off.report.left] == ["Sequential.1.weight"]
        assert "backward() first" in off.report.left[0].reason
        assert off.residency["params"] is Residency.LEFT
        held.sum().backward()  # the graph's weight is on the device
    del held
    assert Offloader(model, device=device).offload().left == ()
