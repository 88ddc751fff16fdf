"""Modules under PyTorch's FSDP2 (`fully_shard`), whose parameters are shards in DTensors."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from ..errors import OffloadedTensorError, UnsupportedTargetError
from ..parts import foreign
from ..tensors import gradient_of
from .base import Claim
from .methods import refuse
from .per_parameter import PerParameterStrategy, is_sharded

_MODULE = ("torch.distributed.fsdp", "FSDPModule")


class FSDP2Strategy(PerParameterStrategy):
    """A module with `torch.distributed.fsdp.fully_shard` applied to it or to modules inside: every rank its own shards.

    Claims padded shards whole, their gradients, gradients that wait unsharded for a later reduction
    (`set_requires_gradient_sync(False)`), and what `fully_shard` was not applied to. An offload reshards first; the next
    forward gathers again, as after any reshard.

    Args:
        module: the module, or a list of modules. Held weakly.
        grads, read_only, name, shared: as for `PerParameterStrategy`.

    Raises:
        UnsupportedTargetError: nothing in ``module`` is an `FSDPModule`, or one is under a `CPUOffloadPolicy`.
        ValueError: an unknown policy.
    """

    def accept(self, target: Any) -> None:
        if not isinstance(target, torch.nn.Module) or not is_sharded(target):
            raise UnsupportedTargetError(
                f"{type(self).__name__} takes a module to which fully_shard was applied, or one around it, and a "
                f"{type(target).__name__} is none"
            )
        for path, each in _sharded_parameters(target):
            if each.offload_to_cpu:
                raise UnsupportedTargetError(
                    f"{type(target).__name__}.{path} is under a CPUOffloadPolicy: FSDP2 itself keeps it in host memory and "
                    "streams it in. Nothing was touched. Apply fully_shard without offload_policy, or leave it to that policy"
                )

    def wait(self) -> None:
        for part in torch.nn.Module.modules(self.target):
            if isinstance(part, foreign(*_MODULE)):
                part.reshard()  # not recursive

    def claims(self) -> Iterator[Claim]:
        yield from super().claims()
        discard = self.grads == "discard"
        for path, each in _sharded_parameters(self.target):
            parameter = each.sharded_param
            yield Claim(tensor=each._sharded_param_data, name="_sharded_param_data", component="params", of=parameter)
            for name, of, gradient in _unreduced(each):
                yield Claim(tensor=gradient, name=name, component="grads", of=of, of_name=f"{path} unsharded", discard=discard)

    def aliases(self) -> Iterator[torch.Tensor]:
        for _, each in _sharded_parameters(self.target):
            yield from each.all_gather_outputs
            yield from getattr(each, "_unsharded_inner_tensors", ())

    def barriers(self, check: Callable[[str], None]) -> Iterator[Callable[[], None]]:  # noqa: ARG002
        for _, each in _sharded_parameters(self.target):
            yield from refuse(each, "reset_sharded_param", functools.partial(_is_in_place, weakref.ref(each)))
        for part in torch.nn.Module.modules(self.target):
            if isinstance(part, foreign(*_MODULE)):
                begins = functools.partial(_check_gradients, weakref.ref(self.target))
                yield from refuse(part._get_fsdp_state(), "_register_root_post_backward_final_callback", begins)

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """The shards, also while something else stands in the modules in their place."""
        shards = {}
        for _, each in _sharded_parameters(self.target):
            for form in ("_unsharded_param", "_sharded_post_forward_param"):  # which some parameters never had
                if hasattr(each, form):
                    shards[id(getattr(each, form))] = each.sharded_param
        return ((name, shards.get(id(parameter), parameter)) for name, parameter in super().named_parameters())

    def gradients(self) -> Iterator[str]:
        yield from super().gradients()
        for path, each in _sharded_parameters(self.target):
            yield from (f"{path}.{name} (unsharded)" for name, _, _ in _unreduced(each))


def _sharded_parameters(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """FSDP2's record of each parameter that it shards (`FSDPParam`), with the name of the parameter."""
    names = {id(part): path for path, part in torch.nn.Module.named_modules(module)}
    for part in torch.nn.Module.modules(module):
        if isinstance(part, foreign(*_MODULE)):
            for group in _groups(part._get_fsdp_state()):
                for each in group.fsdp_params:
                    path = names.get(id(each._module_info.module), "")
                    yield f"{path}.{each._module_info.param_name}".lstrip("."), each


def _groups(state: Any) -> Iterable[Any]:
    """The groups of parameters that are gathered together; torch 2.11 has at most one for each module."""
    several = getattr(state, "_fsdp_param_groups", None)
    return several if several is not None else [state._fsdp_param_group] if state._fsdp_param_group else []


def _is_in_place(reference: weakref.ref[Any], _call: str) -> bool:
    """Whether a shard is offloaded and still the same tensor: what was loaded is in its mirror, and nothing is to be reset."""
    each = reference()
    if each is None or getattr(each._module_info.module, each._module_info.param_name) is not each.sharded_param:
        return False
    try:
        each.sharded_param._local_tensor.data_ptr()
    except OffloadedTensorError:
        return True
    return False


def _check_gradients(reference: weakref.ref[Any], _call: str) -> None:
    """Refuse a backward by name, where FSDP2 begins it, if it would reduce into an offloaded gradient.

    FSDP2 (torch 2.13) never finishes another backward after one that failed on its way.
    """
    target = reference()
    for _, each in () if target is None else _sharded_parameters(target):
        gradient: Any = gradient_of(each.sharded_param)
        if gradient is not None:
            try:
                gradient._local_tensor.data_ptr()
            except OffloadedTensorError as error:
                raise OffloadedTensorError(str(error).replace("data_ptr", "backward()", 1)) from None


def _unreduced(each: Any) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Gradients that wait unsharded for a reduction: attribute, the tensor that has it, gradient."""
    unsharded: Any = getattr(each, "_unsharded_param", None)
    gradient = None if unsharded is None else gradient_of(unsharded)
    if gradient is not None:
        yield "grad", unsharded, gradient
    if each.unsharded_accumulated_grad is not None:
        yield "unsharded_accumulated_grad", each.sharded_param, each.unsharded_accumulated_grad
