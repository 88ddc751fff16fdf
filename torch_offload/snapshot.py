"""Snapshots: independent host copies of what targets hold at one moment, to be copied back into them or others like them."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from . import copies, ledger, mirror
from . import device as devices
from .errors import MirrorMismatchError, TransitionError, UnsupportedTargetError, listed
from .interrupts import Deferred
from .mirror import Need, PinnedMirror, Slot
from .scope import Scope
from .strategies import strategies_for
from .tensors import Storage, attribute, plainly, storage_of
from .transition import start

# The target's position, the component, the name below the target, and the position of the target whose parameter it belongs to
Name = tuple[int, str, str, int]
_REPAIR = "Nothing was written. Copy it to a target of the structure it was made of, or make another snapshot"
Geometry = tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int, int]  # dtype, shape, stride, offset, bytes of the storage


@dataclasses.dataclass(frozen=True, eq=False)
class _Copy:
    """The bytes of one storage, the names of what is claimed on it, and their checksum."""

    names: list[Name]
    slot: Slot
    checksum: int | None

    def incoming(self, claimed: Sequence[_Claimed]) -> copies.Incoming:
        """What is to be copied into these tensors, which are all on one storage."""
        changed = {id(each): each for one in claimed for each in one.tensors}
        tensors = [one.tensor for one in claimed]
        return copies.Incoming(self.names[0][2], claimed[0].storage, self.slot, self.checksum, tensors, list(changed.values()))


class Snapshot:
    """Host copies of what targets held when it was made. Made by `snapshot`; several may be alive, each holds its bytes once.

    Attributes:
        nbytes: the sum of the distinct storages, in bytes.
    """

    def __init__(self, scope: Scope, components: frozenset[str]) -> None:
        self._components, self._verify = components, scope.verify
        claimed = _claimed(scope, components)
        self._known = {name: each.geometry for name, each in claimed.items()}
        names: dict[int, list[Name]] = {}
        for name, each in claimed.items():
            if ledger.nbytes_of(each.storage):
                names.setdefault(each.storage._cdata, []).append(name)
        storages = [claimed[every[0]].storage for every in names.values()]
        self.nbytes = sum(map(ledger.nbytes_of, storages))
        self._mirror = PinnedMirror(next(iter(devices.accelerators(each.device for each in storages)), torch.device("cpu")))
        needs = [Need(each, ledger.nbytes_of(each), ".".join(map(str, names[each._cdata][0]))) for each in storages]
        ((slots),) = mirror.take([(self._mirror, needs)])
        sums = copies.copy_out(list(zip(storages, slots, strict=True)), verify=scope.verify)
        self._copies = [_Copy(names[each._cdata], slot, value) for each, slot, value in zip(storages, slots, sums, strict=True)]

    @property
    def host_nbytes(self) -> int:
        """Host memory that it holds, in bytes, whole pages."""
        return self._mirror.nbytes

    def copy_to(self, *targets: Any, device: torch.device | str | None = None, **policy: Any) -> None:
        """Copy everything into targets like those it was made of: onto the device, or into mirrors where they are offloaded.

        Synchronises the devices; the bytes are compared with the checksums, on their device where all of a storage goes there.
        In-place, as `copy_` is: tensors stay what they are, and a graph built before raises in its backward.

        Args:
            targets, device, policy: as for `Offloader`, in the order in which the snapshot was made.

        Raises:
            MirrorMismatchError: a name is missing, or its shape, dtype or layout differs. Nothing was written.
            IntegrityError: the snapshot's memory went bad, and nothing was written; or something else arrived than was kept.
            TransitionError: as `Offloader.offload`; or the snapshot was closed.
        """
        if not self._copies and self.nbytes:
            raise TransitionError("this snapshot was closed: its host memory is given back. Make another with snapshot()")
        scope = Scope(strategies_for(targets, policy), devices.resolve(device), verify=self._verify)
        with Deferred(), ledger.LOCK:
            claimed = _claimed(scope, self._components)
            self._check(claimed)
            copies.copy_in(
                [copy.incoming([claimed[name] for name in copy.names]) for copy in self._copies], verify=self._verify
            )

    def close(self) -> None:
        """Give the host memory back to the operating system. Also happens when the snapshot is dropped."""
        self._copies.clear()
        self._mirror.close()

    def _check(self, claimed: dict[Name, _Claimed]) -> None:
        for where, names in (
            ("snapshot", self._known.keys() - claimed.keys()),
            ("target", claimed.keys() - self._known.keys()),
        ):
            if names:
                raise MirrorMismatchError(
                    f"only the {where} has {listed(sorted(name[2] for name in names))}. {_REPAIR}, with as much optimizer state"
                )
        for name, geometry in self._known.items():
            now = claimed[name].geometry
            if now != geometry:
                raise MirrorMismatchError(
                    f"{name[2]!r} was {_described(geometry)} when the snapshot was made, and in the target it is "
                    f"{_described(now)}. {_REPAIR}"
                )
        landing: dict[int, Name] = {}
        for copy in self._copies:
            first = copy.names[0]
            other = landing.setdefault(claimed[first].storage._cdata, first)
            if other is not first:
                raise MirrorMismatchError(
                    f"{listed([other[2], first[2]])} share memory in the target, and did not when the snapshot was made. "
                    f"{_REPAIR}"
                )
            if len({claimed[name].storage._cdata for name in copy.names}) > 1:
                raise MirrorMismatchError(
                    f"{listed(name[2] for name in copy.names)} shared memory when the snapshot was made, and do not in the "
                    f"target. {_REPAIR}"
                )


def snapshot(
    *targets: Any,
    components: Iterable[str] | str | None = None,
    device: torch.device | str | None = None,
    verify: bool = True,
    **policy: Any,
) -> Snapshot:
    """Copy what targets hold now to exactly as much host memory: from the device, or from mirrors where they are offloaded.

    Example:
        >>> actor = torch.nn.Linear(2, 2)
        >>> before = snapshot(actor, device="cpu")
        >>> with torch.no_grad(): _ = actor.weight.zero_()
        >>> before.copy_to(actor, device="cpu")
        >>> bool(actor.weight.any()), before.nbytes
        (True, 24)

    Args:
        targets, device, policy: as for `Offloader`.
        components: some of ``"params"``, ``"grads"``, ``"buffers"``, ``"optimizer"``; all but gradients by default. Tensors of
            theirs that live in host memory on purpose (AdamW's ``step``) are kept too.
        verify: checksum the bytes, here and when they are copied back.

    Raises:
        HostMemoryError, UnsupportedTargetError, TransitionError: as `Offloader.offload`.
        ValueError: an unknown component.
    """
    scope = Scope(strategies_for(targets, policy), devices.resolve(device), verify=verify)
    chosen = scope.chosen(components)
    with Deferred(), ledger.LOCK:
        return Snapshot(scope, chosen if components is not None else chosen - {"grads"})


@dataclasses.dataclass(frozen=True, eq=False)
class _Claimed:
    """A tensor with memory, as it is now; it, those around it and the whole."""

    tensor: torch.Tensor
    tensors: Sequence[torch.Tensor]
    storage: Storage
    geometry: Geometry


def _claimed(scope: Scope, components: frozenset[str]) -> dict[Name, _Claimed]:
    """Every tensor of these components, by name, once nothing is under way on them."""
    start(scope.device)
    alive = scope.alive()
    for strategy in alive:
        strategy.wait()
    positions = {id(strategy): index for index, strategy in enumerate(alive)}
    claims = scope.plan().claims
    owners = {id(each.claim.tensor): positions[id(each.strategy)] for each in reversed(claims) if each.claim.of is None}
    found: dict[Name, _Claimed] = {}
    seen: collections.Counter[Name] = collections.Counter()
    for named in claims:
        tensor = named.part.tensor
        if named.claim.component in components:
            if attribute(tensor, "layout") is not torch.strided:
                raise UnsupportedTargetError(f"{named.name!r} has the layout {tensor.layout} and no storage to copy")
            storage = storage_of(tensor)
            own = positions[id(named.strategy)]
            name = (own, named.claim.component, named.below, owners.get(id(named.claim.of), own))
            seen[name] += 1
            number = "" if seen[name] == 1 else f" ({seen[name]})"
            every = (tensor, *named.part.around, named.claim.tensor)
            found[own, name[1], name[2] + number, name[3]] = _Claimed(tensor, every, storage, _geometry(tensor, storage))
    return found


def _geometry(tensor: torch.Tensor, storage: Storage) -> Geometry:
    size, stride, offset = (
        plainly(each, tensor) for each in (torch.Tensor.size, torch.Tensor.stride, torch.Tensor.storage_offset)
    )
    return attribute(tensor, "dtype"), tuple(size), tuple(stride), offset, ledger.nbytes_of(storage)


def _described(geometry: Geometry) -> str:
    dtype, shape, stride, offset, nbytes = geometry
    return f"{dtype} of shape {shape}, stride {stride} at {offset} of {nbytes} bytes"
