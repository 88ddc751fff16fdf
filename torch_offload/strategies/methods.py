"""Stand-ins for methods of other people's objects that change something before they come to what is offloaded."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..errors import OffloadedTensorError


def refuse(owner: Any, method: str, check: Callable[[str], bool | None]) -> Iterator[Callable[[], None]]:
    """Have calls of a method pass ``check("method()")`` first, and give what undoes that.

    It is given before the method is exchanged, in case of an interruption. If the check gives True, the call has nothing to
    do, and does nothing.
    """
    yield functools.partial(_restore, weakref.ref(owner), method)
    setattr(owner, method, _Refusing(owner, method, check))


def check_resident(tensor: torch.Tensor, call: str) -> None:
    """Raise by name, on behalf of a call that needs it, if a tensor is offloaded.

    Where its own refusal would come too late: from inside of what the call has begun.
    """
    try:
        tensor.data_ptr()
    except OffloadedTensorError as error:
        raise OffloadedTensorError(str(error).replace("data_ptr", call, 1)) from None


class _Refusing:
    """Stands in for a method, and raises before anything is done if it must not be called now. Holds its owner weakly."""

    def __init__(self, owner: Any, method: str, check: Callable[[str], bool | None]) -> None:
        self.was = vars(owner).get(method)  # somebody's own
        self._owner, self._method, self._check = weakref.ref(owner), method, check

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        if self._check(f"{self._method}()"):
            return None
        owner = self._owner()
        call = getattr(type(owner), self._method).__get__(owner) if self.was is None else self.was
        return call(*args, **keywords)


def _restore(reference: weakref.ref[Any], method: str) -> None:
    """Take away what stands in for a method, if it still does. Calling it twice is harmless."""
    owner = reference()
    ours = None if owner is None else vars(owner).get(method)
    if not isinstance(ours, _Refusing):
        return
    if ours.was is None:
        delattr(owner, method)
    else:
        setattr(owner, method, ours.was)
