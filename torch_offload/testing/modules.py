"""Modules that hypothesis generates, with everything that storages are shared by."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..tensors import byte_view, storage_of

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

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
