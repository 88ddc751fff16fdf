"""Offloaded tensors answer for themselves: the matrix of operations, and what is served."""

from __future__ import annotations

import copy
import gc
import io
import json
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from fresh import ROOT
from torch import nn

import torch_offload
from torch_offload import OffloadedTensorError, Offloader, TransitionError, ledger, offloaded, serving, testing
from torch_offload.tensors import storage_of
from torch_offload.testing import Portrait

HERE = Path(__file__).parent
ROWS = [row for row in (HERE / "op_matrix.txt").read_text().splitlines() if row.strip() and not row.startswith("#")]
BEFORE = [
    "wrap.linear.backward()",
    "wrap.leaf.backward()",
    "wrap.product.backward()",
    "wrap.scaled.backward()",
    "wrap.traced(x)",
    "wrap.traced_product(w)",
    "wrap.scripted(x)",
    "wrap.compiled(x)",
    "wrap.resident.backward(w.detach())",
    "wrap.unpacked.backward()",
    "torch.as_tensor(w,dtype=torch.float64)",
    "x.new_tensor(w)",
    "torch.func.vjp(lambda p:p*2,w)",
    "thread(lambda: w + 1)",
    "all_reduce(w)",
]

# What no exchanged class can see: C++ that reads a tensor without asking it. The README names these.
CRASHES = {
    "torch.tensor(w)",
    "torch.Tensor(w)",
    "torch.Tensor._make_subclass(nn.Parameter,w).sum()",
    "torch.func.grad(lambda p:(p*2).sum())(w)",
    "torch.func.vmap(lambda p:p*2)(w)",
    "torch._C.DisableTorchFunctionSubclass().__enter__() or w.sum()",
    "torch.as_tensor(w,dtype=torch.float64)",
    "x.new_tensor(w)",
    "torch.func.vjp(lambda p:p*2,w)",
    "wrap.traced_product(w)",
    "wrap.resident.backward(w.detach())",
    "wrap.unpacked.backward()",
}
HOLLOW = {"torch.utils.dlpack.to_dlpack(w)"}  # gives a capsule around no memory
# C++ that notices by itself: an error before anything is read, which cannot know the name.
UNNAMED = {
    "torch.jit.script(nn.Sequential(m.l))(x)",
    "torch._C._functorch._wrap_for_grad(w,1)",
    "torch.nested.nested_tensor([w,w])",
    "wrap.linear.backward()",
    "wrap.leaf.backward()",
    "wrap.product.backward()",
    "wrap.traced(x)",
    "wrap.scripted(x)",
}
KNOWN_LIMITS = CRASHES | HOLLOW | UNNAMED


@pytest.fixture(scope="module")
def outcomes() -> dict[str, dict[str, list[str]]]:
    return {}


def outcome_of(row: str, device: str, outcomes: dict[str, dict[str, list[str]]]) -> tuple[str, str]:
    if device not in outcomes:
        done = subprocess.run(
            [sys.executable, str(HERE / "op_matrix.py"), device],
            input=json.dumps(ROWS + BEFORE),
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            env=os.environ | {"PYTHONPATH": str(HERE.parent)} | ({"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}),
        )
        outcomes[device] = json.loads(done.stdout)
    kind, text = outcomes[device][row]
    return kind, text


@pytest.mark.xdist_group("op_matrix")
@pytest.mark.parametrize("row", [row for row in ROWS + BEFORE if row not in KNOWN_LIMITS])
def test_an_operation_is_refused_by_name_or_gives_the_right_value(row: str, device: str, outcomes) -> None:
    kind, text = outcome_of(row, device, outcomes)
    assert kind in ("refused", "right"), f"{kind}: {text}"


@pytest.mark.xdist_group("op_matrix")
@pytest.mark.parametrize(("row", "wanted"), [(row, "unnamed") for row in sorted(UNNAMED)] + [(row, "hollow") for row in HOLLOW])
def test_known_limit_without_the_name(row: str, wanted: str, device: str, outcomes) -> None:
    kind, text = outcome_of(row, device, outcomes)
    on_a_gpu = {"torch.nested.nested_tensor([w,w])": "crash"} if device == "cuda" else {}
    assert kind == on_a_gpu.get(row, wanted), f"{kind}: {text}"


@pytest.mark.xdist_group("op_matrix")
@pytest.mark.parametrize("row", sorted(CRASHES))
def test_known_limit_what_reads_past_every_class(row: str, device: str, outcomes) -> None:
    """On the CPU these end the process. A GPU build may notice by itself, which is better; it must not give a value."""
    kind, text = outcome_of(row, device, outcomes)
    assert kind == "crash" if device == "cpu" else kind in ("crash", "unnamed"), f"{kind}: {text}"


def test_the_readme_names_the_known_limits() -> None:
    readme = (HERE.parent / "README.md").read_text()
    names = "torch.tensor(w) as_tensor new_tensor _make_subclass torch.func DisableTorchFunctionSubclass to_dlpack TorchScript"
    for name in [*names.split(), "saved_tensors_hooks", "incoming gradient"]:
        assert name in readme


# What is served --------------------------------------------------------------------------------------------------------


@pytest.fixture
def model(device: str) -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).to(device)
    model[1].weight = nn.Parameter(model[0].weight.data[0])
    return model


def test_a_captured_state_dict_shows_current_values(device: str, model: nn.Module) -> None:
    captured, named = model.state_dict(), dict(model.named_parameters())
    off = Offloader(model, device=device)
    for cycle in range(3):
        report = off.offload()
        assert report.left == ()
        assert report.nbytes == sum({storage_of(t)._cdata: off_nbytes(t) for t in captured.values()}.values())
        with torch.no_grad():
            named["0.weight"].copy_(torch.full((3, 3), float(cycle)))
        assert named["0.weight"].cpu().eq(cycle).all()
        assert captured["0.weight"].cpu().eq(cycle).all()
        off.reload()
        assert captured["0.weight"].eq(cycle).all()
        assert captured["1.weight"].eq(cycle).all()
        with torch.no_grad():
            model[0].bias.add_(1)
        assert torch.equal(captured["0.bias"], model[0].bias)


def off_nbytes(tensor: torch.Tensor) -> int:
    entry = torch_offload.ledger.entry_of(storage_of(tensor))
    return entry.nbytes if entry else 0


def test_errors_say_what_was_tried(device: str, model: nn.Module) -> None:
    def assign(name: str) -> None:
        setattr(model[0].weight, name, torch.ones(3, 3, device=device))

    with offloaded(model, device=device):
        for call, words in (
            (lambda: model[0].weight.T, "T needs"),
            (lambda: model[0].weight.__cuda_array_interface__, "__cuda_array_interface__ needs"),
            (lambda: assign("data"), "setting data needs"),
            (lambda: assign("grad"), "setting grad needs"),
            (lambda: model.to("meta"), "moving or casting a module needs"),
            (lambda: model[0].weight + 1, "add needs"),
        ):
            with pytest.raises(OffloadedTensorError, match=f"^{words} the memory of '.*weight'"):
                call()


def test_writing_the_mirror_moves_the_version_and_passes_the_checksum(device: str, model: nn.Module) -> None:
    versions = model[0].weight._version
    with offloaded(model, device=device), torch.no_grad():
        assert model[0].weight.copy_(torch.ones(3, 3)) is model[0].weight
        model[1].running_mean.copy_(torch.ones(3, dtype=torch.float64))
        model[0].weight.copy_(model[0].weight.detach())
    assert model[0].weight._version == versions + 2
    assert model[0].weight.eq(1).all()
    assert model[1].weight.eq(1).all()
    assert model[1].running_mean.eq(1).all()


def test_writing_under_autograd_or_what_was_discarded_is_refused(device: str, model: nn.Module) -> None:
    model[0].weight.grad = torch.ones(3, 3, device=device)
    with offloaded(model, device=device, grads="discard"):
        with pytest.raises(OffloadedTensorError, match=r"no_grad.*0\.weight"):
            model[0].weight.copy_(torch.ones(3, 3))
        with pytest.raises(OffloadedTensorError, match="discarded"), torch.no_grad():
            model[0].weight.grad.copy_(torch.ones(3, 3))
        assert model[0].weight.grad.cpu().eq(0).all()  # as it will come back


def test_a_graph_that_saved_a_written_tensor_raises_after_the_reload(device: str) -> None:
    weight = nn.Parameter(torch.ones(3, device=device))
    holder = nn.ParameterList([weight])
    loss = (weight * weight).sum()
    with offloaded(holder, device=device), torch.no_grad():
        weight.copy_(torch.zeros(3))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_aliases_made_while_offloaded_are_plain_afterwards(device: str, model: nn.Module) -> None:
    with offloaded(model, device=device):
        made = [model[0].weight.detach(), model[0].weight.data, model[0].weight.view_as(model[0].weight), model.state_dict()]
        for alias in made[:3]:
            with pytest.raises(OffloadedTensorError, match=r"0\.weight"):
                alias.sum()
    for alias in [*made[:3], made[3]["0.weight"]]:
        assert type(alias) is torch.Tensor
        assert not alias.__dict__
        assert torch.equal(alias, model[0].weight)


def test_pickling_keeps_ties_sizes_classes_and_python_attributes(device: str, model: nn.Module) -> None:
    model[0].weight.note = "kept"
    with offloaded(model, device=device):
        module = pickle.loads(pickle.dumps(model))
        file = io.BytesIO()
        torch.save(model, file)
        with pytest.raises(OffloadedTensorError, match=r"0\.weight"):
            copy.copy(model[0].weight)
        with pytest.raises(OffloadedTensorError, match=r"Sequential\."):
            copy.deepcopy(model)
    file.seek(0)
    for each in (module, torch.load(file, weights_only=False)):
        assert type(each[0].weight) is nn.Parameter
        assert each[0].weight.device.type == "cpu"
        assert torch.equal(each[0].weight, model[0].weight.cpu())
        assert vars(each[0].weight) == {"note": "kept"}
    loaded = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    assert storage_of(loaded[0].weight) is storage_of(loaded[1].weight)


def test_what_is_still_being_saved_is_not_overwritten_by_the_next_offload(device: str, model: nn.Module) -> None:
    off = Offloader(model, device=device)
    off.offload()
    wanted = model[0].weight.cpu()
    function, arguments = model[0].weight.detach().__reduce_ex__(4)[:2]
    saved = function(*arguments)  # shares the mirror's memory, as a writer in another thread does
    off.reload()
    with torch.no_grad():
        model[0].weight.zero_()
    off.offload()
    assert torch.equal(saved, wanted)
    off.reload()
    assert model[0].weight.eq(0).all()
    off.close()
    assert torch.equal(saved, wanted)


def test_a_multiprocessing_queue_gets_the_values_and_who_reads_it_writes_his_own(device: str, model: nn.Module) -> None:
    context = torch.multiprocessing.get_context("fork")
    wanted = model[0].weight.detach().cpu().clone()
    with offloaded(model, device=device):
        queue = context.SimpleQueue()
        for _ in range(2):
            queue.put(model[0].weight.detach())
            got = queue.get()
            assert torch.equal(got, wanted)
            got.fill_(7)  # shared memory, which another process may write
            assert torch.equal(model[0].weight.cpu(), wanted)
            file = io.BytesIO()
            torch.save(model.state_dict(), file)
            file.seek(0)
            assert torch.equal(torch.load(file)["0.weight"], wanted)
    assert torch.equal(model[0].weight.cpu(), wanted)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_gets_an_error_and_not_a_crash() -> None:
    model = nn.Linear(3, 3)

    def child(sender) -> None:
        for call in (model.weight.tolist, off.reload, lambda: torch_offload.reload(model.weight)):
            try:
                call()
            except TransitionError as error:
                sender.send(str(error))
            else:
                sender.send("no error")
        os._exit(0)

    with Offloader(model, device="cpu").offloaded() as off:
        receiver, sender = multiprocessing.Pipe(duplex=False)
        process = multiprocessing.get_context("fork").Process(target=child, args=(sender,))
        process.start()
        process.join()
        assert process.exitcode == 0
        for _ in range(3):
            assert "forked child" in receiver.recv()


def test_a_read_waits_for_a_transition_of_another_thread(device: str, model: nn.Module) -> None:
    wanted, found, begun = model[0].weight.tolist(), [], threading.Event()

    def read() -> None:
        begun.set()
        found.append(model[0].weight.tolist())

    thread = threading.Thread(target=read)

    def in_the_middle(index: int, _destination: torch.Tensor) -> None:
        if index == 0:
            thread.start()
            begun.wait()
            assert not found

    off = Offloader(model, device=device)
    off.offload()
    with testing.link(corrupt=in_the_middle):
        off.reload()
    thread.join()
    assert found == [wanted]


def test_reload_of_one_tensor_whose_module_is_gone(device: str) -> None:
    model = nn.Linear(3, 3, device=device)
    alias, portrait = model.weight.detach(), Portrait.of(model.weight.detach())
    Offloader(model, device=device).offload()
    del model
    gc.collect()
    with pytest.raises(OffloadedTensorError, match=r"Linear\.weight.*torch_offload\.reload\(tensor\)"):
        alias.sum()
    torch_offload.reload(alias)
    torch_offload.reload(alias)
    assert torch.equal(alias.cpu().view(torch.uint8).view(-1), portrait.content)


def test_optimizer_load_state_dict_is_refused_and_its_hook_goes(device: str, model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1, momentum=0.9)
    model(torch.randn(4, 3, device=device)).sum().backward()
    optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    keys = [sorted(entry) for entry in optimizer.state.values()]
    with offloaded(optimizer, device=device):
        assert [sorted(entry) for entry in optimizer.state.values()] == keys
        assert optimizer.state_dict()["param_groups"] == state["param_groups"]
        with pytest.raises(OffloadedTensorError, match=r"load_state_dict\(\).*momentum_buffer.*reload\(\)"):
            optimizer.load_state_dict(state)
    assert not optimizer._optimizer_load_state_dict_pre_hooks
    optimizer.load_state_dict(state)


def test_a_refused_write_keeps_the_checksum(device: str) -> None:
    model = nn.Linear(3, 3, device=device)
    off = Offloader(model, device=device)
    off.offload()
    sums = {entry.name: entry.checksum for entry in ledger.entries()}
    with torch.no_grad(), pytest.raises(RuntimeError, match="size"):
        model.weight.copy_(torch.ones(5, 7))
    assert {entry.name: entry.checksum for entry in ledger.entries()} == sums
    off.reload()


def test_what_is_saved_stays_as_it_was_after_the_mirror_was_written(device: str) -> None:
    model = nn.Linear(3, 3, device=device)
    off = Offloader(model, device=device)
    off.offload()
    (entry,) = [entry for entry in ledger.entries() if entry.name == "Linear.weight"]
    kept = entry.export()
    with torch.no_grad():
        model.weight.copy_(torch.ones(3, 3))
    written = bytes(kept)
    del entry
    off.reload()
    with torch.no_grad():
        model.weight.fill_(5)
    off.offload()
    assert bytes(kept) == written
    off.reload()


def test_a_version_counter_that_two_storages_share(device: str) -> None:
    one = torch.zeros(4, device=device)
    other = one.detach()
    one.data = torch.ones(4, device=device)  # the counter stays shared
    model = nn.Module()
    model.register_buffer("one", one)
    model.register_buffer("other", other)
    off = Offloader(model, device=device)
    off.offload()
    off.reload()
    assert (one._version, other._version) == (0, 0)
    del model.other
    off.offload()
    other.add_(1)  # resident, and changed
    off.reload()
    assert other._version == 1


def test_version_counters_that_views_share(device: str) -> None:
    flat = torch.zeros(6, device=device)
    model = nn.Module()
    model.register_buffer("first", flat[:3])
    model.register_buffer("second", flat[3:])
    del flat
    version = model.second._version
    off = Offloader(model, device=device)
    off.offload()
    model.first = None
    off.reload()
    assert model.second._version == version


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")
def test_quantized_buffers_are_saved_and_read(device: str) -> None:
    model = nn.Module()
    values = torch.randn(4, 4, device=device)
    model.register_buffer("tensor", torch.quantize_per_tensor(values, 0.1, 3, torch.qint8))
    wanted = model.tensor.cpu().clone()
    with offloaded(model, device=device):
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        assert torch.equal(model.tensor.cpu().dequantize(), wanted.dequantize())
    file.seek(0)
    assert torch.equal(torch.load(file)["tensor"].dequantize(), wanted.dequantize())
    assert torch.equal(model.tensor.int_repr().cpu(), wanted.int_repr())


def test_tokens_of_a_spawned_process(tmp_path: Path) -> None:
    script = tmp_path / "spawn.py"
    script.write_text("""
import torch
import torch.multiprocessing as multiprocessing
import torch_offload

def child(state):
    print({name: tensor.sum().item() for name, tensor in state.items()} == {"weight": 9.0, "bias": 3.0}, flush=True)

if __name__ == "__main__":
    torch.set_num_threads(1)
    model = torch.nn.Linear(3, 3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1)
    with torch_offload.offloaded(model, device="cpu"):
        process = multiprocessing.get_context("spawn").Process(target=child, args=(model.state_dict(),))
        process.start()
        process.join()
    print(process.exitcode, model.weight.sum().item())
""")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.split("\n")[:2] == ["True", "0 9.0"], done.stderr


def test_aliases_made_while_offloaded_are_no_parameters(device: str) -> None:
    model, other, holder = nn.Linear(3, 3, device=device), nn.Linear(3, 3, device=device), nn.Module()
    with offloaded(model, device=device):
        holder.cache = model.weight.detach()
        assert not isinstance(model.weight.data, nn.Parameter)
        with pytest.raises(RuntimeError, match=r"Linear\.weight.*reload"):  # torch wraps it
            other.load_state_dict(model.state_dict(), assign=True)
        with pytest.raises(OffloadedTensorError, match=r"Linear\.weight"):
            nn.Parameter(model.weight)
        with pytest.raises(OffloadedTensorError, match=r"Linear\.weight"):
            model.weight.detach().requires_grad = True
    assert list(holder.state_dict()) == []
    assert type(other.weight) is nn.Parameter
    other.load_state_dict(model.state_dict(), assign=True)
    assert torch.equal(other.weight, model.weight)


@pytest.mark.parametrize("call", ["all_gather([w], p)", "reduce_scatter_tensor(w, p)"])
def test_known_limit_collectives_into_an_offloaded_tensor(call: str) -> None:
    """They ask only their inputs. One day they may ask all: then they are no limit any more."""
    script = f"""
import torch, torch.distributed as dist, warnings
from torch_offload import Offloader
warnings.simplefilter("ignore")
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.Linear(64, 64, bias=False)
w, p = model.weight.data, torch.ones(64, 64)
off = Offloader(model, device="cpu")
off.offload()
dist.{call}
"""
    environment = os.environ | {"PYTHONPATH": str(HERE.parent), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == -signal.SIGSEGV, done.stderr


def test_a_copy_that_autograd_would_record_is_refused(device: str) -> None:
    model = nn.Linear(3, 3, device=device)
    wanted = model.weight.detach().cpu().clone()
    with offloaded(model, device=device):
        for call in (torch.Tensor.clone, lambda w: w.to(device, torch.float64) if device != "cpu" else w.clone()):
            with pytest.raises(OffloadedTensorError, match=r"autograd would record.*no_grad.*'Linear\.weight'"):
                call(model.weight)
            with torch.no_grad():
                assert torch.equal(call(model.weight).cpu().float(), wanted)
        for call in (copy.deepcopy, lambda w: w.to(torch.float16), lambda w: w.float().half()):
            with torch.no_grad(), pytest.raises(OffloadedTensorError, match=r"'Linear\.weight'"):
                call(model.weight)
        with pytest.raises(OffloadedTensorError, match=r"'Linear\.weight'"):
            copy.deepcopy(model)
    assert torch.equal(model.weight.cpu(), wanted)


def test_copying_out_of_an_offloaded_tensor_gives_its_values(device: str) -> None:
    """As when a reference is refreshed from an actor that is away."""
    actor, reference = nn.Linear(3, 3, device=device), nn.Linear(3, 3, device=device)
    with offloaded(actor, device=device):
        reference.load_state_dict(actor.state_dict())
        with torch.no_grad():
            reference.bias.double().copy_(actor.bias)
        with pytest.raises(OffloadedTensorError, match=r"autograd would record.*'Linear\.weight'"):
            torch.zeros(3, 3, device=device).copy_(actor.weight)
        assert torch.equal(reference.weight.cpu(), actor.weight.detach().cpu())
    assert torch.equal(reference.weight, actor.weight)


def test_a_copy_has_the_memory_format_and_the_device_that_were_asked_for(device: str) -> None:
    model = nn.Conv2d(3, 4, 5, device=device)
    with offloaded(model, device=device), torch.no_grad():
        for fresh in (
            model.weight.clone(memory_format=torch.channels_last),
            model.weight.detach().to(torch.device(device), memory_format=torch.channels_last, copy=True),
        ):
            assert fresh.is_contiguous(memory_format=torch.channels_last)
        assert model.weight.clone().is_contiguous()
        asked = [
            serving.copy_device(torch.Tensor.cuda, (model.weight, *args), keywords)
            for args, keywords in (((1,), {}), ((), {"device": 1}), ((torch.device("cuda", 1),), {}))
        ]
    assert asked == [torch.device("cuda", 1)] * 3
