"""What a tensor consists of: its own memory, or the tensors inside of it that have the memory.

Wrapper subclasses say so themselves (`__tensor_flatten__`: DTensor, torchao's), as sparse tensors do through their accessors.
Some carry tensors in attributes instead; those are known by the name of their class, which is looked up in `sys.modules`, so
that nothing foreign is imported. `register` adds a class of your own.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .tensors import attribute, plainly
from .walk import tensors_in

PLAIN: set[type] = {torch.Tensor, torch.nn.Parameter}  # with nothing inside; and what guard.py makes of these
Carried = Callable[[Any], Iterable[tuple[str, torch.Tensor]]]


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """A tensor that has memory of its own.

    Attributes:
        tensor: the tensor.
        suffix: what its name has beyond the name of the whole: ``""`` or ``"._local_tensor"``.
        hidden: holders of its storage inside of the whole that are no tensor object.
        around: the tensors around it that are inside of the whole themselves.
    """

    tensor: torch.Tensor
    suffix: str = ""
    hidden: int = 0
    around: tuple[torch.Tensor, ...] = ()


def register(where: str, name: str, carried: Carried, *, wraps: bool = False) -> Callable[[], None]:
    """Say which tensors the tensors, or the modules, of a class carry in attributes: those are offloaded with them.

    For the whole process, since a class is; call it when nothing of that class is offloaded.

    Example:
        >>> undo = register("mypackage.tensors", "Scaled", lambda tensor: [("scale", tensor.scale)])

    Args:
        where, name: the module of the class and its name there; it is looked up when it has been imported, never before.
        carried: gives pairs of a name and a tensor, as they are at the moment. Looks at attributes only.
        wraps: of a class of tensors, whether their own storage has no memory.

    Returns:
        What undoes it.
    """
    before = _registered.get((where, name))
    _registered[where, name] = (carried, wraps)

    def undo() -> None:
        if before is None:
            _registered.pop((where, name), None)
        else:
            _registered[where, name] = before

    return undo


def parts_of(tensor: torch.Tensor) -> list[Part]:
    """The tensors with memory that this one consists of: itself alone, if it is like most."""
    return list(_parts_of(tensor, set()))


def _parts_of(tensor: torch.Tensor, seen: set[int]) -> Iterator[Part]:
    is_plain = type(tensor) in PLAIN
    layout = attribute(tensor, "layout")
    if layout in _ACCESSORS:
        for name in _ACCESSORS[layout]:
            yield Part(plainly(getattr(torch.Tensor, name), tensor), f".{name}", hidden=1)
        return
    is_wrapper = not is_plain and is_traceable_wrapper_subclass(tensor)
    if not is_wrapper and not (not is_plain and _wraps(tensor)):
        yield Part(tensor)
    if not is_plain:
        seen.add(id(tensor))  # what is carried may refer to what carries it
        for name, each in inner_of(tensor).items() if is_wrapper else carried_by(tensor):
            for part in _parts_of(each, seen) if id(each) not in seen else ():
                around = part.around if part.tensor is each else (each, *part.around)
                yield dataclasses.replace(part, suffix=f".{name}{part.suffix}", around=around)


def carried_by(thing: torch.Tensor | torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """The tensors in attributes of a tensor or a module, with their names, for the classes that are registered."""
    return [pair for kind, carried in carriers() if isinstance(thing, kind) for pair in carried(thing)]


def carriers() -> list[tuple[Any, Carried]]:
    """The registered classes whose modules have been imported, and what tells what theirs carry."""
    return [(foreign(where, name), carried) for (where, name), (carried, _) in _registered.items() if where in sys.modules]


def is_foreign(kind: type) -> bool:
    """Whether a class of tensors is registered, or derives from one that is: its methods may hand memory to C++."""
    return any(isinstance(found := foreign(where, name), type) and issubclass(kind, found) for where, name in _registered)


def is_whole(tensor: torch.Tensor) -> bool:
    """Whether the tensor consists of others, and has no memory that is its own."""
    return all(part.tensor is not tensor for part in parts_of(tensor))


def inner_of(tensor: Any) -> dict[str, torch.Tensor]:
    """The tensors that a wrapper subclass wraps, by attribute."""
    found = {name: getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]}
    return {name: each for name, each in found.items() if isinstance(each, torch.Tensor)}  # DTensor gives its mesh too


def rebuilt(tensor: torch.Tensor, cls: Any, exchange: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """A tensor like this one, whose class is ``cls``, with the tensors right inside of it exchanged.

    Raises:
        TypeError: it is of a class that does not say how to put one together.
    """
    layout = attribute(tensor, "layout")
    if layout in _ACCESSORS:
        parts = [exchange(part.tensor) for part in parts_of(tensor)]
        make: Any = torch.sparse_coo_tensor if layout is torch.sparse_coo else torch.sparse_compressed_tensor
        is_coalesced = layout is torch.sparse_coo and plainly(torch.Tensor.is_coalesced, tensor)
        keywords = {"is_coalesced": is_coalesced} if layout is torch.sparse_coo else {"layout": layout}
        # As an argument, torch 2.11 warns of it all the same.
        with torch.sparse.check_sparse_tensor_invariants(enable=False):  # type: ignore[no-untyped-call]
            sparse: torch.Tensor = make(*parts, attribute(tensor, "shape"), **keywords)
        return sparse
    size, stride = attribute(tensor, "shape"), plainly(torch.Tensor.stride, tensor)
    if not is_traceable_wrapper_subclass(tensor):
        raise TypeError(f"{cls.__name__} does not say how it is put together (__tensor_unflatten__)")
    names, context = tensor.__tensor_flatten__()
    inner = {name: getattr(tensor, name) for name in names}
    inner |= {name: exchange(each) for name, each in inner.items() if isinstance(each, torch.Tensor)}
    made: torch.Tensor = cls.__tensor_unflatten__(inner, context, size, stride)
    return made


def foreign(where: str, name: str) -> Any:
    """A class, as `isinstance` takes it: nothing is one where its module was never imported, or has no class of that name."""
    found = getattr(sys.modules.get(where), name, None)
    return found if isinstance(found, type) else ()


def _wraps(tensor: torch.Tensor) -> bool:
    return any(wraps and isinstance(tensor, foreign(where, name)) for (where, name), (_, wraps) in _registered.items())


_ACCESSORS = {  # of the tensors inside of a sparse one; each call gives a new tensor object on the same storage
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


def _attributes(*names: str) -> Carried:
    """What is in these attributes, records and plain objects looked into."""

    def carried(thing: Any) -> Iterator[tuple[str, torch.Tensor]]:
        return tensors_in({name: thing.__dict__.get(name) for name in names}, {id(thing)}, objects=True)

    return carried


def _everything(tensor: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """What a tensor has in whatever attribute but those that all parameters may have."""
    shown = {name: value for name, value in tensor.__dict__.items() if name not in ("grad", "main_grad", "main_param")}
    return tensors_in(shown, {id(tensor)}, objects=True)


_registered: dict[tuple[str, str], tuple[Carried, bool]] = {
    # read in bitsandbytes 0.50.2: quantisation state in an object, the same that the module has
    ("bitsandbytes.nn", "Params4bit"): (_attributes("quant_state"), False),
    ("bitsandbytes.nn", "Int8Params"): (_attributes("CB", "SCB"), False),
    ("bitsandbytes.nn", "Linear8bitLt"): (_attributes("state"), False),  # where the first forward puts those
    # read in TransformerEngine, August 2026: data, transposes and scales in attributes. Since then it flattens by itself; the
    # class had moved before, with its pull request 2276
    ("transformer_engine.pytorch.tensor.quantized_tensor", "QuantizedTensor"): (_everything, True),
    ("transformer_engine.pytorch.quantized_tensor", "QuantizedTensor"): (_everything, True),
}
