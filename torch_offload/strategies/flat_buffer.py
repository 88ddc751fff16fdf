"""Megatron-core's DistributedDataParallel, whose parameters and gradients are views of a few flat buffers."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from ..errors import UnsupportedTargetError
from ..tensors import address_of, byte_view, storage_of
from ..walk import tensors_in
from .base import Claim
from .methods import check_resident, refuse
from .per_parameter import PerParameterStrategy

_BUFFERS = ("buffers", "expert_parallel_buffers")
_GROUPS = ("bucket_groups", "expert_parallel_bucket_groups")
# Methods that change something before they come to the data they need, and that data: of the wrapper, of a bucket group.
_OF_CHUNK = {"disable_forward_pre_hook": "param_data", "zero_grad_buffer": "grad_data"}
_OF_GROUP = {"start_param_sync": "param_data", "start_grad_sync": "grad_data", "finish_grad_sync": "grad_data"}


class FlatBufferStrategy(PerParameterStrategy):
    """Megatron-core's `DistributedDataParallel`: its flat buffers of parameters and gradients, dense and expert-parallel, and
    all of the module that lies outside of them (frozen parameters, module buffers, without the distributed optimizer every
    parameter).

    Collectives that its bucket groups have started are waited for. Views that the wrapper keeps (buckets, shards of ranks,
    ``main_grad``) are guarded; its methods that would start a collective over what is away raise before they change anything.

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

    zeroing = "zero_grad_buffer()"

    def accept(self, target: Any) -> None:
        is_module = isinstance(target, torch.nn.Module)
        if not is_module or not all(isinstance(getattr(target, table, None), list) for table in _BUFFERS + _GROUPS):
            raise UnsupportedTargetError(
                f"{type(self).__name__} takes Megatron-core's DistributedDataParallel, or a list of them, and a "
                f"{type(target).__name__} is none. Pass the wrapper itself, not what is in it or around it"
            )
        for path, buffer in _members(target, _BUFFERS):
            if getattr(buffer, "nccl_ub", False):
                raise UnsupportedTargetError(
                    f"{type(target).__name__}.{path} lives in an NCCL memory pool (nccl_ub=True), whose registration with NCCL "
                    "would go stale when its memory is freed and taken anew. Build the wrapper with nccl_ub=False"
                )

    def claims(self) -> Iterable[Claim]:
        claims = [*self._flat_claims(), *super().claims()]
        claims += [
            Claim(tensor=gradient, name="main_grad", component="grads", of=parameter, discard=self.grads == "discard")
            for _, parameter, gradient in self._main_grads()
        ]
        claimed = {address_of(claim.tensor) for claim in claims}
        for path, tensor in self._kept():
            if address_of(tensor) not in claimed:
                claims.append(Claim(tensor=tensor, name=path, component="buffers", host=True))
        return claims

    def aliases(self) -> Iterable[torch.Tensor]:
        return (tensor for _, tensor in self._kept())

    def wait(self) -> None:
        for _, group in _members(self.target, _GROUPS):
            for name in ("param_gather_handle", "grad_reduce_handle"):
                handle = getattr(group, name)
                if handle is not None:
                    handle.wait()
                    # gloo's would write its result again whenever it is waited for, and all hold their tensors in C++
                    setattr(group, name, torch.distributed.distributed_c10d._CoalescingManager())

    def check(self, components: frozenset[str]) -> None:
        self.check_gradients(components)

    def gradients(self) -> Iterator[str]:
        yield from super().gradients()
        found = [(claim.name, claim.tensor) for claim in self._flat_claims() if claim.component == "grads"]
        found += [(f"{name}.main_grad", gradient) for name, _, gradient in self._main_grads()]
        seen: set[int] = set()
        for name, tensor in found:
            storage = storage_of(tensor)
            if storage._cdata not in seen and bool(byte_view(storage).any()):
                yield name
            seen.add(storage._cdata)

    def barriers(self, check: Callable[[str], None]) -> Iterator[Callable[[], None]]:  # noqa: ARG002
        chunk = self.target
        owners = [(chunk, _OF_CHUNK, [buffer for _, buffer in _members(chunk, _BUFFERS)])]
        owners += [(group, _OF_GROUP, group.buckets) for _, group in _members(chunk, _GROUPS)]
        for owner, methods, parts in owners:
            for method, data in methods.items():
                needed = [weakref.ref(getattr(part, data)) for part in parts if getattr(part, data) is not None]
                yield from refuse(owner, method, functools.partial(_check_needed, needed))

    def _flat_claims(self) -> Iterator[Claim]:
        gathers = any(group.param_gather_handle is not None for _, group in _members(self.target, _GROUPS))
        for path, buffer in _members(self.target, _BUFFERS):
            receives = buffer.param_data is None and gathers  # a layer-wise optimizer's gather puts parameters there
            if buffer.param_data is not None:
                yield Claim(tensor=buffer.param_data, name=f"{path}.param_data", component="params")
            discard = self.grads == "discard" and not receives
            yield Claim(tensor=buffer.grad_data, name=f"{path}.grad_data", component="grads", discard=discard)

    def _main_grads(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """Each parameter that has a main gradient: its name, it, and that."""
        for name, parameter in torch.nn.Module.named_parameters(self.target):
            gradient = parameter.__dict__.get("main_grad")
            if gradient is not None:
                yield name, parameter, gradient

    def _kept(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors, other than parameters, that the wrapper's buffers, buckets and bucket groups have, with their names."""
        parameters = {id(parameter) for parameter in torch.nn.Module.parameters(self.target)}
        owners = [*_members(self.target, _BUFFERS), *_members(self.target, _GROUPS)]
        owners += [(f"{path}.{name}", each) for path, owner in owners for name, each in _members(owner, ("buckets",))]
        for path, owner in owners:
            for name, tensor in tensors_in(vars(owner), parameters, objects=False):
                yield f"{path}.{name}", tensor


def _members(owner: Any, tables: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """What is in these lists, with its name there."""
    return ((f"{table}.{index}", each) for table in tables for index, each in enumerate(getattr(owner, table)))


def _check_needed(needed: Sequence[weakref.ref[torch.Tensor]], call: str) -> None:
    """Raise by name if some of this data is offloaded, on behalf of a call that needs it.

    The data's own refusal would come from inside of torch's coalescing of collectives, which then swallows later ones.
    """
    for reference in needed:
        tensor = reference()
        if tensor is not None:
            check_resident(tensor, call)
