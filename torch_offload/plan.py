"""From what strategies describe to what is to move: claims grouped by storage, with names and policies."""

from __future__ import annotations

import collections
import dataclasses
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from . import device as devices
from . import ledger
from .errors import MirrorMismatchError, SharedStorageError, UnsupportedTargetError
from .ledger import Entry, Key
from .parts import Part, parts_of
from .report import LeftRow
from .storage import Holding, Verdict, advice, examine
from .strategies.base import Claim, Strategy
from .tensors import Storage, address_of, attribute, gradient_of, has_memory, storage_of
from .transfer import Move

_WRAPS = "it wraps other tensors without saying which (torch_offload.parts.register says so for a class)"
_STRICTEST_FIRST = ("raise", "leave", "guard", "free")


@dataclasses.dataclass(frozen=True, eq=False)
class Named:
    """A part of what is claimed, the strategy that claims it, its full name, and its name below the target."""

    strategy: Strategy
    claim: Claim
    part: Part
    name: str
    below: str

    @property
    def key(self) -> Key:
        """What it is called within its target, whatever other targets are named with it."""
        return (0 if self.claim.of is None else id(self.claim.of), f"{self.claim.name}{self.part.suffix}")

    def tensors(self) -> list[torch.Tensor]:
        """The tensor with the memory, those around it, and the one that it belongs to."""
        every = (self.part.tensor, *self.part.around, self.claim.tensor, self.claim.of)
        return list({id(each): each for each in every if each is not None}.values())


@dataclasses.dataclass(eq=False)
class Planned:
    """One storage and everything that is claimed on it.

    Attributes:
        storage: the storage.
        nbytes: its size in bytes when resident.
        claims: at least one.
        aliases: further tensors that strategies know on it.
        leaves: tensors that somebody claims, or whose gradient somebody claims, that have their gradient on it.
    """

    storage: Storage
    nbytes: int
    claims: list[Named]
    aliases: list[torch.Tensor] = dataclasses.field(default_factory=list)
    leaves: list[torch.Tensor] = dataclasses.field(default_factory=list)

    @property
    def name(self) -> str:
        return self.claims[0].name

    @property
    def entry(self) -> Entry | None:
        """The ledger's entry while the storage is offloaded."""
        entry = ledger.entry_of(self.storage)
        return entry if entry is not None and entry.offloaded else None

    @property
    def shared(self) -> str:
        """The strictest policy of those who claim it."""
        return min((named.strategy.shared for named in self.claims), key=_STRICTEST_FIRST.index)

    def kept_by(self, away: Mapping[int, frozenset[str]]) -> list[str]:
        """The components that claim it and are to be resident."""
        return sorted({
            named.claim.component for named in self.claims if named.claim.component not in away[id(named.strategy)]
        })  # fmt: skip

    def is_wanted(self, away: Mapping[int, frozenset[str]]) -> bool:
        """Whether some component that claims it is to be away."""
        return any(named.claim.component in away[id(named.strategy)] for named in self.claims)

    def is_claimed_as(self, component: str) -> bool:
        """Whether this component claims it."""
        return any(named.claim.component == component for named in self.claims)

    def known(self) -> list[torch.Tensor]:
        """The tensors on it, and the leaves whose gradients are on it."""
        return [*(tensor for named in self.claims for tensor in named.tensors()), *self.aliases, *self.leaves]

    def inside(self) -> list[Part]:
        """The parts of wholes that are on it, each once, under however many names the whole is claimed."""
        found = {(id(named.claim.tensor), named.part.suffix): named.part for named in self.claims if named.part.suffix}
        return list(found.values())

    def owned(self) -> list[tuple[weakref.ref[ledger.TargetState], str, Key]]:
        """What `Entry.claims` has of it."""
        strategies = {id(named.strategy): named.strategy for named in self.claims}
        owners = {key: weakref.ref(ledger.state_of(each.target)) for key, each in strategies.items()}
        return [(owners[id(named.strategy)], named.claim.component, named.key) for named in self.claims]

    def move(self, verdict: Verdict) -> Move:
        """How to offload it, guarding the aliases that the checker found as well."""
        names = {id(named.claim.tensor): named.name for named in self.claims}
        tensors = [(named.part.tensor, named.name) for named in self.claims]
        for named in self.claims:
            whole = named.name.removesuffix(named.part.suffix)
            tensors += [(each, whole) for each in (*named.part.around, named.claim.tensor)]
        tensors += [(alias, self.name) for alias in (*self.aliases, *verdict.aliases)]
        gradients = [(leaf, "grad", names.get(id(gradient_of(leaf)), self.name)) for leaf in (*self.leaves, *verdict.leaves)]
        gradients += [
            (named.claim.of, named.claim.name, named.name)
            for named in self.claims
            if named.claim.component == "grads" and named.claim.of is not None and named.claim.name != "grad"
        ]
        first = self.claims[0].strategy
        return Move(
            storage=self.storage,
            name=self.name,
            mirror=ledger.state_of(first.target).mirror_for(self.storage.device),
            tensors=tensors,
            gradients=gradients,
            claims=self.owned(),
            component=self.claims[0].claim.component,
            discard=all(named.claim.discard for named in self.claims),
            read_only=all(named.strategy.read_only for named in self.claims),
        )


class Plan:
    """What these strategies hold at this moment. It holds tensors: make one per call and drop it.

    Args:
        strategies: those whose targets are alive.
        device: whose memory is meant, as `device.resolve` gave it.

    Raises:
        UnsupportedTargetError: a claim has no memory that could move (meta, fake, lazy, a wrapper subclass).
    """

    def __init__(self, strategies: Sequence[Strategy], device: torch.device) -> None:
        self.storages: dict[int, Planned] = {}
        self.elsewhere: list[LeftRow] = []
        self.components_elsewhere: set[str] = set()
        self.claims = list(_named(strategies))
        for named in self.claims:
            storage = _storage(named)
            if storage is None:
                tensor = named.part.tensor
                nbytes = tensor.numel() * tensor.element_size()
                self._add_elsewhere(named, nbytes, f"its layout is {tensor.layout}: it has no single storage")
            elif devices.covers(device, storage.device):
                self._add(storage, named)
            elif not named.claim.host and (nbytes := ledger.nbytes_of(storage)):
                where = "already in host memory" if storage.device.type == "cpu" else f"on {storage.device}"
                self._add_elsewhere(named, nbytes, where)
        for strategy in strategies:
            for alias in _known(strategy, "aliases"):
                planned = self.storages.get(address_of(alias))
                if planned is not None:
                    planned.aliases.append(alias)
        leaves = [each for named in self.claims for each in named.tensors()]
        leaves += [each for strategy in strategies for each in _known(strategy, "leaves")]
        for leaf in {id(each): each for each in leaves}.values():
            gradient = gradient_of(leaf)
            for part in () if gradient is None else parts_of(gradient):
                planned = self.storages.get(address_of(part.tensor))
                if planned is not None:
                    planned.leaves.append(leaf)

    def _add_elsewhere(self, named: Named, nbytes: int, reason: str) -> None:
        self.elsewhere.append(LeftRow(named.name, nbytes, reason))
        self.components_elsewhere.add(named.claim.component)

    def _add(self, storage: Storage, named: Named) -> None:
        planned = self.storages.get(storage._cdata)
        if planned is None:
            nbytes = ledger.nbytes_of(storage)
            if nbytes == 0:
                return
            planned = self.storages[storage._cdata] = Planned(storage, nbytes, [])
        planned.claims.append(named)

    def check_names(self, away: Mapping[int, frozenset[str]]) -> None:
        """Raise if a name that is away stands for other memory than when it was offloaded. Gradients come and go.

        Raises:
            MirrorMismatchError: with the name.
        """
        offloaded: dict[tuple[int, str, Key], set[Storage | None]] = {}
        for entry in ledger.entries():
            for reference, component, key in entry.claims if entry.offloaded else ():
                offloaded.setdefault((id(reference()), component, key), set()).add(entry.storage())
        strategies = {id(named.strategy): named.strategy for named in self.claims}
        states = {key: ledger.state_of(each.target) for key, each in strategies.items()}
        for named in self.claims:
            component = named.claim.component
            if component == "grads" or component not in away[id(named.strategy)]:
                continue
            state = states[id(named.strategy)]
            storages = offloaded.get((id(state), component, named.key))
            if (storages and _storage(named) not in storages) or (component, named.key) in state.lost:
                raise MirrorMismatchError(
                    f"{named.name!r} was re-pointed while offloaded: it now stands for other memory than the mirror has the "
                    "bytes of. Put the offloaded tensor back under this name and call reload(), or call off.close() to keep "
                    "what is there now; the next offload() builds the mirror anew"
                )

    def check_sizes(self, known: dict[tuple[int, str], tuple[int, torch.dtype]], components: frozenset[str]) -> None:
        """Raise if a parameter's name stands for another size or dtype than in ``known``, which learns new names.

        Raises:
            MirrorMismatchError: with the name and both sizes.
        """
        for named in self.claims:
            if named.claim.component != "params" or "params" not in components:
                continue
            tensor = named.part.tensor
            now = (tensor.numel() * tensor.element_size(), tensor.dtype)
            then = known.setdefault((id(named.strategy), named.name), now)
            if then != now:
                raise MirrorMismatchError(
                    f"{named.name!r} had {then[0]} bytes of {then[1]} at an earlier offload, and now {now[0]} of {now[1]}: "
                    "something rebuilt it. If that was meant, call off.close(); the next offload() builds the mirror anew"
                )

    def outgoing(self, planned: Sequence[Planned]) -> tuple[list[Move], list[LeftRow]]:
        """Which of these storages may be freed, and which are left because somebody else would notice.

        Raises:
            SharedStorageError: one has other holders and its policy is ``shared="raise"``.
            UnsupportedTargetError: one has no memory.
        """
        for each in planned:
            if not has_memory(each.storage):
                raise UnsupportedTargetError(
                    f"{each.name!r} is a {type(each.claims[0].part.tensor).__name__}, whose storage has no memory: {_WRAPS}. "
                    "Nothing was touched"
                )
        verdicts = examine([(each.storage, each.known(), each.inside()) for each in planned])
        moves, left = [], []
        for each, verdict in zip(planned, verdicts, strict=True):
            if _may_go(each.shared, verdict.holding):
                moves.append(each.move(verdict))
            elif each.shared == "raise":
                raise SharedStorageError(f"{each.name!r} ({each.nbytes} bytes) is {verdict}. {advice(verdict)}")
            else:
                left.append(LeftRow(each.name, each.nbytes, f"{verdict}. {advice(verdict)}"))
        return moves, left


def _may_go(shared: str, holding: Holding) -> bool:
    accepted = {
        "raise": {Holding.EXCLUSIVE},
        "leave": {Holding.EXCLUSIVE},
        "guard": {Holding.EXCLUSIVE, Holding.ALIASED},
        "free": set(Holding) - {Holding.NOT_RESIZABLE},
    }
    return holding in accepted[shared]


def _named(strategies: Iterable[Strategy]) -> Iterator[Named]:
    """Claims with full names: a state is named after its parameter, whichever target that is claimed by."""
    claims = [(strategy, claim) for strategy in strategies for claim in _claims(strategy)]
    owners = {id(claim.tensor): (strategy, claim.name) for strategy, claim in reversed(claims) if claim.of is None}
    alike = collections.Counter(name for _, name in owners.values())
    for strategy, claim in claims:
        parts, below = [strategy.name, claim.name], claim.name
        if claim.of is not None or claim.of_name:
            owner, name = owners.get(id(claim.of), (strategy, claim.of_name or "unnamed"))
            parts.insert(1, name if owner is strategy or alike[name] == 1 else f"{owner.name}.{name}")
            below = f"{name}.{below}"
        if claim.component not in strategy.components:
            raise UnsupportedTargetError(
                f"{type(strategy).__name__} claims {'.'.join(parts)!r} for the component {claim.component!r}, which is not in "
                f"its components {strategy.components}"
            )
        for part in _parts(claim, ".".join(parts)):
            yield Named(strategy, claim, part, f"{'.'.join(parts)}{part.suffix}", f"{below}{part.suffix}")


def _claims(strategy: Strategy) -> list[Claim]:
    given = strategy.claims()
    claims = list(given) if isinstance(given, Iterable) else [given]
    for claim in claims:
        if not isinstance(claim, Claim):
            raise UnsupportedTargetError(f"{type(strategy).__name__}.claims() gave a {type(claim).__name__}, not a Claim")
        if not isinstance(claim.name, str):
            raise UnsupportedTargetError(
                f"{type(strategy).__name__}.claims() gave a Claim with the name {claim.name!r}, no string"
            )
    return claims


def _known(strategy: Strategy, what: str) -> list[torch.Tensor]:
    """The aliases or leaves that a strategy knows."""
    given = getattr(strategy, what)()
    tensors = list(given) if isinstance(given, Iterable) else [given]
    if wrong := [each for each in tensors if not isinstance(each, torch.Tensor)]:
        raise UnsupportedTargetError(f"{type(strategy).__name__}.{what}() gave a {type(wrong[0]).__name__}, not a tensor")
    return tensors


def _parts(claim: Claim, name: str) -> list[Part]:
    """The tensors with memory that a claim is about."""
    if not isinstance(claim.tensor, torch.Tensor):
        raise UnsupportedTargetError(f"{name!r} is a {type(claim.tensor).__name__}, not a tensor. Nothing was touched")
    if problem := _unsupported(claim.tensor):
        raise UnsupportedTargetError(f"{name!r} {problem}. Nothing was touched")
    return parts_of(claim.tensor)


def _storage(named: Named) -> Storage | None:
    """The storage that the part's bytes are in; None where there is no single one."""
    tensor = named.part.tensor
    return storage_of(tensor) if attribute(tensor, "layout") is torch.strided else None


def _unsupported(tensor: torch.Tensor) -> str | None:
    if torch.nn.parameter.is_lazy(tensor):
        return "is not initialised yet. Run a forward first"
    fake = getattr(sys.modules.get("torch._subclasses.fake_tensor"), "FakeTensor", None)
    is_meta = attribute(tensor, "is_meta")
    if is_meta or (fake is not None and isinstance(tensor, fake)):
        return f"is a {'meta' if is_meta else 'fake'} tensor and has no memory to offload. Materialise it (to_empty) first"
    return None
