"""Modules under PyTorch's FSDP2 (`fully_shard`), whose parameters are shards in DTensors."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..errors import OffloadedTensorError, UnsupportedTargetError
from ..parts import foreign, parts_of
from ..tensors import gradient_of
from .base import Claim
from .methods import check_resident, refuse
from .per_parameter import FSDP_MODULE, PerParameterStrategy, is_sharded


class FSDP2Strategy(PerParameterStrategy):
    """A module with `torch.distributed.fsdp.fully_shard` applied to it or to modules inside: every rank its own shards.

    Claims padded shards whole, their gradients, gradients that wait unsharded for a later reduction
    (`set_requires_gradient_sync(False)`), and what `fully_shard` was not applied to. An offload reshards first; the next
    forward gathers again, as after any reshard.

    Args:
        module: the module, or a list of modules. Held weakly.
        grads, read_only, scratch, name, shared: as for `PerParameterStrategy`.

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
        for _, group in _groups(self.target):
            if group._all_gather_result is not None:  # a pending unshard would end with parameters from before
                work = group._all_gather_result.all_gather_work
                if isinstance(work, torch.distributed.Work):
                    work.wait()
                group._all_gather_result = None
            group._to_sharded()  # reshard() does nothing after a forward that failed
            for each in group.fsdp_params:
                if each.sharded_state.name != "SHARDED":
                    each.to_sharded()

    def claims(self) -> Iterator[Claim]:
        yield from super().claims()
        discard = self.grads == "discard"
        for path, each in _sharded_parameters(self.target):
            parameter = each.sharded_param
            yield Claim(tensor=each._sharded_param_data, name="_sharded_param_data", component="params", of=parameter)
            if getattr(each, "_sharded_post_forward_param_data", None) is not None:
                name = "_sharded_post_forward_param_data"
                yield Claim(tensor=getattr(each, name), name=name, component="params", of=parameter)
            for name, gradient in _unreduced(each):
                if name == "grad":
                    of, of_name = each._unsharded_param, f"{path} unsharded"
                else:
                    of, of_name, name = None, "", f"{path}.{name}"
                yield Claim(tensor=gradient, name=name, component="grads", of=of, of_name=of_name, discard=discard)
        for path, group in _groups(self.target):
            if group._partial_reduce_output is not None:
                name = f"{path}._partial_reduce_output".lstrip(".")
                yield Claim(tensor=group._partial_reduce_output, name=name, component="grads", discard=discard)

    def barriers(self, check: Callable[[str], None]) -> Iterator[Callable[[], None]]:  # noqa: ARG002
        for _, each in _sharded_parameters(self.target):
            yield from refuse(each, "reset_sharded_param", functools.partial(_is_in_place, weakref.ref(each)))
        for _, group in _groups(self.target):
            yield from refuse(group, "unshard", functools.partial(_check_shards, weakref.ref(group)))
        begins = functools.partial(_check_backward, weakref.ref(self.target))
        own = [state for _, state in _states(self.target).values()]
        around = [each for state in own for each in state._state_ctx.all_states]  # a root around the target too
        for state in {id(each): each for each in (*own, *around)}.values():
            yield from refuse(state, "_register_root_post_backward_final_callback", begins)

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
            yield from (f"{path}.{name} (unsharded)" for name, _ in _unreduced(each))
        for path, group in _groups(self.target):
            if group._partial_reduce_output is not None:
                yield f"{path}._partial_reduce_output".lstrip(".")


def _states(module: torch.nn.Module) -> dict[int, tuple[str, Any]]:
    """FSDP2's state of each module, or of several that were sharded together, by its id, with the name of the first."""
    found: dict[int, tuple[str, Any]] = {}
    for path, part in torch.nn.Module.named_modules(module):
        if isinstance(part, foreign(*FSDP_MODULE)):
            state = part._get_fsdp_state()
            found.setdefault(id(state), (path, state))
    return found


def _groups(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """The groups of parameters that are gathered together, with the name of their module; torch 2.11 has at most one each."""
    for path, state in _states(module).values():
        several = getattr(state, "_fsdp_param_groups", None)
        if several is None:
            several = [state._fsdp_param_group] if state._fsdp_param_group else []
        yield from ((path, group) for group in several)


def _sharded_parameters(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """FSDP2's record of each parameter that it shards (`FSDPParam`), with the name of the parameter."""
    names = {id(part): path for path, part in torch.nn.Module.named_modules(module)}
    for _, group in _groups(module):
        for each in group.fsdp_params:
            path = names.get(id(each._module_info.module), "")
            yield f"{path}.{each._module_info.param_name}".lstrip("."), each


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


def _check_backward(reference: weakref.ref[Any], _call: str) -> None:
    """Refuse a backward by name, where FSDP2 begins it, if it would gather offloaded shards or add to offloaded gradients.

    FSDP2 (torch 2.13) never finishes another backward after one that failed on its way.
    """
    target = reference()
    shards = [] if target is None else [each._sharded_param_data for _, each in _sharded_parameters(target)]
    claims = [] if target is None else [claim for claim in FSDP2Strategy(target).claims() if claim.component == "grads"]
    for tensor in (*shards, *(part.tensor for claim in claims for part in parts_of(claim.tensor))):
        check_resident(tensor, "backward()")


def _check_shards(reference: weakref.ref[Any], call: str) -> None:
    """Refuse to gather what is offloaded: one rank alone would copy it out of the mirror and compute."""
    group = reference()
    for each in () if group is None else group.fsdp_params:
        check_resident(each._sharded_param_data, call)


def _unreduced(each: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Gradients that wait unsharded for a reduction, with the attribute that each stands in."""
    unsharded: Any = getattr(each, "_unsharded_param", None)
    gradient = None if unsharded is None else gradient_of(unsharded)
    if gradient is not None:
        yield "grad", gradient
    if each.unsharded_accumulated_grad is not None:
        yield "unsharded_accumulated_grad", each.unsharded_accumulated_grad
