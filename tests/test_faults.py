"""Every seam fails at every call: afterwards everything is resident or everything is offloaded, and a retry succeeds."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from torch_offload import (
    Claim,
    DeviceMemoryError,
    IntegrityError,
    Offloader,
    OffloadError,
    PageableMirrorWarning,
    Residency,
    Strategy,
    checksum,
    ledger,
    offloaded,
    testing,
)
from torch_offload.testing import InjectedError, Portrait, Seam, failing


@pytest.fixture
def trainer(device: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Linear(5, 5)).to(device)
    model[2].weight = model[0].weight
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    model(torch.randn(4, 5, device=device)).sum().backward()
    optimizer.step()
    return model, optimizer


def portraits_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Portrait]:
    tensors = [*model.parameters(), *(p.grad for p in model.parameters()), *model.buffers()]
    tensors += [value for state in optimizer.state.values() for value in state.values()]
    return [Portrait.of(tensor) for tensor in tensors]


def residencies(off: Offloader) -> set[Residency]:
    return set(off.residency.values())


FAULTS_OF_OFFLOAD = [Seam.HOST_ALLOCATION, Seam.SYNCHRONISE, Seam.CHECKSUM, Seam.COPY]
FAULTS_OF_RELOAD = [Seam.DEVICE_ALLOCATION, Seam.COPY, Seam.SYNCHRONISE, Seam.CHECKSUM]
LEAST = {Seam.CHECKSUM: 1, Seam.SYNCHRONISE: 1, Seam.HOST_ALLOCATION: 2}  # for all storages at once; others, for each


@pytest.mark.parametrize("seam", FAULTS_OF_OFFLOAD)
def test_a_failing_offload_leaves_everything_resident(device: str, trainer, seam: Seam) -> None:
    portraits = portraits_of(*trainer)
    fired = 0
    for at in itertools.count(1):
        off = Offloader(*trainer, device=device)
        with failing(seam, at) as fault:
            if not _raises(off.offload, fault):
                break
        fired += 1
        assert residencies(off) == {Residency.RESIDENT}
        assert not list(ledger.entries())
        optimizer = trainer[1]
        assert not optimizer._optimizer_step_pre_hooks
        assert not optimizer._optimizer_load_state_dict_pre_hooks
        for portrait in portraits:
            portrait.check()
        off.offload()
        off.reload()
        for portrait in portraits:
            portrait.check()
        off.close()
    assert fired >= LEAST.get(seam, 10)
    off.reload()


@pytest.mark.parametrize("seam", FAULTS_OF_RELOAD)
def test_a_failing_reload_leaves_everything_offloaded(device: str, trainer, seam: Seam) -> None:
    portraits = portraits_of(*trainer)
    off = Offloader(*trainer, device=device)
    fired = 0
    for at in itertools.count(1):
        off.offload()
        mirrored = {entry.name: entry.slot.bytes().clone() for entry in ledger.entries()}
        with failing(seam, at) as fault:
            if not _raises(off.reload, fault):
                break
        fired += 1
        assert residencies(off) == {Residency.OFFLOADED}
        for entry in ledger.entries():
            assert torch.equal(entry.slot.bytes(), mirrored[entry.name])
            assert entry.storage().nbytes() == 0
        off.reload()
        for portrait in portraits:
            portrait.check()
    assert fired >= LEAST.get(seam, 10)
    off.reload()


def _raises(call, fault) -> bool:
    """Whether the fault fired; then the call raised, and raised nothing that hides the cause."""
    raised: BaseException | None = None
    try:
        call()
    except (InjectedError, DeviceMemoryError) as error:
        raised = error if isinstance(error, InjectedError) else error.__cause__
    assert isinstance(raised, InjectedError) == fault.fired
    return fault.fired


def test_out_of_device_memory_says_what_is_missing(device: str, trainer) -> None:
    off = Offloader(*trainer, device=device)
    off.offload()
    with (
        failing(Seam.DEVICE_ALLOCATION, 2),
        pytest.raises(DeviceMemoryError, match=r"reload 'Sequential.*missing.*reload\(\) again"),
    ):
        off.reload()
    off.reload()


@pytest.mark.parametrize(
    ("error", "wanted", "words"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), DeviceMemoryError, "no device memory for the few MiB.*verify=False"),
        (RuntimeError("a kernel failed"), RuntimeError, "^a kernel failed$"),
    ],
)
def test_checksums_without_room_are_told_from_other_errors(
    device: str, trainer, monkeypatch: pytest.MonkeyPatch, error: Exception, wanted: type[Exception], words: str
) -> None:
    def fails(_tensors: object) -> list[int]:
        raise error

    portraits = portraits_of(*trainer)
    off = Offloader(*trainer, device=device)
    with monkeypatch.context() as patch:
        patch.setattr(checksum, "checksums", fails)
        with pytest.raises(wanted, match=words):
            off.offload()
    for portrait in portraits:
        portrait.check()


def test_a_fault_in_the_body_and_one_in_the_reload_are_both_seen(device: str, trainer) -> None:
    with (
        pytest.raises(DeviceMemoryError) as caught,
        failing(Seam.DEVICE_ALLOCATION, 1) as fault,
        offloaded(*trainer, device=device),
    ):
        raise KeyError("body")
    assert fault.fired
    assert isinstance(caught.value.__context__, InjectedError) or isinstance(caught.value.__cause__, InjectedError)
    chain, error = [], caught.value
    while error is not None:
        chain.append(type(error))
        error = error.__context__
    assert KeyError in chain
    Offloader(*trainer, device=device).reload()


def test_a_refused_registration_falls_back_to_pageable_memory(device: str, trainer) -> None:
    portraits = portraits_of(*trainer)
    for at in (1, 4):  # a block for each of parameters, gradients and buffers, and one for the optimizer
        off = Offloader(*trainer, device=device)
        with testing.pretended_pinning() as registered, failing(Seam.REGISTRATION, at) as fault:
            with pytest.warns(PageableMirrorWarning, match="page-lock.*close"):
                report = off.offload()
            assert fault.fired
            assert [row.pinned for row in report.mirrors] == [at == 4, at == 1]
            assert len(registered) == 3
            off.reload()
            off.close()
            assert registered == []
        for portrait in portraits:
            portrait.check()


DAMAGE = {
    "a flipped bit": lambda held: held[7:8].bitwise_xor_(16),
    "a zeroed page": lambda held: held[4096:8192].zero_(),
    "a stale page": lambda held: held[4096:8192].copy_(torch.roll(held[4096:8192], 1)).add_(1),
    "two swapped pages": lambda held: held[: 2 * 4096].copy_(torch.cat([held[4096 : 2 * 4096], held[:4096]])),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("direction", ["offload", "reload", "host"])
def test_damaged_bytes_are_caught_and_named(device: str, damage: str, direction: str) -> None:
    model = nn.ParameterDict({name: nn.Parameter(torch.randn(8192, device=device)) for name in ("first", "second")})
    portraits = [Portrait.of(parameter) for parameter in model.values()]
    off = Offloader(model, device=device)

    def corrupt(index: int, destination: torch.Tensor) -> None:
        if index == 1:
            DAMAGE[damage](destination)

    with testing.link(corrupt=corrupt if direction == "offload" else lambda *_: None):
        off.offload()
    (entry,) = [entry for entry in ledger.entries() if entry.name == "ParameterDict.second"]
    if direction == "host":
        DAMAGE[damage](entry.slot.bytes())
    with (
        testing.link(corrupt=corrupt if direction == "reload" else lambda *_: None),
        pytest.raises(IntegrityError, match=r"'ParameterDict\.second'.*mirror is kept") as caught,
    ):
        off.reload()
    assert "first" not in str(caught.value)
    assert residencies(off) >= {Residency.OFFLOADED}
    if direction == "reload":  # the mirror is whole
        off.reload()
        for portrait in portraits:
            portrait.check()
    else:
        with pytest.raises(IntegrityError):
            off.reload()
        Offloader(model, device=device, verify=False).reload()
        portraits[0].check()


def test_swapped_storages_are_caught(device: str) -> None:
    model = nn.ParameterDict({name: nn.Parameter(torch.randn(500, device=device)) for name in ("first", "second")})
    off = Offloader(model, device=device)
    off.offload()
    one, other = (entry.slot.bytes() for entry in ledger.entries())
    kept = one.clone()
    one.copy_(other)
    other.copy_(kept)
    with pytest.raises(IntegrityError, match=r"first.*second"):
        off.reload()
    kept = one.clone()
    one.copy_(other)
    other.copy_(kept)
    off.reload()


def test_a_strategy_that_raises_changes_nothing(device: str, trainer) -> None:
    class HalfWay(Strategy):
        components = ("params",)

        def claims(self):
            yield Claim(tensor=self.target.weight, name="weight", component="params")
            raise OffloadError("no more")

    portraits = portraits_of(*trainer)
    layer = nn.Linear(2, 2, device=device)
    with pytest.raises(OffloadError, match="no more"):
        Offloader(*trainer, HalfWay(layer), device=device).offload()
    for portrait in portraits:
        portrait.check()
