"""Reinforcement learning in which training and rollout take turns on one device.

A tiny language model (transformers, random weights, nothing is downloaded) learns to write tokens from a target set. Three
models share the device: the actor that is trained, a rollout copy that generates (a stand-in for your inference engine), and
a frozen reference for the KL penalty. Each phase has on the device what it needs, and the rest is in host memory:

    sync       actor, rollout copy    the rollout copy takes the actor's weights
    rollout    rollout copy           it generates
    score      actor, reference       the reference says how likely it finds what was generated
    update     actor, optimizer       forward, backward, step

    python examples/rollout_phase.py --steps 40 --seed 0

The memory that it takes can be drawn, beside what it takes today's way (todays_way.py):

    python examples/rollout_phase.py --steps 6 --hidden 256 --layers 4 --way both --plot memory.png
"""

from __future__ import annotations

import argparse
import copy
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from timeline import Timeline, keep, phase, require_matplotlib, resident_nbytes
from todays_way import Moved, TodaysWay, tensors_of
from transformers import LlamaConfig, LlamaForCausalLM

from torch_offload import Offloader, PerParameterStrategy, TransitionReport
from torch_offload.testing import is_away

VOCABULARY, TARGETS = 32, 8  # a token below TARGETS is worth a point
BATCH, PROMPT, NEW = 32, 4, 12  # sequences, and tokens in each
LEARNING_RATE, KL_WEIGHT = 3e-3, 0.02

WAYS = {"torch_offload": Offloader, "today": TodaysWay}

Log = Callable[[str, TransitionReport | Moved], None]


def build_policy(device: torch.device | str, *, hidden: int = 64, layers: int = 2) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        max_position_embeddings=PROMPT + NEW,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,  # every sequence has the full length
    )
    with torch.device(device):
        return LlamaForCausalLM(config).eval()  # eval: no dropout, gradients all the same


@phase("sync")
def sync_weights(actor: LlamaForCausalLM, rollout_copy: LlamaForCausalLM) -> None:
    rollout_copy.load_state_dict(actor.state_dict())


@phase("rollout")
def rollout(model: LlamaForCausalLM) -> torch.Tensor:
    """Prompts and what the model writes after them: int64 of shape (BATCH, PROMPT + NEW)."""
    prompts = torch.randint(VOCABULARY, (BATCH, PROMPT), device=model.device)
    return model.generate(prompts, attention_mask=torch.ones_like(prompts), do_sample=True, max_new_tokens=NEW)


def reward(tokens: torch.Tensor) -> torch.Tensor:
    """The share of new tokens that are targets: shape (BATCH,)."""
    return (tokens[:, PROMPT:] < TARGETS).float().mean(dim=1)


def log_probs(model: LlamaForCausalLM, tokens: torch.Tensor) -> torch.Tensor:
    """Of each new token: shape (BATCH, NEW)."""
    logits = model(tokens, use_cache=False).logits[:, PROMPT - 1 : -1]
    return logits.log_softmax(dim=-1).gather(2, tokens[:, PROMPT:, None]).squeeze(2)


@phase("score")
@torch.no_grad()
def score(reference: LlamaForCausalLM, tokens: torch.Tensor) -> torch.Tensor:
    return log_probs(reference, tokens)


@phase("update")
def update(
    actor: LlamaForCausalLM,
    optimizer: torch.optim.Optimizer,
    tokens: torch.Tensor,
    rewards: torch.Tensor,
    reference_log_probs: torch.Tensor,
) -> None:
    """One policy gradient step, with the batch's mean as baseline and a KL penalty against the reference.

    The loss and its graph die with this function. A graph that lives on holds the parameters, which would then be left on
    the device by the next offload (the report names them).
    """
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    current = log_probs(actor, tokens)
    gap = reference_log_probs - current
    kl = gap.exp() - gap - 1  # never negative, unbiased: k3 in J. Schulman, "Approximating KL divergence"
    loss = (KL_WEIGHT * kl - advantages[:, None] * current).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()  # gradients would be kept too, but nobody needs them after the step


def print_line(phase: str, report: TransitionReport | Moved) -> None:
    print(f"{phase:<8} {report.line()}")


def train(
    steps: int = 40,
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
    log: Log = print_line,
    offloader: Callable[..., Any] | None = None,
    **sizes: int,
) -> list[float]:
    """Returns the mean reward of each rollout.

    Args:
        log: gets the report of what moved at the beginning of each phase.
        offloader: what makes the offloaders; `Offloader` by default.
        sizes: for `build_policy`.
    """
    offloader = offloader or Offloader
    torch.manual_seed(seed)
    actor = build_policy(device, **sizes)
    rollout_copy = copy.deepcopy(actor)
    reference = copy.deepcopy(actor).requires_grad_(False)
    optimizer = torch.optim.AdamW(actor.parameters(), lr=LEARNING_RATE)

    training = offloader(actor, optimizer, device=device)
    engine = offloader(rollout_copy, device=device)
    frozen = offloader(PerParameterStrategy(reference, read_only=True), device=device)  # copied to the host once only

    mean_rewards = []
    with engine.offloaded(), frozen.offloaded():  # each comes back for its own phases
        for _ in range(steps):
            with training.offloaded(["grads", "optimizer"]):  # makes room for a second set of weights
                log("sync", training.report)
                with engine.resident():
                    sync_weights(actor, rollout_copy)
                    with training.offloaded():  # now the actor's weights too
                        log("rollout", training.report)
                        tokens = rollout(rollout_copy)
                with frozen.resident():
                    log("score", frozen.report)
                    reference_log_probs = score(reference, tokens)
            log("update", training.report)
            rewards = reward(tokens)
            update(actor, optimizer, tokens, rewards, reference_log_probs)
            mean_rewards.append(rewards.mean().item())
    return mean_rewards


def first_and_last_fifth(rewards: Sequence[float]) -> tuple[float, float]:
    fifth = max(1, len(rewards) // 5)
    return sum(rewards[:fifth]) / fifth, sum(rewards[-fifth:]) / fifth


def train_watched(
    steps: int, *, device: torch.device, offloader: Callable[..., Any], **options: int
) -> tuple[list[float], dict[str, Any]]:
    """What `train` returns, and the timeline of the memory that it took.

    Beside an accelerator that is what the driver has given the process, and by how much the process has grown on the host. On
    the CPU, where both are one, it is what the models have and what is kept for them, at the ends of each phase.
    """
    targets: list[Any] = []
    made: list[Any] = []

    def watched(*given: Any, **policy: Any) -> Any:
        targets.extend(getattr(target, "target", target) for target in given)
        made.append(offloader(*given, **policy))
        return made[-1]

    def kept() -> tuple[int, int]:
        resident = (tensor for target in targets for tensor in tensors_of(target) if not is_away(tensor))
        storages = {tensor.untyped_storage() for tensor in resident}
        return sum(each.nbytes() for each in storages), sum(each.host_nbytes for each in made)

    def taken() -> tuple[int, int]:
        return torch.accelerator.memory_reserved(device), resident_nbytes() - before

    train(1, device=device, offloader=offloader, log=lambda *_: None)  # libraries take memory when they are first used
    before = resident_nbytes()
    with Timeline(kept) if device.type == "cpu" else Timeline(taken, every_s=0.002) as timeline:
        rewards = train(steps, device=device, offloader=watched, **options)
    return rewards, timeline.as_dict()


def draw_both_ways(arguments: Sequence[str], picture: Path) -> None:
    """Each in a process of its own, so that neither finds host memory that the other left behind."""
    timelines = {}
    for way in WAYS:
        print(f"-- {way}", flush=True)
        subprocess.run([sys.executable, __file__, *arguments, "--way", way], check=True)
        timelines |= json.loads(picture.with_suffix(".json").read_text())
    keep(timelines, picture)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default=torch.accelerator.current_accelerator(check_available=True) or "cpu")
    parser.add_argument("--hidden", type=int, default=64, help="width of the models, a multiple of 8")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--plot", type=Path, metavar="PICTURE", help="draw memory over time; the numbers go beside it")
    parser.add_argument("--way", choices=[*WAYS, "both"], default="torch_offload", help="what moves it; both with --plot")
    arguments = sys.argv[1:] if argv is None else argv
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)  # so small a model is slower with more: they wait for each other
    options = {"seed": args.seed, "device": torch.device(args.device), "hidden": args.hidden, "layers": args.layers}
    if args.plot is None:
        if args.way == "both":
            parser.error("--way both draws a picture: say where with --plot")
        rewards = train(args.steps, offloader=WAYS[args.way], **options)
    else:
        require_matplotlib()
        if args.way == "both":
            draw_both_ways(arguments, args.plot)
            return
        rewards, timeline = train_watched(args.steps, offloader=WAYS[args.way], **options)
        keep({args.way: timeline}, args.plot)
    first, last = first_and_last_fifth(rewards)
    print(f"mean reward: {first:.3f} in the first fifth of the steps, {last:.3f} in the last")


if __name__ == "__main__":
    main()
