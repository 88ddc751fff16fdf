"""verl's loop around a rollout, with one import changed.

In verl itself the import stands in verl/workers/engine/megatron/transformer_impl.py and its like:

    python3 -m pip install -c constraints.txt -e '.[megatron]'
    python3 examples/verl_drop_in.py
"""

from __future__ import annotations

import torch
from megatron_flat_buffers import VOCABULARY, Policy, ranks, train_step, wrap

# was: from verl.utils.megatron_utils import (
from torch_offload.compat.verl import (
    copy_megatron_model_to_cpu,
    load_megatron_model_to_gpu,
    offload_megatron_model_to_cpu,
    restore_megatron_model_from_cpu,
)


def main() -> None:
    with ranks() as device:
        torch.manual_seed(0)
        actor = [wrap(Policy(), device)]
        optimizer = torch.optim.AdamW(actor[0].params_with_grad, lr=1e-2)
        start = copy_megatron_model_to_cpu(actor)
        for step in range(5):
            offload_megatron_model_to_cpu(actor)
            starts = torch.randint(VOCABULARY, (16, 1), device=device)  # the rollout engine has the device here
            load_megatron_model_to_gpu(actor, load_grad=True)
            loss = train_step(actor[0], optimizer, (starts + torch.arange(8, device=device)) % VOCABULARY)
            offload_megatron_model_to_cpu(actor)
            exported = {name: tensor.cpu() for name, tensor in actor[0].module.state_dict().items()}  # from host memory
            print(f"step {step}: loss {loss:.4f}, {len(exported)} tensors exported while offloaded")
        restore_megatron_model_from_cpu(actor, start)  # into host memory, since that is where the model is
        load_megatron_model_to_gpu(actor, load_grad=False)
        print(f"back at the start: {bool(actor[0].module.layers[0].weight.cpu().ne(exported['layers.0.weight']).any())}")


if __name__ == "__main__":
    main()
