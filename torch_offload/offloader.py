"""The offloader runs it: targets, components, transitions."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

import torch

from . import device as devices
from . import ledger
from .contexts import Context
from .interrupts import Deferred
from .parts import parts_of
from .plan import Plan
from .report import Residency, TransitionReport
from .scope import Aim, Logged, Scope
from .strategies import strategies_for
from .tensors import storage_of
from .transition import PreparedOffload, bring_back, prepare, put_away, reload_entries
from .unreached import Unreached, find

Components = Iterable[str] | str | None


class Offloader:
    """Puts the device memory of its targets away in host memory, and brings it back.

    Example:
        >>> model = torch.nn.Linear(4, 4)
        >>> off = Offloader(model, grads="discard", device="cpu")
        >>> off.offload().nbytes
        80
        >>> off.residency["params"], off.reload().nbytes
        (<Residency.OFFLOADED: 'offloaded'>, 80)

    Args:
        targets: modules, lists of modules, optimizers, None (nothing to do), or strategy objects. Held weakly: dropping the
            Offloader loses nothing, and dropping a target frees its memory as usual.
        device: whose memory is meant; the current accelerator by default, or the CPU where there is none.
        verify: checksum the bytes on every transition.
        policy: keywords for the strategies of targets that are given as objects (``shared``, ``grads``, ``read_only``,
            ``name``).

    Raises:
        UnsupportedTargetError: no strategy describes a target whole.
        TypeError: a keyword that no target takes.
        ValueError: a policy with an unknown value.
    """

    def __init__(self, *targets: Any, device: torch.device | str | None = None, verify: bool = True, **policy: Any) -> None:
        self._scope = Scope(strategies_for(targets, policy), devices.resolve(device), verify=verify)

    def offload(self, components: Components = None) -> TransitionReport:
        """Put these components (all by default) away: copy to the mirror, wait, free. Idempotent; all or nothing.

        Synchronises the devices. Allocates host memory at the first call and for what is new. Tensors on freed storages
        raise `OffloadedTensorError` until they are reloaded.

        Args:
            components: some of `components`; one name or several.

        Raises:
            HostMemoryError, SharedStorageError, GradientsError, MirrorMismatchError, UnsupportedTargetError,
            TransitionError: everything is as it was.
            ValueError: an unknown component.
        """
        with Logged(self._scope), Deferred(), ledger.LOCK:
            return put_away(self._scope, *self._offload(components))

    def prepare(self, components: Components = None) -> PreparedOffload:
        """Do everything of `offload` that can fail, and free nothing yet: for ranks that must agree first.

        Until ``commit()`` or ``abandon()`` is called on what is returned, the tensors are guarded and other transitions
        raise. Raises as `offload` does.
        """
        with Deferred(), ledger.LOCK:
            return prepare(self._scope, *self._offload(components))

    def reload(self, components: Components = None) -> TransitionReport:
        """Bring these components (all by default) back: allocate, copy, wait, verify. Idempotent; all or nothing.

        Args:
            components: some of `components`; one name or several.

        Raises:
            DeviceMemoryError, IntegrityError, MirrorMismatchError, TransitionError: everything stays offloaded, call again.
            ValueError: an unknown component.
        """
        with Logged(self._scope), Deferred(), ledger.LOCK:
            chosen = self._scope.chosen(components)
            return bring_back(self._scope, chosen, Aim(self._scope.away(minus=chosen)))

    def close(self) -> None:
        """Reload what is away and give its host memory back to the operating system; the next `offload` builds it anew.

        Names that were re-pointed while offloaded keep what they stand for now; sizes are learnt again.

        Raises:
            DeviceMemoryError, IntegrityError, TransitionError: as `reload`; nothing is lost.
        """
        with Logged(self._scope), Deferred(), ledger.LOCK:
            every = frozenset(self.components)
            bring_back(self._scope, every, Aim(self._scope.away(minus=every)), check_names=False)
            states = self._scope.states()
            rest = [entry for entry in ledger.entries() if any(entry.is_claimed_by(state) for state in states)]
            reload_entries(rest, self._scope.device, verify=self._scope.verify)
            for state in states:
                for mirror in state.mirrors.values():
                    mirror.close()
                for mirror in state.elsewhere:
                    mirror.give_up(states)
            self._scope.known.clear()

    def offloaded(self, components: Components = None) -> Context[Offloader]:
        """A context in which these components are away; see `torch_offload.offloaded`."""
        return Context(self, self._scope, self._scope.chosen(components), away=True)

    def resident(self, components: Components = None) -> Context[Offloader]:
        """A context in which these components are on the device; see `torch_offload.resident`."""
        return Context(self, self._scope, self._scope.chosen(components), away=False)

    @property
    def components(self) -> tuple[str, ...]:
        """The components that the targets have."""
        return self._scope.components()

    @property
    def residency(self) -> dict[str, Residency]:
        """Where each component is, read from the ledger."""
        with ledger.LOCK:
            plan = self._scope.plan()
            return {name: self._residency(name, plan) for name in self.components}

    @property
    def report(self) -> TransitionReport | None:
        """The report of the last transition through this Offloader, or None."""
        return self._scope.report

    @property
    def host_nbytes(self) -> int:
        """Host memory of the mirrors that hold the targets' bytes: in use and idle, whole pages."""
        with ledger.LOCK:
            ledger.drain()
            return sum(row.nbytes for row in self._scope.mirrors())

    def explain(self, *, most: int = 10) -> Unreached:
        """What is on the device and no claim covers, and who holds the largest of it: for when an offload freed too little.

        Looks at every object that the garbage collector knows; changes nothing.

        Args:
            most: how many of the largest storages are named.

        Raises:
            ValueError: ``most`` is negative.
        """
        if most < 0:
            raise ValueError(f"most={most!r} is how many storages are named, and not below 0")
        with ledger.LOCK:
            plan = self._scope.plan()
            resident = sum(each.nbytes for each in plan.storages.values() if each.entry is None)
            where = [each.storage.device for each in plan.storages.values()] or [self._scope.device]
            found = find(functools.partial(devices.covers, self._scope.device), set(plan.storages), most=most)
            allocated = devices.allocated_nbytes(where)
            return dataclasses.replace(found, nbytes=None if allocated is None else max(0, allocated - resident))

    def _offload(self, components: Components) -> tuple[frozenset[str], Aim]:
        chosen = self._scope.chosen(components)
        return chosen, Aim(self._scope.away(plus=chosen))

    def _residency(self, component: str, plan: Plan) -> Residency:
        claimed = [each for each in plan.storages.values() if each.is_claimed_as(component)]
        offloaded = [each for each in claimed if each.entry is not None]
        stayed = len(claimed) > len(offloaded) or component in plan.components_elsewhere
        if offloaded or any(component in state.away for state in self._scope.states()):
            return Residency.LEFT if stayed else Residency.OFFLOADED
        return Residency.RESIDENT


def offloaded(
    *targets: Any, components: Components = None, device: torch.device | str | None = None, **policy: Any
) -> Context[Offloader]:
    """A context in which the targets' memory is away: in host memory, freed on the device. Also a decorator.

    Example:
        >>> actor = torch.nn.Linear(2, 2)
        >>> with offloaded(actor, device="cpu") as off:
        ...     off.report.nbytes
        24
        >>> actor(torch.zeros(1, 2)).shape
        torch.Size([1, 2])

    Leaving it puts back what was away when it was entered, also after an exception. Contexts nest. In a loop the host memory is
    taken once. Entering and leaving synchronise the devices.

    Args:
        targets, device, policy: as for `Offloader`, which ``as`` binds.
        components: some of ``"params"``, ``"grads"``, ``"buffers"``, ``"optimizer"``; all that the targets have by default.

    Raises:
        as `Offloader` and `Offloader.offload` on entering, as `Offloader.reload` on leaving;
        TransitionError: another thread has a context open over a target.
    """
    return Offloader(*targets, device=device, **policy).offloaded(components)


def resident(
    *targets: Any, components: Components = None, device: torch.device | str | None = None, **policy: Any
) -> Context[Offloader]:
    """The inverse of `offloaded`: a context in which the targets' memory is on the device; then the entry state again.

    Example:
        >>> actor = torch.nn.Linear(2, 2)
        >>> with offloaded(actor, device="cpu"):
        ...     with resident(actor, components=["params", "buffers"], device="cpu"):
        ...         total = actor.weight.sum()

    Arguments and errors are those of `offloaded`.
    """
    return Offloader(*targets, device=device, **policy).resident(components)


def reload(tensor: torch.Tensor, *, verify: bool = True) -> None:
    """Bring one tensor's storages back, with all tensors on them. For tensors whose model is gone; does nothing if resident.

    Args:
        tensor: any offloaded tensor.
        verify: compare checksums.

    Raises:
        DeviceMemoryError, IntegrityError, TransitionError: it stays offloaded; call again.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"reload() takes a tensor, not a {type(tensor).__name__}; use an Offloader for modules and optimizers")
    with Deferred(), ledger.LOCK:
        storages = [storage_of(part.tensor) for part in parts_of(tensor)]
        entries = {id(entry): entry for found in storages if (entry := ledger.entry_of(found)) is not None}
        reload_entries(list(entries.values()), storages[0].device if storages else torch.device("cpu"), verify=verify)
