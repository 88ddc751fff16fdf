"""One transition: nothing on top of it, nothing lost when it fails, in what order, and what it waits for."""

from __future__ import annotations

import ctypes
import gc
import logging
import subprocess
import sys
import threading
from unittest import mock

import pytest
import torch
from fresh import ROOT, output_of
from torch import nn

from torch_offload import (
    Claim,
    IntegrityError,
    Offloader,
    Residency,
    Strategy,
    TransitionError,
    checksum,
    device,
    host_memory,
    ledger,
    mirror,
    offloaded,
    storage,
    testing,
    transfer,
)
from torch_offload.tensors import storage_of
from torch_offload.testing import InjectedError, Portrait, Seam, failing, is_away


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


def test_a_forked_child_cannot_commit_what_its_parent_prepared_but_go_on() -> None:
    lines = run("""
import os, torch, torch_offload
torch.set_num_threads(1)
model, other = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
token = torch_offload.Offloader(model, device="cpu").prepare()
if os.fork() == 0:
    try:
        token.commit()
    except torch_offload.TransitionError as error:
        print("prepared by process" in str(error), type(model.weight).__name__)
    with torch_offload.offloaded(other, device="cpu") as off:  # what waits in the parent does not wait here
        print(off.report.nbytes, type(model.weight).__name__)
    token.abandon()
    print(model.weight.sum().isfinite().item(), flush=True)
    os._exit(0)
os.wait()
token.commit()
print("committed")
torch_offload.reload(model.weight)
""")
    assert lines[:4] == ["True OffloadedParameter", "48 Parameter", "True", "committed"]


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


def test_torchs_error_about_a_capture_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(3, 3)
    portraits = [Portrait.of(p) for p in model.parameters()]
    off = Offloader(model, device="cpu")
    off.offload()

    def refuse(*_: object) -> None:
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    monkeypatch.setattr(storage, "stage", refuse)
    with pytest.raises(TransitionError, match=r"another thread is capturing.*record it again"):
        off.reload()
    monkeypatch.undo()
    off.reload()
    for portrait in portraits:
        portrait.check()


def test_messages_name_the_targets(device: str) -> None:
    model = nn.Linear(3, 3, device=device)
    off = Offloader(model, device=device, name="actor")
    token = off.prepare()
    with pytest.raises(TransitionError, match=r"offload of 'actor' waits: call its commit\(\)"):
        off.reload()
    token.abandon()
    with pytest.raises(TransitionError, match="offload of 'actor' was committed or abandoned"):
        token.commit()
    with off.offloaded() as _, pytest.raises(TransitionError, match="context over 'actor' is left more often"):
        off.resident().__exit__(None, None, None)


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
