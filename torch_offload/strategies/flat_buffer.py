"""Megatron-core's DistributedDataParallel, whose parameters and gradients are views of a few flat buffers."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from ..errors import GradientsError, OffloadedTensorError, UnsupportedTargetError, listed
from ..tensors import address_of, byte_view, storage_of
from .base import Claim
from .per_parameter import PerParameterStrategy
from .walk import tensors_in

_BUFFERS = ("buffers", "expert_parallel_buffers")
_GROUPS = ("bucket_groups", "expert_parallel_bucket_groups")
# Methods that change something before they come to the data they need, and that data: of the wrapper, of a bucket group.
_OF_CHUNK = {"disable_forward_pre_hook": "param_data", "zero_grad_buffer": "grad_data"}
_OF_GROUP = {
    "start_param_sync": "param_data",
    "finish_param_sync": "param_data",
    "register_grad_ready": "grad_data",
    "start_grad_sync": "grad_data",
    "finish_grad_sync": "grad_data",
}


class FlatBufferStrategy(PerParameterStrategy):
    """Megatron-core's `DistributedDataParallel`: its flat buffers of parameters and gradients, dense and expert-parallel, and
    all of the module that lies outside of them (frozen parameters, module buffers, without the distributed optimizer every
    parameter).

    Collectives under way are waited for. Views that the wrapper keeps (buckets, shards of ranks, ``main_grad``) are guarded;
    its methods that would start a collective over what is away raise before they change anything.

    `examples/megatron_flat_buffers.py` and `examples/trainer.py` show it at work.

    Args:
        module: a wrapper, or a list of those that make up a virtual pipeline. Held weakly.
        grads: as for `PerParameterStrategy`, for the flat buffers and for `.grad`; ``"refuse"`` raises if there is a `.grad`,
            or a non-zero byte in a flat buffer.
        read_only, name, shared: as for `PerParameterStrategy`.

    Raises:
        UnsupportedTargetError: one has no flat buffers, or they are registered with NCCL (``nccl_ub``).
        ValueError: an unknown policy.
    """

    def accept(self, target: Any) -> None:
        super().accept(target)
        if not all(isinstance(getattr(target, table, None), list) for table in _BUFFERS + _GROUPS):
            raise UnsupportedTargetError(
                f"FlatBufferStrategy takes Megatron-core's DistributedDataParallel, and a {type(target).__name__} has no list "
                f"of {listed(_BUFFERS)}. Pass the wrapper itself, or PerParameterStrategy(module) for any other module"
            )
        for path, buffer in _flat_buffers(target):
            if getattr(buffer, "nccl_ub", False):
                raise UnsupportedTargetError(
                    f"{type(target).__name__}.{path} lives in an NCCL memory pool (nccl_ub=True), whose registration with NCCL "
                    "would go stale when its memory is freed and taken anew. Build the wrapper with nccl_ub=False"
                )

    def claims(self) -> Iterable[Claim]:
        claims = [*self._flat_claims(), *super().claims(), *self._main_grads()]
        claimed = {address_of(claim.tensor) for claim in claims}
        for path, tensor in self._kept():
            if address_of(tensor) not in claimed:
                claims.append(Claim(tensor=tensor, name=path, component="buffers", host=True))
        return claims

    def aliases(self) -> Iterable[torch.Tensor]:
        return (tensor for _, tensor in self._kept())

    def wait(self) -> None:
        for group in _groups(self.target):
            for handle in (group.param_gather_handle, group.grad_reduce_handle):
                if handle is not None:
                    handle.wait()

    def check(self, components: frozenset[str]) -> None:
        super().check(components)
        if self.grads != "refuse" or "grads" not in components:
            return
        buffers = [(path, storage_of(buffer.grad_data)) for path, buffer in _flat_buffers(self.target)]
        if present := [f"{self.name}.{path}.grad_data" for path, storage in buffers if bool(byte_view(storage).any())]:
            raise GradientsError(
                f'grads="refuse", and there are bytes that are not zero in {listed(present)}. Call optimizer.step() and '
                'zero_grad_buffer() first, or pass grads="preserve" or grads="discard"'
            )

    def barriers(self, check: Callable[[str], None]) -> Iterator[Callable[[], None]]:  # noqa: ARG002
        chunk = self.target
        owners = [(chunk, _OF_CHUNK, [buffer for _, buffer in _flat_buffers(chunk)])]
        owners += [(group, _OF_GROUP, group.buckets) for group in _groups(chunk)]
        for owner, methods, parts in owners:
            for method, data in methods.items():
                yield _refuse(owner, method, [getattr(part, data) for part in parts])

    def _flat_claims(self) -> Iterator[Claim]:
        # an unfinished collective's handle holds its tensors in C++; once waited for it does not use them
        gathering = any(group.param_gather_handle is not None for group in _groups(self.target))
        reducing = any(group.grad_reduce_handle is not None for group in _groups(self.target))
        for path, buffer in _flat_buffers(self.target):
            if buffer.param_data is not None:
                yield Claim(tensor=buffer.param_data, name=f"{path}.param_data", component="params", vouched=gathering)
            yield Claim(
                tensor=buffer.grad_data,
                name=f"{path}.grad_data",
                component="grads",
                discard=self.grads == "discard",
                vouched=reducing,
            )

    def _main_grads(self) -> Iterator[Claim]:
        for parameter in torch.nn.Module.parameters(self.target):
            gradient = parameter.__dict__.get("main_grad")
            if gradient is not None:
                discard = self.grads == "discard"
                yield Claim(tensor=gradient, name="main_grad", component="grads", of=parameter, discard=discard)

    def _kept(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors, other than parameters, that the wrapper's buffers, buckets and bucket groups keep, with their names."""
        parameters = {id(parameter) for parameter in torch.nn.Module.parameters(self.target)}
        tables = {table: getattr(self.target, table) for table in _BUFFERS + _GROUPS}
        return ((".".join(path), tensor) for path, tensor in tensors_in(tables, parameters))


def _flat_buffers(chunk: Any) -> Iterator[tuple[str, Any]]:
    """The wrapper's buffers, with their names."""
    return ((f"{table}.{index}", buffer) for table in _BUFFERS for index, buffer in enumerate(getattr(chunk, table)))


def _groups(chunk: Any) -> list[Any]:
    return [group for table in _GROUPS for group in getattr(chunk, table)]


def _refuse(owner: Any, method: str, data: Iterable[torch.Tensor | None]) -> Callable[[], None]:
    """Have a method raise before it does anything while some of this data is offloaded; returns what undoes that.

    The data's own refusal would come from inside of torch's coalescing of collectives, which then swallows later ones.
    """
    was = vars(owner).get(method)  # somebody's own
    call, needed = getattr(owner, method), [weakref.ref(tensor) for tensor in data if tensor is not None]

    def refusing(*args: Any, **keywords: Any) -> Any:
        for reference in needed:
            tensor = reference()
            if tensor is not None:
                try:
                    tensor.data_ptr()
                except OffloadedTensorError as error:
                    raise OffloadedTensorError(f"{method}(): {error}") from None
        return call(*args, **keywords)

    setattr(owner, method, refusing)
    weakly = weakref.ref(owner)

    def undo() -> None:
        alive = weakly()
        if alive is not None and was is None:
            vars(alive).pop(method, None)
        elif alive is not None:
            setattr(alive, method, was)

    return undo
