"""What a strategy is: it describes a target and never moves a byte."""

from __future__ import annotations

import abc
import copy
import dataclasses
import weakref
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Literal, Self, get_args

import torch

from ..errors import UnsupportedTargetError

Shared = Literal["guard", "leave", "raise", "free"]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Claim:
    """A tensor that a strategy asks to be moved with its component.

    Attributes:
        tensor: any tensor. The storages of all that it consists of (`torch_offload.parts`) move whole.
        name: its name below the target, or below ``of`` if that is given: ``"layers.0.weight"``, ``"grad"``, ``"exp_avg"``. A
            gradient's is the attribute of ``of`` that it stands in.
        component: one of the strategy's ``components``.
        of: the tensor it belongs to (a gradient's or a state's parameter).
        of_name: what to call ``of`` where no claim names it.
        discard: its bytes may be given up; they come back as zeros unless another claim on the storage keeps them.
        host: it lives in host memory on purpose beside an accelerator, which is then not worth a word.
    """

    tensor: torch.Tensor
    name: str
    component: str
    of: torch.Tensor | None = None
    of_name: str = ""
    discard: bool = False
    host: bool = False


class Strategy(abc.ABC):
    """Describes one kind of target: which tensors it holds, in which components, under which policies.

    A strategy of your own says what it claims, and everything else (mirrors, guards, checksums, errors) follows:

        >>> class LookupTable(Strategy):
        ...     components = ("table",)
        ...     def claims(self):
        ...         yield Claim(tensor=self.target.rows, name="rows", component="table")

    Args:
        target: the object whose tensors are claimed, or a list of such objects. Held weakly.
        name: what names in messages start with; the target's class by default. In a list, an index follows: ``"actor[1]"``.
        shared: what to do with a storage that has other holders. ``"guard"``: free it if all of them can be made to raise,
            leave it otherwise; ``"leave"``: leave it; ``"raise"``: raise `SharedStorageError`; ``"free"``: free it, the
            caller vouches for holders that cannot be made to raise.

    Raises:
        UnsupportedTargetError: the strategy does not describe a target whole, or no weak reference to it can be made.
        ValueError: an unknown policy.
        TypeError: ``name`` is no string.
    """

    components: ClassVar[tuple[str, ...]] = ()
    read_only: bool = False

    def __init__(self, target: Any, *, name: str | None = None, shared: Shared = "guard") -> None:
        check_choice("shared", shared, get_args(Shared))
        if name is not None and not isinstance(name, str):
            raise TypeError(f"name={name!r} is no string; it is what names in messages start with, such as 'actor'")
        targets = list(target) if isinstance(target, (list, tuple)) else [target]
        self._targets = [self._weakly(each) for each in targets]
        self.name = name or type(targets[0] if targets else self).__name__
        self.shared: Shared = shared

    def _weakly(self, target: Any) -> weakref.ref[Any]:
        self.accept(target)
        try:
            return weakref.ref(target)
        except TypeError as error:
            raise UnsupportedTargetError(
                f"a {type(target).__name__} cannot be a target: it takes no weak reference. Give its class a __weakref__ slot"
            ) from error

    def accept(self, target: Any) -> None:  # noqa: B027
        """Raise an `UnsupportedTargetError` unless this strategy describes the target whole."""

    @property
    def target(self) -> Any:
        """The target, or None once it is gone. A strategy over a list has one for each that `each` gives."""
        if not hasattr(self, "_targets"):
            raise TypeError(
                f"{type(self).__name__} was made without Strategy.__init__(target): call it, in __post_init__ for example"
            )
        if len(self._targets) != 1:
            raise TypeError(f"the strategy {self.name!r} is over a list of {len(self._targets)} targets; go over its each()")
        return self._targets[0]()

    def each(self) -> list[Self]:
        """This strategy for each of its targets alone, which is what transitions work with."""
        if not hasattr(self, "_targets") or len(self._targets) == 1:
            return [self]
        alone = [copy.copy(self) for _ in self._targets]
        for index, (strategy, target) in enumerate(zip(alone, self._targets, strict=True)):
            strategy._targets = [target]
            strategy.name = f"{self.name}[{index}]"
        return alone

    @abc.abstractmethod
    def claims(self) -> Iterable[Claim]:
        """Every tensor of the target, as it is now. Called at each transition, also while offloaded: look at metadata only."""

    def aliases(self) -> Iterable[torch.Tensor]:
        """Tensors on the claimed storages that the target itself holds beside its claims, gradients that are views of a flat
        buffer for example. They are guarded, not moved."""
        return ()

    def leaves(self) -> Iterable[torch.Tensor]:
        """Tensors beyond the claims whose gradients the target itself uses. If those lie on claimed storages, they may go."""
        return ()

    def wait(self) -> None:  # noqa: B027
        """Wait for work of the target's own that may be under way on its tensors beside the device's streams, such as
        collectives on the CPU. Called before anything is touched."""

    def scratch(self) -> Iterable[Callable[[], object]]:
        """What drops caches on the device that belong to the target's libraries and are built again when needed. Each is called
        once for each offload, after `wait` and before claims are asked for."""
        return ()

    def check(self, components: frozenset[str]) -> None:  # noqa: B027
        """Raise an `OffloadError` if these components must not be offloaded now. Nothing was touched yet."""

    def barriers(self, check: Callable[[str], None]) -> Iterable[Callable[[], None]]:  # noqa: ARG002
        """Set hooks on the target for calls that would go wrong past every tensor, and give for each what removes it.

        Args:
            check: to be called by the hook with the name of the call; raises while something of the target is away.
        """
        return ()


def check_choice(keyword: str, value: object, choices: Iterable[object]) -> None:
    """Raise a ValueError that names the keyword, the value and the choices."""
    if value not in choices:
        raise ValueError(f"{keyword}={value!r} is not one of {', '.join(repr(choice) for choice in choices)}")
