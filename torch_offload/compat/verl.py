"""The functions that verl's Megatron and FSDP engines call around a rollout, over this package: the import is all that changes.

    from torch_offload.compat.verl import load_megatron_model_to_gpu, offload_megatron_model_to_cpu

Names, signatures and effects are those of verl.utils.megatron_utils, verl.utils.fsdp_utils and
verl.experimental.fully_async_policy.megatron_utils (volcengine/verl, January 2026). What differs:

- Host memory is taken once, exactly as much as there are bytes, and gradients outside of flat buffers, module buffers, expert
  buffers and every tensor of an optimizer's state go too.
- A parameter's ``device`` names the device all the time; what is offloaded raises when it is computed with. What read
  ``param_data.cpu_data`` uses `copy_megatron_model_to_cpu`, or reads the parameters themselves, which answer from host memory.
- Loading zeroes the gradients that come back, and leaves alone those that never went.
- ``empty_cache=False`` has no effect: memory that was freed is given back to the driver.
- FSDP1 is refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ..offloader import Offloader
from ..parts import foreign
from ..snapshot import Snapshot, snapshot
from ..strategies import (
    Claim,
    FlatBufferStrategy,
    FSDP2Strategy,
    MegatronOptimizerStrategy,
    OptimizerStrategy,
    PerParameterStrategy,
    Strategy,
)

DEVICE: torch.device | str | None = None  # whose memory is meant: as for `Offloader`


class _Chunk(FlatBufferStrategy):
    """A wrapped chunk; its frozen parameters can be left behind."""

    components = ("params", "grads", "buffers", "frozen")

    def claims(self) -> Iterable[Claim]:
        return _with_frozen(super().claims())


class _Module(PerParameterStrategy):
    """A chunk without a wrapper, such as a reference model."""

    components = ("params", "grads", "buffers", "frozen")

    def claims(self) -> Iterable[Claim]:
        return _with_frozen(super().claims())


class _Optimizer(MegatronOptimizerStrategy):
    """An optimizer whose main parameters ("copy params") can be moved by themselves."""

    components = ("optimizer", "copy_params")

    def claims(self) -> Iterable[Claim]:
        for claim in super().claims():
            yield dataclasses.replace(claim, component="copy_params") if claim.name == "main_param" else claim


def offload_megatron_model_to_cpu(models: Sequence[torch.nn.Module]) -> None:
    """Put parameters and buffers of model chunks away, and drop the gradients of those that are wrapped.

    Raises:
        OffloadError: see `Offloader.offload`. Everything is as it was.
    """
    _of_models(models).offload()


def load_megatron_model_to_gpu(
    models: Sequence[torch.nn.Module], load_grad: bool = True, load_frozen_params: bool = True
) -> None:
    """Bring model chunks back. Gradients of wrapped ones come back as zeros.

    Args:
        models: the chunks.
        load_grad: whether to take memory for gradients; not needed to infer or to export.
        load_frozen_params: whether parameters that are not trained come back too; not needed to export adapters.

    Raises:
        OffloadError: see `Offloader.reload`. Everything stays offloaded.
    """
    chosen = ["params", "buffers", *(["grads"] if load_grad else []), *(["frozen"] if load_frozen_params else [])]
    _of_models(models).reload(chosen)


def offload_megatron_optimizer(optimizers: Any) -> None:
    """Put everything that Megatron's optimizer holds away: main parameters, their gradients, state, scalers."""
    _of_optimizer(optimizers).offload()


def load_megatron_optimizer(optimizers: Any) -> None:
    """Bring all of Megatron's optimizer back."""
    _of_optimizer(optimizers).reload()


def offload_megatron_copy_params(optimizers: Any) -> None:
    """Put the main parameters of Megatron's optimizer away, and leave its state."""
    _of_optimizer(optimizers).offload("copy_params")


def load_megatron_copy_params(optimizers: Any) -> None:
    """Bring the main parameters of Megatron's optimizer back."""
    _of_optimizer(optimizers).reload("copy_params")


def copy_megatron_model_to_cpu(models: Sequence[torch.nn.Module]) -> Snapshot:
    """Copy the parameters of model chunks, wherever they are, to host memory of their own: once, not three times."""
    return snapshot(*_kept(models), components=["params"] if len(models) else None, device=DEVICE)


def restore_megatron_model_from_cpu(models: Sequence[torch.nn.Module], cpu_state: Snapshot) -> None:
    """Copy parameters back that `copy_megatron_model_to_cpu` kept, onto the device or into the mirror."""
    cpu_state.copy_to(*_kept(models), device=DEVICE)


def offload_fsdp_model_to_cpu(model: torch.nn.Module, empty_cache: bool = True) -> None:
    """Put a module under FSDP2 away: shards, gradients, buffers.

    Raises:
        UnsupportedTargetError: it is under FSDP1.
    """
    offload_fsdp2_model_to_cpu(model, empty_cache)


def load_fsdp_model_to_gpu(model: torch.nn.Module) -> None:
    """Bring a module under FSDP2 back."""
    load_fsdp2_model_to_gpu(model)


def offload_fsdp2_model_to_cpu(model: torch.nn.Module, empty_cache: bool = True) -> None:  # noqa: ARG001
    """Put a module under FSDP2 away: shards, gradients, buffers."""
    Offloader(FSDP2Strategy(model), device=DEVICE).offload()


def load_fsdp2_model_to_gpu(model: torch.nn.Module) -> None:
    """Bring a module under FSDP2 back."""
    Offloader(FSDP2Strategy(model), device=DEVICE).reload()


def offload_fsdp_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Put the state of a torch optimizer away, if there is one; tensors that live in host memory stay there."""
    if not optimizer.state:
        return
    Offloader(OptimizerStrategy(optimizer), device=DEVICE).offload()


def load_fsdp_optimizer(optimizer: torch.optim.Optimizer, device_id: int | str | torch.device) -> None:  # noqa: ARG001
    """Bring the state of a torch optimizer back, to where it was."""
    Offloader(OptimizerStrategy(optimizer), device=DEVICE).reload()


def _of_models(models: Sequence[torch.nn.Module]) -> Offloader:
    return Offloader(*_strategies(models), device=DEVICE)


def _strategies(models: Sequence[torch.nn.Module]) -> list[Strategy]:
    return [_Chunk(each, grads="discard") if _is_wrapped(each) else _Module(each) for each in models]


def _kept(models: Sequence[torch.nn.Module]) -> list[Strategy]:
    """For snapshots, for which it is one whether a parameter is trained."""
    return [FlatBufferStrategy(each) if _is_wrapped(each) else PerParameterStrategy(each) for each in models]


def _is_wrapped(model: torch.nn.Module) -> bool:
    return isinstance(model, foreign("megatron.core.distributed", "DistributedDataParallel"))


def _of_optimizer(optimizers: Any) -> Offloader:
    return Offloader(*([] if optimizers is None else [_Optimizer(optimizers)]), device=DEVICE)


def _with_frozen(claims: Iterable[Claim]) -> list[Claim]:
    """The claims, with a component of their own for parameters that are not trained."""
    return [
        dataclasses.replace(claim, component="frozen")
        if claim.component == "params" and isinstance(claim.tensor, torch.nn.Parameter) and not claim.tensor.requires_grad
        else claim
        for claim in claims
    ]
