"""What may be a target, what is refused, and what is said about it."""

from __future__ import annotations

import copy
import dataclasses
import gc
import logging
import sys
import types

import pytest
import torch
from torch import nn

from torch_offload import (
    Claim,
    GradientsError,
    MirrorMismatchError,
    OffloadedTensorError,
    Offloader,
    OptimizerStrategy,
    PerParameterStrategy,
    Residency,
    SharedStorageError,
    Strategy,
    UnsupportedTargetError,
    ledger,
    offloaded,
    strategy_for,
    testing,
)
from torch_offload.host_memory import PAGE
from torch_offload.parts import parts_of
from torch_offload.tensors import storage_of
from torch_offload.testing import Portrait, assert_round_trip, is_away, link, mirrored_nbytes


def trained(device: str, kind=torch.optim.AdamW, **keywords) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(device)
    optimizer = kind(model.parameters(), **keywords)
    model(torch.randn(2, 4, device=device)).sum().backward()
    optimizer.step()
    return model, optimizer


class Table:
    def __init__(self, device: str) -> None:
        self.rows = torch.randn(5, device=device)
        self.view = self.rows[1:]


class TableStrategy(Strategy):
    components = ("table",)

    def claims(self):
        yield Claim(tensor=self.target.rows, name="rows", component="table")

    def aliases(self):
        return [self.target.view]


# One contract for all strategies ---------------------------------------------------------------------------------------

OPTIMIZERS = {
    "AdamW": (torch.optim.AdamW, {}),
    "AdamW foreach": (torch.optim.AdamW, {"foreach": True}),
    "AdamW fused": (torch.optim.AdamW, {"fused": True}),
    "Adam amsgrad": (torch.optim.Adam, {"amsgrad": True}),
    "SGD momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "Adafactor": (torch.optim.Adafactor, {}),
    "LBFGS": (torch.optim.LBFGS, {}),
}


def strategies(device: str) -> dict[str, tuple[Strategy, object]]:
    """Each strategy with a target that has something of everything it claims."""
    model, optimizer = trained(device)
    found = {
        "PerParameterStrategy": (PerParameterStrategy(model), model),
        "PerParameterStrategy read_only": (PerParameterStrategy(model, read_only=True), model),
        "OptimizerStrategy": (OptimizerStrategy(optimizer), (model, optimizer)),
    }
    table = Table(device)
    return found | {"a user's own": (TableStrategy(table), table)}


@pytest.mark.parametrize(
    "which", ["PerParameterStrategy", "PerParameterStrategy read_only", "OptimizerStrategy", "a user's own"]
)
def test_the_contract_of_every_strategy(device: str, which: str) -> None:
    strategy, keep = strategies(device)[which]
    check_contract(strategy, device)
    del keep


def check_contract(strategy: Strategy, device: str) -> None:
    """What every strategy keeps to, over a target that has something of everything it claims."""
    claims = list(strategy.claims())
    assert claims
    names = [(claim.component, id(claim.of), claim.name) for claim in claims]
    assert len(set(names)) == len(names)
    assert {claim.component for claim in claims} <= set(strategy.components)
    storages = [storage_of(part.tensor) for claim in claims for part in parts_of(claim.tensor)]
    sizes = {each._cdata: each.nbytes() for each in storages if each.device.type == device}
    off = Offloader(strategy, device=device)
    assert off.offload().nbytes == sum(sizes.values())
    again = list(strategy.claims())  # describing needs no memory
    assert [claim.name for claim in again] == [claim.name for claim in claims]
    assert all(one.tensor is other.tensor for one, other in zip(claims, again, strict=True))
    off.reload()
    assert_round_trip(strategy, device=device)
    with pytest.raises(ValueError, match=r"shared='always'.*'guard'"):
        type(strategy)(strategy.target, shared="always")
    single = type(strategy)([strategy.target], name="alone").each()
    assert [(each.name, each.target) for each in single] == [("alone", strategy.target)]
    twice = type(strategy)([strategy.target] * 2, name="pair")
    assert [each.name for each in twice.each()] == ["pair[0]", "pair[1]"]
    with pytest.raises(TypeError, match=r"'pair' is over a list of 2 targets.*each\(\)"):
        twice.target  # noqa: B018


def test_a_strategy_over_a_list_is_one_for_each(device: str) -> None:
    pair = [nn.Linear(2, 2, device=device) for _ in range(2)]
    for off in (
        Offloader(PerParameterStrategy(pair, name="actor", grads="discard"), device=device),
        Offloader(pair, name="actor", grads="discard", device=device),
    ):
        off.offload()
        for index, model in enumerate(pair):
            with pytest.raises(OffloadedTensorError, match=rf"'actor\[{index}\]\.weight'"):
                model.weight.sum()
        assert {strategy.grads for strategy in off._scope.strategies} == {"discard"}
        off.close()
    assert Offloader(OptimizerStrategy([]), device=device).offload().nbytes == 0
    assert Offloader([], grads="discard", device=device).offload().nbytes == 0
    both = PerParameterStrategy(pair)
    assert strategy_for(both) is both
    with pytest.raises(UnsupportedTargetError, match=r"takes a torch\.optim\.Optimizer, not a Linear"):
        OptimizerStrategy(pair)


def test_a_strategy_holds_its_target_weakly(device: str) -> None:
    model, optimizer = trained(device)
    table = Table(device)
    made = [PerParameterStrategy(model), OptimizerStrategy(optimizer), TableStrategy(table)]
    off = Offloader(*made, device=device)
    off.offload()
    del model, optimizer, table
    gc.collect()
    assert [strategy.target for strategy in made] == [None, None, None]
    report = off.offload()
    assert (report.nbytes, report.targets) == (0, ("Sequential (gone)", "AdamW (gone)", "Table (gone)"))
    assert not list(ledger.entries())
    with pytest.raises(UnsupportedTargetError, match=r"'Sequential' is gone.*weakly"):
        Offloader(made[0], device=device)


@pytest.mark.parametrize("which", OPTIMIZERS)
def test_optimizers_train_on_as_if_nothing_had_happened(device: str, which: str) -> None:
    kind, keywords = OPTIMIZERS[which]

    def run(offloads: bool) -> list[torch.Tensor]:
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(device)
        optimizer = kind(model.parameters(), **keywords)
        for _ in range(3):
            inputs = torch.randn(2, 4, device=device)

            def closure(inputs=inputs, model=model, optimizer=optimizer) -> torch.Tensor:
                optimizer.zero_grad()
                loss = model(inputs).pow(2).sum()
                loss.backward()
                return loss

            optimizer.step(closure)
            if offloads:
                keys = [sorted(state) for state in optimizer.state_dict()["state"].values()]
                with offloaded(model, optimizer, device=device) as off:
                    assert off.report.left == ()
                    assert [sorted(state) for state in optimizer.state_dict()["state"].values()] == keys
        return [p.detach().clone() for p in model.parameters()]

    for one, other in zip(run(offloads=True), run(offloads=False), strict=True):
        assert torch.equal(one, other)


def test_looking_at_an_optimizer_creates_no_state(device: str) -> None:
    model = nn.Linear(2, 2, device=device)
    optimizer = torch.optim.AdamW(model.parameters())
    with offloaded(model, optimizer, device=device) as off:
        assert off.residency["optimizer"] is Residency.OFFLOADED
    assert not optimizer.state
    optimizer.param_groups.clear()
    assert Offloader(optimizer, device=device).offload().nbytes == 0


def test_state_is_named_after_its_parameter(device: str) -> None:
    model, optimizer = trained(device)
    plan = Offloader(model, optimizer, device=device)._scope.plan()
    names = [named.name for named in plan.claims]
    assert "Sequential.0.weight.grad" in names
    assert "AdamW.0.weight.exp_avg" in names
    alone = Offloader(OptimizerStrategy(optimizer, name="mine"), device=device)._scope.plan()
    assert "mine.param 1.exp_avg_sq" in [named.name for named in alone.claims]


@pytest.mark.gpu
def test_beside_an_accelerator_host_tensors_are_left_alone() -> None:
    model, optimizer = trained("cuda")
    steps = [state["step"] for state in optimizer.state.values()]
    pointers = [step.data_ptr() for step in steps]
    with offloaded(model, optimizer) as off:
        assert off.report.left == ()
        assert [step.item() for step in steps] == [1.0] * len(steps)
        assert all(type(step) is torch.Tensor for step in steps)
    assert [state["step"] for state in optimizer.state.values()] == steps
    assert [step.data_ptr() for step in steps] == pointers
    assert all(step.device.type == "cpu" for step in steps)


@pytest.mark.gpu
def test_a_model_in_host_memory_beside_a_gpu_is_left_with_that_reason() -> None:
    model = nn.Linear(3, 3)
    report = Offloader(model).offload()
    assert report.nbytes == 0
    assert [(row.name, row.reason) for row in report.left] == [
        ("Linear.weight", "already in host memory"),
        ("Linear.bias", "already in host memory"),
    ]


# Bad input -------------------------------------------------------------------------------------------------------------


def test_what_cannot_be_a_target_is_refused_by_name(device: str) -> None:
    for target, message in (
        ("model", r"a str cannot be offloaded.*'model'.*Pass a torch\.nn\.Module"),
        (3, r"a int cannot be offloaded"),
        (torch.ones(3), r"a Tensor cannot be offloaded"),
        (object(), r"a object cannot be offloaded"),
        ([nn.Linear(1, 1), "chunk"], r"a str cannot be offloaded"),
        (nn.Linear, r"a type cannot be offloaded"),
    ):
        for call in (Offloader, offloaded):
            with pytest.raises(UnsupportedTargetError, match=message):
                call(target, device=device)
    with pytest.raises(TypeError):  # one of the tree, and a TypeError as well
        offloaded("model")


def test_tensors_without_memory_are_refused_and_nothing_is_touched(device: str) -> None:
    whole = nn.Linear(2, 2, device=device)
    portraits = [Portrait.of(p) for p in whole.parameters()]
    fake_mode = torch._subclasses.fake_tensor.FakeTensorMode()
    with fake_mode:
        fake = nn.Linear(2, 2)
    for module, message in (
        (nn.Linear(2, 2, device="meta"), r"'Linear\.weight' is a meta tensor.*to_empty"),
        (fake, r"'Linear\.weight' is a fake tensor"),
        (nn.LazyLinear(2), r"'LazyLinear\.weight' is not initialised.*forward"),
    ):
        off = Offloader(whole, module, device=device)
        with pytest.raises(UnsupportedTargetError, match=message):
            off.offload()
        for portrait in portraits:
            portrait.check()


def test_nothing_to_do_is_a_report_of_zero_bytes(device: str) -> None:
    for targets in ((None,), (), (nn.Module(),), (nn.ReLU(), None, []), (torch.optim.SGD([torch.ones(1)], lr=1),)):
        off = Offloader(*targets, device=device)
        assert (off.offload().nbytes, off.report.storages, off.reload().nbytes, off.host_nbytes) == (0, 0, 0, 0)
        off.close()


def test_keywords_go_to_the_targets_that_take_them(device: str) -> None:
    model, optimizer = trained(device)
    off = Offloader(model, optimizer, None, device=device, grads="discard", shared="leave")
    assert [strategy.shared for strategy in off._scope.strategies] == ["leave", "leave"]
    with pytest.raises(TypeError, match=r"'gradients'.*grads.*shared"):
        offloaded(model, device=device, gradients="discard")
    with pytest.raises(TypeError, match=r"'grads'"):
        offloaded(optimizer, device=device, grads="discard")
    with pytest.raises(TypeError, match="keep the policies they were made with"):
        offloaded(PerParameterStrategy(model), device=device, grads="discard")
    with pytest.raises(ValueError, match=r"grads='drop' is not one of 'preserve', 'discard', 'refuse'"):
        offloaded(model, device=device, grads="drop")
    assert strategy_for(optimizer, name="adam").name == "adam"


def test_gradients_are_refused_when_asked_to(device: str) -> None:
    model, optimizer = trained(device)
    off = Offloader(model, device=device, grads="refuse")
    with pytest.raises(GradientsError, match=r"'Sequential\.0\.weight\.grad'.*zero_grad"):
        off.offload()
    off.offload(["params", "buffers"])
    off.reload()
    optimizer.zero_grad()
    off.offload()
    off.reload()


def test_an_open_accumulation_window_survives(device: str) -> None:
    model, twin = (trained(device)[0] for _ in range(2))
    twin.load_state_dict(model.state_dict())
    for each in (model, twin):
        each.zero_grad()
        each(torch.ones(2, 4, device=device)).sum().backward()
        if each is model:
            with offloaded(each, device=device):
                pass
        each(torch.ones(2, 4, device=device)).pow(2).sum().backward()
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_memory_that_is_not_torchs_is_left_with_that_reason(device: str) -> None:
    model = nn.Linear(2, 2, device=device)
    model.register_buffer("foreign", torch.frombuffer(bytearray(16), dtype=torch.float32))
    with offloaded(model, device="cpu") as off:
        (row,) = [row for row in off.report.left if row.name == "Linear.foreign"]
        assert "not torch's own" in row.reason
        assert "clone()" in row.reason
        assert model.foreign.sum() == 0


# Sharing ---------------------------------------------------------------------------------------------------------------


def test_policies_for_storages_with_other_holders(device: str) -> None:
    model = nn.Linear(3, 3, device=device)
    alias = model.weight.detach()
    for shared, freed in (("guard", True), ("free", True), ("leave", False)):
        with offloaded(model, device=device, shared=shared) as off:
            assert (storage_of(model.weight).nbytes() == 0) is freed
            assert ("Linear.weight" in [row.name for row in off.report.left]) is not freed
    with pytest.raises(SharedStorageError, match=r"'Linear\.weight' \(36 bytes\) is aliased: .*shared="):
        Offloader(model, device=device, shared="raise").offload()
    assert type(model.weight) is nn.Parameter
    del alias
    with offloaded(model, device=device, shared="raise"):
        pass


def test_weights_of_a_module_outside_are_left_until_it_is_a_target_too(device: str) -> None:
    actor, head = nn.Linear(3, 3, device=device), nn.Linear(3, 3, device=device)
    head.weight = nn.Parameter(actor.weight.data)
    with offloaded(actor, device=device) as off:
        assert "'Linear.weight'" in off.report.left[0].reason
        head(torch.ones(1, 3, device=device))
    with offloaded(actor, head, device=device) as off:
        assert off.report.left == ()
        assert off.report.nbytes == (9 + 3 + 3) * 4  # one mirror for the tie
        assert len(list(ledger.entries())) == 3


def test_a_storage_that_two_targets_claim_goes_when_both_are_named(device: str) -> None:
    """An optimizer whose state is a view of a parameter's storage."""
    model, optimizer = trained(device)
    optimizer.state[model[0].weight]["shadow"] = model[0].weight.detach()
    off = Offloader(model, optimizer, device=device)
    report = off.offload("params")
    (row,) = report.left
    assert row.name == "Sequential.0.weight"
    assert "'optimizer'" in row.reason
    assert off.residency["params"] is Residency.LEFT
    off.offload("optimizer")
    assert storage_of(model[0].weight).nbytes() == 0
    off.reload("params")
    assert storage_of(model[0].weight).nbytes() > 0
    off.reload()


def test_lossless_wins_over_discard(device: str) -> None:
    model = nn.Linear(3, 3, device=device)
    model.weight.grad = model.weight.detach()
    portrait = Portrait.of(model.weight)
    with offloaded(model, device=device, grads="discard"):
        pass
    portrait.check()


# Between cycles --------------------------------------------------------------------------------------------------------


def test_new_parameters_extend_the_mirror_and_changed_ones_raise(device: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(device)
    off = Offloader(model, device=device)
    off.offload()
    off.reload()
    model.adapter = nn.Linear(4, 2, device=device)
    assert off.offload().nbytes == (2 * 20 + 10) * 4
    off.reload()
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)  # other tensors, the same sizes
    off.offload()
    off.reload()
    model[1].half()
    with pytest.raises(MirrorMismatchError, match=r"'Sequential\.1\.weight' had 64 bytes of torch\.float32.*off\.close\(\)"):
        off.offload()
    assert type(model[1].weight) is nn.Parameter
    off.close()
    assert off.offload().nbytes == (20 + 10) * 4 + 20 * 2
    off.reload()
    with offloaded(model, device=device):  # a bare context has no earlier offload to differ from
        pass
    model.half()
    with offloaded(model, device=device):
        pass


def test_a_parameter_that_is_re_pointed_while_offloaded_raises(device: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(device)
    wanted = Portrait.of(model[1].weight)
    old, new = model[0].weight, nn.Parameter(torch.zeros(4, 4, device=device))
    off = Offloader(model, device=device)
    off.offload()
    model[0].weight = new
    for call in (off.reload, off.offload):
        with pytest.raises(MirrorMismatchError, match=r"'Sequential\.0\.weight' was re-pointed.*off\.close\(\)"):
            call()
    model[0].weight = old
    off.reload()
    wanted.check()
    off.offload()
    model[0].weight = new
    del old
    gc.collect()
    with pytest.raises(MirrorMismatchError, match=r"Sequential\.0\.weight"):
        off.reload()
    off.close()
    assert model[0].weight is new
    wanted.check()
    off.offload()
    off.reload()
    assert new.eq(0).all()


def test_a_weight_with_two_owners_has_one_place(device: str) -> None:
    one, other = nn.Linear(64, 64, device=device), nn.Linear(64, 64, device=device)
    other.weight = one.weight
    both, first, second = (Offloader(*targets, device=device) for targets in ([one, other], [one], [other]))
    wanted = (64 * 64 + 2 * 64) * 4
    for off in (both, first, both, second, both):
        off.offload()
        assert storage_of(other.weight).nbytes() == 0
        assert wanted - 64 * 4 <= mirrored_nbytes(first, second) <= wanted + 4 * PAGE
        assert off.host_nbytes >= off.report.nbytes
        off.reload()
    second.close()  # what lies in the mirror of the first one too
    assert second.host_nbytes == 0
    assert mirrored_nbytes(first, second) <= 2 * PAGE
    first.offload()
    second.offload()  # it is away already, under the first one's name
    assert second.residency["params"] is Residency.OFFLOADED
    first.reload()  # the first one's is to be resident, so it is
    assert one(torch.ones(1, 64, device=device)).isfinite().all()
    assert second.residency["params"] is Residency.LEFT
    second.reload()
    assert second.residency["params"] is Residency.RESIDENT


def test_strategies_that_compare_equal_are_two(device: str) -> None:
    @dataclasses.dataclass
    class ByKind(PerParameterStrategy):
        kind: str

        def __init__(self, module: nn.Module, name: str) -> None:
            super().__init__(module, name=name)
            self.kind = "linear"

    one, other = nn.Linear(4, 4, device=device), nn.Linear(4, 4, device=device)
    other.weight = one.weight
    first, second = ByKind(one, "one"), ByKind(other, "other")
    assert first == second
    off = Offloader(first, second, device=device)
    off.offload()
    owners = {entry.name: [reference() for reference, _, _ in entry.claims] for entry in ledger.entries()}
    assert owners["one.weight"] == [ledger.state_of(one), ledger.state_of(other)]
    off.reload()


def test_removed_parameters_are_no_fault(device: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(device)
    off = Offloader(model, device=device)
    off.offload()
    del model[1]
    gc.collect()
    assert off.reload().nbytes == 20 * 4
    off.offload()
    off.reload()
    off.close()
    assert off.host_nbytes == 0


def test_a_frozen_reference_is_copied_once_and_again_when_it_changed(device: str) -> None:
    model = nn.Linear(64, 64, device=device)
    off = Offloader(model, device=device, read_only=True)
    copies = []
    for cycle in range(6):
        with torch.no_grad():
            if cycle == 2:
                model.weight[0, 0] += 1
            if cycle == 4:
                model.bias[0] += 1
        portraits = [Portrait.of(p) for p in model.parameters()]
        with link() as traffic:
            report = off.offload()
        copies.append(traffic.nbytes)
        assert report.copied_nbytes == traffic.nbytes
        off.reload()
        for portrait in portraits:
            portrait.check()
    assert copies == [(64 * 64 + 64) * 4, 0, 64 * 64 * 4, 0, 64 * 4, 0]


def test_nothing_is_remembered_of_gradients_that_are_gone(device: str) -> None:
    model = nn.Linear(64, 64, device=device)
    off, remembered, ballast = Offloader(model, device=device), set(), []
    for _ in range(5):
        model.zero_grad()
        ballast += [torch.ones(1, device=device) for _ in range(50)]  # so that no address comes twice
        model(torch.randn(2, 64, device=device)).sum().backward()
        off.offload()
        off.reload()
        remembered.add(len(ledger._places))
    assert remembered == {4}


def test_later_cycles_allocate_nothing_while_sizes_stay(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = trained(device)
    for cycle in range(4):
        if cycle == 1:
            monkeypatch.setattr("torch_offload.mirror.HostBlock", lambda *_: pytest.fail("allocated"))
        optimizer.zero_grad()  # new gradients every step
        model(torch.randn(2, 4, device=device)).sum().backward()
        optimizer.step()
        with offloaded(model, optimizer, device=device):
            pass


# Reports ---------------------------------------------------------------------------------------------------------------


def test_the_report_reads_as_a_table_a_dict_and_a_line(device: str, caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = trained(device)
    held = model(torch.randn(2, 4, device=device, requires_grad=True))
    off = Offloader(model, optimizer, device=device)
    assert off.report is None
    with caplog.at_level(logging.INFO, logger="torch_offload"):
        report = off.offload()
        off.reload()
    assert len(caplog.records) == 2
    assert report.line() in caplog.text
    assert report.line().startswith("offload Sequential + AdamW (buffers, grads, optimizer, params): ")
    plain = report.as_dict()
    assert plain["nbytes"] == report.nbytes
    assert plain["left"][0]["name"].startswith("Sequential.")
    assert report.left_nbytes == sum(row["nbytes"] for row in plain["left"])
    table = str(report)
    for row in report.left:
        assert f"left {row.name}" in table
    assert [row.target for row in report.mirrors] == ["Sequential", "AdamW"]
    assert report.host_nbytes == sum(row.nbytes for row in report.mirrors) == off.host_nbytes
    assert report.mirrors[0].pinned is (device == "cuda")
    with pytest.raises(AttributeError):
        report.nbytes = 0
    del held


def test_a_target_in_host_memory_is_left_and_says_so() -> None:
    model = nn.Linear(3, 3)
    off = Offloader(model, device="cuda")
    report = off.offload()
    assert [row.reason for row in report.left] == ["already in host memory"] * 2
    assert off.residency == {"params": Residency.LEFT, "grads": Residency.OFFLOADED, "buffers": Residency.OFFLOADED}
    assert not is_away(model.weight)
    off.reload()


def test_strategy_for_takes_one_target() -> None:
    for target in (None, [nn.Linear(1, 1)]):
        with pytest.raises(UnsupportedTargetError, match="one module or optimizer"):
            strategy_for(target)


def test_what_is_no_claim_is_named(device: str) -> None:
    class Wrong(Strategy):
        components = ("params",)

        def claims(self):
            return [self.target.weight]

    class Forgotten(Wrong):
        def claims(self):
            Claim(tensor=self.target.weight, name="weight", component="params")

    class Numbered(Wrong):
        def claims(self):
            yield Claim(tensor=self.target.weight, name=3, component="params")

    class Named(PerParameterStrategy):
        def aliases(self):
            return ["weight"]

    class Silent(PerParameterStrategy):
        def leaves(self):
            pass

    @dataclasses.dataclass
    class Unmade(Strategy):
        module: nn.Module

        def claims(self):
            return ()

    model = nn.Linear(3, 3, device=device)
    for strategy, message in (
        (Wrong(model), r"Wrong\.claims\(\) gave a Parameter, not a Claim"),
        (Forgotten(model), r"Forgotten\.claims\(\) gave a NoneType, not a Claim"),
        (Numbered(model), r"Numbered\.claims\(\) gave a Claim with the name 3, no string"),
        (Named(model), r"Named\.aliases\(\) gave a str, not a tensor"),
        (Silent(model), r"Silent\.leaves\(\) gave a NoneType, not a tensor"),
    ):
        with pytest.raises(UnsupportedTargetError, match=message):
            Offloader(strategy, device=device).offload()
    with pytest.raises(TypeError, match=r"Unmade was made without Strategy\.__init__\(target\)"):
        Offloader(Unmade(model), device=device)


def test_overlapping_targets_hold_one_mirror(device: str) -> None:
    model = nn.Sequential(nn.Linear(512, 512, bias=False), nn.Linear(512, 512, bias=False)).to(device)
    wanted = 2 * 512 * 512 * 4
    offs = [Offloader(model[0], device=device), Offloader(model, device=device), Offloader(model[1], device=device)]
    for off in (*offs, *offs):
        off.offload()
        off.reload()
        assert testing.mirrored_nbytes(*offs) <= wanted + 4 * 4096


def test_a_tensor_without_memory_of_its_own_is_refused() -> None:
    class Wrapper(torch.Tensor):
        @staticmethod
        def __new__(cls, inner: torch.Tensor) -> torch.Tensor:
            return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            raise NotImplementedError

    model = nn.Module()
    model.register_buffer("wrapped", Wrapper(torch.ones(3)))
    with pytest.raises(UnsupportedTargetError, match=r"'Module\.wrapped' is a Wrapper.*no memory"):
        Offloader(model, device="cpu").offload()


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace.* is deprecated:DeprecationWarning")
def test_scripted_modules_are_refused() -> None:
    with pytest.raises(UnsupportedTargetError, match=r"ScriptModule at '0'"):
        Offloader(nn.Sequential(torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2))), device="cpu")


def test_tensors_of_mkldnn_are_left_with_their_size() -> None:
    model = nn.Module()
    model.register_buffer("packed", torch.ones(3, 4).to_mkldnn())
    with offloaded(model, device="cpu") as off:
        assert [(row.name, row.nbytes) for row in off.report.left] == [("Module.packed", 48)]


def test_policies_and_devices_of_the_wrong_kind() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(TypeError, match="name=5"):
        Offloader(model, name=5)
    with pytest.raises(ValueError, match="read_only='no'"):
        Offloader(model, read_only="no")
    for where, said in (("meta", "no memory"), ("nowhere", "is no device"), (object(), "is no device")):
        with pytest.raises(ValueError, match=said):
            Offloader(model, device=where)


def test_a_name_that_is_no_class_in_another_release_is_passed_over(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron-core turned a wrapper's class into a function."""
    module = types.ModuleType("megatron.core.distributed")
    module.FullyShardedDataParallel = module.DistributedDataParallel = lambda: None
    monkeypatch.setitem(sys.modules, "megatron.core.distributed", module)
    model = nn.Linear(2, 2, device=device)
    with offloaded(model, device=device) as off:
        assert off.report.nbytes == 24


def test_components_that_are_no_names_are_told(device: str) -> None:
    off = Offloader(nn.Linear(2, 2, device=device), device=device)
    for wrong in (3, ["params", None]):
        with pytest.raises(TypeError, match="components are names such as 'params', not"):
            off.offload(wrong)
