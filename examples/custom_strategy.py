"""A strategy of your own, for an object that is neither a module nor an optimizer.

Here it is a running average of a model's weights, in one flat tensor with a view for each parameter. The strategy says which
tensors the object holds; mirrors, guards, checksums and errors follow.

    python examples/custom_strategy.py
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from torch_offload import Claim, OffloadedTensorError, Strategy, offloaded


class WeightAverage:
    """An exponential moving average of a model's parameters."""

    def __init__(self, model: torch.nn.Module, decay: float = 0.9) -> None:
        self.decay = decay
        parameters = [parameter.detach() for parameter in model.parameters()]
        self.flat = torch.cat([parameter.flatten() for parameter in parameters])
        pieces = self.flat.split([parameter.numel() for parameter in parameters])
        self.views = [piece.view_as(parameter) for piece, parameter in zip(pieces, parameters, strict=True)]

    @torch.no_grad()
    def update(self, model: torch.nn.Module) -> None:
        for average, parameter in zip(self.views, model.parameters(), strict=True):
            average.lerp_(parameter, 1 - self.decay)


class WeightAverageStrategy(Strategy):
    """Describes a `WeightAverage` and moves nothing. The target is held weakly, so a strategy may be kept for long."""

    components = ("average",)

    def claims(self) -> Iterable[Claim]:
        """What is to move. Also called while it is away, so look at tensors here and do not compute with them."""
        yield Claim(tensor=self.target.flat, name="flat", component="average")

    def aliases(self) -> Iterable[torch.Tensor]:
        """What else the target holds on that memory: guarded with it. What is not told is searched for, which takes time."""
        return self.target.views


def main() -> None:
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.Linear(512, 10)).to(device)
    average = WeightAverage(model)
    before = average.flat.clone()

    with offloaded(model, WeightAverageStrategy(average)) as off:
        print(off.report)
        try:
            average.update(model)
        except OffloadedTensorError as error:
            print(f"touched while offloaded: {error}")

    print(f"same values: {torch.equal(average.flat, before)}")
    with torch.no_grad():
        model[0].weight.add_(1)
    average.update(model)
    print(f"moved by the next update: {(average.flat - before).max():.2f}")

    with offloaded(model, WeightAverageStrategy(average), components="average") as off:
        print(off.report.line())
        print(f"the model stayed and works: {tuple(model(torch.zeros(1, 256, device=device)).shape)}")


if __name__ == "__main__":
    main()
