"""Caches that libraries keep on the device and build again when they need them: they may simply be dropped.

Nothing is imported: what is not in `sys.modules` has no cache. Where a module has captured CUDA graphs, or is part of some,
nothing of it is dropped, since a replay reads what was there.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

_LIBRARIES = ("megatron.core", "transformer_engine.pytorch.module.base")
_PACKAGES = ("megatron.", "transformer_engine.")
# Of Megatron-core's MoE token dispatchers and of what communicates for them: the tensors of the last forward (0.16.1).
_OF_DISPATCHERS = (
    "probs",
    "routing_map",
    "local_map",
    "local_probs",
    "global_local_map",
    "token_probs",
    "token_indices",
    "dispatched_indices",
    "dispatched_probs",
    "reversed_local_input_permutation_mapping",
    "reversed_mapping_for_combine",
    "num_global_tokens_per_local_expert",
)


def of_module(module: torch.nn.Module) -> Iterator[Callable[[], object]]:
    """What drops the caches of a module's libraries; nothing if something captured may need them.

    TransformerEngine's fp8 copies of weights (`_fp8_workspaces`) and dummy weight gradients, Megatron-core's global memory
    buffer, rotary tables in an `lru_cache`, and what MoE token dispatchers keep of the last forward.
    """
    if not any(name in sys.modules for name in _LIBRARIES):
        return
    parts = list(torch.nn.Module.modules(module))
    classes = {base for part in parts for base in type(part).__mro__ if base.__module__.startswith(_PACKAGES)}
    if not classes or any(map(is_captured, parts)):
        return
    for part in parts:
        workspaces: Any = part.__dict__.get("_fp8_workspaces")
        if workspaces and _is_of("transformer_engine.", part):
            yield workspaces.clear
        dispatcher = part.__dict__.get("token_dispatcher")
        for owner in (dispatcher, getattr(dispatcher, "_comm_manager", None)):
            if _is_of("megatron.", owner):
                yield functools.partial(_forget, owner)
    record = getattr(sys.modules.get("megatron.core.transformer.cuda_graphs"), "_CudagraphGlobalRecord", None)
    if getattr(record, "cudagraph_created", False):  # of some model in the process, and what follows belongs to all
        return
    yield from (member.cache_clear for kind in classes for member in vars(kind).values() if hasattr(member, "cache_clear"))
    gradients = getattr(sys.modules.get("transformer_engine.pytorch.module.base"), "_dummy_wgrads", None)
    buffer = getattr(sys.modules.get("megatron.core.parallel_state"), "_GLOBAL_MEMORY_BUFFER", None)
    yield from (cache.clear for cache in (gradients, getattr(buffer, "buffer", None)) if cache)


def is_captured(part: torch.nn.Module) -> bool:
    """Whether CUDA graphs of this module are known to exist: Megatron-core's, TransformerEngine's or torch's own."""
    found = vars(part)
    replaced = getattr(found.get("forward"), "__qualname__", "")
    return "cudagraph_manager" in found or bool(found.get("cuda_graphs")) or "make_graphed" in replaced


def _is_of(package: str, thing: object) -> bool:
    """Whether a thing's class derives from one of this package."""
    return any(base.__module__.startswith(package) for base in type(thing).__mro__)


def _forget(owner: Any) -> None:
    for name in _OF_DISPATCHERS:
        if isinstance(vars(owner).get(name), torch.Tensor):
            setattr(owner, name, None)
