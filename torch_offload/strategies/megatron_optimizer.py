"""Megatron-core's optimizers: torch optimizers, and the main parameters, main gradients and scalers around them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

import torch

from ..errors import UnsupportedTargetError
from ..parts import foreign
from ..tensors import address_of, gradient_of
from ..walk import tensors_in
from .base import Claim, Strategy
from .methods import refuse
from .optimizer import hooks, parameter_names

_METHODS = (  # that change something before they come to what is away, or would replace it
    "step",
    "prepare_grads",
    "step_with_ready_grads",
    "load_state_dict",
    "load_parameter_state",
    "reload_model_params",
    "offload_to_cpu",
    "restore_from_cpu",
)


class MegatronOptimizerStrategy(Strategy):
    """Any optimizer of Megatron-core (`FP32Optimizer`, `Float16OptimizerWithFloat16Params`, `DistributedOptimizer`,
    `ChainedOptimizer` and what derives from them; stubs without parameters too).

    It claims main parameters, their gradients, every tensor in the state of the torch optimizers inside under any key, and
    scalers. What views the model's parameters or gradients, such as the shards of a distributed optimizer in fp32, goes
    with the model. Looking creates no state, and nothing is added to it. Beside an accelerator, tensors in host memory (a
    `HybridDeviceOptimizer`'s) are left alone. While it is away, `step`, `load_state_dict` and their like raise by name.

    Args:
        optimizer: the optimizer, as `get_megatron_optimizer` gives it, or a list of them. Held weakly.
        name, shared: as for `Strategy`.

    Raises:
        UnsupportedTargetError: ``optimizer`` is none of Megatron-core's, or is one of its own FSDP's.
        ValueError: an unknown policy.
    """

    components: ClassVar[tuple[str, ...]] = ("optimizer",)

    def accept(self, target: Any) -> None:
        if not isinstance(target, foreign("megatron.core.optimizer.optimizer", "MegatronOptimizer")):
            raise UnsupportedTargetError(
                f"{type(self).__name__} takes an optimizer of megatron.core.optimizer, not a {type(target).__name__}"
            )
        if any(getattr(getattr(each, "ddp_config", None), "use_megatron_fsdp", False) for each in _chained(target)):
            raise UnsupportedTargetError(
                f"this {type(target).__name__} belongs to Megatron's FSDP (use_megatron_fsdp=True), which keeps its tensors in "
                "buffers that no strategy here knows. Nothing was touched. Write a Strategy that claims those"
            )

    def claims(self) -> Iterable[Claim]:
        models = self._addresses_of_models()
        return [claim for claim in self._claims() if address_of(claim.tensor) not in models]

    def aliases(self) -> Iterator[torch.Tensor]:
        for _, tensor in self._tables():
            yield tensor
            yield from (value for _, value in _attached(tensor))

    def leaves(self) -> Iterable[torch.Tensor]:
        return (tensor for each in _torch_optimizers(self.target) for tensor in _parameters(each))

    def barriers(self, check: Callable[[str], None]) -> Iterator[Callable[[], None]]:
        for owner in {id(each): each for each in (self.target, *_chained(self.target))}.values():
            for method in _METHODS:
                if hasattr(owner, method):
                    yield from refuse(owner, method, check)
        for optimizer in _torch_optimizers(self.target):
            yield from hooks(optimizer, check)

    def _claims(self) -> Iterator[Claim]:
        """Each tensor once, named after the model's parameter that it stands for if there is one."""
        model_parameters = self._model_parameters()
        names = parameter_names(*_torch_optimizers(self.target))
        taken: set[int] = {*map(id, model_parameters)}

        def claim(tensor: torch.Tensor, name: str, main: torch.Tensor | None) -> Iterator[Claim]:
            if id(tensor) not in taken:
                taken.add(id(tensor))
                of = None if main is None else origin.get(id(main), main)
                of_name = "" if main is None else names.get(id(main), "")
                yield Claim(tensor=tensor, name=name, component="optimizer", of=of, of_name=of_name, host=True)

        origin = self._origins(model_parameters)
        for optimizer in _torch_optimizers(self.target):
            for index, (key, state) in enumerate(optimizer.state.items()):
                names.setdefault(id(key), f"state {index}")
                for path, tensor in tensors_in(state, taken, objects=True):
                    yield from claim(tensor, path or "state", key if isinstance(key, torch.Tensor) else None)
        for path, tensor in self._tables():
            main = tensor if id(tensor) in origin else None
            name = path if main is None else "main_param"
            yield from claim(tensor, name, main)
            for attribute, value in _attached(tensor):
                yield from claim(value, f"{name}.{attribute}", main)

    def _tables(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor in the attributes, lists and tables of the optimizers."""
        for path, owner in _owners(self.target):
            for name, tensor in tensors_in(vars(owner), (), objects=False):
                yield f"{path}.{name}", tensor

    def _model_parameters(self) -> list[torch.nn.Parameter]:
        found = (tensor for _, tensor in self._tables() if isinstance(tensor, torch.nn.Parameter))
        return list({id(each): each for each in found}.values())

    def _addresses_of_models(self) -> set[int]:
        """The storages that are the models' and not the optimizer's."""
        found: list[torch.Tensor | None] = []
        for parameter in self._model_parameters():
            found += [parameter, gradient_of(parameter), parameter.__dict__.get("main_grad")]
        for each in _chained(self.target):
            for buffer in getattr(each, "buffers", ()):
                found += [buffer.param_data, buffer.grad_data]
        return {address_of(tensor) for tensor in found if tensor is not None}

    def _origins(self, parameters: Iterable[torch.nn.Parameter]) -> dict[int, torch.Tensor]:
        """The model's parameter that stands behind each main parameter, by the id of the latter."""
        found: dict[int, torch.Tensor] = {}
        for parameter in parameters:
            main = parameter.__dict__.get("main_param")
            if main is not None:
                found[id(main)] = parameter
        for each in _chained(self.target):
            for whole, shards in zip(
                getattr(each, "model_fp32_groups", ()), getattr(each, "shard_fp32_groups", ()), strict=True
            ):
                found |= {id(shard): parameter for parameter, shard in zip(whole, shards, strict=True)}
        for optimizer in _torch_optimizers(self.target):
            for table in ("gpu_params_map_cpu_copy", "param_to_fp32_param"):  # a HybridDeviceOptimizer's
                for original, copy in getattr(optimizer, table, {}).items():
                    found[id(copy)] = found.get(id(original), original)
        return found


def _chained(optimizer: Any) -> list[Any]:
    """The optimizers that a chain consists of; one that is no chain, alone."""
    chained = getattr(optimizer, "chained_optimizers", None)
    return [optimizer] if chained is None else [each for one in chained for each in _chained(one)]


def _torch_optimizers(optimizer: Any) -> list[torch.optim.Optimizer]:
    """The torch optimizers inside, those inside of a `HybridDeviceOptimizer` too; none in a stub."""
    inner = [each.optimizer for each in _chained(optimizer) if each.optimizer is not None]
    return [each for one in inner for each in (one, *getattr(one, "sub_optimizers", ()))]


def _owners(optimizer: Any) -> Iterator[tuple[str, Any]]:
    """Whatever may hold tensors in attributes, with its name."""
    for index, each in enumerate(_chained(optimizer)):
        yield f"{index}", each
        if getattr(each, "grad_scaler", None) is not None:
            yield f"{index}.grad_scaler", each.grad_scaler
    for index, each in enumerate(_torch_optimizers(optimizer)):
        yield f"{type(each).__name__} {index}", each


def _attached(tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The gradients that a tensor has, under whatever name; a model's parameters have other things too, which are not ours."""
    gradient = gradient_of(tensor)
    if gradient is not None:
        yield "grad", gradient
    if not isinstance(tensor, torch.nn.Parameter):
        yield from ((name, value) for name, value in tensor.__dict__.items() if isinstance(value, torch.Tensor))


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    return (tensor for group in optimizer.param_groups for tensor in group["params"])
