"""The whole idea in one block: a model and its optimizer leave the device, and training goes on afterwards.

python examples/minimal.py
"""

import torch

from torch_offload import offloaded

device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
model = torch.nn.Linear(1024, 1024, device=device)
optimizer = torch.optim.AdamW(model.parameters())
inputs = torch.randn(8, 1024, device=device)


def train_step() -> float:
    loss = model(inputs).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()


print(f"loss before: {train_step():.4f}")
with offloaded(model, optimizer) as off:  # parameters, gradients and optimizer state
    print(off.report)  # the device is free for something else here
optimizer.zero_grad()
print(f"loss after:  {train_step():.4f}")
