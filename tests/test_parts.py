"""Tensors that consist of others: wrapper subclasses, sparse tensors, and what carries tensors in attributes."""

from __future__ import annotations

import copy
import io
import itertools
import sys
import types
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy
import pytest
import torch
from test_gradients import looks
from test_interrupts import cut, interrupted
from torch import nn

from torch_offload import (
    OffloadedTensorError,
    Offloader,
    PerParameterStrategy,
    SharedStorageError,
    UnsupportedTargetError,
    ledger,
    offloaded,
    parts,
    storage,
)
from torch_offload import reload as reload_tensor
from torch_offload.parts import parts_of
from torch_offload.storage import is_exclusive
from torch_offload.tensors import storage_of
from torch_offload.testing import InjectedError, Seam, assert_round_trip, failing, is_away
from torch_offload.transition import reload_entries

pytestmark = [
    pytest.mark.xdist_group("parts"),
    pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta:UserWarning"),
]

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor


class Pair(torch.Tensor):
    """A wrapper subclass: the sum of two tensors, of which one may be a wrapper again."""

    @staticmethod
    def __new__(cls, one: torch.Tensor, two: torch.Tensor) -> Pair:
        made = torch.Tensor._make_wrapper_subclass(cls, one.shape, dtype=one.dtype, device=one.device)
        made.one, made.two = one, two
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["one", "two"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], _context: None, _size: Any, _stride: Any) -> Pair:
        return cls(inner["one"], inner["two"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def pick(which: str) -> Any:
            return [getattr(each, which) if isinstance(each, Pair) else each for each in args]

        out = [func(*pick(which), **(kwargs or {})) for which in ("one", "two")]
        if func is torch.ops.aten.copy_.default:
            return args[0]
        return cls(*out) if all(isinstance(each, torch.Tensor) for each in out) else out[0]


@pytest.fixture
def ranks(device: str) -> Iterator[None]:
    if device == "cuda":
        torch.cuda.set_device(0)  # or a device mesh warns
    torch.distributed.init_process_group("nccl" if device == "cuda" else "gloo", store=torch.distributed.HashStore(), rank=0,
                                         world_size=1)  # fmt: skip
    yield
    torch.distributed.destroy_process_group()


def distributed(device: str) -> nn.Module:
    module = nn.Module()
    mesh = init_device_mesh(device, (1,))
    module.weight = nn.Parameter(distribute_tensor(torch.randn(6, 4, device=device), mesh, [Shard(0)]))
    (module.weight * 2).sum().backward()
    return module


def pair(device: str) -> nn.Module:
    module = nn.Module()
    inner = Pair(torch.randn(5, device=device), torch.randn(5, device=device))
    module.weight = nn.Parameter(Pair(torch.randn(5, device=device), inner), requires_grad=False)
    return module


def sparse(device: str) -> nn.Module:
    module = nn.Embedding(10, 4, sparse=True, device=device)
    module(torch.tensor([1, 2, 2], device=device)).sum().backward()
    module.register_buffer("rows", torch.eye(3, device=device).to_sparse_csr())
    module.register_buffer("columns", torch.eye(3, device=device).to_sparse_csc())
    module.register_buffer("blocks", torch.eye(4, device=device).to_sparse_bsr((2, 2)))
    return module


MODULES: dict[str, Callable[[str], nn.Module]] = {"DTensor": distributed, "nested wrapper": pair, "sparse": sparse}


def members(module: nn.Module) -> list[torch.Tensor]:
    grads = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    return [*module.parameters(), *grads, *module.buffers()]


def content(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Host copies of what these consist of."""
    return [part.tensor.detach().cpu().clone() for tensor in tensors for part in parts_of(tensor)]


@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize("which", MODULES)
def test_all_that_is_inside_goes_and_comes_back(device: str, which: str) -> None:
    module = MODULES[which](device)
    before = content(members(module))
    storages = {storage_of(part.tensor)._cdata: storage_of(part.tensor) for each in members(module) for part in parts_of(each)}
    wanted = sum(each.nbytes() for each in storages.values())
    assert_round_trip(module, device=device)
    with offloaded(module, device=device) as off:
        assert off.report.nbytes == wanted > 0
        assert not off.report.left
        assert not any(each.nbytes() for each in storages.values())
    assert all(map(torch.equal, before, content(members(module))))
    assert [type(each).__name__.startswith("Offloaded") for each in members(module)] == [False] * len(members(module))


@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize("which", MODULES)
def test_the_whole_and_what_is_inside_raise_by_name(device: str, which: str) -> None:
    module = MODULES[which](device)
    insides = [part.tensor for each in members(module) for part in parts_of(each) if which != "sparse"]
    inner = insides[0] if insides else None
    with offloaded(module, device=device, name="actor"):
        for each in [*members(module), *insides]:
            for use in (lambda t: t + 1, lambda t: t.sum(), lambda t: torch.mul(t, t), lambda t: t.add_(1), copy.deepcopy):
                with pytest.raises(OffloadedTensorError, match=r"'actor\."):
                    use(each)
        if inner is not None:
            with pytest.raises(OffloadedTensorError, match=r"'actor\.weight\.(_local_tensor|one)'"):
                inner.sum()
        with pytest.raises(OffloadedTensorError, match=r"'actor\.weight'"):
            module.weight.sum()
        assert repr(module.weight).startswith("<offloaded")


@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize("which", MODULES)
def test_it_is_read_and_saved_from_the_mirror(device: str, which: str) -> None:
    module = MODULES[which](device)
    wanted = content(members(module))
    with offloaded(module, device=device):
        read = content(each.cpu() for each in members(module))
        file = io.BytesIO()
        torch.save([each.detach() for each in members(module)], file)
        with torch.no_grad():
            fresh = [each.to(device) for each in members(module)] if device != "cpu" else []
            copies = [each.clone() for each in members(module)]
        assert not any(map(is_away, [*fresh, *copies]))
    file.seek(0)
    saved = content(torch.load(file, weights_only=False))
    for found in (read, saved, content(copies), *([content(fresh)] if fresh else [])):
        assert len(found) == len(wanted)
        assert all(map(torch.equal, found, wanted))


@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize("which", ["DTensor", "nested wrapper"])
def test_loading_writes_the_mirror(device: str, which: str) -> None:
    module, other = MODULES[which](device), MODULES[which](device)
    saved = {name: tensor.detach().clone() for name, tensor in other.state_dict().items()}
    with offloaded(module, device=device):
        module.load_state_dict(saved)
        assert is_away(module.weight)
    assert all(map(torch.equal, content([module.weight]), content([other.weight])))


def test_copying_into_a_sparse_tensor_is_refused(device: str) -> None:
    module = sparse(device)
    refused = pytest.raises(OffloadedTensorError, match=r"copy_ into the layout torch\.sparse_csr.*'Embedding\.rows'")
    with offloaded(module, device=device), refused:
        module.rows.copy_(module.rows.cpu())


def test_a_whole_stays_loud_until_the_last_of_its_parts_is_back(device: str) -> None:
    one, two = torch.ones(3, device=device), torch.ones(3, device=device)
    module = nn.Module()
    module.weight = nn.Parameter(Pair(one, two), requires_grad=False)
    off = Offloader(module, device=device)
    off.offload()
    for part in (one, two):
        with pytest.raises(OffloadedTensorError, match="weight"):
            module.weight + 1
        assert repr(module.weight).startswith(
            "<offloaded Pair 'Module.weight'"
        )  # it refuses by itself, not only what is inside
        reload_tensor(part)
    assert bool((module.weight + 1).one.eq(2).all())
    off.close()


def test_other_wholes_around_the_same_memory_are_found_and_guarded(device: str) -> None:
    one, two = torch.ones(3, device=device), torch.ones(3, device=device)
    module = nn.Module()
    module.weight = nn.Parameter(Pair(one, two), requires_grad=False)
    alias, mixed = module.weight.detach(), Pair(one[:2], torch.zeros(2, device=device))
    with offloaded(module, device=device) as off:
        assert not off.report.left
        for other in (alias, mixed):
            with pytest.raises(OffloadedTensorError, match=r"'Module\.weight\.one'"):
                other + 1
    assert bool((mixed + 1).one.eq(2).all())
    assert [type(each) for each in (alias, mixed)] == [Pair, Pair]


def test_the_verdict_on_a_whole_is_that_on_its_worst_part(device: str) -> None:
    whole = Pair(torch.ones(3, device=device), torch.ones(3, device=device))
    assert is_exclusive(whole)
    alias = whole.two.view(-1)
    assert "other tensors on it" in str(is_exclusive(whole))
    assert is_exclusive(whole, known=[alias])
    rows = torch.eye(3, device=device).to_sparse_csr()
    assert is_exclusive(rows)


def test_a_view_inside_of_a_sparse_tensor_is_found_though_nothing_counts_it(device: str) -> None:
    module = nn.Module()
    module.register_buffer("rows", torch.eye(30, device=device).to_sparse())
    alias = module.rows.detach()
    assert "other tensors on it" in str(is_exclusive(module.rows))
    for _ in range(2):
        with offloaded(module, device=device) as off:
            assert not off.report.left
            for use in (lambda: alias.mul_(2), lambda: alias._values().sum(), lambda: alias.coalesce().values().sum()):
                with pytest.raises(OffloadedTensorError, match=r"'Module\.rows"):
                    use()
    with pytest.raises(SharedStorageError, match=r"'Module\.rows\._indices'"):
        Offloader(module, shared="raise", device=device).offload()


def test_a_backward_into_an_offloaded_sparse_gradient_is_refused(device: str) -> None:
    module = nn.Embedding(500, 4, sparse=True, device=device)
    x = torch.arange(400, device=device)
    module(x).sum().backward()
    refused = pytest.raises(OffloadedTensorError, match=r"backward\(\).*'Embedding\.weight\.grad")
    with offloaded(module, components=["grads"], device=device), refused:
        module(x).sum().backward()
    assert float(module.weight.grad.coalesce().values().sum()) == 400 * 4


@pytest.mark.usefixtures("ranks")
def test_another_whole_around_the_very_same_tensor_is_found(device: str) -> None:
    module = distributed(device)
    module.weight.grad = None
    with offloaded(module, device=device):
        pass
    other = DTensor(module.weight._local_tensor, module.weight._spec, requires_grad=False)  # after the first look at the heap
    with offloaded(module, device=device) as off:
        assert not off.report.left
        with pytest.raises(OffloadedTensorError, match=r"'Module\.weight"):
            other + 1
    assert type(other) is DTensor


def test_a_whole_that_a_module_outside_uses_is_left(device: str) -> None:
    module, outside = pair(device), nn.Module()
    outside.weight = nn.Parameter(module.weight.detach(), requires_grad=False)
    with offloaded(module, device=device) as off:
        assert off.report.nbytes == 0
        assert {row.reason.split(":")[0] for row in off.report.left} == {"in use"}
        outside.weight + 1
    with pytest.raises(SharedStorageError, match=r"used outside the targets: 'Module\.weight'"):
        Offloader(module, shared="raise", device=device).offload()


def test_wholes_that_were_found_are_remembered_while_they_are_where_they_were(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, outside = pair(device), nn.Module()
    outside.weight = nn.Parameter(module.weight.detach(), requires_grad=False)
    off, seen = Offloader(module, device=device), looks(monkeypatch)
    for _ in range(2):
        assert {row.reason.split(":")[0] for row in off.offload().left} == {"in use"}
        off.reload()
    assert len(seen) == 1
    kept = outside.weight
    del outside.weight  # nobody's now
    for _ in range(2):
        assert not off.offload().left
        assert is_away(kept)
        off.reload()
    assert len(seen) == 2
    del kept
    assert not off.offload().left
    assert len(seen) == 3
    off.close()


def test_what_is_in_the_middle_raises_too(device: str) -> None:
    module = pair(device)
    with offloaded(module, device=device):
        alias = module.weight.detach()
        for each in (module.weight.two, alias, alias.two):
            with pytest.raises(OffloadedTensorError, match=r"'Module\.weight'"):
                each + 1
    assert [type(each) for each in (module.weight.two, alias, alias.two)] == [Pair] * 3


@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize("which", MODULES)
def test_one_whole_is_brought_back_by_itself(device: str, which: str) -> None:
    module = MODULES[which](device)
    wanted = content(members(module))
    off = Offloader(module, device=device)
    off.offload()
    for each in members(module):
        reload_tensor(each)
        assert not is_away(each)
    assert all(map(torch.equal, content(members(module)), wanted))
    off.close()


@pytest.mark.parametrize("which", ["one", "two"])
def test_a_whole_around_either_of_two_parts_on_one_storage_is_found(device: str, which: str) -> None:
    base = torch.ones(8, device=device)
    module = nn.Module()
    module.weight = nn.Parameter(Pair(base[:4], base[4:]), requires_grad=False)
    off = Offloader(module, device=device)
    off.offload()
    off.reload()
    other = Pair(getattr(module.weight, which), torch.ones(4, device=device))
    off.offload()
    assert repr(other).startswith("<offloaded Pair")
    off.close()


def test_a_sparse_tensor_under_two_names(device: str) -> None:
    module = nn.Module()
    module.register_buffer("rows", torch.eye(3, device=device).to_sparse())
    module.register_buffer("again", module.rows)
    assert_round_trip(module, device=device)
    with offloaded(module, device=device) as off:
        assert not off.report.left


def test_two_parts_on_one_storage_are_written_once_into_its_checksum(device: str) -> None:
    for middle in (4096, 100):  # in rows of their own, and in the same
        base = torch.zeros(2 * middle, device=device)
        module = nn.Module()
        module.weight = nn.Parameter(Pair(base[:middle], base[middle:]), requires_grad=False)
        with offloaded(module, device=device):
            module.weight.copy_(Pair(torch.ones(middle, device=device), torch.ones(middle, device=device)))
        assert float(base.sum()) == 2 * middle


@pytest.mark.usefixtures("_after_cuts")
def test_an_interruption_between_two_parts_leaves_the_whole_loud(device: str) -> None:
    module = nn.Module()
    module.register_buffer("weight", Pair(torch.ones(3, device=device), torch.ones(3, device=device)))
    one, two = module.weight.one, module.weight.two
    struck = 0
    for at in itertools.count(1, 7):
        off = Offloader(module, device=device)
        off.offload()
        if not interrupted(at, lambda: reload_tensor(one), cut):
            break
        struck += 1
        reload_tensor(one)
        assert is_away(two)
        assert repr(module.weight).startswith("<offloaded Pair 'Module.weight'")
        off.close()
        assert type(module.weight) is Pair
    assert struck > 100
    off.close()


def test_a_retry_works_while_the_first_error_is_still_there(device: str) -> None:
    """Its frames keep what was looked at then: other tensor objects inside of the same sparse gradient."""
    module = sparse(device)
    off = Offloader(module, device=device)
    with failing(Seam.HOST_ALLOCATION, 1), pytest.raises(InjectedError) as first:
        off.offload()
    off.offload()
    assert first.tb is not None
    assert all(map(is_away, members(module)))
    off.reload()


def test_jagged_tensors(device: str) -> None:
    module = nn.Module()
    rows = [torch.randn(2, 3, device=device), torch.randn(4, 3, device=device)]
    module.register_buffer("rows", torch.nested.nested_tensor(rows, layout=torch.jagged))
    with offloaded(module, device=device) as off:
        assert not off.report.left
        assert is_away(module.rows)
        with pytest.raises(OffloadedTensorError, match=r"'Module\.rows'"):
            module.rows * 2
    assert all(map(torch.equal, module.rows.unbind(), rows))


# What carries tensors in attributes --------------------------------------------------------------------------------------


class Scaled(nn.Parameter):
    """A parameter with a scale beside it."""


@pytest.fixture
def scaled_is_known() -> Iterator[None]:
    undo = parts.register(__name__, "Scaled", lambda tensor: [("scale", tensor.scale)])
    yield
    undo()
    undo()


@pytest.mark.usefixtures("scaled_is_known")
def test_a_class_of_ones_own_can_be_registered(device: str) -> None:
    module = nn.Module()
    module.weight = Scaled(torch.ones(4, device=device), requires_grad=False)
    module.weight.scale = torch.ones(2, device=device)
    assert_round_trip(module, device=device)
    with offloaded(module, device=device):
        with pytest.raises(OffloadedTensorError, match=r"'Module\.weight\.scale'"):
            module.weight.scale * 2
        with pytest.raises(OffloadedTensorError, match=r"'Module\.weight'"):
            module.weight * 2


@pytest.mark.usefixtures("scaled_is_known")
def test_each_answers_from_its_own_mirror(device: str) -> None:
    """Also when only what is carried is offloaded: because the other was brought back, or could not go."""
    fixed = torch.from_numpy(numpy.ones(4, dtype="float32")) if device == "cpu" else torch.ones(4, device=device)
    for memory in (torch.ones(4, device=device), fixed):
        module = nn.Module()
        module.weight = Scaled(memory, requires_grad=False)
        module.weight.scale = torch.full((8,), 7.0, device=device)
        off = Offloader(module, device=device)
        off.offload()
        reload_scaled = memory is not fixed or device != "cpu"
        if reload_scaled:
            assert is_away(module.weight)
            module.load_state_dict({"weight": torch.full((4,), 2.0)})
            assert module.weight.cpu().tolist() == [2.0] * 4
            off.reload()
            off.offload()
            entry = ledger.entry_of(storage_of(module.weight))
            reload_entries([entry], torch.device(device), verify=True)
        assert module.weight.scale.cpu().tolist() == [7.0] * 8
        assert (
            module.weight.cpu().tolist() == module.state_dict()["weight"].cpu().tolist() == [2.0 if reload_scaled else 1.0] * 4
        )
        module.load_state_dict({"weight": torch.full((4,), 3.0)})
        off.reload()
        assert module.weight.tolist() == [3.0] * 4
        assert module.weight.scale.tolist() == [7.0] * 8
        off.close()


@pytest.mark.usefixtures("scaled_is_known")
def test_what_carries_itself_is_taken_once(device: str) -> None:
    module = nn.Module()
    module.weight = Scaled(torch.ones(4, device=device), requires_grad=False)
    module.weight.scale = Scaled(torch.ones(2, device=device), requires_grad=False)
    module.weight.scale.scale = module.weight
    assert_round_trip(module, device=device)


def test_a_wrapper_that_does_not_say_what_it_wraps_is_refused(device: str) -> None:
    class Closed(torch.Tensor):
        @staticmethod
        def __new__(cls, inside: torch.Tensor) -> Closed:
            made = torch.Tensor._make_wrapper_subclass(cls, inside.shape, dtype=inside.dtype, device=inside.device)
            made.inside = inside
            return made

        @classmethod
        def __torch_dispatch__(cls, *_: Any) -> Any:
            return NotImplemented

    module = nn.Module()
    module.register_buffer("closed", Closed(torch.ones(3, device=device)))
    off = Offloader(module, device=device)
    with pytest.raises(UnsupportedTargetError, match=r"'Module\.closed' is a Closed.*parts\.register"):
        off.offload()


def test_bitsandbytes(device: str) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes", exc_type=ImportError)
    nested = bitsandbytes.nn.Linear4bit(64, 64, quant_type="nf4", compute_dtype=torch.float32).to(device)
    state = nested.weight.quant_state
    eight = bitsandbytes.nn.Linear8bitLt(64, 64, has_fp16_weights=False).to(device)
    inputs = torch.ones(2, 64, device=device)
    wanted = [layer(inputs).detach() for layer in (nested, eight)]
    hidden = [state.absmax, state.code, state.offset, state.state2.absmax, state.state2.code, eight.state.CB, eight.state.SCB]
    model = nn.Sequential(nested, eight)
    saved = {key: value.clone() for key, value in nested.state_dict().items()}
    for _ in range(2):
        with offloaded(model, device=device) as off:
            assert not off.report.left
            assert all(map(is_away, hidden))
            with pytest.raises(OffloadedTensorError, match=r"'Sequential\."):
                nested(inputs)
            again = {key: value.cpu() for key, value in nested.state_dict().items()}
            nested.weight.cpu()
        assert nested.weight.quant_state is state
    assert state.absmax is hidden[0]
    assert saved.keys() == again.keys()
    assert all(torch.equal(saved[key].cpu(), again[key]) for key in saved)
    assert all(torch.equal(layer(inputs), value) for layer, value in zip((nested, eight), wanted, strict=True))
    optimizer = bitsandbytes.optim.AdamW8bit([torch.nn.Parameter(torch.ones(128, 128, device=device))], min_8bit_size=16)
    optimizer.param_groups[0]["params"][0].grad = torch.ones(128, 128, device=device)
    optimizer.step()
    assert_round_trip(optimizer, device=device)
    with offloaded(optimizer, device=device):
        assert all(map(is_away, (each for each in optimizer.state[optimizer.param_groups[0]["params"][0]].values()
                                 if isinstance(each, torch.Tensor) and each.device.type == device)))  # fmt: skip


@pytest.mark.parametrize("config", ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig"])
def test_torchao(device: str, config: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantization = pytest.importorskip("torchao.quantization", exc_type=ImportError)
        model = nn.Sequential(nn.Linear(64, 64, device=device))
        quantization.quantize_(model, getattr(quantization, config)())
    inputs = torch.ones(2, 64, device=device)
    wanted = model(inputs).detach()
    assert_round_trip(model, device=device)
    assert torch.equal(model(inputs), wanted)
    other = copy.deepcopy(model)
    with offloaded(model, device=device):
        with pytest.raises(OffloadedTensorError, match=r"'Sequential\.0\.weight'"):
            model(inputs)
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        model.load_state_dict(other.state_dict())
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=False))
    assert torch.equal(other(inputs), wanted)
    assert torch.equal(model(inputs), wanted)


class Quantized(torch.Tensor):
    """As TransformerEngine's Float8Tensor is built (August 2026: pytorch/quantized_tensor.py, tensor/float8_tensor.py and
    tensor/storage/float8_tensor_storage.py): a wrapper whose data, transpose and scale stand in attributes, with a quantiser
    that has tensors too, and methods that make others of ``type(self)`` around the very same tensors.

    It says nothing of TransformerEngine's kernels, which take the attributes' pointers in C++: `dequantize` stands for them.
    """

    @staticmethod
    def __new__(cls, data: torch.Tensor, transpose: torch.Tensor, scale: torch.Tensor) -> Quantized:
        made = torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.bfloat16, device=data.device)
        made._data, made._transpose, made._scale_inv = data, transpose, scale
        made._quantizer = types.SimpleNamespace(scale=torch.ones_like(scale), amax=torch.zeros_like(scale))
        return made

    @classmethod
    def make_like(cls, other: Quantized) -> Quantized:
        return cls(other._data, other._transpose, other._scale_inv)

    def detach(self) -> Quantized:
        return type(self).make_like(self)

    def dequantize(self, *, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return self._data.to(dtype) * self._scale_inv

    def float(self) -> torch.Tensor:
        return self.dequantize(dtype=torch.float32)

    def quantize_(self, source: torch.Tensor) -> Quantized:
        self._data.copy_(source)
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return type(args[0]).make_like(args[0])
        raise NotImplementedError(func)


class Flattening(Quantized):
    """As it is since it says by itself what it wraps."""

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        return ["_data", "_transpose", "_scale_inv"], {"cls": type(self)}

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], context: dict[str, Any], _size: Any, _stride: Any) -> Flattening:
        return context["cls"](inner["_data"], inner["_transpose"], inner["_scale_inv"])


@pytest.mark.parametrize("kind", [Quantized, Flattening])
@pytest.mark.parametrize("where", ["tensor.quantized_tensor", "quantized_tensor"])
def test_tensors_like_those_of_transformer_engine(
    device: str, kind: type[Quantized], where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module_name = f"transformer_engine.pytorch.{where}"
    monkeypatch.setitem(sys.modules, module_name, types.SimpleNamespace(QuantizedTensor=Quantized))
    data = torch.ones(4, 4, dtype=torch.uint8, device=device)
    weight = kind(data, data.t().contiguous(), torch.full((1,), 2.0, device=device))
    inside = [weight._data, weight._transpose, weight._scale_inv]
    inside += [] if kind is Flattening else [weight._quantizer.scale, weight._quantizer.amax]
    module = nn.Module()
    module.register_buffer("weight", weight)
    assert_round_trip(module, device=device)
    other = weight.detach()  # around the very same tensors
    with offloaded(module, device=device) as off:
        assert not off.report.left
        assert all(map(is_away, inside))
        alias = weight.detach()
        for each in (weight, other, alias, *inside):
            with pytest.raises(OffloadedTensorError, match=r"'Module\.weight"):
                each + 1
        for each in (weight, other, alias):
            for use in (each.dequantize, each.float, lambda each=each: each.quantize_(data)):
                with pytest.raises(OffloadedTensorError, match=r"'Module\.weight"):
                    use()
        saved = module.state_dict()
        if kind is Flattening:
            assert torch.equal(weight.cpu().dequantize(), torch.full((4, 4), 2.0))
            assert type(weight.cpu()) is Flattening
            file = io.BytesIO()
            torch.save(saved, file)
        else:
            with pytest.raises(OffloadedTensorError, match=r"__tensor_unflatten__.*'Module\.weight'"):
                weight.cpu()
    assert [type(each) for each in (weight, other, alias, saved["weight"])] == [kind] * 4
    assert torch.equal(alias.float().cpu(), torch.full((4, 4), 2.0))
    assert all(one is two for one, two in zip((weight._data, weight._transpose, weight._scale_inv), inside, strict=False))


def test_a_frozen_quantised_base_copies_once(device: str) -> None:
    module = pair(device)
    off = Offloader(PerParameterStrategy(module, read_only=True), device=device)
    assert off.offload().copied_nbytes == 5 * 3 * 4
    off.reload()
    assert off.offload().copied_nbytes == 0
    off.close()


@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize(("which", "later"), [("DTensor", 0), ("nested wrapper", 0), ("sparse", 3)])
def test_how_often_the_heap_is_looked_at(device: str, which: str, later: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, while nothing refers to what is inside that did not; at every offload where that cannot be asked."""
    module, looks, look = MODULES[which](device), [], storage._look
    monkeypatch.setattr(storage, "_look", lambda cases: (looks.append(1), look(cases)))
    off = Offloader(module, device=device)
    off.offload()
    assert len(looks) == 1
    for _ in range(3):
        off.reload()
        off.offload()
    assert len(looks) == 1 + later
    off.close()
