"""An interruption at the k-th opcode of one `with` block, for every k: no lying state, no failed retry."""

from __future__ import annotations

import gc
import itertools
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import torch_offload
from torch_offload import (
    OffloadedTensorError,
    Offloader,
    TransitionError,
    host_memory,
    ledger,
    offloaded,
    resident,
    transfer,
)
from torch_offload.tensors import storage_of
from torch_offload.testing import Portrait

PACKAGE = str(Path(torch_offload.__file__).parent)


class Cut(BaseException):
    """Raised between two opcodes, past every handler that expects a signal."""


def _traced(trace: Callable[[FrameType, str, Any], Any], call: Callable[[], None]) -> None:
    report = sys.unraisablehook

    def lost(unraisable: Any) -> None:
        """What is struck while Python finalises something goes nowhere, and the call goes on."""
        if not isinstance(unraisable.exc_value, Cut | KeyboardInterrupt):
            report(unraisable)

    sys._getframe().f_trace_opcodes = True  # Python 3.12 gives no opcode events unless some frame asked before
    sys.unraisablehook = lost
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(None)
        sys.unraisablehook = report


def interrupted(at: int, call: Callable[[], None], strike: Callable[[], None], *, within: str = PACKAGE) -> bool:
    """Run ``call`` and strike at the ``at``-th opcode of the package's code, or of a part of it. Whether it came that far."""
    count = 0
    struck = False

    def trace(frame: FrameType, event: str, _argument: Any) -> Any:
        nonlocal count, struck
        if struck or not frame.f_code.co_filename.startswith(within):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            count += 1
            if count == at:
                struck = True
                sys.settrace(None)
                strike()
        return trace

    try:
        _traced(trace, call)
    except (Cut, KeyboardInterrupt):
        assert struck
    return struck


def cut() -> None:
    raise Cut


def sigint() -> None:
    signal.raise_signal(signal.SIGINT)


class Life:
    """One small module with a tie and a gradient, and what must be true of it whatever happened."""

    def __init__(self) -> None:
        self.model = nn.Linear(2, 2, bias=False)
        self.model.register_buffer("tied", self.model.weight.data)
        self.model.weight.grad = torch.ones(2, 2)
        self.tensors = [self.model.weight, self.model.tied, self.model.weight.grad]
        self.portraits = [Portrait.of(tensor) for tensor in self.tensors]

    def check_no_lie(self) -> bool:
        """Every storage is resident with the right bytes, or offloaded with the right bytes in its mirror. Whether all
        are resident and usable."""
        assert torch._C._is_torch_function_enabled()
        assert torch.is_grad_enabled()
        usable = True
        for portrait in self.portraits:
            storage = storage_of(portrait.tensor)
            entry = ledger.entry_of(storage)
            if entry is not None and entry.offloaded:
                usable = False
                assert torch.equal(entry.slot.bytes(), portrait.content)
                with pytest.raises(OffloadedTensorError):
                    portrait.tensor + 1
            else:
                assert storage.nbytes() == portrait.content.numel()
                assert torch.equal(torch.empty(0, dtype=torch.uint8).set_(storage), portrait.content)
        return usable

    def check_retry(self) -> None:
        off = Offloader(self.model, device="cpu")
        off.offload()
        assert all(storage_of(tensor).nbytes() == 0 for tensor in self.tensors)
        off.reload()
        for portrait in self.portraits:
            portrait.check()
        assert not list(ledger.entries())


Point = tuple[int, int]  # the number of a call within the package, and of an opcode in it


def points_of(call: Callable[[], None]) -> list[Point]:
    """Every opcode of the package that a call comes by, in order."""
    found: list[Point] = []
    calls = 0

    def trace(frame: FrameType, _event: str, _argument: Any) -> Any:
        nonlocal calls
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        calls += 1
        number, opcodes = calls, 0
        frame.f_trace_opcodes, frame.f_trace_lines = True, False

        def within(_frame: FrameType, event: str, _argument: Any) -> Any:
            nonlocal opcodes
            if event == "opcode":
                opcodes += 1
                found.append((number, opcodes))
            return within

        return within

    _traced(trace, call)
    return found


def interrupted_at(point: Point, call: Callable[[], None], strike: Callable[[], None]) -> bool:
    """Run ``call`` and strike at a point, asking only the one call that it lies in for its opcodes. Whether it came there."""
    calls = opcodes = 0
    struck = False

    def trace(frame: FrameType, _event: str, _argument: Any) -> Any:
        nonlocal calls
        if struck or not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        calls += 1
        if calls != point[0]:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return within

    def within(_frame: FrameType, event: str, _argument: Any) -> Any:
        nonlocal opcodes, struck
        opcodes += event == "opcode"
        if opcodes == point[1] and not struck:
            struck = True
            sys.settrace(None)
            strike()
        return within

    try:
        _traced(trace, call)
    except (Cut, KeyboardInterrupt):
        assert struck
    return struck


def every_opcode(strike: Callable[[], None], block: Callable[[Life], None], first: int, step: int) -> tuple[int, int]:
    """Strike at each opcode in turn, as one run came by them. How often, and how often the entry state was missed."""
    warm = Life()
    block(warm)  # the first call of a process does more
    warm.check_retry()
    life = Life()
    points = points_of(lambda: block(life))
    struck = missed = 0
    for point in points[first - 1 :: step]:
        life = Life()
        if interrupted_at(point, lambda life=life: block(life), strike):
            struck += 1
            missed += not life.check_no_lie()
        life.check_retry()
    assert struck >= 0.99 * len(points[first - 1 :: step])  # a collection of garbage may come in between
    return struck, missed


def offload_block(life: Life) -> None:
    with offloaded(life.model, device="cpu"):
        pass


def resident_block(life: Life) -> None:
    off = Offloader(life.model, device="cpu")
    off.offload()
    with resident(life.model, components=["params", "buffers"], device="cpu"):
        pass
    off.reload()


STEP = 4  # each test takes every fourth opcode, with another offset, so that workers share them


pytestmark = pytest.mark.usefixtures("_after_cuts")


@pytest.fixture(autouse=True)
def _endless_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "require", lambda _: None)  # reading /proc changes nothing and is a third of the opcodes


@pytest.mark.parametrize("offset", range(1, STEP + 1))
@pytest.mark.parametrize("strike", [cut, sigint])
def test_every_opcode_of_an_offload(strike: Callable[[], None], offset: int) -> None:
    struck, missed = every_opcode(strike, offload_block, offset, STEP)
    assert struck > 500
    print(f"interrupted at {struck} points, entry state missed at {missed}")
    if strike is sigint:
        assert missed <= struck // 20


@pytest.mark.parametrize("strike", [cut, sigint])
def test_every_ninth_opcode_of_a_reload_inside(strike: Callable[[], None]) -> None:
    struck, _ = every_opcode(strike, resident_block, 1, 9)
    assert struck > 500


def test_a_transition_from_a_handler_at_every_ninth_opcode() -> None:
    """It is refused or it runs, and what was under way is as good as without it."""
    struck = refused = 0
    for at in itertools.count(1, 9):
        life = Life()
        other = Offloader(life.model, device="cpu")

        def intrude(other: Offloader = other) -> None:
            nonlocal refused
            for call in (other.reload, other.offload, other.reload):
                try:
                    call()
                except TransitionError:
                    refused += 1

        if not interrupted(at, lambda life=life: offload_block(life), intrude):
            break
        struck += 1
        life.check_no_lie()
        life.check_retry()
    assert struck > 500
    assert refused > struck


def test_a_signal_is_handed_on_when_the_context_is_entered_and_left() -> None:
    life = Life()
    seen = []
    previous = signal.signal(signal.SIGINT, lambda *_: seen.append(life.model.weight.__class__.__name__))
    try:
        original = transfer.copy

        def copy(destination: torch.Tensor, source: torch.Tensor) -> None:
            original(destination, source)
            sigint()

        transfer.copy = copy
        try:
            with offloaded(life.model, device="cpu"):
                assert seen  # a handler that does not raise: the block is entered all the same
                assert storage_of(life.model.weight).nbytes() == 0
        finally:
            transfer.copy = original
    finally:
        signal.signal(signal.SIGINT, previous)
    assert signal.getsignal(signal.SIGINT) is previous
    for portrait in life.portraits:
        portrait.check()


def test_other_threads_do_not_touch_the_handlers() -> None:
    life = Life()
    handler = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=offload_block, args=(life,))
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGINT) is handler
    gc.collect()
    for portrait in life.portraits:
        portrait.check()
