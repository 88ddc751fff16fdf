"""Offload and reload as one assertion, and what a tensor must still be afterwards."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch

from .. import device, host_memory
from ..offloader import Offloader
from ..parts import parts_of
from ..report import Residency
from ..tensors import Storage, byte_view, storage_of


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
