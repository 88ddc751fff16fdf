"""What an offloaded tensor may be asked, and how the mirror answers.

Metadata needs no memory. Host reads get a copy, `clone()` and `to(device)` a fresh one on a device, and `copy_` writes the
mirror and its checksum; there is nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from . import checksum
from .ledger import Entry
from .tensors import Storage, plainly

_Tensor: Any = torch.Tensor


def _members(names: str, *, on: Any = _Tensor) -> Iterator[Any]:
    return (getattr(on, name) for name in names.split() if hasattr(on, name))


def _getters(names: str) -> Iterator[Callable[..., Any]]:
    return (getattr(_Tensor, name).__get__ for name in names.split() if hasattr(_Tensor, name))


METADATA = {
    *_getters(
        "shape dtype device layout ndim is_leaf requires_grad grad_fn grad is_cuda is_sparse is_quantized is_meta _version "
        "output_nr name itemsize nbytes is_cpu is_xpu is_mps is_nested is_mkldnn _backward_hooks retains_grad is_sparse_csr "
        "_base is_vulkan is_ipu is_xla is_mtia is_hpu is_maia names _post_accumulate_grad_hooks"
    ),
    *(getattr(_Tensor, name).__set__ for name in ("requires_grad", "_backward_hooks", "_post_accumulate_grad_hooks")),
    *_members(
        "size dim numel stride storage_offset is_contiguous element_size is_floating_point is_complex __hash__ __len__ "
        "requires_grad_ register_hook register_post_accumulate_grad_hook retain_grad nelement ndimension is_shared "
        "is_pinned is_inference _is_view has_names is_conj is_neg is_signed get_device is_same_size is_set_to __dir__ "
        "dim_order _nnz sparse_dim dense_dim is_coalesced"
    ),
    *_members("is_floating_point is_complex numel is_same_size is_conj is_neg is_inference is_signed get_device", on=torch),
}
ALIASES = {_Tensor.detach, torch.detach, _Tensor.data.__get__, _Tensor.view_as}
HOST_READS = set(_members("cpu numpy tolist item __array__ __bool__ __int__ __float__ __index__ __complex__"))
# Methods that never ask `__torch_function__` and would move the memory from under the mirror, or read what is not there.
UNSEEN = (
    "__deepcopy__",
    "set_",
    "as_subclass",
    "record_stream",
    "_use_count",
    "_view_func",
    "_view_func_unsafe",
    "_autocast_to_full_precision",
    "_autocast_to_reduced_precision",
)


def is_metadata(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether this call needs no memory. Dropping a gradient and asking for the type's name depend on the arguments."""
    return func in METADATA or (func == _Tensor.grad.__set__ and args[1] is None) or (func is _Tensor.type and len(args) == 1)


def described(func: Any) -> str:
    """What a call is, in the words of whoever made it."""
    name: str = getattr(func, "__name__", str(func))
    member = getattr(func, "__self__", None)  # the property: w.T, w.data = x
    of: str = getattr(getattr(member, "fget", member), "__name__", name)
    return {
        "__get__": of,
        "__set__": f"setting {of}",
        "__delete__": f"deleting {of}",
        "_has_compatible_shallow_copy_type": "moving or casting a module",
    }.get(name, name)


def makes_leaf(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether this call asks for gradients of a tensor, as `torch.nn.Parameter(w)` does of `w.detach()`."""
    asks = func is _Tensor.requires_grad_ or func == _Tensor.requires_grad.__set__
    return asks and (len(args) < 2 or bool(args[1]))


def is_host_read(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether this call wants the values in host memory."""
    return func in HOST_READS or (func is _Tensor.to and _goes_to_host(*args[1:], **kwargs))


def copy_device(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device | None:
    """The device that this call wants a copy on; None if it wants something else."""
    if func in (_Tensor.clone, torch.clone):
        own: torch.device = args[0].device
        return own
    if func is _Tensor.cuda:
        wanted = args[1] if len(args) > 1 else kwargs.get("device")
        index = wanted if wanted is None or isinstance(wanted, int) else torch.device(wanted).index
        return torch.device("cuda", torch.cuda.current_device() if index is None else index)
    return _device_in(*args[1:], **kwargs) if func is _Tensor.to else None


def _goes_to_host(*args: Any, **kwargs: Any) -> bool:
    device = _device_in(*args, **kwargs)
    return device is not None and device.type == "cpu"


def _device_in(*args: Any, copy: bool = False, **kwargs: Any) -> torch.device | None:  # noqa: ARG001  (a copy is made anyway)
    found: torch.device | None = torch._C._nn._parse_to(*args, **kwargs)[0]
    return found


def host_view(tensor: torch.Tensor, storage: Storage) -> torch.Tensor:
    """A host tensor with the tensor's geometry over these host bytes."""
    if tensor.is_quantized:
        view = plainly(torch.empty_quantized, [*tensor.size()], tensor, device="cpu")
    else:
        view = torch.empty(0, dtype=tensor.dtype, device="cpu")
    view.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
    view = view.conj() if tensor.is_conj() else view
    return torch._neg_view(view) if tensor.is_neg() else view


def host_copy(tensor: torch.Tensor, entry: Entry) -> torch.Tensor:
    """The tensor's values as an independent host tensor of the same geometry."""
    return mirror_view(tensor, entry).clone()


def mirror_view(tensor: torch.Tensor, entry: Entry) -> torch.Tensor:
    """A host tensor with the tensor's geometry and values that shares the mirror's memory: to be read at once."""
    return host_view(tensor, entry.host_storage())


def slot_view(tensor: torch.Tensor, entry: Entry) -> torch.Tensor:
    """A host tensor with the tensor's geometry over the mirror's own memory, to be written by `write`."""
    assert entry.slot is not None
    return host_view(tensor, entry.slot.bytes().untyped_storage())


def write(target: torch.Tensor, views: Sequence[tuple[Entry, torch.Tensor]], source: torch.Tensor) -> None:
    """`target.copy_(source)` into the mirrors and their checksums; waits for the copy.

    Sums over rows add up, so only the rows that a tensor lies in are summed again.

    Args:
        target: a host tensor that consists of `slot_view`s.
        views: those, each with its entry.
        source: any tensor that can be copied there.
    """
    entries = {id(entry): entry for entry, _ in views}
    rows = {key: _rows([view for entry, view in views if id(entry) == key]) for key in entries}
    rests = {key: entry.checksum - _sum(entry, rows[key]) for key, entry in entries.items() if entry.checksum is not None}
    try:
        target.copy_(source)
    finally:
        for key, rest in rests.items():
            entries[key].checksum = checksum.wrapped(rest + _sum(entries[key], rows[key]))
    for entry in entries.values():
        entry.written()


def _rows(views: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    """The rows of a storage that these host views of it lie in, as ranges that do not overlap."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted(_extent(view) for view in views if view.numel()):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(stop, found[-1][1]))
        else:
            found.append((start, stop))
    return found


def _extent(view: torch.Tensor) -> tuple[int, int]:
    """The first row that a view lies in, and the one after its last."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(view.size(), view.stride(), strict=True))
    start = view.storage_offset() * view.element_size() // checksum.ROW
    return start, -(-((view.storage_offset() + extent) * view.element_size()) // checksum.ROW)


def _sum(entry: Entry, rows: Sequence[tuple[int, int]]) -> int:
    """What these rows add to the storage's checksum."""
    assert entry.slot is not None
    found = entry.slot.bytes()
    return sum(checksum.partial(found[start * checksum.ROW : stop * checksum.ROW], start) for start, stop in rows)
