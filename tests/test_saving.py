"""What trainers save, export and stream while everything is offloaded."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from torch_offload import OffloadedTensorError, Offloader, offloaded
from torch_offload.testing import is_away

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch.distributed.checkpoint as dcp


@pytest.fixture
def _rank(device: str) -> Iterator[None]:
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    torch.distributed.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def language_model(device: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).to(device)


def in_a_fresh_process(script: str, *args: str) -> None:
    """Run a script that checks what was saved; it knows nothing of torch_offload."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", script, *args], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_torch_save_and_safetensors(device: str, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to(device)
    torch.save({name: each.detach().cpu().clone() for name, each in model.state_dict().items()}, tmp_path / "wanted.pt")
    with offloaded(model, device=device):
        torch.save(model.state_dict(), tmp_path / "saved.pt")
        safetensors.save_file({name: each.cpu() for name, each in model.state_dict().items()}, tmp_path / "saved.safetensors")
        with pytest.raises(OffloadedTensorError, match=r"'Sequential\.0\."):
            safetensors.save_file(model.state_dict(), tmp_path / "refused.safetensors")  # it keys on storage pointers
        with pytest.raises(OffloadedTensorError, match=r"'Sequential\.0\."):
            safetensors.save_model(model, str(tmp_path / "refused.safetensors"))
    in_a_fresh_process(
        """
import sys, torch, safetensors.torch
folder = sys.argv[1]
wanted = torch.load(folder + "/wanted.pt")
for found in (torch.load(folder + "/saved.pt", map_location="cpu"), safetensors.torch.load_file(folder + "/saved.safetensors")):
    assert wanted.keys() == found.keys()
    assert all(torch.equal(wanted[name], found[name]) for name in wanted)
""",
        str(tmp_path),
    )


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_save_pretrained(device: str, tmp_path: Path) -> None:
    model = language_model(device)
    torch.save({name: each.detach().cpu().clone() for name, each in model.state_dict().items()}, tmp_path / "wanted.pt")
    with offloaded(model, device=device):
        host = {name: each.cpu() for name, each in model.state_dict().items()}
        model.save_pretrained(tmp_path / "saved", state_dict=host)
        try:
            model.save_pretrained(tmp_path / "direct")
        except OffloadedTensorError as error:
            named = str(error)
            assert "'LlamaForCausalLM." in named
        else:
            in_a_fresh_process(_PRETRAINED, str(tmp_path), "direct")
    in_a_fresh_process(_PRETRAINED, str(tmp_path), "saved")


_PRETRAINED = """
import sys, torch, transformers
folder, name = sys.argv[1:]
model = transformers.LlamaForCausalLM.from_pretrained(f"{folder}/{name}")
wanted = torch.load(folder + "/wanted.pt")
found = model.state_dict()
assert wanted.keys() == found.keys()
assert all(torch.equal(wanted[name], found[name]) for name in wanted)
"""


@pytest.mark.usefixtures("_rank")
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("how", ["save", "async_save"])
def test_torch_distributed_checkpoint(device: str, tmp_path: Path, how: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 8, device=device)).sum().backward()
    optimizer.step()

    def state() -> dict[str, object]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    wanted = {name: each.detach().cpu().clone() for name, each in model.state_dict().items()}
    moments = [each.detach().cpu().clone() for one in optimizer.state.values() for each in one.values()]
    off = Offloader(model, optimizer, device=device)
    off.offload()
    writer = dcp.FileSystemWriter(tmp_path, **({"per_thread_copy_ahead": 0} if device == "cpu" else {}))
    if how == "async_save":  # its stager keys on storage pointers
        with pytest.raises(OffloadedTensorError, match=r"data_ptr.*'Sequential\.0\.weight'"):
            dcp.async_save(state(), storage_writer=writer)
        done = dcp.async_save(tree_map_only(torch.Tensor, torch.Tensor.cpu, state()), storage_writer=writer)
    else:
        dcp.save(state(), storage_writer=writer)
    off.reload()
    with torch.no_grad():
        for each in [*model.parameters(), *(each for one in optimizer.state.values() for each in one.values())]:
            each.fill_(3)  # the next step, while an asynchronous save may still write
    if how == "async_save":
        done.result()
    off.offload()
    found = state()
    dcp.load(found, checkpoint_id=str(tmp_path))  # lands in the mirror
    assert all(map(is_away, model.parameters()))
    off.reload()
    assert all(torch.equal(each.cpu(), wanted[name]) for name, each in model.state_dict().items())
    now = [each for one in optimizer.state.values() for each in one.values()]
    assert all(map(torch.equal, [each.cpu() for each in now], moments))
    off.close()


def test_weights_are_streamed_one_by_one_long_after_the_dict_was_made(device: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to(device)
    wanted = {name: each.detach().cpu().clone() for name, each in model.state_dict().items()}
    off = Offloader(model, device=device)
    off.offload()
    lazily = ((name, each.to(device) if device != "cpu" else each.clone()) for name, each in model.state_dict().items())
    for _ in range(2):
        name, fresh = next(lazily)
        assert torch.equal(fresh.cpu(), wanted[name])
        assert fresh.device.type == device
    off.reload()  # meanwhile the phase ended
    assert all(torch.equal(fresh.cpu(), wanted[name]) for name, fresh in lazily)
    off.close()
