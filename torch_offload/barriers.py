"""What stops code that asks no tensor's class in time: a backward that accumulates in C++, an optimizer that counts its step
before it reads."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from . import ledger
from .guard import guard_of, refusal
from .ledger import Entry
from .parts import parts_of
from .tensors import gradient_of, storage_of


class Barrier:
    """A hook that stops a backward before it accumulates into an offloaded gradient, in C++ and past every class.

    The leaf's own hooks keep it alive, and the entry refers to it weakly.
    """

    def __init__(self, leaf: torch.Tensor, attribute: str, name: str, entry: Entry) -> None:
        self._leaf, self._attribute, self._name, self._entry = leaf, attribute, name, entry
        hooks: dict[int, Any] | None = leaf._backward_hooks
        # a gradient with several storages has a barrier for each; the first knows what the leaf had before
        others = [each for hook in (hooks or {}).values() if isinstance(each := getattr(hook, "__self__", None), Barrier)]
        self._had_hooks: bool = others[0]._had_hooks if others else hooks is not None
        entry.barriers.append(weakref.ref(self))
        frozen = not leaf.requires_grad  # it may be trained again while its gradient is away
        if frozen:
            leaf.requires_grad_(True)
        try:
            leaf.register_hook(self._refuse)  # type: ignore[no-untyped-call]
        finally:
            if frozen:
                leaf.requires_grad_(False)

    def is_needed(self) -> bool:
        """Whether the leaf's gradient is still on the entry's storage."""
        gradient = gradient_of(self._leaf) if self._attribute == "grad" else self._leaf.__dict__.get(self._attribute)
        parts = [] if gradient is None else parts_of(gradient)
        return any(ledger.entry_of(storage_of(part.tensor)) is self._entry for part in parts)

    def _refuse(self, _incoming: torch.Tensor) -> None:
        if self._entry.holds_tensors() and self.is_needed():
            raise refusal("backward() would accumulate into", self._name, self._entry)

    def remove(self) -> None:
        """Leave no trace on the leaf. Calling it twice is harmless, as is an interrupted registration."""
        hooks: dict[int, Any] = self._leaf._backward_hooks or {}
        ours = [key for key, hook in hooks.items() if hook == self._refuse]
        if len(ours) == len(hooks) and not self._had_hooks:
            self._leaf._backward_hooks = None
        else:
            for key in ours:
                del hooks[key]


@functools.cache
def watch_steps() -> None:
    """From now on, refuse steps of torch optimizers while something of theirs is offloaded. One hook a process, which stays:
    torch goes through the table of hooks while other threads may run transitions."""
    register_optimizer_step_pre_hook(_check_step)


def _check_step(optimizer: torch.optim.Optimizer, _args: object, _kwargs: object) -> None:
    """Refuse a step of which a parameter or a gradient is offloaded; parameters without gradients are passed over by all."""
    if ledger.is_empty() or torch.compiler.is_compiling():
        return
    mains = _main_parameters()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) in mains:
                name, entry = mains[id(parameter)]
                raise refusal(f"{type(optimizer).__name__}.step() would be followed by a copy into", name, entry)
            gradient = gradient_of(parameter)
            if gradient is None:
                continue
            for tensor in (parameter, gradient):
                found = guard_of(tensor)
                if found is not None and found.entry.holds_tensors():
                    raise refusal(f"{type(optimizer).__name__}.step() would use", found.name, found.entry)


def _main_parameters() -> dict[int, tuple[str, Entry]]:
    """The main parameters of what is offloaded, by id: Megatron-core steps them, and then copies them into the model's."""
    found: dict[int, tuple[str, Entry]] = {}
    for entry in ledger.entries():
        for reference in list(entry.guards) if entry.holds_tensors() else ():
            guarded = reference()
            tensor = None if guarded is None else guarded.tensor()
            main = None if tensor is None else tensor.__dict__.get("main_param")
            if guarded is not None and main is not None:
                found[id(main)] = (guarded.name, entry)
    return found
