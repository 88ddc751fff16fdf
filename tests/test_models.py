"""Real transformers models with tied embeddings and a real optimizer, trained on beside a twin that is never offloaded."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint

from torch_offload import OffloadedTensorError, Offloader, PerParameterStrategy, offloaded, resident
from torch_offload.tensors import storage_of

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    transformers = pytest.importorskip("transformers")

SMALL: dict[str, Any] = {"vocab_size": 96, "tie_word_embeddings": True, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
CONFIGS: dict[str, Callable[[], Any]] = {
    "Llama": lambda: transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, **SMALL
    ),
    "GPT2": lambda: transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=32, **SMALL),
    "T5, an encoder and a decoder": lambda: transformers.T5Config(
        d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0, **SMALL
    ),
    "Mixtral, a mixture of experts": lambda: transformers.MixtralConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        num_local_experts=4, **SMALL,
    ),
}  # fmt: skip


def build(which: str, device: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(11)
    config = CONFIGS[which]()
    kind = transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM
    model = kind.from_config(config).to(device)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> float:
    tokens = torch.randint(3, 96, (2, 12), generator=torch.Generator().manual_seed(seed))
    device = next(model.parameters()).device
    torch.manual_seed(seed)  # dropout
    loss = model(input_ids=tokens.to(device), labels=tokens.to(device)).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def distinct_nbytes(*tensors: torch.Tensor) -> int:
    return sum({storage_of(tensor)._cdata: storage_of(tensor).nbytes() for tensor in tensors}.values())


@pytest.mark.filterwarnings("ignore::DeprecationWarning:transformers")
@pytest.mark.parametrize("which", CONFIGS)
def test_a_model_trains_on_as_if_it_had_never_been_away(device: str, which: str) -> None:
    model, optimizer = build(which, device)
    twin, twin_optimizer = build(which, device)
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    start = [p.detach().clone() for p in model.parameters()]
    off = Offloader(model, optimizer, device=device)
    for seed in range(3):
        assert train(model, optimizer, seed) == train(twin, twin_optimizer, seed)
        state = [v for s in optimizer.state.values() for v in s.values() if v.device.type == device]
        wanted = distinct_nbytes(*model.parameters(), *model.buffers(), *state)
        with off.offloaded():
            assert off.report.nbytes == wanted
            assert off.report.left == ()
            assert off.host_nbytes <= wanted * 1.01 + 16 * off.report.storages + 8192
            with pytest.raises(OffloadedTensorError, match=type(model).__name__):
                train(model, optimizer, seed)
            with off.resident(["params", "buffers"]), torch.no_grad():
                model.generate(torch.ones(1, 2, dtype=torch.long, device=device), max_new_tokens=2)
        assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    for one, other, before in zip(model.parameters(), twin.parameters(), start, strict=True):
        assert torch.equal(one, other)
        assert not torch.equal(one, before)
    for one, other in zip(optimizer.state.values(), twin_optimizer.state.values(), strict=True):
        assert all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("which", CONFIGS)
def test_a_checkpoint_written_while_offloaded_loads_into_the_twin(device: str, which: str) -> None:
    model, optimizer = build(which, device)
    train(model, optimizer, 0)
    file = io.BytesIO()
    with offloaded(model, optimizer, device=device):
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, map_location=device)
    twin, twin_optimizer = build(which, device)
    twin.load_state_dict(saved["model"])
    twin_optimizer.load_state_dict(saved["optimizer"])
    assert train(model, optimizer, 1) == train(twin, twin_optimizer, 1)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_distributed_checkpoint_is_written_and_read_while_offloaded(device: str, tmp_path: Path) -> None:
    model, optimizer = build("Llama", device)
    train(model, optimizer, 0)
    wanted = [p.detach().clone() for p in model.parameters()]
    # beside a GPU the writer would look at the storages of tensors on the CPU, which offloaded ones refuse by name
    ahead = {"per_thread_copy_ahead": 0} if device == "cpu" else {}
    writer = checkpoint.FileSystemWriter(tmp_path, **ahead)
    with offloaded(model, optimizer, device=device):
        checkpoint.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, storage_writer=writer, no_dist=True)
    train(model, optimizer, 1)
    with offloaded(model, optimizer, device=device):
        checkpoint.load({"model": model.state_dict()}, checkpoint_id=tmp_path, no_dist=True)
    for parameter, value in zip(model.parameters(), wanted, strict=True):
        assert torch.equal(parameter, value)
    saved = {"optimizer": optimizer.state_dict()}
    checkpoint.load(saved, checkpoint_id=tmp_path, no_dist=True)
    assert {int(state["step"]) for state in saved["optimizer"]["state"].values()} == {1}


def test_a_frozen_reference_scores_between_rollouts(device: str) -> None:
    policy, _ = build("Llama", device)
    reference, _ = build("Llama", device)
    reference.requires_grad_(False)
    tokens = torch.ones(1, 4, dtype=torch.long, device=device)
    wanted = reference(tokens).logits
    off = Offloader(PerParameterStrategy(reference, read_only=True, name="reference"), device=device)
    off.offload()
    for _ in range(2):
        with off.resident():
            assert torch.equal(reference(tokens).logits, wanted)
        assert off.report.copied_nbytes == 0 or off.report.direction == "reload"
        with resident(policy, device=device):
            policy(tokens)
    off.reload()
