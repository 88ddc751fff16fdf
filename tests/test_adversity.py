"""What people do to a library: finalizers, handlers and hooks inside transitions, forks, twins in name, stale knowledge."""

from __future__ import annotations

import asyncio
import collections
import ctypes
import dataclasses
import gc
import io
import itertools
import logging
import os
import signal
import subprocess
import sys
import threading
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
from fresh import ROOT, output_of
from torch import nn
from torch.optim import optimizer as optimizer_module

from torch_offload import (
    Claim,
    IntegrityError,
    MirrorMismatchError,
    OffloadedTensorError,
    Offloader,
    PerParameterStrategy,
    Residency,
    Strategy,
    TransitionError,
    UnsupportedTargetError,
    checksum,
    device,
    host_memory,
    interrupts,
    ledger,
    mirror,
    offloaded,
    resident,
    storage,
    strategy_for,
    testing,
    transfer,
)
from torch_offload.tensors import storage_of
from torch_offload.testing import InjectedError, Portrait, Seam, failing


def is_away(tensor: torch.Tensor) -> bool:
    return storage_of(tensor).nbytes() == 0


# One transition on top of another --------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["a call", "a finalizer", "a generator"])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_transition_inside_another_is_refused_and_nothing_is_lost(how: str) -> None:
    model, other = nn.Linear(8, 8), nn.Linear(8, 8)
    portraits = [Portrait.of(p) for each in (model, other) for p in each.parameters()]
    off, refused = Offloader(model, device="cpu"), []

    def intrude() -> None:
        try:
            off.close()
        except TransitionError as error:
            refused.append(str(error))

    class Dying:
        def __del__(self) -> None:
            intrude()

    def suspended():
        with offloaded(other, device="cpu"):
            try:
                yield
            finally:
                intrude()

    generator = suspended()
    next(generator)
    held = {"a call": intrude, "a finalizer": Dying(), "a generator": generator}
    del generator

    def in_the_middle(index: int, _destination: torch.Tensor) -> None:
        if index == 0:
            thing = held.pop(how)
            if how == "a call":
                thing()
            del thing
            gc.collect()

    with testing.link(corrupt=in_the_middle):
        off.offload()
    assert len(refused) == 1
    assert "on top of it" in refused[0]
    assert is_away(model.weight)
    held.clear()
    gc.collect()
    Offloader(model, other, device="cpu").reload()
    for portrait in portraits:
        portrait.check()


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM, signal.SIGINT])
def test_a_handler_that_reloads_runs_when_the_transition_is_over(number: int) -> None:
    model = nn.Linear(8, 8)
    portraits = [Portrait.of(p) for p in model.parameters()]
    off, seen = Offloader(model, device="cpu"), []

    def handler(*_: object) -> None:
        seen.append(off.reload().nbytes)

    previous = signal.signal(number, handler)
    try:
        with testing.link(corrupt=lambda index, _: signal.raise_signal(number) if index == 0 else None):
            off.offload()
        assert seen == [(64 + 8) * 4]
        assert signal.getsignal(number) is handler
    finally:
        signal.signal(number, previous)
    for portrait in portraits:
        portrait.check()


@pytest.mark.parametrize("kind", ["hook", "post accumulate", "module hook"])
def test_a_transition_inside_a_backward_is_refused(device: str, kind: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(device)
    model(torch.ones(1, 4, device=device)).sum().backward()
    off = Offloader(model, device=device)

    def intrude(*_: object) -> None:
        off.offload()

    if kind == "hook":
        model[1].weight.register_hook(intrude)
    elif kind == "post accumulate":
        model[1].weight.register_post_accumulate_grad_hook(intrude)
    else:
        model[1].register_full_backward_hook(intrude)
    with pytest.raises(TransitionError, match="backward"):
        model(torch.ones(1, 4, device=device, requires_grad=True)).sum().backward()
    assert not is_away(model[0].weight)


# Signals ---------------------------------------------------------------------------------------------------------------


class Term(Exception):
    pass


@pytest.fixture
def handlers() -> Iterator[list[int]]:
    """SIGTERM's handler raises, SIGUSR1's notes; those of before come back."""
    noted: list[int] = []

    def raising(*_: object) -> None:
        raise Term

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    signal.signal(signal.SIGTERM, raising)
    signal.signal(signal.SIGUSR1, lambda number, _: noted.append(number))
    yield noted
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("at", range(1, 7))  # three handlers are exchanged and exchanged back
def test_a_handler_that_raises_while_handlers_are_exchanged_leaves_none_exchanged(
    at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {number: signal.getsignal(number) for number in interrupts._SIGNALS}
    exchange, calls = signal.signal, itertools.count(1)

    def exchanged(number, handler):
        found = exchange(number, handler)
        if next(calls) == at:
            signal.raise_signal(signal.SIGTERM)
        return found

    monkeypatch.setattr(signal, "signal", exchanged)
    with pytest.raises(Term), interrupts.Deferred():
        pass
    assert next(calls) > at
    assert {number: signal.getsignal(number) for number in interrupts._SIGNALS} == before


def test_all_signals_that_waited_are_handed_on_though_one_raises(handlers: list[int]) -> None:
    def all_of_them() -> None:
        with interrupts.Deferred():
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR1):
                signal.raise_signal(number)

    with pytest.raises((KeyboardInterrupt, Term)) as caught:  # in the order in which Python looks after them
        all_of_them()
    assert {type(caught.value), type(caught.value.__context__)} == {KeyboardInterrupt, Term}
    assert handlers == [signal.SIGUSR1]


# Committing ------------------------------------------------------------------------------------------------------------


class WeightOnly(Strategy):
    components = ("params",)

    def claims(self):
        yield Claim(tensor=self.target.weight, name="weight", component="params")


def test_a_commit_does_not_fail_for_what_users_bring(device: str) -> None:
    class Unwilling(WeightOnly):
        def barriers(self, check):  # noqa: ARG002
            def remove() -> None:
                raise KeyError("cannot")

            return [remove]

    class Broken(logging.Handler):
        def emit(self, _record: logging.LogRecord) -> None:
            raise KeyError("disk full")

    handler, logger = Broken(), logging.getLogger("torch_offload")
    model = nn.Linear(3, 3, device=device)
    off = Offloader(Unwilling(model), device=device)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        assert off.offload().nbytes == 36
        assert off.reload().nbytes == 36
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)


def test_barriers_that_cannot_be_set_fail_the_offload_before_anything_is_freed(device: str) -> None:
    class Unwilling(WeightOnly):
        def barriers(self, check):  # noqa: ARG002
            raise KeyError("cannot")

    model = nn.Linear(3, 3, device=device)
    with pytest.raises(KeyError):
        Offloader(Unwilling(model), device=device).offload()
    assert not is_away(model.weight)
    assert type(model.weight) is nn.Parameter


def test_a_commit_of_what_another_transition_undid_frees_nothing(device: str) -> None:
    model = nn.Linear(3, 3, device=device)
    portraits = [Portrait.of(p) for p in model.parameters()]
    token = Offloader(model, device=device).prepare()
    transfer.repair()
    with pytest.raises(TransitionError, match=r"undid .*Linear\.weight.*prepare\(\)"):
        token.commit()
    token.abandon()
    for portrait in portraits:
        portrait.check()


def test_a_token_that_is_kept_holds_nothing(device: str) -> None:
    model = nn.Linear(3, 3, device=device)
    off = Offloader(model, device=device)
    token = off.prepare()
    token.commit()
    del model
    gc.collect()
    assert off.host_nbytes == 0
    assert not list(ledger.entries())
    with pytest.raises(TransitionError, match="before"):
        token.abandon()


def run(code: str) -> list[str]:
    return output_of(code, warnings="ignore").split("\n")


def test_a_forked_child_cannot_commit_what_its_parent_prepared() -> None:
    lines = run("""
import os, torch, torch_offload
torch.set_num_threads(1)
model = torch.nn.Linear(3, 3)
token = torch_offload.Offloader(model, device="cpu").prepare()
if os.fork() == 0:
    try:
        token.commit()
    except torch_offload.TransitionError:
        print("refused", model.weight.__class__.__base__.__name__, flush=True)
    os._exit(0)
os.wait()
token.commit()
print("committed")
torch_offload.reload(model.weight)
""")
    assert lines[:2] == ["refused Parameter", "committed"]


@pytest.mark.parametrize("flags", [[], ["-X", "dev"]])
def test_the_interpreter_exits_cleanly_while_offloaded(flags: list[str]) -> None:
    code = """
import torch, torch_offload, threading, time, atexit
torch.set_num_threads(1)
model = torch.nn.Linear(3, 3)
wanted = model.weight.tolist()
context = torch_offload.offloaded(model, device="cpu")
context.__enter__()
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
atexit.register(lambda: print(model.weight.tolist() == wanted))
"""
    command = [sys.executable, *flags, "-W", "ignore", "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")


# Waiting ---------------------------------------------------------------------------------------------------------------


def test_a_failed_offload_waits_for_the_copies_that_are_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    synchronize, copy = device.synchronize, transfer.copy
    monkeypatch.setattr(device, "synchronize", lambda devices: (log.append("wait"), synchronize(devices)))
    model = nn.Linear(3, 3)
    off = Offloader(model, device="cpu")
    with failing(Seam.COPY, 2):
        monkeypatch.setattr(transfer, "copy", _logged(log, transfer.copy))
        with pytest.raises(InjectedError):
            off.offload()
    assert log == ["wait", "copy", "copy", "wait"]
    monkeypatch.setattr(transfer, "copy", _logged(log, copy))
    off.offload()
    log.clear()
    with failing(Seam.COPY, 2), pytest.raises(InjectedError):
        off.reload()
    assert log[-1] == "wait"
    off.reload()


def _logged(log: list[str], call):
    def logged(*args: object) -> None:
        log.append("copy")
        call(*args)

    return logged


def test_the_order_of_a_transition(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []

    def watch(owner: object, name: str) -> None:
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, **keywords: (log.append(name), original(*args, **keywords))[1])

    for name in ("synchronize", "empty_cache"):
        watch(device, name)
    for name in ("give_up", "stage", "publish"):
        watch(storage, name)
    watch(transfer.checksum, "checksums")
    watch(transfer, "copy")
    off = Offloader(model := nn.Linear(3, 3, bias=False), device="cpu")
    off.offload()
    assert log == ["synchronize", "checksums", "copy", "synchronize", "give_up", "empty_cache"]
    log.clear()
    off.reload()
    assert log == ["stage", "synchronize", "copy", "synchronize", "checksums", "publish"]
    assert model.weight.shape == (3, 3)


def test_refused_while_a_stream_captures_and_pinned_memory_waits_too(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(3, 3)
    off = Offloader(model, device="cpu")
    with testing.pretended_pinning() as registered:
        off.offload()
        off.reload()
        held = len(registered)
        off._scope.states()[0].mirrors.clear()
        monkeypatch.setattr(device, "is_capturing", lambda _: True)
        assert off.host_nbytes == 0
        assert len(registered) == held  # unregistering would break the capture
        for call in (off.offload, off.reload, off.prepare):
            with pytest.raises(TransitionError, match="capturing"):
                call()
        monkeypatch.undo()
    assert registered == []


@pytest.mark.gpu
def test_a_capture_in_another_thread_is_named() -> None:
    """In an interpreter of its own: a broken capture leaves torch's random numbers unusable."""
    lines = run("""
import contextlib, threading, torch
from torch_offload import Offloader, TransitionError
from torch_offload.testing import Portrait
model = torch.nn.Linear(3, 3, device="cuda")
off = Offloader(model)
portraits = [Portrait.of(p) for p in model.parameters()]
capturing, done = threading.Event(), threading.Event()

def capture():
    with torch.cuda.stream(torch.cuda.Stream()):
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        capturing.set()
        done.wait()
        with contextlib.suppress(RuntimeError):
            graph.capture_end()

thread = threading.Thread(target=capture)
thread.start()
capturing.wait()
try:
    off.offload()
except TransitionError as error:
    print(error)
done.set()
thread.join()
for portrait in portraits:
    portrait.check()
off.offload()
print(off.report.mirrors[0].pinned, off.reload().nbytes)
for portrait in portraits:
    portrait.check()
""")
    assert "another thread is capturing" in lines[0]
    assert lines[1] == "True 48"


# Others' locks ---------------------------------------------------------------------------------------------------------


def test_the_log_is_written_without_the_lock(device: str) -> None:
    free: list[bool] = []

    def try_lock() -> None:
        free.append(ledger.LOCK.acquire(blocking=False))
        if free[-1]:
            ledger.LOCK.release()

    class Handler(logging.Handler):
        def emit(self, _record: logging.LogRecord) -> None:
            thread = threading.Thread(target=try_lock)  # which formats an offloaded tensor, say
            thread.start()
            thread.join()

    handler, logger = Handler(), logging.getLogger("torch_offload")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    model = nn.Linear(3, 3, device=device)
    off = Offloader(model, device=device)
    try:
        off.offload()
        off.reload()
        off.prepare().commit()
        with off.resident():
            pass
        off.close()
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    assert free == [True] * 6  # an offload, a reload, a commit, two of the context and the reload of close()


def test_the_collector_rests_while_threads_touch_pages() -> None:
    seen: list[bool] = []
    pages = bytearray(8)
    pointer = (ctypes.c_char * 8).from_buffer(pages)
    with mock.patch.object(ctypes, "memset", side_effect=lambda *_: seen.append(gc.isenabled())):
        host_memory.touch(pages, ctypes.addressof(pointer), 8)
        gc.disable()
        try:
            host_memory.touch(pages, ctypes.addressof(pointer), 8)
            assert not gc.isenabled()
        finally:
            gc.enable()
    assert seen == [False, False]


# Gradients -------------------------------------------------------------------------------------------------------------


def looks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One item for each look at the heap."""
    found: list[int] = []
    look = storage._look
    monkeypatch.setattr(storage, "_look", lambda cases: (found.append(1), look(cases)))
    return found


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
        assert [row.name for row in off.report.left] == ["ParameterList.0"]
        assert is_away(weight.grad)
    assert weight.grad.eq(1).all()


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


# Optimizers ------------------------------------------------------------------------------------------------------------


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


def test_state_is_found_in_any_nesting(device: str) -> None:
    weight = nn.Parameter(torch.ones(3, device=device))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    state = optimizer.state[weight]
    made = [torch.full((100 + index,), float(index), device=device) for index in range(5)]
    state["deque"], state["record"], state["deep"] = collections.deque([made[0]]), History(made[1]), {"a": [(made[2],)]}
    state["plain"], state["set"] = types.SimpleNamespace(inner=made[3]), {made[4]}
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
        assert off.report.nbytes == 4 * sum(range(100, 105))
        with pytest.raises(OffloadedTensorError, match=r"param 0\.deque\.0"):
            made[0].sum()
    for portrait in portraits:
        portrait.check()


# Names and targets -----------------------------------------------------------------------------------------------------


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


def test_a_target_in_host_memory_is_left_and_says_so() -> None:
    model = nn.Linear(3, 3)
    off = Offloader(model, device="cuda")
    report = off.offload()
    assert [row.reason for row in report.left] == ["already in host memory"] * 2
    assert off.residency == {"params": Residency.LEFT, "grads": Residency.OFFLOADED, "buffers": Residency.OFFLOADED}
    assert not is_away(model.weight)
    off.reload()


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


def test_strategy_for_takes_one_target() -> None:
    for target in (None, [nn.Linear(1, 1)]):
        with pytest.raises(UnsupportedTargetError, match="one module or optimizer"):
            strategy_for(target)


def test_what_is_no_claim_is_named(device: str) -> None:
    class Wrong(Strategy):
        components = ("params",)

        def claims(self):
            return [self.target.weight]

    model = nn.Linear(3, 3, device=device)
    with pytest.raises(UnsupportedTargetError, match=r"Wrong\.claims\(\) gave a Parameter"):
        Offloader(Wrong(model), device=device).offload()


# Contexts --------------------------------------------------------------------------------------------------------------


def test_overlapping_contexts_put_back_each_storage(device: str) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).to(device)
    with offloaded(model, device=device), resident(model[0], device=device):
        with resident(model, device=device):
            assert not is_away(model[1].weight)
        assert not is_away(model[0].weight)
        assert is_away(model[1].weight)
    assert not is_away(model[1].weight)


def test_an_exit_is_not_a_new_request(device: str) -> None:
    """Gradients made in the body of `resident` are no reason to refuse the exit."""
    model = nn.Linear(3, 3, device=device)
    with offloaded(model, device=device, grads="refuse"), resident(model, device=device, grads="refuse"):
        model(torch.ones(1, 3, device=device)).sum().backward()
    assert model.weight.grad is not None


def test_a_failed_entry_leaves_the_last_report(device: str) -> None:
    model = nn.Linear(3, 3, device=device)
    off = Offloader(model, device=device)
    report = off.offload()
    off.reload()
    last = off.report
    with failing(Seam.CHECKSUM), pytest.raises(InjectedError):
        off.offloaded().__enter__()
    assert off.report is last
    assert report.direction == "offload"


def test_contexts_that_are_dropped_or_left_twice(device: str) -> None:
    model = nn.Linear(3, 3, device=device)
    context = offloaded(model, device=device)
    context.__enter__()
    del context
    gc.collect()
    Offloader(model, device=device).reload()
    with offloaded(model, device=device) as off:
        pass
    context = off.offloaded()
    with pytest.raises(TransitionError, match="more often"):
        context.__exit__(None, None, None)
    with pytest.raises(TypeError, match="decorates functions"):
        context(3)


# What the checker remembers --------------------------------------------------------------------------------------------


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


# Mirrors ---------------------------------------------------------------------------------------------------------------


def test_overlapping_targets_hold_one_mirror(device: str) -> None:
    model = nn.Sequential(nn.Linear(512, 512, bias=False), nn.Linear(512, 512, bias=False)).to(device)
    wanted = 2 * 512 * 512 * 4
    offs = [Offloader(model[0], device=device), Offloader(model, device=device), Offloader(model[1], device=device)]
    for off in (*offs, *offs):
        off.offload()
        off.reload()
        assert testing.mirrored_nbytes(*offs) <= wanted + 4 * 4096


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


def test_a_refused_write_keeps_the_checksum(device: str) -> None:
    model = nn.Linear(3, 3, device=device)
    off = Offloader(model, device=device)
    off.offload()
    sums = {entry.name: entry.checksum for entry in ledger.entries()}
    with torch.no_grad(), pytest.raises(RuntimeError, match="size"):
        model.weight.copy_(torch.ones(5, 7))
    assert {entry.name: entry.checksum for entry in ledger.entries()} == sums
    off.reload()


def test_what_is_saved_stays_as_it_was_after_the_mirror_was_written(device: str) -> None:
    model = nn.Linear(3, 3, device=device)
    off = Offloader(model, device=device)
    off.offload()
    (entry,) = [entry for entry in ledger.entries() if entry.name == "Linear.weight"]
    kept = entry.export()
    with torch.no_grad():
        model.weight.copy_(torch.ones(3, 3))
    written = bytes(kept)
    del entry
    off.reload()
    with torch.no_grad():
        model.weight.fill_(5)
    off.offload()
    assert bytes(kept) == written
    off.reload()


def test_a_version_counter_that_two_storages_share(device: str) -> None:
    one = torch.zeros(4, device=device)
    other = one.detach()
    one.data = torch.ones(4, device=device)  # the counter stays shared
    model = nn.Module()
    model.register_buffer("one", one)
    model.register_buffer("other", other)
    off = Offloader(model, device=device)
    off.offload()
    off.reload()
    assert (one._version, other._version) == (0, 0)
    del model.other
    off.offload()
    other.add_(1)  # resident, and changed
    off.reload()
    assert other._version == 1


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


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")
def test_quantized_buffers_are_saved_and_read(device: str) -> None:
    model = nn.Module()
    values = torch.randn(4, 4, device=device)
    model.register_buffer("tensor", torch.quantize_per_tensor(values, 0.1, 3, torch.qint8))
    wanted = model.tensor.cpu().clone()
    with offloaded(model, device=device):
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        assert torch.equal(model.tensor.cpu().dequantize(), wanted.dequantize())
    file.seek(0)
    assert torch.equal(torch.load(file)["tensor"].dequantize(), wanted.dequantize())
    assert torch.equal(model.tensor.int_repr().cpu(), wanted.int_repr())


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta:UserWarning")
def test_sparse_tensors_are_left_with_their_size(device: str) -> None:
    model = nn.Embedding(10, 4, sparse=True, device=device)
    model(torch.tensor([1, 2], device=device)).sum().backward()
    model.register_buffer("rows", torch.eye(3, device=device).to_sparse_csr())
    with offloaded(model, device=device) as off:
        assert {row.name: row.nbytes for row in off.report.left} == {
            "Embedding.weight.grad": 2 * 8 + 2 * 4 * 4,
            "Embedding.rows": 4 * 8 + 3 * 8 + 3 * 4,
        }


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


def test_tasks_inside_a_context_may_open_their_own(device: str) -> None:
    model = nn.Linear(2, 2, device=device)
    off = Offloader(model, device=device)

    async def sync() -> bool:
        with off.resident("params"):
            return is_away(model.weight)

    async def rollout() -> list[bool]:
        with off.offloaded():
            return [await asyncio.create_task(sync()), await asyncio.wait_for(sync(), None), is_away(model.weight)]

    assert asyncio.run(rollout()) == [False, False, True]
    with off.offloaded():
        assert asyncio.run(sync()) is False
    assert not is_away(model.weight)


def test_an_inner_context_that_was_cut_while_it_was_left_does_not_stop_the_outer(device: str) -> None:
    model = nn.Linear(2, 2, device=device)
    off = Offloader(model, device=device)
    inner = off.offloaded("grads")

    def cut() -> None:
        with off.offloaded("params"):
            inner.__enter__()
            raise KeyboardInterrupt  # on the first instruction of the inner one's exit

    with pytest.raises(KeyboardInterrupt):
        cut()
    assert not is_away(model.weight)
    assert set(off.residency.values()) == {Residency.RESIDENT}
    with pytest.raises(TransitionError, match="reverse order"):
        inner.__exit__(None, None, None)
    with off.offloaded():
        assert is_away(model.weight)


def test_neither_the_default_device_nor_a_subclass_is_asked(device: str) -> None:
    asked = []

    class Traced(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            asked.append(func)
            return super().__torch_function__(func, types, args, kwargs or {})

    model = nn.Module()
    model.register_buffer("traced", torch.ones(5000, device=device).as_subclass(Traced))
    checksum._weights.cache_clear()
    asked.clear()
    with torch.device("meta"):
        off = Offloader(model, device=device)
        off.offload()
        off.reload()
    assert asked == []
    assert model.traced.sum() == 5000


def test_a_storage_that_was_regrown_while_offloaded_is_freed_again(device: str) -> None:
    model = nn.Linear(3, 3, device=device)
    portraits = [Portrait.of(p) for p in model.parameters()]
    off = Offloader(model, device=device)
    off.offload()
    storage_of(model.weight).resize_(36)  # as a foreign `out=` does on an alias
    assert off.residency["params"] is Residency.OFFLOADED
    off.offload()
    assert is_away(model.weight)
    storage_of(model.weight).resize_(36)
    off.reload()
    for portrait in portraits:
        portrait.check()


def test_the_builders_pair_moves_storages_and_verifies_them(device: str) -> None:
    weight = torch.randn(5, device=device)
    held, wanted = mirror.PinnedMirror(torch.device(device)), weight.cpu().clone()
    move = transfer.Move(storage_of(weight), "weight", held, [(weight, "weight")])
    transfer.copy_then_free([move])
    assert is_away(weight)
    assert torch.equal(weight.cpu(), wanted)
    entries = list(ledger.entries())
    with testing.link(corrupt=lambda _, bytes_: bytes_[:1].add_(1)), pytest.raises(IntegrityError, match="'weight'"):
        transfer.allocate_then_copy(entries)
    transfer.allocate_then_copy(entries)
    assert torch.equal(weight.cpu(), wanted)
    assert held.nbytes > 0
    held.close()
    del entries
    assert held.nbytes == 0


def test_what_was_offloaded_without_a_checksum_gets_one_from_the_mirror(device: str) -> None:
    model = nn.Linear(3, 3, device=device)
    Offloader(model, device=device, verify=False).offload()
    off = Offloader(model, device=device)
    with testing.link(corrupt=lambda _, held: held[:1].add_(1)), pytest.raises(IntegrityError, match=r"Linear\.weight"):
        off.reload()
    off.reload()


def test_version_counters_that_views_share(device: str) -> None:
    flat = torch.zeros(6, device=device)
    model = nn.Module()
    model.register_buffer("first", flat[:3])
    model.register_buffer("second", flat[3:])
    del flat
    version = model.second._version
    off = Offloader(model, device=device)
    off.offload()
    model.first = None
    off.reload()
    assert model.second._version == version


def test_tokens_of_a_spawned_process(tmp_path: Path) -> None:
    script = tmp_path / "spawn.py"
    script.write_text("""
import torch
import torch.multiprocessing as multiprocessing
import torch_offload

def child(state):
    print({name: tensor.sum().item() for name, tensor in state.items()} == {"weight": 9.0, "bias": 3.0}, flush=True)

if __name__ == "__main__":
    torch.set_num_threads(1)
    model = torch.nn.Linear(3, 3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1)
    with torch_offload.offloaded(model, device="cpu"):
        process = multiprocessing.get_context("spawn").Process(target=child, args=(model.state_dict(),))
        process.start()
        process.join()
    print(process.exitcode, model.weight.sum().item())
""")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.split("\n")[:2] == ["True", "0 9.0"], done.stderr


def test_aliases_made_while_offloaded_are_no_parameters(device: str) -> None:
    model, other, holder = nn.Linear(3, 3, device=device), nn.Linear(3, 3, device=device), nn.Module()
    with offloaded(model, device=device):
        holder.cache = model.weight.detach()
        assert not isinstance(model.weight.data, nn.Parameter)
        with pytest.raises(RuntimeError, match=r"Linear\.weight.*reload"):  # torch wraps it
            other.load_state_dict(model.state_dict(), assign=True)
        with pytest.raises(OffloadedTensorError, match=r"Linear\.weight"):
            nn.Parameter(model.weight)
        with pytest.raises(OffloadedTensorError, match=r"Linear\.weight"):
            model.weight.detach().requires_grad = True
    assert list(holder.state_dict()) == []
    assert type(other.weight) is nn.Parameter
    other.load_state_dict(model.state_dict(), assign=True)
    assert torch.equal(other.weight, model.weight)
