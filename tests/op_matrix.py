"""Run operations on an offloaded module, each in a forked process of its own, and say what came of each.

    python tests/op_matrix.py DEVICE < rows.json > outcomes.json

A row ends in one of: ``refused`` (an error that carries a tensor's name and the call that brings it back), ``right`` (the
value, and the module after the reload, are what a twin that was never offloaded gives), ``crash`` (a signal), or ``wrong`` with
what was seen.
"""

from __future__ import annotations

import copy
import io
import json
import multiprocessing
import os
import pickle
import sys
import tempfile
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.nn import utils as U  # noqa: N812

try:
    import numpy as np
except ImportError:
    np = None

from torch_offload import Offloader

WIDTH = 256
SHARES = 4  # processes beside each other on a GPU: after each crash one starts anew, which takes seconds


class Everything(nn.Module):
    """One of each of the layers that trainers are made of."""

    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(WIDTH, WIDTH)
        self.b = nn.BatchNorm1d(WIDTH)
        self.e = nn.Embedding(WIDTH, WIDTH)
        self.n = nn.LayerNorm(WIDTH)
        self.r = nn.LSTM(WIDTH, WIDTH)
        self.a = nn.MultiheadAttention(WIDTH, 4)
        self.c = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.register_buffer("cache", torch.randn(WIDTH, WIDTH), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.n(self.b(self.l(x)) + self.e(torch.arange(x.shape[0], device=x.device)))
        x = self.a(*[self.r(x[:, None])[0]] * 3)[0]
        return self.c(x.permute(1, 2, 0)).permute(2, 0, 1).flatten(1) @ self.cache


def world(device: str) -> dict[str, Any]:
    """The names that rows use. The same at every call."""
    torch.manual_seed(0)
    with torch.device(device):
        m = Everything()
        x = torch.randn(8, WIDTH)
    o = torch.optim.AdamW(m.parameters())
    ema = torch.optim.swa_utils.AveragedModel(m)
    m(x).sum().backward()
    o.step()
    names = {"m": m, "o": o, "x": x, "w": m.l.weight, "st": o.state[m.l.weight], "ema": ema}
    names |= {"sd": copy.deepcopy(m.state_dict()), "osd": copy.deepcopy(o.state_dict())}
    return names | {
        "torch": torch, "nn": nn, "F": F, "U": U, "np": np, "io": io, "copy": copy, "pickle": pickle, "wrap": Before(m),
        "thread": thread, "all_reduce": all_reduce,
    }  # fmt: skip


def thread(call: Callable[[], Any]) -> Any:
    """The value of a call in another thread, or its error."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


def all_reduce(tensor: torch.Tensor) -> None:
    """A collective over one gloo rank."""
    with tempfile.NamedTemporaryFile() as file:
        torch.distributed.init_process_group("gloo", init_method=f"file://{file.name}", rank=0, world_size=1)
        torch.distributed.all_reduce(tensor)


class Before:
    """What existed of the module before the offload: graphs over it, and traced, scripted and compiled copies."""

    def __init__(self, m: Everything) -> None:
        self.m = m

    def prepare(self, x: torch.Tensor) -> None:
        w = self.m.l.weight
        self.linear = self.m.l(x.detach().requires_grad_()).sum()
        self.leaf = F.layer_norm(x, (WIDTH,), self.m.n.weight, self.m.n.bias).sum()
        self.product = (w * w).sum()
        self.scaled = (w * 2).sum()
        self.resident = torch.ones_like(w, requires_grad=True) * 2
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            self.unpacked = (torch.ones_like(w, requires_grad=True) * w).sum()
        self.traced = torch.jit.trace(self.m.l, x)
        self.traced_product = torch.jit.trace(lambda tensor: tensor * 2, x)
        self.scripted = torch.jit.script(self.m.l)
        self.compiled = torch.compile(self.m.l, backend="eager")
        self.compiled(x)


def snapshot(names: dict[str, Any]) -> list[Any]:
    """Everything that a row may change, as host tensors."""
    state = [value for st in names["o"].state.values() for value in st.values()]
    tensors = [*names["m"].parameters(), *(p.grad for p in names["m"].parameters()), *names["m"].buffers(), *state]
    return [observed(tensor) for tensor in tensors]


def observed(value: Any) -> Any:
    """A value in a form that can be compared: bytes are loaded, tensors are brought to the host."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, bytes):
        return observed(pickle.loads(value))
    if isinstance(value, nn.Module):
        return [observed(value.state_dict()), type(value).__name__]
    if isinstance(value, dict):
        return {str(key): observed(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [observed(item) for item in value]
    if np is not None and isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy())
    return value if isinstance(value, (int, float, bool, type(None), torch.Size)) else type(value).__name__


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


def perform(row: str, names: dict[str, Any]) -> Any:
    """The value of an expression; None for a statement."""
    try:
        return eval(row, names)
    except SyntaxError:
        return exec(row, names)


# What a resident tensor gives only once it is detached and on the host; a mirror is both.
DETACHED = {
    "w.numpy()": "w.detach().cpu().numpy()",
    "w.detach().numpy()": "w.detach().cpu().numpy()",
    "np.asarray(w)": "np.asarray(w.detach().cpu())",
    "np.array(w.grad)": "np.array(w.grad.cpu())",
}


def outcome(row: str, names: dict[str, Any], twin: dict[str, Any], device: str) -> tuple[str, str]:
    """What comes of one row."""
    for each in (names, twin) if "wrap." in row else ():
        each["wrap"].prepare(each["x"])
    before = snapshot(twin)
    off = Offloader(names["m"], names["o"], device=device, shared="free")
    claimed = [named.name for named in off._scope.plan().claims]
    off.offload()
    torch.manual_seed(1)
    try:
        seen = observed(perform(row, names))
    except BaseException as error:
        text = str(error)
        off.reload()
        if not same(snapshot(names), before):
            return "wrong", f"raised, and changed the module: {text}"
        if any(name in text for name in claimed) and "reload" in text:
            return "refused", text
        return "unnamed", f"{type(error).__name__}: {text}"
    off.close()
    if seen == "PyCapsule":
        return "hollow", "a capsule around no memory"
    torch.manual_seed(1)
    try:
        wanted = observed(perform(DETACHED.get(row, row), twin))
    except Exception as error:
        return "wrong", f"gave {seen!r:.200} where a resident module raises {error!r:.200}"
    if not same(seen, wanted):
        return "wrong", f"gave {seen!r:.200} and not {wanted!r:.200}"
    return ("right", "") if same(snapshot(names), snapshot(twin)) else ("wrong", "the module differs from its twin afterwards")


Worlds = tuple[dict[str, Any], dict[str, Any]]  # one that is offloaded, and its twin


def child(rows: list[str], device: str, sender: Any, worlds: Worlds | None) -> None:
    """Send the outcome of each row, with fresh worlds but for the first, until one of them kills the process."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(1, 2)
    warnings.simplefilter("ignore")
    for row in rows:
        found = outcome(row, *(worlds or (world(device), world(device))), device)
        worlds = None
        if "CUDA error" in found[1]:
            os._exit(99)  # the context is gone for good
        sender.send(found)


def outcomes(start: str, rows: list[str], device: str, worlds: Worlds | None = None) -> dict[str, tuple[str, str]]:
    """What came of the rows in one process, up to the row that killed it."""
    context = multiprocessing.get_context(start)
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=child, args=(rows, device, sender, worlds))
    process.start()
    sender.close()
    found: dict[str, tuple[str, str]] = {}
    for row in rows:
        try:
            found[row] = receiver.recv()
        except EOFError:
            process.join()
            return found | {row: ("crash", f"exit code {process.exitcode}")}
    process.join()
    return found


def forked(rows: list[str], device: str) -> dict[str, tuple[str, str]]:
    """Each row in a fork, which inherits the worlds. No GPU may be visible: a fork cannot use one."""
    worlds = world(device), world(device)
    return {row: found for each in rows for row, found in outcomes("fork", [each], device, worlds).items()}


def spawned(rows: list[str], device: str) -> dict[str, tuple[str, str]]:
    """The rows in a process that is replaced when one of them kills it."""
    found: dict[str, tuple[str, str]] = {}
    while rows[len(found) :]:
        found |= outcomes("spawn", rows[len(found) :], device)
    return found


def main(device: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rows = json.load(sys.stdin)
    if device == "cpu":
        found = forked(rows, device)
    else:
        with ThreadPoolExecutor(SHARES) as pool:
            shares = pool.map(spawned, [rows[share::SHARES] for share in range(SHARES)], [device] * SHARES)
            found = {row: outcome for share in shares for row, outcome in share.items()}
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1])
