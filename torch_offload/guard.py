"""Offloaded tensors answer for themselves: the class of each is exchanged for a subclass that refuses or serves.

Deny by default. Metadata and `repr` pass; `detach`, `.data` and `view_as` give guarded aliases; host reads and pickling are
answered from the mirror; `copy_` writes the mirror. Everything else raises an error that names the tensor. torch's own
`UninitializedParameter` sets the precedent for a class that is exchanged.

[Note: the tag]
A guard is found from its tensor through the tensor's `__dict__`, and the tensor from its guard by a weak reference. A
parameter is referred to plainly instead, a cycle that the garbage collector sees: `torch.utils.swap_tensors` stops on weak
references with an error that names nothing.

[Note: what asks no class]
A backward through a graph that was built before reads its saved tensors, and accumulates into gradients, in C++. The version
counters of guarded tensors are moved far away while they are offloaded and back afterwards, so a saved tensor is refused
before it is read (barriers.py stops accumulation). Views share a counter, whose value says whether it was moved.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FunctionType
from typing import Any

import torch

from . import ledger, serving
from .errors import OffloadedTensorError, UnsupportedTargetError
from .ledger import Entry
from .parts import PLAIN, is_foreign, is_whole, parts_of, rebuilt
from .tensors import attribute, plainly, storage_of

_TAG = "_torch_offload_guard"
_FAR = 2**30  # more than any tensor is changed in place; counters have 32 bits


class Guard:
    """What one tensor was before it was guarded.

    Attributes:
        cls: its class.
        name: for messages.
        entry: the ledger's entry of its storage.
        is_new: whether it is an alias that was made while offloaded.
        tensor: gives the tensor, or None once it is gone.
    """

    __slots__ = ("__weakref__", "_is_plain", "cls", "entry", "is_new", "name", "tensor")

    def __init__(self, tensor: torch.Tensor, name: str, entry: Entry, *, is_new: bool = False) -> None:
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        self._is_plain = type(tensor) in PLAIN and tensor.layout is torch.strided
        self.tensor: Callable[[], torch.Tensor | None] = (lambda: tensor) if is_parameter else weakref.ref(tensor)
        self.cls, self.name, self.entry, self.is_new = type(tensor), name, entry, is_new
        guarded = _guarded_class(self.cls, name)
        entry.guards[weakref.ref(self, entry.guards.pop)] = None
        tensor.__dict__[_TAG] = self
        if not is_new:
            _move_version(tensor, _FAR)
        tensor.__class__ = guarded

    def lift(self) -> None:
        """Make the tensor what it was, unless another tensor inside of it is still offloaded. Calling it twice is harmless."""
        tensor = self.tensor()
        if tensor is None:
            return
        if not self._is_plain and self._handed_over(tensor):
            return
        _move_version(tensor, self.entry.writes - _FAR)
        if type(tensor) in _bases:
            tensor.__class__ = self.cls
        tensor.__dict__.pop(_TAG, None)

    def _handed_over(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is now guarded for another storage that it has memory on."""
        inside = (ledger.entry_of(storage_of(part.tensor)) for part in parts_of(tensor) if part.tensor is not tensor)
        for other in inside:
            if other is not None and other is not self.entry and other.holds_tensors():
                other.guards[weakref.ref(self, other.guards.pop)] = None  # first, in case of an interruption
                self.entry = other
                return True
        return False


def guard(tensors: Iterable[tuple[torch.Tensor, str]], entry: Entry) -> None:
    """Guard these tensors, named for messages, until `lift` is called for their entry.

    Raises:
        UnsupportedTargetError: the class of one cannot be exchanged.
    """
    for tensor, name in tensors:
        found = guard_of(tensor)
        if found is not None and not found.entry.holds_tensors():  # left by an interrupted reload
            found.lift()
        if guard_of(tensor) is None:
            Guard(tensor, name, entry)


def guard_of(tensor: torch.Tensor) -> Guard | None:
    """The tensor's guard, if it has one."""
    return tensor.__dict__.get(_TAG) if type(tensor) in _bases else None


def lift(entry: Entry) -> None:
    """Free every tensor that was guarded for this entry, newest first. Calling it twice is harmless."""
    for reference in list(entry.guards)[::-1]:  # a copy: those that die leave the table
        found = reference()
        if found is not None and found.entry is entry:  # not handed over to another
            found.lift()


def _move_version(tensor: torch.Tensor, by: int) -> None:
    """Move the tensor's version counter there or back, unless it is there or back already.

    What was made in inference mode has none, and no graph can have saved it.
    """
    if plainly(torch.Tensor.is_inference, tensor):
        return
    version = attribute(tensor, "_version")
    if (version < _FAR) == (by > 0):
        torch._C._autograd._unsafe_set_version_counter((tensor,), (version + by,))


# The guarded classes ---------------------------------------------------------------------------------------------------

_classes: dict[type, type] = {}
_bases: dict[type, type] = {}


def _guarded_class(base: type, name: str) -> type:
    if base not in _classes:
        members = {
            "__slots__": (),
            "__module__": __name__,
            "__doc__": f"A {base.__name__} whose memory is offloaded.",
            "__torch_function__": classmethod(_torch_function),
            "__repr__": _repr,
            "__format__": _format,
            "__reduce_ex__": _reduce_ex,
            "__copy__": _copy,
            **{member: _refusing(member) for member in serving.UNSEEN if hasattr(base, member)},
            **_plain_methods(base),
        }
        try:
            made = type(base)(f"Offloaded{base.__name__}", (base,), members)
        except Exception as error:
            raise UnsupportedTargetError(
                f"{name!r} is a {base.__name__}, a class that cannot be derived from ({error}), so nothing could stop its use "
                "while offloaded. Nothing was touched; make its class derivable or hold the memory in a plain Parameter"
            ) from error
        if base in PLAIN:
            PLAIN.add(made)
        _bases[made] = base
        _classes[base] = made
    return _classes[base]


def _plain_methods(base: type) -> dict[str, Any]:
    """torch's own methods in place of those that a class has under their names, since those may reach into what is offloaded or
    make tensors of ``type(self)``; and refusals of what else a registered class has, which may be handed to C++."""
    own = {name for cls in base.__mro__[: base.__mro__.index(torch.Tensor)] if cls is not torch.nn.Parameter
           for name, member in vars(cls).items() if isinstance(member, FunctionType) and not name.startswith("_")}  # fmt: skip
    found = {name: getattr(torch.Tensor, name) for name in own if hasattr(torch.Tensor, name)}
    return found | {name: _refusing(name) for name in own - found.keys() if is_foreign(base)}


def _torch_function(_cls: type, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
    kwargs = kwargs or {}
    things = (*args, *kwargs.values())
    makes_leaf = serving.makes_leaf(func, args) and any(guard.is_new for guard in _guards_in(things))
    if serving.is_metadata(func, args) and not makes_leaf:
        return plainly(func, *args, **kwargs)
    was_guarded = any(_guards_in(things))
    with ledger.LOCK:
        found = list(_guards_in(things))
        stale = [guard for guard in found if not guard.entry.holds_tensors()]  # left by an interrupted reload
        for guard in stale:
            guard.lift()
        if not stale and (found or not was_guarded):
            return _answer(func, found, args, kwargs)
    return func(*args, **kwargs)  # another thread reloaded while this one waited


def _answer(func: Any, found: Sequence[Guard], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Serve a call that has at least one offloaded argument, or refuse it."""
    first = guard_of(args[0]) if args and isinstance(args[0], torch.Tensor) else None
    if first is not None:
        if func in serving.ALIASES:
            return _alias(first, plainly(func, *args, **kwargs))
        if func is torch.Tensor.copy_:
            return _copy_into(first, *args, **kwargs)
        if serving.is_host_read(func, args, kwargs):
            return getattr(_host(args[0], serving.host_copy), func.__name__)(*args[1:], **kwargs)
        device = serving.copy_device(func, args, kwargs)
        if device is not None:
            return _device_copy(first, device, args[0], *(args[1:] if func is torch.Tensor.to else ()), **kwargs)
    if func is torch.Tensor.copy_ and len(args) > 1 and (source := guard_of(args[1])) is not None:
        _check_unrecorded(source, args[1])
        return args[0].copy_(_host(args[1], serving.mirror_view))
    what = f"{serving.described(func)} needs the memory of"
    if not found:
        raise OffloadedTensorError(f"{what} an offloaded tensor, handed over in a container. Call reload() first")
    raise refusal(what, found[0].name, found[0].entry)


def _guards_in(things: Iterable[Any]) -> Iterator[Guard]:
    for thing in things:
        if isinstance(thing, torch.Tensor):
            found = guard_of(thing)
            if found is not None:
                yield found
        elif isinstance(thing, (list, tuple)):
            yield from _guards_in(thing)
        elif isinstance(thing, dict):
            yield from _guards_in(thing.values())


def refusal(what: str, name: str, entry: Entry) -> OffloadedTensorError:
    """The error for an offloaded tensor, which names it and the call that brings it back."""
    if not entry.offloaded:
        return OffloadedTensorError(
            f"{what} {name!r}, which a prepared transition is about to offload. Call commit() and reload(), or abandon()"
        )
    return OffloadedTensorError(
        f"{what} {name!r}, which is offloaded. Call reload() on its Offloader, leave the offloaded() block, or call "
        "torch_offload.reload(tensor) first"
    )


def _alias(source: Guard, tensor: torch.Tensor) -> torch.Tensor:
    """Guard an alias that was made while offloaded."""
    for part in parts_of(tensor):
        entry = ledger.entry_of(storage_of(part.tensor))
        if entry is not None:
            for each in (part.tensor, *part.around):
                if each is not tensor and guard_of(each) is None:
                    _guard_new(each, source.name, entry)
    _guard_new(tensor, source.name, source.entry)
    return tensor


def _guard_new(tensor: torch.Tensor, name: str, entry: Entry) -> None:
    if type(tensor) in _bases:  # some classes make their aliases of type(self)
        tensor.__class__ = _bases[type(tensor)]
    Guard(tensor, name, entry, is_new=True)


def _resident_copy(tensor: torch.Tensor) -> torch.Tensor:
    copied: torch.Tensor = plainly(torch.Tensor.to, tensor, "cpu", copy=True)
    return copied


def _host(
    tensor: torch.Tensor,
    make: Callable[[torch.Tensor, Entry], torch.Tensor],
    copy: Callable[[torch.Tensor], torch.Tensor] = _resident_copy,
) -> torch.Tensor:
    """A host tensor like this one: ``make`` gives what stands for each tensor with memory that is offloaded, ``copy`` (a copy)
    for what is resident."""
    found = guard_of(tensor)
    if is_whole(tensor):
        try:
            made = rebuilt(tensor, _bases.get(type(tensor), type(tensor)), lambda inner: _host(inner, make, copy))
            if type(made) in _bases:  # some classes rebuild what type(self) was
                made.__class__ = _bases[type(made)]
            return made
        except TypeError as error:
            if found is None:
                raise
            raise refusal(f"{error}, so a host read cannot be served for", found.name, found.entry) from error
    entry = ledger.entry_of(storage_of(tensor))  # what guards it may be another storage's, of something that it carries
    if entry is None:
        return copy(tensor)
    entry.check_process()
    if not entry.offloaded:
        raise refusal("a host read cannot be served for", entry.name if found is None else found.name, entry)
    return make(tensor, entry)


def _device_copy(guard: Guard, device: torch.device, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """A fresh tensor with the values on a device, in the dtype of these arguments of `to`; waits for the copy."""
    _check_unrecorded(guard, tensor)
    keywords = {key: value for key, value in kwargs.items() if key not in ("copy", "device", "memory_format")}
    _, dtype, _, layout = torch._C._nn._parse_to(*args, **keywords)
    layout = layout or kwargs.get("memory_format") or torch.preserve_format
    return _host(tensor, serving.mirror_view).to(device, dtype, copy=True, memory_format=layout)


def _check_unrecorded(guard: Guard, tensor: torch.Tensor) -> None:
    if torch.is_grad_enabled() and tensor.requires_grad:
        raise refusal("autograd would record the copy (detach() first, or use torch.no_grad()) of", guard.name, guard.entry)


def _copy_into(guard: Guard, tensor: torch.Tensor, source: Any, non_blocking: bool = False) -> torch.Tensor:  # noqa: ARG001
    views: list[tuple[Entry, torch.Tensor]] = []

    def writable(part: torch.Tensor, entry: Entry) -> torch.Tensor:
        if entry.slot is None:
            raise refusal("copy_ would write what was discarded,", guard.name, entry)
        views.append((entry, serving.slot_view(part, entry)))
        return views[-1][1]

    host = source if guard_of(source) is None else _host(source, serving.host_copy)
    if not is_whole(tensor) and ledger.entry_of(storage_of(tensor)) is None:  # only what it carries is offloaded
        written: torch.Tensor = plainly(torch.Tensor.copy_, tensor, host)
        return written
    if tensor.layout is not torch.strided:
        raise refusal(f"copy_ into the layout {tensor.layout} is not possible on", guard.name, guard.entry)
    if torch.is_grad_enabled() and (tensor.requires_grad or source.requires_grad):
        raise refusal("copy_ is recorded by autograd (write under torch.no_grad()) on", guard.name, guard.entry)

    def resident(part: torch.Tensor) -> torch.Tensor:
        if part.numel():
            raise refusal("copy_ would write what is resident together with what is not of", guard.name, guard.entry)
        return _resident_copy(part)

    target = _host(tensor, writable, resident)
    serving.write(target, views, host)
    return tensor


def _refusing(name: str) -> Any:
    def refuse(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found = guard_of(self)
        if found is not None and found.entry.holds_tensors():
            raise refusal(f"{name} is not possible on", found.name, found.entry)
        return getattr(super(type(self), self), name)(*args, **kwargs)

    return refuse


def _repr(self: torch.Tensor) -> str:
    found = guard_of(self)
    if found is None:
        return object.__repr__(self)
    return (
        f"<offloaded {found.cls.__name__} {found.name!r}, shape={tuple(self.shape)}, dtype={self.dtype}, "
        f"device={str(self.device)!r}, requires_grad={self.requires_grad}>"
    )


def _format(self: torch.Tensor, spec: str) -> str:
    return format(self.item(), spec) if spec else repr(self)


def _copy(self: torch.Tensor) -> torch.Tensor:
    """`copy.copy` would go through pickling and give a host tensor on the mirror's memory."""
    return self.clone()


def _reduce_ex(self: torch.Tensor, protocol: Any) -> Any:
    """Pickled as a host tensor of the true class, straight from the mirror: a saved slice keeps its storage's size and
    tied tensors stay tied."""
    with ledger.LOCK:
        found = guard_of(self)
        if found is not None and found.entry.holds_tensors():
            host: Any = _host(self, lambda part, entry: serving.host_view(part, entry.export()))
            host.requires_grad_(self.requires_grad)
            host.__class__ = found.cls
            host.__dict__.update({key: value for key, value in self.__dict__.items() if key not in (_TAG, *host.__dict__)})
            return host.__reduce_ex__(protocol)
        if found is not None:
            found.lift()
    again: Any = self
    return again.__reduce_ex__(protocol)
