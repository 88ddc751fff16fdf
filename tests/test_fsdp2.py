"""FSDP2Strategy, on one rank here and on several in processes of their own."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import fsdp2
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
    from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, fully_shard
from fsdp2 import CONFIGS, accumulate, locals_of, optimizer_of, sharded, state_of, train
from test_targets import check_contract

from torch_offload import (
    FSDP2Strategy,
    GradientsError,
    OffloadedTensorError,
    Offloader,
    PerParameterStrategy,
    UnsupportedTargetError,
    offloaded,
    strategy_for,
)
from torch_offload.testing import is_away

pytestmark = [pytest.mark.xdist_group("fsdp2"), pytest.mark.filterwarnings("ignore::FutureWarning:torch.distributed")]


@pytest.fixture
def _rank(device: str) -> Iterator[None]:
    with fsdp2.ranks(device, store=torch.distributed.HashStore(), rank=0, world_size=1):
        yield


@pytest.mark.ranks(2, 4)
def test_every_rank_trains_on_as_if_nothing_had_moved(device: str, ranks: int) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), fsdp2.__file__, device]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    environment |= {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("as if nothing had moved") == ranks


@pytest.mark.usefixtures("_rank")
@pytest.mark.parametrize("config", CONFIGS)
def test_one_rank_trains_on_as_if_nothing_had_moved(device: str, config: str) -> None:
    fsdp2.check(device, config)


@pytest.mark.usefixtures("_rank")
def test_the_contract(device: str) -> None:
    net = sharded(device, "unsharded after forward")
    accumulate(net, 0)
    net.reshard()
    check_contract(FSDP2Strategy(net), device)


@pytest.mark.usefixtures("_rank")
@pytest.mark.parametrize("config", CONFIGS)
def test_gradients_that_wait_for_their_reduction_are_kept(device: str, config: str) -> None:
    (net, optimizer), (twin, its) = [(each, optimizer_of(each)) for each in (sharded(device, config) for _ in range(2))]
    off = Offloader(net, optimizer, device=device)
    for step in range(2):
        for last, number in ((False, 0), (False, 1), (True, 2)):
            for each in (net, twin):
                each.set_requires_gradient_sync(last)
                accumulate(each, 3 * step + number)
            report = off.offload()
            assert not report.left
            if not last:
                waiting = unreduced(net)
                assert waiting
                assert all(map(is_away, waiting))
            off.reload()
        for each in (optimizer, its):
            each.step()
            each.zero_grad()
    assert all(map(torch.equal, state_of(net, optimizer), state_of(twin, its)))
    off.close()


def unreduced(net: nn.Module) -> list[torch.Tensor]:
    """Gradients that no parameter of the module shows: found among FSDP2's records of parameters, on the heap."""
    records = [each for each in gc.get_objects() if type(each).__name__ == "FSDPParam"]
    mine = [each for each in records if each._module_info.module in set(net.modules())]
    found = [getattr(each, "_unsharded_param", each.sharded_param).grad for each in mine]
    found += [each.unsharded_accumulated_grad for each in mine]
    return [each for each in found if each is not None]


@pytest.mark.usefixtures("_rank")
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("away", [["grads"], ["params"], None])
def test_a_refused_call_leaves_everything_as_it_was(device: str, config: str, away: list[str] | None) -> None:
    (net, optimizer), (twin, its) = [(each, optimizer_of(each)) for each in (sharded(device, config) for _ in range(2))]
    for each in (net, twin):
        accumulate(each, 0)
    off = Offloader(net, optimizer, device=device, name="actor")
    for _ in range(2):
        off.offload(away)
        with pytest.raises(OffloadedTensorError, match=r"'actor\."):
            accumulate(net, 1)
        off.reload()
        assert accumulate(net, 2) == accumulate(twin, 2)
    assert train(net, optimizer, 3) == train(twin, its, 3)
    assert all(map(torch.equal, state_of(net, optimizer), state_of(twin, its)))
    off.close()


@pytest.mark.usefixtures("_rank")
def test_policies_for_gradients(device: str) -> None:
    net = sharded(device, "plain")
    accumulate(net, 0)
    with pytest.raises(GradientsError, match=r"gradients in 'FSDPNet\.\S+\.grad'"):
        Offloader(net, grads="refuse", device=device).offload()
    with offloaded(net, grads="discard", device=device) as off:
        assert off.report.copied_nbytes < off.report.nbytes
    assert not any(bool(each.any()) for each in locals_of(p.grad for p in net.parameters() if p.grad is not None))


@pytest.mark.usefixtures("_rank")
def test_state_dicts_of_what_is_away(device: str) -> None:
    net = sharded(device, "plain")
    optimizer = optimizer_of(net)
    train(net, optimizer, 0)
    wanted = [each.cpu().clone() for each in locals_of(get_model_state_dict(net).values())]
    state = get_optimizer_state_dict(net, optimizer)["state"]
    moments = [each.cpu().clone() for each in locals_of(value for one in state.values() for value in one.values())]
    with offloaded(net, optimizer, device=device):
        found = {name: each.detach() for name, each in get_model_state_dict(net).items()}
        assert all(map(torch.equal, locals_of(each.cpu() for each in found.values()), wanted))
        fresh = [each.to(device, copy=True) for each in found.values()]  # as trainers stream weights to the rollout engine
        assert all(torch.equal(one.cpu(), two) for one, two in zip(locals_of(fresh), wanted, strict=True))
        assert not any(map(is_away, fresh))
        state = get_optimizer_state_dict(net, optimizer)["state"]
        again = locals_of(value.cpu() for one in state.values() for value in one.values())
        assert all(map(torch.equal, again, moments))


@pytest.mark.usefixtures("_rank")
def test_what_is_under_a_cpu_offload_policy_is_refused() -> None:
    net = fully_shard(nn.Linear(4, 4), mesh=torch.distributed.init_device_mesh("cpu", (1,)), offload_policy=CPUOffloadPolicy(
        pin_memory=False))  # fmt: skip
    with pytest.raises(UnsupportedTargetError, match=r"FSDPLinear\.weight is under a CPUOffloadPolicy.*without offload_policy"):
        Offloader(net, device="cpu")


@pytest.mark.usefixtures("_rank")
def test_which_strategy_takes_what(device: str) -> None:
    net = sharded(device, "plain")
    around = nn.Sequential(net, nn.Linear(fsdp2.WIDTH, 6, device=device))
    assert [type(strategy_for(each)) for each in (net, around, net.blocks[0])] == [FSDP2Strategy] * 3
    with offloaded(around, device=device) as off:
        assert not off.report.left
        assert all(map(is_away, around.parameters()))
    for wrong in (nn.Linear(2, 2), "actor", None):
        with pytest.raises(UnsupportedTargetError, match="takes a module to which fully_shard was applied"):
            FSDP2Strategy(wrong)
    for wrong in (net, around):
        with pytest.raises(UnsupportedTargetError, match=r"fully_shard was applied.*FSDP2Strategy"):
            PerParameterStrategy(wrong)


def test_other_wrappers_are_refused_with_a_reason() -> None:
    with fsdp2.ranks("cpu", store=torch.distributed.HashStore(), rank=0, world_size=1), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrappers = [
            nn.parallel.DistributedDataParallel(nn.Linear(2, 2)),
            FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu")),
        ]
    for made in wrappers:
        with pytest.raises(UnsupportedTargetError, match=rf"{type(made).__name__} at 'its root'.*Nothing was touched"):
            Offloader(made, device="cpu")


class Failure(Exception):
    pass


def fail(*_: object) -> None:
    raise Failure


@pytest.mark.usefixtures("_rank")
@pytest.mark.parametrize("config", CONFIGS)
def test_after_a_forward_that_failed_all_of_it_goes(device: str, config: str) -> None:
    (net, optimizer), (twin, its) = [(each, optimizer_of(each)) for each in (sharded(device, config) for _ in range(2))]
    for each in (net, twin):
        train(each, optimizer if each is net else its, 0)
        hook = each.narrow.register_forward_hook(fail)
        with pytest.raises(Failure):
            each(torch.ones(1, fsdp2.WIDTH, device=device))
        hook.remove()
    off = Offloader(net, optimizer, device=device)
    assert not off.offload().left
    assert all(map(is_away, net.parameters()))
    with torch.no_grad(), pytest.raises(OffloadedTensorError, match="unshard"):
        net(torch.ones(1, fsdp2.WIDTH, device=device))
    off.reload()
    for step in range(1, 3):
        assert train(net, optimizer, step) == train(twin, its, step)
    off.close()


@pytest.mark.usefixtures("_rank")
def test_a_pending_unshard_does_not_outlive_the_offload(device: str) -> None:
    net = sharded(device, "plain")
    handle = net.unshard(async_op=True)
    off = Offloader(net, device=device)
    off.offload()
    net.load_state_dict({name: torch.zeros_like(each) for name, each in sharded(device, "plain").state_dict().items()})
    with torch.no_grad(), pytest.raises(OffloadedTensorError, match="unshard"):
        net(torch.ones(1, fsdp2.WIDTH, device=device))
    off.reload()
    handle.wait()
    with torch.no_grad():
        out = net(torch.ones(1, fsdp2.WIDTH, device=device))
    assert torch.equal(out, net.shift.expand_as(out))
    off.close()


@pytest.mark.usefixtures("_rank")
def test_modules_that_are_sharded_together(device: str) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))).to(device)
    mesh = torch.distributed.init_device_mesh(device, (1,))
    fully_shard([net[0], net[1]], mesh=mesh)
    fully_shard(net, mesh=mesh)
    net(torch.ones(1, 4, device=device)).sum().backward()
    net.reshard()
    check_contract(FSDP2Strategy(net), device)
    assert not any("register_root" in key for part in net.modules() if hasattr(part, "_get_fsdp_state")
                   for key in vars(part._get_fsdp_state()))  # fmt: skip


@pytest.mark.usefixtures("_rank")
def test_gradients_that_wait_for_the_reduction_among_replicas(device: str) -> None:
    mesh = torch.distributed.init_device_mesh(device, (1, 1), mesh_dim_names=("replicas", "shards"))
    nets = []
    for _ in range(2):
        torch.manual_seed(0)
        nets.append(fully_shard(nn.Linear(8, 8).to(device), mesh=mesh))
        nets[-1].set_requires_all_reduce(False)
        nets[-1](torch.ones(1, 8, device=device)).sum().backward()
    net, twin = nets
    with pytest.raises(GradientsError, match="_partial_reduce_output"):
        Offloader(net, grads="refuse", device=device).offload()
    off = Offloader(net, device=device)
    assert off.offload().nbytes == 2 * (8 * 8 + 8) * 4
    assert not off.report.left
    with pytest.raises(OffloadedTensorError, match=r"unshard|backward"):
        net(torch.ones(1, 8, device=device)).sum().backward()
    off.reload()
    for each in nets:
        each.set_requires_all_reduce(True)
        each(torch.ones(1, 8, device=device)).sum().backward()
    assert all(map(torch.equal, locals_of(p.grad for p in net.parameters()), locals_of(p.grad for p in twin.parameters())))
    off.close()


@pytest.mark.usefixtures("_rank")
@pytest.mark.parametrize("config", CONFIGS)
def test_a_backward_onto_unreduced_gradients_that_are_away_is_refused_before_it_begins(device: str, config: str) -> None:
    net, twin = sharded(device, config), sharded(device, config)
    for each in (net, twin):
        each.set_requires_gradient_sync(False)
        accumulate(each, 0)
    off = Offloader(net, device=device)
    off.offload(["grads"])
    with pytest.raises(OffloadedTensorError, match=r"backward\(\)"):
        accumulate(net, 1)
    off.reload()
    for each in (net, twin):
        each.set_requires_gradient_sync(True)
        accumulate(each, 2)
    grads = [locals_of(p.grad for p in each.parameters() if p.grad is not None) for each in (net, twin)]
    assert grads[0]
    assert all(map(torch.equal, *grads))
    off.close()


@pytest.mark.usefixtures("_rank")
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("part", ["all", "a block"])
@pytest.mark.parametrize("away", [["params"], ["grads"], None])
def test_a_backward_of_an_older_graph_is_refused_before_it_begins(
    device: str, config: str, part: str, away: list[str] | None
) -> None:
    (net, optimizer), (twin, its) = [(each, optimizer_of(each)) for each in (sharded(device, config) for _ in range(2))]
    for each in (net, twin):
        train(each, optimizer if each is net else its, 0)
        if away == ["grads"]:
            accumulate(each, 1)
    loss = net(torch.ones(2, fsdp2.WIDTH, device=device)).float().sum()
    off = Offloader(net if part == "all" else net.blocks[0], device=device)
    off.offload(away)
    with pytest.raises(OffloadedTensorError, match=r"backward\(\) needs"):
        loss.backward()
    off.reload()
    del loss
    for step in range(2, 5):
        assert train(net, optimizer, step) == train(twin, its, step)
    assert all(map(torch.equal, state_of(net, optimizer), state_of(twin, its)))
    off.close()
