"""The trainer over several data-parallel ranks: each puts away and brings back its own, and all train as if nothing had moved.

    python3 -m pip install -c constraints.txt -e '.[megatron]'
    torchrun --nproc-per-node 2 examples/multi_rank.py

Two runs with the same seeds: one with everything in host memory between phases, one that never offloads. Gloo on the CPU, NCCL
with a GPU for each rank.
"""

from __future__ import annotations

import torch
from megatron_flat_buffers import ranks
from trainer import build, run


def train(device: torch.device, *, offload: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The losses of this rank's steps, and the parameters that all ranks then have."""
    trainer = build(device)
    if offload:
        trainer.everything.offload()  # else phases find everything resident, and nothing ever moves
    torch.manual_seed(torch.distributed.get_rank())  # each rank its own data
    losses, _ = run(trainer, device, steps=10)
    trainer.everything.reload()
    return torch.tensor(losses, device=device), trainer.actor.buffers[0].param_data


def main() -> None:
    with ranks() as device:
        rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        moving, staying = train(device, offload=True), train(device, offload=False)
        if not all(map(torch.equal, moving, staying)):
            raise SystemExit(f"rank {rank} trains on differently: losses {moving[0].tolist()} and not {staying[0].tolist()}")
        of_all = [torch.empty_like(moving[1]) for _ in range(size)]
        torch.distributed.all_gather(of_all, moving[1])
        if not all(torch.equal(each, moving[1]) for each in of_all):
            raise SystemExit(f"rank {rank} has other parameters than another rank")
        if rank == 0:
            print(f"{size} ranks: losses and parameters are identical with and without offloading, and on all ranks")


if __name__ == "__main__":
    main()
