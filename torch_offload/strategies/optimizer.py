"""The state of any torch optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from ..errors import UnsupportedTargetError
from ..walk import tensors_in
from .base import Claim, Strategy


class OptimizerStrategy(Strategy):
    """Every tensor in the state of a `torch.optim.Optimizer`, under any key, in any nesting of containers, records and plain
    objects.

    Looking creates no state, and nothing is added to it. Beside an accelerator, tensors in host memory (AdamW's ``step``)
    are left alone. While the state is away, `load_state_dict` raises, since it would build fresh state on the device, and
    so does `step`, before it counts.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = torch.optim.AdamW([weight])
        >>> weight.sum().backward(); optimizer.step()
        >>> [(claim.of_name, claim.name) for claim in OptimizerStrategy(optimizer).claims()]
        [('param 0', 'step'), ('param 0', 'exp_avg'), ('param 0', 'exp_avg_sq')]

    Args:
        optimizer: the optimizer, or a list of them. Held weakly.
        name, shared: as for `Strategy`.

    Raises:
        UnsupportedTargetError: ``optimizer`` is no torch optimizer.
        ValueError: an unknown policy.
    """

    components = ("optimizer",)

    def accept(self, target: Any) -> None:
        if not isinstance(target, torch.optim.Optimizer):
            raise UnsupportedTargetError(f"{type(self).__name__} takes a torch.optim.Optimizer, not a {type(target).__name__}")

    def claims(self) -> Iterable[Claim]:
        names = parameter_names(self.target)
        for index, (key, state) in enumerate(self.target.state.items()):
            is_parameter = isinstance(key, torch.Tensor)
            of_name = names.get(id(key), f"state {index}") if is_parameter else str(key)
            for path, tensor in tensors_in(state, names, objects=True):
                yield Claim(
                    tensor=tensor,
                    name=path or "state",
                    component="optimizer",
                    of=key if is_parameter else None,
                    of_name=of_name,
                    host=True,
                )

    def leaves(self) -> Iterable[torch.Tensor]:
        return (parameter for group in self.target.param_groups for parameter in group["params"])

    def barriers(self, check: Callable[[str], None]) -> Iterable[Callable[[], None]]:
        return hooks(self.target, check)


def hooks(optimizer: torch.optim.Optimizer, check: Callable[[str], None]) -> tuple[Callable[[], None], ...]:
    """Have `load_state_dict` and `step` pass ``check`` first; gives what undoes that."""
    loading = optimizer.register_load_state_dict_pre_hook(lambda *_: check("load_state_dict()"), prepend=True)
    stepping = optimizer.register_step_pre_hook(lambda *_: check("step()"))
    return loading.remove, stepping.remove


def parameter_names(*optimizers: torch.optim.Optimizer) -> dict[int, str]:
    """What to call each parameter, by its id, where no model names it: each has a name of its own."""
    names: dict[int, str] = {}
    taken: set[str] = set()
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        given = group.get("param_names", ())
        for index, parameter in enumerate(group["params"]):
            position = f"param {len(names)}"
            name = given[index] if index < len(given) else position
            if id(parameter) not in names:
                names[id(parameter)] = f"{name} ({position})" if name in taken else name
                taken.add(name)
    return names
