"""Signals wait until a transition is over, and all of them arrive."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Iterator

import pytest
from torch import nn

from torch_offload import Offloader, interrupts, testing
from torch_offload.testing import Portrait


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


@pytest.mark.parametrize("name", ["INT", "TERM", "HUP", "USR1", "USR2", "ALRM", "QUIT", "VTALRM", "PROF", "XCPU"])
def test_a_handler_that_reloads_runs_when_the_transition_is_over(name: str) -> None:
    number = getattr(signal, f"SIG{name}")
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
