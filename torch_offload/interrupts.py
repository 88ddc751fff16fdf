"""Ctrl-C waits until a transition, or the entering or leaving of a context, is over.

The ledger keeps every byte recoverable wherever a call is cut; this keeps the promise that leaving a block restores the state
of its entry, also under a signal that arrives while the block is being left.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class Deferred:
    """Note SIGINT while the block runs and hand it to the handler afterwards. Does nothing outside the main thread."""

    def __init__(self) -> None:
        self._noted: list[FrameType | None] = []
        self._handler: Any = None

    @property
    def noted(self) -> bool:
        return bool(self._noted)

    def __enter__(self) -> Deferred:
        handler = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is threading.main_thread() and callable(handler):
            self._handler = handler
            signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
            if self._noted:
                self._handler(signal.SIGINT, self._noted[0])

    def _note(self, _number: int, frame: FrameType | None) -> None:
        self._noted.append(frame)
