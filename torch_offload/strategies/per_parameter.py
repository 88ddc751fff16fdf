"""Any module, tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, Literal, get_args

import torch

from ..errors import GradientsError, UnsupportedTargetError, listed
from ..parts import carried_by, carriers, foreign
from ..tensors import gradient_of
from .base import Claim, Shared, Strategy, check_choice
from .scratch import of_module

Gradients = Literal["preserve", "discard", "refuse"]


FSDP_MODULE = ("torch.distributed.fsdp", "FSDPModule")


def is_sharded(module: torch.nn.Module) -> bool:
    """Whether FSDP2's `fully_shard` was applied to the module or to one inside."""
    kind = foreign(*FSDP_MODULE)
    return kind != () and any(isinstance(part, kind) for part in torch.nn.Module.modules(module))


class PerParameterStrategy(Strategy):
    """Parameters, gradients and buffers (persistent or not) of any `torch.nn.Module`.

    Example:
        >>> reference = torch.nn.Linear(2, 2)
        >>> [claim.name for claim in PerParameterStrategy(reference, read_only=True).claims()]
        ['weight', 'bias']

    Args:
        module: the module, or a list of modules. Held weakly.
        grads: ``"preserve"`` moves gradients like everything else; ``"discard"`` gives their bytes up, they come back as
            zeros; ``"refuse"`` raises `GradientsError` if there is one.
        read_only: the module is not trained: later offloads copy nothing, once a checksum has shown on the device that the
            bytes still equal the mirror. If they do not, they are copied as ever.
        scratch: functions without arguments that drop caches of yours on the device; called at every offload, beside those
            that drop the caches of known libraries (`torch_offload.strategies.scratch`).
        name, shared: as for `Strategy`.

    Raises:
        UnsupportedTargetError: ``module`` is no module.
        ValueError: an unknown policy.
    """

    components: ClassVar[tuple[str, ...]] = ("params", "grads", "buffers")
    zeroing = "zero_grad(set_to_none=True)"  # how its users drop gradients

    def __init__(
        self,
        module: torch.nn.Module | Sequence[torch.nn.Module],
        *,
        grads: Gradients = "preserve",
        read_only: bool = False,
        scratch: Sequence[Callable[[], object]] = (),
        name: str | None = None,
        shared: Shared = "guard",
    ) -> None:
        check_choice("grads", grads, get_args(Gradients))
        check_choice("read_only", read_only, (True, False))
        super().__init__(module, name=name, shared=shared)
        self.grads = grads
        self.read_only = read_only
        self._scratch = tuple(scratch)
        if wrong := [each for each in self._scratch if not callable(each)]:
            raise TypeError(
                f"scratch has {wrong[0]!r:.60}, which cannot be called; give what drops a cache, such as cache.clear"
            )

    def accept(self, target: Any) -> None:
        if not isinstance(target, torch.nn.Module):
            raise UnsupportedTargetError(f"{type(self).__name__} takes a torch.nn.Module, not a {type(target).__name__}")
        if is_sharded(target):
            raise UnsupportedTargetError(
                f"fully_shard was applied to this {type(target).__name__} or inside of it, so that its parameters come and go. "
                "Pass it as it is, or to FSDP2Strategy"
            )

    def claims(self) -> Iterable[Claim]:
        parameters = list(self.named_parameters())
        for name, parameter in parameters:
            yield Claim(tensor=parameter, name=name, component="params")
        for parameter in {id(parameter): parameter for _, parameter in parameters}.values():
            gradient = gradient_of(parameter)
            if gradient is not None:
                yield Claim(tensor=gradient, name="grad", component="grads", of=parameter, discard=self.grads == "discard")
        # unbound: some wrappers hide Module.buffers() behind an attribute of that name
        for name, buffer in torch.nn.Module.named_buffers(self.target, remove_duplicate=False):
            yield Claim(tensor=buffer, name=name, component="buffers")
        for name, part in torch.nn.Module.named_modules(self.target) if carriers() else ():
            for attribute, tensor in carried_by(part):
                yield Claim(tensor=tensor, name=f"{name}.{attribute}" if name else attribute, component="params")

    def scratch(self) -> Iterable[Callable[[], object]]:
        return (*of_module(self.target), *self._scratch)

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """The parameters under all their names."""
        return torch.nn.Module.named_parameters(self.target, remove_duplicate=False)

    def check(self, components: frozenset[str]) -> None:
        for name, parameter in torch.nn.Module.named_parameters(self.target):
            if "main_grad" in parameter.__dict__:
                raise UnsupportedTargetError(
                    f"'{self.name}.{name}' has its gradient in a main_grad, so it lies in the flat buffers of a wrapper "
                    "(Megatron-core's DistributedDataParallel). Nothing was touched. Pass that wrapper"
                )
        self.check_gradients(components)

    def check_gradients(self, components: frozenset[str]) -> None:
        """Raise a `GradientsError` if gradients are among these components, are to be refused, and there is one."""
        if self.grads != "refuse" or "grads" not in components:
            return
        if present := [f"{self.name}.{name}" for name in self.gradients()]:
            raise GradientsError(
                f'grads="refuse", and there are gradients in {listed(present)}. Call optimizer.step() and {self.zeroing} '
                'first, or pass grads="preserve" or grads="discard"'
            )

    def gradients(self) -> Iterator[str]:
        """The names of what holds a gradient now."""
        for name, parameter in {id(parameter): (name, parameter) for name, parameter in self.named_parameters()}.values():
            if gradient_of(parameter) is not None:
                yield f"{name}.grad"
