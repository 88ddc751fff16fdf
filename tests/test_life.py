"""A life of a trainer, step by step, beside a plain model: clones that are never offloaded."""

from __future__ import annotations

import copy
import gc
from typing import Any

import hypothesis
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import nn

from torch_offload import OffloadedTensorError, Offloader, Residency, offloaded, resident
from torch_offload.host_memory import PAGE
from torch_offload.tensors import storage_of

COMPONENTS = ["params", "grads", "buffers", "optimizer"]
some = st.sets(st.sampled_from(COMPONENTS), min_size=1)


def build(device: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(7)
    model = nn.Module()
    model.embed = nn.Embedding(50, 192, device=device)
    model.layer = nn.Linear(192, 192, device=device)
    model.head = nn.Linear(192, 50, bias=False, device=device)
    model.head.weight = model.embed.weight  # a tie
    flat = torch.randn(12_000, device=device)
    model.first, model.second = nn.Parameter(flat[:7000]), nn.Parameter(flat[7000:])  # slices of one storage
    model.register_buffer("count", torch.zeros(3, device=device))
    model.register_buffer("scale", flat[3:9000], persistent=False)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def loss_of(model: nn.Module) -> torch.Tensor:
    hidden = model.layer(model.embed(torch.tensor([0, 2, 3], device=model.first.device)))
    extra = sum(p.sum() for name, p in model.named_parameters() if name.startswith("added"))
    return (model.head(hidden) * model.scale.mean()).pow(2).sum() + model.first.sum() * model.second.sum() + extra


class Life(RuleBasedStateMachine):
    """Every rule does the same to the module and to its twin, but for offloading."""

    device = "cpu"

    # what another kind of model does in another way

    def build(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        return build(self.device)

    def layer(self) -> nn.Module:
        return self.model.layer

    def loss(self, model: nn.Module) -> torch.Tensor:
        return loss_of(model)

    def take_step(self, _model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()

    def zero(self, _model: nn.Module, optimizer: torch.optim.Optimizer, *, to_none: bool) -> None:
        optimizer.zero_grad(set_to_none=to_none)

    def check_ties(self) -> None:
        assert self.model.head.weight is self.model.embed.weight
        assert storage_of(self.model.first) is storage_of(self.model.second)
        if self.exact and not self.away:
            assert not any(tensor.__dict__ for tensor in self.tensors().values())
            assert copy.deepcopy(self.model) is not self.model

    @initialize()
    def begin(self) -> None:
        self.model, self.optimizer = self.build()
        self.twin, self.twin_optimizer = self.build()
        self.off = Offloader(self.model, self.optimizer, device=self.device)
        self.part = Offloader(self.layer(), device=self.device)
        self.part_first = Offloader(self.layer(), self.model, self.optimizer, device=self.device)
        self.entered: list[tuple[Any, set[str], dict[str, int], bool]] = []
        self.alias: torch.Tensor | None = None
        self.away: set[str] = set()
        self.exact = True  # no transition of the overlapping Offloader is in force
        self.trained = False

    # transitions

    @rule(components=some)
    def offload(self, components: set[str]) -> None:
        self.off.offload(components)
        self.away |= components

    @rule(components=some)
    def reload(self, components: set[str]) -> None:
        self.off.reload(components)
        self.away -= components
        self.exact = self.exact or components == set(COMPONENTS)

    @rule()
    def offload_a_part(self) -> None:
        self.part.offload()
        self.exact = False

    @rule(components=some)
    def offload_a_part_first(self, components: set[str]) -> None:
        self.part_first.offload(components)
        self.away |= components
        self.exact = False

    @rule()
    def reload_a_part(self) -> None:
        self.part.reload()
        self.exact = False

    @rule(components=some, kind=st.sampled_from([offloaded, resident]))
    @precondition(lambda self: len(self.entered) < 3)
    def enter(self, components: set[str], kind: Any) -> None:
        context = kind(self.model, self.optimizer, components=components, device=self.device)
        entry = set(self.away), {name: nbytes_of(tensor) for name, tensor in self.tensors().items()}
        context.__enter__()
        self.entered.append((context, *entry, self.exact))
        self.away = self.away | components if kind is offloaded else self.away - components

    @rule()
    @precondition(lambda self: self.entered)
    def leave(self) -> None:
        context, self.away, sizes, was_exact = self.entered.pop()
        context.__exit__(None, None, None)
        self.exact = self.exact and was_exact
        if self.exact:
            for name, tensor in self.tensors().items():
                if name in sizes and not name.endswith(".grad") and self.alias is None:
                    assert (nbytes_of(tensor) == 0) == (sizes[name] == 0), f"{name}: the entry state is not restored"

    @rule()
    def drop_the_offloader(self) -> None:
        self.off = Offloader(self.model, self.optimizer, device=self.device)
        gc.collect()

    @rule()
    @precondition(lambda self: not self.entered)
    def close(self) -> None:
        self.off.close()
        self.part.close()
        self.away.clear()
        self.exact = True
        gc.collect()
        assert self.off.host_nbytes == 0

    # what a trainer does

    @rule()
    def train(self) -> None:
        needs = {"params", "grads", "buffers"}
        if self.exact and not self.away & needs:
            for model in (self.model, self.twin):
                self.loss(model).backward()
            self.trained = True
        elif self.away >= needs and self.exact:
            try:
                self.loss(self.model)
            except OffloadedTensorError as error:
                assert f"{type(self.model).__name__}." in str(error)  # noqa: PT017
            else:
                raise AssertionError("an offloaded module computed")

    @rule()
    def step(self) -> None:
        if self.exact and not self.away:
            self.take_step(self.model, self.optimizer)
            self.take_step(self.twin, self.twin_optimizer)

    @rule(to_none=st.booleans())
    def zero_grad(self, to_none: bool) -> None:
        if to_none or (self.exact and "grads" not in self.away):
            self.zero(self.model, self.optimizer, to_none=to_none)
            self.zero(self.twin, self.twin_optimizer, to_none=to_none)

    @rule(seed=st.integers(0, 99))
    def load(self, seed: int) -> None:
        """Also while offloaded: into the mirror."""
        generator = torch.Generator().manual_seed(seed)
        values = {name: torch.randn(tensor.shape, generator=generator) for name, tensor in self.twin.state_dict().items()}
        self.model.load_state_dict(values)
        self.twin.load_state_dict(values)

    @rule()
    @precondition(lambda self: not any(name.startswith("added") for name, _ in self.twin.named_parameters()))
    def add_a_parameter(self) -> None:
        value = torch.randn(6000)
        for model, optimizer in ((self.model, self.optimizer), (self.twin, self.twin_optimizer)):
            model.added = nn.Parameter(value.clone().to(self.device))
            optimizer.add_param_group({"params": [model.added]})
        self.exact = False

    @rule()
    def hold_an_alias(self) -> None:
        self.alias = self.layer().weight.detach()

    @rule()
    def drop_the_alias(self) -> None:
        self.alias = None

    # what must hold

    def tensors(self, *, twin: bool = False) -> dict[str, torch.Tensor]:
        model, optimizer = (self.twin, self.twin_optimizer) if twin else (self.model, self.optimizer)
        found = dict(model.named_parameters(remove_duplicate=False))
        found |= {f"{name}.grad": p.grad for name, p in found.items() if p.grad is not None}
        found |= dict(model.named_buffers())
        for index, group in enumerate(optimizer.param_groups):
            for number, parameter in enumerate(group["params"]):
                for key, value in optimizer.state.get(parameter, {}).items():
                    found[f"{index}.{number}.{key}"] = value
        return found

    @invariant()
    def values_are_the_twins(self) -> None:
        ours, theirs = self.tensors(), self.tensors(twin=True)
        assert ours.keys() == theirs.keys()
        for name, tensor in ours.items():
            assert torch.equal(tensor.detach().cpu(), theirs[name].detach().cpu()), name

    @invariant()
    def classes_and_ties_are_kept(self) -> None:
        self.check_ties()
        if self.exact and not self.away:
            assert set(self.off.residency.values()) == {Residency.RESIDENT}
            for tensor in self.tensors().values():
                assert type(tensor) in (torch.Tensor, nn.Parameter)

    @invariant()
    def a_storage_is_away_exactly_when_all_that_claim_it_are(self) -> None:
        if not self.exact:
            return
        claims: dict[int, tuple[torch.UntypedStorage, set[str]]] = {}
        buffers = dict(self.model.named_buffers())
        for name, tensor in self.tensors().items():
            component = "buffers" if name in buffers else "grads" if name.endswith(".grad") else "params"
            component = "optimizer" if name[0].isdigit() else component
            if tensor.device.type == self.device:
                claims.setdefault(storage_of(tensor)._cdata, (storage_of(tensor), set()))[1].add(component)
        for storage, components in claims.values():
            assert (storage.nbytes() == 0) == (components <= self.away), f"{components} of {self.away}"
        for component, residency in self.off.residency.items():
            if component not in self.away:
                assert residency is Residency.RESIDENT

    @invariant()
    def host_memory_is_at_most_the_distinct_storages(self) -> None:
        """Gradients that are gone leave their places to the next ones."""
        storages = {storage_of(tensor)._cdata: storage_of(tensor) for tensor in self.tensors(twin=True).values()}
        total = sum(each.nbytes() for each in storages.values())
        if self.trained:
            total += sum(p.numel() * p.element_size() for p in self.model.parameters() if p.grad is None)
        states = [*self.off._scope.states(), *self.part._scope.states()]
        mirrors = [mirror for state in states for mirror in state.mirrors.values()]
        held, blocks = sum(mirror.nbytes for mirror in mirrors), sum(len(mirror._blocks) for mirror in mirrors)
        assert held <= total + blocks * PAGE + 16 * 2 * len(storages), f"{held} host bytes for {total}"

    def teardown(self) -> None:
        while getattr(self, "entered", None):
            self.entered.pop()[0].__exit__(None, None, None)
        if hasattr(self, "off"):
            self.off.reload()
            self.part.reload()
            self.values_are_the_twins()
            self.off.close()
            self.part.close()


def nbytes_of(tensor: torch.Tensor) -> int:
    return storage_of(tensor).nbytes()


def live(machine: type[Life], device: str, *, lives: int = 100) -> None:
    """Run a state machine on a device."""
    hypothesis.stateful.run_state_machine_as_test(
        type(f"{machine.__name__}On{device}", (machine,), {"device": device}),
        settings=hypothesis.settings(max_examples=lives, stateful_step_count=25, deadline=None),
    )


def test_a_trainers_life(device: str) -> None:
    live(Life, device)
