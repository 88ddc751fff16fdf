"""For test suites: nasty modules, seams at which transitions fail, and the round trip as one assertion.

Example:
    >>> model = torch.nn.Linear(3, 3)
    >>> assert_round_trip(model, device="cpu")

`specimens` needs hypothesis, which is imported when it is called.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from . import checksum, device, host_memory, storage, transfer
from .offloader import Offloader
from .parts import parts_of
from .report import Residency
from .tensors import Storage, byte_view, storage_of

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

# Seams -----------------------------------------------------------------------------------------------------------------


class Seam(enum.Enum):
    """The places at which a transition can fail."""

    HOST_ALLOCATION = "the operating system refuses pages"
    REGISTRATION = "the driver refuses to page-lock"
    SYNCHRONISE = "waiting for a device reports an earlier error"
    CHECKSUM = "the checksum's kernel fails"
    COPY = "a copy cannot be enqueued"
    DEVICE_ALLOCATION = "the device is out of memory"


class InjectedError(RuntimeError):
    """What a failing seam raises."""


class InjectedOutOfMemoryError(InjectedError, torch.OutOfMemoryError):
    """What a failing device allocation raises."""


_SEAMS: dict[Seam, tuple[Any, str]] = {
    Seam.HOST_ALLOCATION: (host_memory, "map_pages"),
    Seam.REGISTRATION: (device, "register_host"),
    Seam.SYNCHRONISE: (device, "synchronize"),
    Seam.CHECKSUM: (checksum, "checksums"),
    Seam.COPY: (transfer, "copy"),
    Seam.DEVICE_ALLOCATION: (storage, "stage"),
}


@dataclasses.dataclass
class Fault:
    """A seam that fails once. ``calls`` counts how often it was reached, ``fired`` says whether it failed."""

    calls: int = 0
    fired: bool = False


@contextlib.contextmanager
def failing(seam: Seam, at: int = 1) -> Iterator[Fault]:
    """Fail the ``at``-th call of a seam with `InjectedError` (a refused registration returns False instead)."""
    owner, name = _SEAMS[seam]
    original: Callable[..., Any] = getattr(owner, name)
    fault = Fault()

    def call(*args: Any, **kwargs: Any) -> Any:
        fault.calls += 1
        if fault.calls != at:
            return original(*args, **kwargs)
        fault.fired = True
        if seam is Seam.REGISTRATION:
            return False
        raise (InjectedOutOfMemoryError if seam is Seam.DEVICE_ALLOCATION else InjectedError)(f"injected: {seam.value}")

    with mock.patch.object(owner, name, call):
        yield fault


@contextlib.contextmanager
def pretended_pinning() -> Iterator[list[int]]:
    """Without a GPU: page-lock for the CPU through calls that do nothing. Gives the addresses that are registered now."""
    registered: list[int] = []

    def register(pointer: int, _nbytes: int) -> bool:
        registered.append(pointer)
        return True

    with (
        mock.patch.object(device, "registers_host_memory", return_value=True),
        mock.patch.object(device, "register_host", register),
        mock.patch.object(device, "unregister_host", registered.remove),
    ):
        try:
            yield registered
        finally:
            host_memory.drain()


@dataclasses.dataclass
class Link:
    """What went over the link: the size in bytes of each copy."""

    copies: list[int] = dataclasses.field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return sum(self.copies)


@contextlib.contextmanager
def link(*, corrupt: Callable[[int, torch.Tensor], None] = lambda _index, _bytes: None) -> Iterator[Link]:
    """Watch the link, and corrupt what comes over it.

    Args:
        corrupt: called after each copy with its index and its destination, a uint8 tensor that it may change.
    """
    seen = Link()
    original = transfer.copy

    def copy(destination: torch.Tensor, source: torch.Tensor) -> None:
        original(destination, source)
        device.synchronize([destination.device, source.device])
        corrupt(len(seen.copies), destination)
        seen.copies.append(destination.numel())

    with mock.patch.object(transfer, "copy", copy):
        yield seen


# The round trip --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Portrait:
    """What must not change about a tensor: its object, and what it says of itself and of its bytes."""

    tensor: torch.Tensor
    identity: tuple[Any, ...]
    content: torch.Tensor

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Portrait:
        return cls(tensor, _identity(tensor), byte_view(storage_of(tensor)).cpu().clone())

    def check(self) -> None:
        """Raise an AssertionError unless the tensor is as it was, bit for bit."""
        assert _identity(self.tensor) == self.identity, f"{_identity(self.tensor)} is not {self.identity}"
        content = byte_view(storage_of(self.tensor)).cpu()
        assert torch.equal(content, self.content), f"the bytes of {self.identity} changed"


def _identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (
        type(tensor).__name__,
        tensor._cdata,
        storage_of(tensor)._cdata,
        tuple(tensor.shape),
        tensor.stride(),
        tensor.storage_offset(),
        tensor.dtype,
        str(tensor.device),
        tensor.requires_grad,
        None if tensor.is_inference() else tensor._version,
        sorted(tensor.__dict__),
        tensor._backward_hooks is None,
    )


def assert_round_trip(*targets: Any, extra: Iterable[torch.Tensor] = (), cycles: int = 2, **keywords: Any) -> None:
    """Offload and reload, and assert the promises: bytes, identity, host memory of exactly the size, freed device memory.

    Args:
        targets: as for `Offloader`.
        extra: tensors beyond those that the targets claim that must come back unchanged, such as aliases.
        cycles: how often.
        keywords: for `Offloader`.

    Raises:
        AssertionError: a promise does not hold.
    """
    off = Offloader(*targets, **keywords)
    claimed = [(named.name, named.part.tensor) for named in off._scope.plan().claims]
    portraits = [Portrait.of(tensor) for _, tensor in claimed if tensor.layout is torch.strided]
    portraits += [Portrait.of(tensor) for tensor in extra if tensor.layout is torch.strided]
    held: dict[int, tuple[Storage, int, set[str]]] = {}  # each storage, its size, and its names
    for name, tensor in claimed:
        if tensor.layout is torch.strided and device.covers(off._scope.device, tensor.device):
            found = storage_of(tensor)
            held.setdefault(found._cdata, (found, found.nbytes(), set()))[2].add(name)
    for _ in range(cycles):
        report = off.offload()
        left = {row.name for row in report.left}
        for found, nbytes, names in held.values():
            kept = nbytes if names & left else 0
            assert found.nbytes() == kept, f"{sorted(names)} kept {found.nbytes()} bytes, not {kept}"
        moved = sum(nbytes for _, nbytes, names in held.values() if not names & left)
        assert report.nbytes == moved, f"the report says {report.nbytes} bytes, {moved} moved"
        assert report.copied_nbytes <= report.nbytes
        slack = report.storages * 16 + (2 + moved // 2**26) * 2 * host_memory.PAGE
        assert off.host_nbytes <= moved + slack, f"{off.host_nbytes} host bytes for {moved} bytes"
        again = off.offload()
        assert again.nbytes == 0, f"a second offload moved {again.nbytes} bytes"
        back = off.reload()
        assert back.nbytes == moved, f"{back.nbytes} of {moved} bytes came back"
        assert set(off.residency.values()) <= {Residency.RESIDENT}
        for portrait in portraits:
            portrait.check()
    off.close()
    assert off.host_nbytes == 0, f"{off.host_nbytes} host bytes are left after close()"


def is_away(tensor: torch.Tensor) -> bool:
    """Whether the tensor has no device memory now, nor the tensors that it consists of."""
    return all(storage_of(part.tensor).nbytes() == 0 for part in parts_of(tensor))


def mirrored_nbytes(*offs: Offloader) -> int:
    """Host memory of these Offloaders' mirrors in bytes, each mirror once however many of them use it."""
    mirrors = {
        mirror for off in offs for state in off._scope.states() for mirror in (*state.mirrors.values(), *state.elsewhere)
    }
    return sum(mirror.nbytes for mirror in mirrors)


# Nasty modules ---------------------------------------------------------------------------------------------------------

_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64)
_SIZES = (0, 1, 5, 12, 64, 1500)


@dataclasses.dataclass(eq=False)
class Specimen:
    """A module with everything that storages are shared by, and what else holds them.

    Attributes:
        module: the module.
        aliases: tensors on its storages that nobody but this object holds.
        kinds: what is in it: ``"tie"``, ``"slice"``, ``"alias"``, and the names of the views.
        twin: makes another one, equal to it and with nothing in common.
    """

    module: torch.nn.Module
    aliases: list[torch.Tensor]
    kinds: set[str]
    twin: Callable[[], Specimen]

    def tensors(self) -> list[torch.Tensor]:
        """Every tensor object of the module, each once: parameters, buffers, gradients."""
        found = [*self.module.parameters(), *self.module.buffers()]
        found += [parameter.grad for parameter in self.module.parameters() if parameter.grad is not None]
        return list({id(tensor): tensor for tensor in found}.values())

    def nbytes(self) -> int:
        """The sum of the distinct storages of `tensors`."""
        found = {each._cdata: each.nbytes() for each in map(storage_of, self.tensors())}
        return sum(found.values())


_VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "whole": lambda base: base,
    "data": lambda base: base.data,
    "flat view": lambda base: base.view(-1),
    "slice": lambda base: base[base.numel() // 3 : base.numel() - base.numel() // 4],
    "padded shard": lambda base: base[: max(0, base.numel() - 3)],
    "strided": lambda base: base[::2],
    "transposed": lambda base: base[: base.numel() // 2 * 2].view(2, -1).t(),
    "expanded": lambda base: base[:1].expand(3, -1) if base.numel() else base,
    "overlapping": lambda base: base.as_strided((3, 2), (1, 1)) if base.numel() > 4 else base,
    "scalar": lambda base: base[0] if base.numel() else base,
    "empty": lambda base: base[:0],
    "bytes": lambda base: base.view(torch.uint8) if base.dtype not in (torch.bool, torch.complex64) else base,
    "conjugate": lambda base: base.conj(),
}

_OFTEN = [  # whatever else there is
    (0, "whole", "tie", False),
    (1, "slice", "buffer", False),
    (0, "flat view", "alias", False),
    (2, "whole", "parameter", True),
]


def specimens(device: torch.device | str = "cpu") -> SearchStrategy[Specimen]:
    """A hypothesis strategy of `Specimen`: random bytes (NaN payloads included) under every kind of view and tie."""
    from hypothesis import strategies as st

    views = st.sampled_from(sorted(_VIEWS))
    member = st.tuples(
        st.integers(0, 3), views, st.sampled_from(["parameter", "frozen", "buffer", "scratch", "tie", "alias"]), st.booleans()
    )
    base = st.tuples(st.sampled_from(_DTYPES), st.sampled_from(_SIZES), st.integers(0, 2**31), st.booleans())
    return st.builds(
        lambda bases, members, more: _specimen(bases, [*members, *more], torch.device(device)),
        st.lists(base, min_size=1, max_size=4),
        st.lists(member, min_size=1, max_size=8),
        st.lists(st.sampled_from(_OFTEN), max_size=3),
    )


def _specimen(bases: Sequence[tuple[Any, ...]], members: Sequence[tuple[Any, ...]], where: torch.device) -> Specimen:
    grown = [_base(where, *each) for each in bases]
    root = torch.nn.Module()
    found = Specimen(root, [], set(), lambda: _specimen(bases, members, where))
    used: list[Any] = []
    for index, (which, view, role, with_gradient) in enumerate(members):
        base = grown[which % len(grown)]
        tensor = _VIEWS[view](base)
        part = torch.nn.Module()
        root.add_module(f"part{index}", part)
        if view != "slice" or 0 < tensor.numel() < base.numel():
            found.kinds.add(view)
        if role == "alias":
            found.aliases.append(tensor)
            continue
        if role == "tie" and any(isinstance(each, torch.nn.Parameter) for each in used):
            part.tied = next(each for each in used if isinstance(each, torch.nn.Parameter))
            found.kinds.add("tie")
        elif role in ("buffer", "scratch"):
            part.register_buffer("held", tensor, persistent=role == "buffer")
        else:
            trains = role == "parameter" and (tensor.is_floating_point() or tensor.is_complex()) and not tensor.is_inference()
            parameter = torch.nn.Parameter(tensor, requires_grad=trains)
            part.held = parameter
            if trains and with_gradient:
                values = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(index))
                parameter.grad = values.to(where, tensor.dtype)
        if any(storage_of(each) is storage_of(tensor) for each in used):
            found.kinds.add("tie")
        used.append(part.tied if hasattr(part, "tied") else part.held)
    claimed = {storage_of(each)._cdata for each in found.tensors()}
    if any(storage_of(each)._cdata in claimed and each.numel() for each in found.aliases):
        found.kinds.add("alias")
    return found


def _base(where: torch.device, dtype: torch.dtype, numel: int, seed: int, inference: bool) -> torch.Tensor:
    itemsize = torch.empty(0, dtype=dtype).element_size()
    generator = torch.Generator().manual_seed(seed)
    content = torch.randint(0, 2 if dtype is torch.bool else 256, (numel * itemsize,), generator=generator, dtype=torch.uint8)
    with torch.inference_mode(inference and seed % 4 == 0):
        tensor = torch.empty(numel, dtype=dtype, device=where)
        byte_view(storage_of(tensor)).copy_(content)
        return tensor
