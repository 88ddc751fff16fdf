"""Signals wait until a transition, or the entering or leaving of a context, is over.

The ledger keeps every byte recoverable wherever a call is cut; this keeps the promise that leaving a block restores the state
of its entry, also under a signal that arrives while the block is being left.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

_NAMES = "INT TERM HUP USR1 USR2 ALRM QUIT VTALRM PROF XCPU"
_SIGNALS = [getattr(signal, f"SIG{name}") for name in _NAMES.split() if hasattr(signal, f"SIG{name}")]


class Deferred:
    """Note signals that have a handler in Python while the block runs and raise them again afterwards.

    Does nothing outside the main thread, where no such handler runs.
    """

    def __init__(self) -> None:
        self._noted: list[int] = []
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> Deferred:
        try:
            if threading.current_thread() is threading.main_thread():
                for number in _SIGNALS:
                    handler = signal.getsignal(number)
                    if callable(handler):
                        self._handlers[number] = handler
                        signal.signal(number, self._note)
        except BaseException:  # from the handler of a signal whose turn had not come
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Set every handler again and raise every signal that was noted, whatever the handlers raise meanwhile."""
        try:
            while self._handlers:
                number, handler = next(iter(self._handlers.items()))
                signal.signal(number, handler)
                del self._handlers[number]
            while self._noted:
                signal.raise_signal(self._noted.pop(0))
        finally:
            if self._handlers or self._noted:
                self.__exit__()

    def _note(self, number: int, _frame: FrameType | None) -> None:  # the frame would keep its tensors alive
        if number not in self._noted:
            self._noted.append(number)
