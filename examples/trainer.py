"""A trainer that keeps its strategies and puts away, in each phase, what the phase does not need.

After `everything.offload()` all is in host memory between phases, and each phase brings back its own:

    sync_weights    the actor's parameters, for the rollout engine to take
    rollout         nothing: the engine has the device
    log_probs       the frozen reference
    train           the actor and its optimizer

    python3 -m pip install -c constraints.txt -e '.[megatron]'
    python3 examples/trainer.py
"""

from __future__ import annotations

import copy

import torch
from megatron_flat_buffers import VOCABULARY, DistributedDataParallel, Policy, ranks, wrap
from torch import nn

from torch_offload import FlatBufferStrategy, Offloader, OptimizerStrategy, PerParameterStrategy

TARGETS, LENGTH = 8, 12  # a token below TARGETS is worth a point


class Engine:
    """Stands for a rollout engine, which takes weights and frees them after the rollout."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.policy: nn.Module | None = None

    def load(self, state: dict[str, torch.Tensor]) -> None:
        self.policy = Policy().to(self.device)
        self.policy.load_state_dict(state)

    @torch.no_grad()
    def generate(self, prompts: torch.Tensor) -> torch.Tensor:
        """int64 of shape (sequences, LENGTH) that begin with the prompts, of shape (sequences, 1)."""
        tokens, policy = prompts, self.policy
        while tokens.shape[1] < LENGTH:
            tokens = torch.cat([tokens, torch.multinomial(policy(tokens[:, -1]).softmax(-1), 1)], dim=1)
        self.policy = None
        return tokens


class Trainer:
    """Holds the models, and one strategy for each.

    Args:
        actor: its wrapper. (The strategy takes a virtual pipeline's list of them just as well.)
        optimizer: over the actor's parameters.
        reference: frozen.
    """

    def __init__(self, actor: DistributedDataParallel, optimizer: torch.optim.Optimizer, reference: nn.Module) -> None:
        self.actor, self.optimizer, self.reference = actor, optimizer, reference
        weights = FlatBufferStrategy(actor, grads="discard", name="actor")
        state = OptimizerStrategy(optimizer, name="optimizer")
        frozen = PerParameterStrategy(reference, read_only=True, name="reference")
        self.everything = Offloader(weights, state, frozen)
        self.weights = Offloader(weights)
        self.training = Offloader(weights, state)
        self.frozen = Offloader(frozen)

    def sync_weights(self, engine: Engine) -> None:
        with self.weights.resident(["params", "buffers"]):  # the gradients stay away
            engine.load(self.actor.module.state_dict())

    def rollout(self, engine: Engine, prompts: torch.Tensor) -> torch.Tensor:
        return engine.generate(prompts)

    @torch.no_grad()
    def log_probs(self, tokens: torch.Tensor) -> torch.Tensor:
        with self.frozen.resident():
            return log_probs(self.reference, tokens)

    def train(self, tokens: torch.Tensor, reference: torch.Tensor) -> float:
        """One policy gradient step; the loss."""
        with self.training.resident():
            return self._step(tokens, reference)

    def _step(self, tokens: torch.Tensor, reference: torch.Tensor) -> float:
        rewards = (tokens[:, 1:] < TARGETS).float()
        self.actor.zero_grad_buffer()
        current = log_probs(self.actor, tokens)
        loss = ((current - reference).square() * 0.01 - (rewards - rewards.mean()) * current).mean()
        loss.backward()
        self.actor.finish_grad_sync()
        for parameter in self.actor.params_with_grad:
            parameter.grad = parameter.main_grad
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.actor.start_param_sync()
        return loss.item()


def log_probs(policy: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Of each token but the first: shape (sequences, length - 1)."""
    return policy(tokens[:, :-1]).log_softmax(-1).gather(2, tokens[:, 1:, None]).squeeze(2)


def build(device: torch.device, seed: int = 0) -> Trainer:
    torch.manual_seed(seed)
    policy = Policy()
    reference = copy.deepcopy(policy).requires_grad_(False).to(device)
    actor = wrap(policy, device)
    return Trainer(actor, torch.optim.AdamW(actor.params_with_grad, lr=1e-2), reference)


def run(trainer: Trainer, device: torch.device, steps: int = 30) -> tuple[list[float], list[float]]:
    """Losses and mean rewards of some rounds."""
    engine, losses, rewards = Engine(device), [], []
    for _ in range(steps):
        trainer.sync_weights(engine)
        tokens = trainer.rollout(engine, torch.randint(VOCABULARY, (64, 1), device=device))
        losses.append(trainer.train(tokens, trainer.log_probs(tokens)))
        rewards.append((tokens[:, 1:] < TARGETS).float().mean().item())
    return losses, rewards


def main() -> None:
    with ranks() as device:
        trainer = build(device)
        trainer.everything.offload()  # what phases come back to
        _, rewards = run(trainer, device)
        print(trainer.training.report)
        print(f"mean reward: {rewards[0]:.3f} in the first round, {rewards[-1]:.3f} in the last")


if __name__ == "__main__":
    main()
