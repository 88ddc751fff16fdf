"""Call every method of Megatron-core's wrapper, its buffers, buckets and bucket groups while something is offloaded, and say
what came of each.

    python tests/mcore_matrix.py DEVICE > outcomes.json

Each row ends in ``refused`` (an error that names a tensor and the call that brings it back) or ``right`` (what a twin that was
never offloaded gives), or in a sentence that says what was wrong. Afterwards the wrapper trains on as its twin does, or the
outcome says so.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import sys
import warnings
from typing import Any
from unittest import mock

import mcore
import torch

from torch_offload import Offloader

WRAPPER = {
    "forward": "m(x)",
    "state_dict": "m.state_dict()",
    "state_dict_for_save_checkpoint": None,  # the wrapped module's own
    "load_state_dict": "m.load_state_dict(saved)",
    "no_sync": "with m.no_sync(): m(x).sum().backward()",
    "start_param_sync": "m.start_param_sync(force_sync=True)",
    "start_grad_sync": "m.start_grad_sync()",
    "finish_grad_sync": "m.finish_grad_sync()",
    "scale_gradients": "m.scale_gradients(2.0)",
    "zero_grad_buffer": "m.zero_grad_buffer()",
    "broadcast_params": "m.broadcast_params()",
    "offload_grad_buffers": "m.offload_grad_buffers(); m.restore_grad_buffers()",
    "restore_grad_buffers": "m.restore_grad_buffers()",
    "enable_forward_pre_hook": "m.enable_forward_pre_hook()",
    "disable_forward_pre_hook": "m.disable_forward_pre_hook()",
    "set_is_first_microbatch": "m.set_is_first_microbatch()",
    "set_symmetric_ar": "m.set_symmetric_ar()",
    "sharded_state_dict": "m.sharded_state_dict()",
}
BUFFER = {
    "scale_gradients": "b.scale_gradients(2.0)",
    "reset": "b.reset()",
    "offload_to_cpu": "b.offload_to_cpu(move_params=False); b.reload_from_cpu(move_params=False)",
    "reload_from_cpu": "b.reload_from_cpu()",
}
GROUP = {
    "reset": "g.reset()",
    "check_grads": "g.check_grads(True, False)",
    "start_param_sync": "g.start_param_sync()",
    "finish_param_sync": "g.finish_param_sync()",
    "start_grad_sync": "g.start_grad_sync()",
    "finish_grad_sync": "g.finish_grad_sync()",
    "register_grad_ready": "g.register_grad_ready(p)",
}
OTHERS = [
    "m(x).sum().backward()",
    "p.main_grad.add_(1)",
    "p.main_grad.norm()",
    "p.main_grad.cpu()",
    "step(p, o)",
    "torch.nn.utils.clip_grad_norm_([p], 1.0)",
    "b.grad_data.zero_()",
    "b.grad_data.cpu()",
    "b.param_data.sum()",
    "k.grad_data.mul_(0.5)",
    "k.param_data.copy_(torch.ones_like(k.param_data))",
    "k.grad_data.view(-1)[:4]",
    "b.grad_data.storage().size()",
    "torch.distributed.all_reduce(k.grad_data)",
    "torch.distributed.all_reduce(k.grad_data, async_op=True).wait()",
    "torch.distributed.broadcast(p.data, 0)",
    "torch.distributed.reduce_scatter_tensor(shard, k.grad_data)",
    "torch.distributed.all_gather_into_tensor(k.param_data, shard)",
    "shard.add_(1)",
]
ROWS = [row for table in (WRAPPER, BUFFER, GROUP) for row in table.values() if row] + OTHERS
CONFIGS = ["plain", "distributed optimizer", "overlapping"]
AWAY = {"all": None, "grads": ["grads"], "params": ["params", "buffers"]}
KNOWN_LIMITS = {("params", "torch.distributed.all_gather_into_tensor(k.param_data, shard)")}  # it asks only its input


def methods(kind: type) -> set[str]:
    """The public methods that Megatron-core defines."""
    return {
        name
        for cls in kind.__mro__
        if cls.__module__.startswith("megatron")
        for name, member in vars(cls).items()
        if inspect.isfunction(member) and not name.startswith("_")
    }


def world(device: str, config: str) -> dict[str, Any]:
    """The names that rows use, after two steps of training. The same at every call."""
    m = mcore.chunk(device, **mcore.CONFIGS[config])
    o = mcore.optimizer_of(m)
    for step in range(2):
        mcore.train(m, o, step)
    b, g = m.buffers[0], m.bucket_groups[0]
    k = g.buckets[0]
    names = {"torch": torch, "m": m, "o": o, "b": b, "g": g, "k": k, "p": k.params_list[0]}
    names["saved"] = {name: torch.ones_like(tensor) for name, tensor in m.state_dict().items()}
    names["shard"] = next((each[0] for each in g.cached_grad_buffer_shard_list if each), k.grad_data[:])
    return names | {"step": step_with_main_grad, "x": torch.ones(2, mcore.WIDTH, device=device)}


def step_with_main_grad(parameter: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
    parameter.grad = parameter.main_grad
    try:
        optimizer.step()
    finally:
        parameter.grad = None


def perform(row: str, names: dict[str, Any]) -> Any:
    """The value of an expression, None for a statement; or the error."""
    try:
        try:
            return eval(row, names)
        except SyntaxError:
            return exec(row, names)
    except Exception as error:
        return error


def comparable(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().tolist()
    if isinstance(value, dict):
        return {key: comparable(item) for key, item in value.items()}
    return value if isinstance(value, (int, float)) else type(value).__name__


def outcome(row: str, config: str, components: list[str] | None, device: str) -> str:
    names, twin = world(device, config), world(device, config)
    off = Offloader(names["m"], device=device, name="actor")
    off.offload(components)
    value = perform(row, names)
    refused = isinstance(value, Exception) and "offloaded" in str(value)
    if refused and not ("'actor." in str(value) and "reload" in str(value)):
        return f"does not say what and how: {value}"
    seen = comparable(value)
    off.close()
    wanted = seen if refused else comparable(perform(row, twin))
    if seen != wanted:
        return f"gave {seen!r:.300} ({value!r:.300}) and not {wanted!r:.300}"
    return differs(names, twin) or ("refused" if refused else "right")


def bookkeeping(group: Any) -> list[Any]:
    """What a bucket group remembers of what was started."""
    counts = [list(each.values()) for each in (group.per_param_grad_ready_counts, group.golden_per_param_grad_ready_counts)]
    return [group.is_first_batch, group.is_last_microbatch, group.param_gather_dispatched, *counts]


def differs(names: dict[str, Any], twin: dict[str, Any]) -> str:
    """What is different between the two from now on; nothing if all is well."""
    for each in (names, twin):
        for group in [*each["m"].bucket_groups, *each["m"].expert_parallel_bucket_groups]:
            group.grad_reduce_handle = None  # rows may have left one
        if torch.distributed.distributed_c10d._world.pg_coalesce_state:
            return "left a group coalescing: later collectives are swallowed"
    marks = [[bookkeeping(group) for group in each["m"].bucket_groups] for each in (names, twin)]
    if marks[0] != marks[1]:
        return f"left other marks behind: {marks[0]} and not {marks[1]}"
    for step in range(2, 4):
        losses = [perform(f"train(m, o, {step})", each | {"train": mcore.train}) for each in (names, twin)]
        if comparable(losses[0]) != comparable(losses[1]):
            return f"trains on differently: {losses[0]!r:.300} and not {losses[1]!r:.300}"
    states = [mcore.state_of(each["m"], each["o"]) for each in (names, twin)]
    return "" if all(map(torch.equal, *states)) else "has another state after training on"


def main(device: str) -> None:
    outcomes = {}
    without_gpu = mock.patch.object(torch.cuda, "synchronize") if device == "cpu" else contextlib.nullcontext()
    with mcore.ranks(), without_gpu:
        for config in CONFIGS:
            for what, components in AWAY.items():
                for row in ROWS:
                    if (what, row) in KNOWN_LIMITS:
                        continue
                    print(config, what, row, file=sys.stderr, flush=True)
                    outcomes[f"{row} | {config} | {what} away"] = outcome(row, config, components, device)
    json.dump(outcomes, sys.stdout)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(sys.argv[1])
