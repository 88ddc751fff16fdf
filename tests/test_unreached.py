"""What nobody claimed is named with its holders, and what nobody uses goes back to the operating system."""

from __future__ import annotations

import gc
from unittest import mock

import pytest
import torch
from fresh import output_of
from torch import nn

from torch_offload import Offloader

CACHE: dict[str, list[torch.Tensor]] = {}


class Trainer:
    def __init__(self, device: str) -> None:
        self.cache = {"logits": [torch.ones(3, 1000, device=device)]}


def test_the_largest_are_named_with_their_holders(device: str) -> None:
    model = nn.Linear(4, 4, device=device)
    off = Offloader(model, device=device)
    off.offload()
    trainer = Trainer(device)
    CACHE["kept"] = [torch.ones(2000, device=device)]
    local = torch.ones(1500, device=device)
    closed = torch.ones(1400, device=device)

    def closure() -> torch.Tensor:
        return closed

    outside = nn.Linear(1, 1200, bias=False, device=device)
    found = off.explain(most=1000)
    text = str(found)
    for nbytes, what, holder in (
        (12000, "Tensor of shape (3, 1000), torch.float32", "Trainer.cache['logits'][0]"),
        (8000, "Tensor of shape (2000,)", f"{__name__}.CACHE['kept'][0]"),
        (6000, "Tensor of shape (1500,)", "the local 'local' of test_the_largest_are_named_with_their_holders()"),
        (4800, "Parameter of shape (1200, 1)", "Linear._parameters['weight']"),
    ):
        (row,) = [each for each in found.largest if each.nbytes == nbytes and any(what in one for one in each.tensors)]
        assert any(holder in one for one in row.holders), row.holders
        assert holder in text
    assert found.seen_nbytes >= 12000 + 8000 + 6000 + 5600 + 4800
    assert not any("(4, 4)" in one for row in found.largest for one in row.tensors)  # claimed
    assert (found.nbytes is None) == (device == "cpu")
    del closure, outside, local, trainer
    CACHE.clear()
    assert len(off.explain(most=3).largest) == 3
    off.close()


class Unbound(dict):
    def items(self):
        raise RuntimeError("not bound")

    __iter__ = keys = values = __contains__ = items


class UnboundList(list):
    def __iter__(self):
        raise RuntimeError("not bound")


class Strange:
    __slots__ = ("rows",)

    def __getattr__(self, name: str) -> None:
        raise RuntimeError(f"no {name} yet")


def test_no_method_of_a_holder_is_called(device: str) -> None:
    off = Offloader(nn.Linear(2, 2, device=device), device=device)
    holders = [Unbound(), UnboundList(), mock.Mock(spec=dict), Strange()]
    holders[2].rows = holders[3].rows = torch.ones(90_000, device=device)
    dict.__setitem__(holders[0], "rows", torch.ones(70_000, device=device))
    list.append(holders[1], torch.ones(80_000, device=device))
    named = {row.nbytes: row.holders for row in off.explain().largest}
    assert any("['rows']" in each for each in named[280_000])
    assert any("[0]" in each for each in named[320_000])
    assert 360_000 in named
    with pytest.raises(ValueError, match="most=-1 is how many"):
        off.explain(most=-1)


def test_looking_leaves_nothing_behind(device: str) -> None:
    model = nn.Linear(4, 4, device=device)
    off = Offloader(model, device=device)
    off.explain()
    gc.collect()
    before = len(gc.get_objects())
    for _ in range(3):
        str(off.explain())
    gc.collect()
    assert len(gc.get_objects()) - before < 50


def test_memory_that_nobody_uses_is_returned() -> None:
    """Small pieces between which others stay, as a checkpoint writer leaves them."""
    fell, kept = map(int, output_of("""
import torch_offload
pieces = [bytearray(b"x") * 100_000 for _ in range(2000)]
kept = pieces[49::50]
del pieces
print(torch_offload.trim_host_memory(), sum(map(len, kept)))
""").split())  # fmt: skip
    assert kept == 4_000_000
    assert 150_000_000 < fell < 250_000_000


@pytest.mark.gpu
def test_torchs_pinned_cache_is_returned_too() -> None:
    fell = int(output_of("""
import torch, torch_offload
host = torch.empty(2**28, dtype=torch.uint8, pin_memory=True).fill_(1)
del host
print(torch_offload.trim_host_memory())
"""))  # fmt: skip
    assert fell >= 0.9 * 2**28
