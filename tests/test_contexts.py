"""Contexts and components: entry states, nesting, threads, decorators, prepared transitions."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from torch_offload import (
    DeviceMemoryError,
    OffloadedTensorError,
    Offloader,
    Residency,
    TransitionError,
    ledger,
    offloaded,
    reload,
    resident,
)
from torch_offload.testing import InjectedError, Portrait, Seam, failing, is_away


@pytest.fixture
def model(device: str) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).to(device)
    model(torch.randn(3, 4, device=device)).sum().backward()
    return model


def test_calls_are_idempotent_and_need_no_order(device: str, model: nn.Module) -> None:
    off = Offloader(model, device=device)
    assert off.reload().nbytes == 0  # a reload without an offload
    assert off.offload().nbytes > 0
    assert off.offload().nbytes == 0  # a second offload
    assert off.reload().nbytes > 0
    assert off.reload().nbytes == 0
    assert set(off.residency.values()) == {Residency.RESIDENT}


def test_components_go_and_come_in_any_order(device: str, model: nn.Module) -> None:
    off = Offloader(model, device=device)
    off.offload("params")
    off.offload(["grads", "buffers"])
    off.reload("grads")
    assert off.residency == {"params": Residency.OFFLOADED, "grads": Residency.RESIDENT, "buffers": Residency.OFFLOADED}
    assert is_away(model[0].weight)
    assert not is_away(model[0].weight.grad)
    off.reload("params")
    off.reload("buffers")
    assert not is_away(model[0].weight)


def test_a_weight_sync_inside_a_rollout(device: str, model: nn.Module) -> None:
    """Parameters and buffers come back alone; a stray backward raises and leaves the gradients as they were."""
    gradient = Portrait.of(model[0].weight.grad)
    with offloaded(model, device=device):
        with resident(model, components=["params", "buffers"], device=device) as off:
            assert off.residency["grads"] is Residency.OFFLOADED
            out = model(torch.randn(3, 4, device=device))
            with pytest.raises(OffloadedTensorError, match=r"accumulate into 'Sequential\.\d\.\w+\.grad'"):
                out.sum().backward()
            del out
        assert is_away(model[0].weight)
    gradient.check()
    model(torch.randn(3, 4, device=device)).sum().backward()
    assert not torch.equal(model[0].weight.grad.view(torch.uint8), gradient.content.view(4, 16).to(device))


def test_new_gradients_may_be_made_while_the_old_ones_are_dropped(device: str, model: nn.Module) -> None:
    off = Offloader(model, device=device)
    off.offload("grads")
    model.zero_grad()
    model(torch.randn(3, 4, device=device)).sum().backward()
    assert not is_away(model[0].weight.grad)
    off.reload()
    assert model[0].weight._backward_hooks is None


def test_the_exit_restores_what_the_entry_found(device: str, model: nn.Module) -> None:
    off = Offloader(model, device=device)
    off.offload("grads")
    with offloaded(model, device=device):
        assert is_away(model[0].weight)
    assert not is_away(model[0].weight)
    assert is_away(model[0].weight.grad)
    with resident(model, device=device):
        assert not is_away(model[0].weight.grad)
    assert is_away(model[0].weight.grad)
    off.reload()


def test_a_part_of_what_is_away_stays_away(device: str, model: nn.Module) -> None:
    with offloaded(model, device=device):
        with offloaded(model[0], device=device):
            assert is_away(model[0].weight)
        assert is_away(model[0].weight)
        with resident(model[0], device=device):
            assert not is_away(model[0].weight)
            assert is_away(model[1].weight)
        assert is_away(model[0].weight)
    assert not is_away(model[0].weight)
    with offloaded(model[0], device=device):
        with offloaded(model, device=device):
            assert is_away(model[1].weight)
        assert is_away(model[0].weight)
        assert not is_away(model[1].weight)
    assert not is_away(model[0].weight)


def test_what_the_body_did_is_undone_at_the_exit(device: str, model: nn.Module) -> None:
    off = Offloader(model, device=device)
    with off.offloaded():
        off.reload()
    assert not is_away(model[0].weight)
    with off.resident():
        off.offload()
    assert not is_away(model[0].weight)


def test_contexts_are_left_in_reverse_order(device: str, model: nn.Module) -> None:
    first, second = offloaded(model, device=device), offloaded(model, components="grads", device=device)
    first.__enter__()
    second.__enter__()
    with pytest.raises(TransitionError, match="reverse order"):
        first.__exit__(None, None, None)
    assert is_away(model[0].weight)
    second.__exit__(None, None, None)
    Offloader(model, device=device).reload()
    with offloaded(model, device=device):  # nothing of the wrong exit is left behind
        pass


def test_an_exception_elsewhere_does_not_end_somebody_elses_block(device: str, model: nn.Module) -> None:
    async def first() -> None:
        with offloaded(model, device=device):
            await asyncio.sleep(60)

    async def second() -> None:
        task = asyncio.create_task(first())
        await asyncio.sleep(0)
        with offloaded(model, device=device):
            task.cancel()
            with pytest.raises(TransitionError, match="reverse order") as caught:
                await task
            assert isinstance(caught.value.__context__, asyncio.CancelledError)
            assert is_away(model[0].weight)

    asyncio.run(second())
    Offloader(model, device=device).reload()


def batches(model: nn.Module, device: str) -> Iterator[int]:
    with offloaded(model, device=device):
        yield from range(3)


def test_a_generator_that_is_closed_does_not_end_the_block_of_its_consumer(device: str, model: nn.Module) -> None:
    source = batches(model, device)
    next(source)
    with offloaded(model, device=device):
        with pytest.raises(TransitionError, match="reverse order"):
            source.close()
        assert is_away(model[0].weight)
    Offloader(model, device=device).reload()


def test_an_exception_that_is_handed_on_ends_no_block_of_who_hands_it_on(device: str, model: nn.Module) -> None:
    source = batches(model, device)
    next(source)
    with offloaded(model, device=device):
        try:
            raise ValueError("bad batch")
        except ValueError as error:
            with pytest.raises(TransitionError, match="reverse order"):
                source.throw(error)
        assert is_away(model[0].weight)
    Offloader(model, device=device).reload()

    async def wait(future: asyncio.Future[None]) -> None:
        with offloaded(model, device=device):
            await future

    async def hand_on() -> None:
        future = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(wait(future))
        await asyncio.sleep(0)
        with offloaded(model, device=device):
            try:
                raise ValueError("bad batch")
            except ValueError as error:
                future.set_exception(error)
            with pytest.raises(TransitionError, match="reverse order"):
                await task
            assert is_away(model[0].weight)

    asyncio.run(hand_on())
    Offloader(model, device=device).reload()


def test_what_left_its_module_inside_the_block_is_resident_after_it(device: str, model: nn.Module) -> None:
    with offloaded(model, device=device):
        head, model[0] = model[0], nn.Identity()
        assert is_away(head.weight)
    assert head(torch.ones(1, 4, device=device)).isfinite().all()
    off = Offloader(head, device=device)
    off.offload()
    with resident(head, device=device), offloaded(model, device=device):
        pass
    assert is_away(head.weight)
    off.reload()

    with offloaded(model, device=device):
        norm, model[1] = model[1], nn.Identity()
        off = Offloader(norm, device=device)
        off.offload()  # somebody's own wish, from now on
    assert is_away(norm.weight)
    assert set(off.residency.values()) == {Residency.OFFLOADED}
    off.reload()
    assert norm.weight.isfinite().all()


@pytest.mark.parametrize("at", [1, 2, 3])
def test_what_left_its_module_comes_back_in_the_same_transaction(device: str, at: int) -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)).to(device)
    off = Offloader(model, device=device)
    context = off.offloaded()
    context.__enter__()
    head, model[0] = model[0], nn.Identity()
    with failing(Seam.DEVICE_ALLOCATION, at) as fault:
        try:
            context.__exit__(None, None, None)
        except DeviceMemoryError:
            assert fault.fired
            assert is_away(head.weight)
            assert is_away(model[1].weight)
        else:
            assert not fault.fired
            assert not is_away(head.weight)
    reload(head.weight)
    off.reload()
    assert not is_away(model[1].weight)


def test_one_context_object_may_be_entered_again_and_inside_itself(device: str, model: nn.Module) -> None:
    context = Offloader(model, device=device).offloaded()
    for _ in range(2):
        with context, context:
            assert is_away(model[0].weight)
        assert not is_away(model[0].weight)


def test_as_a_decorator_on_every_call(device: str, model: nn.Module) -> None:
    @offloaded(model, device=device)
    def rollout(value: int, *, other: int = 0) -> tuple[bool, int]:
        """Doc."""
        return is_away(model[0].weight), value + other

    assert rollout.__name__ == "rollout"
    assert rollout.__doc__ == "Doc."
    assert [rollout(1, other=2), rollout(5)] == [(True, 3), (True, 5)]
    assert not is_away(model[0].weight)


def test_decorating_what_suspends_is_a_type_error(device: str, model: nn.Module) -> None:
    context = offloaded(model, device=device)

    def generator():
        yield

    async def coroutine() -> None: ...

    async def asynchronous_generator():
        yield

    for function in (generator, coroutine, asynchronous_generator):
        with pytest.raises(TypeError, match=f"{function.__name__} suspends.*inside it"):
            context(function)


def in_a_thread(call) -> BaseException | None:
    found: list[BaseException | None] = [None]

    def run() -> None:
        try:
            call()
        except BaseException as error:
            found[0] = error

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


def test_entering_while_another_thread_is_inside_raises(device: str, model: nn.Module) -> None:
    with offloaded(model, device=device):
        error = in_a_thread(offloaded(model, device=device).__enter__)
        assert isinstance(error, TransitionError)
        assert "another thread" in str(error)
        assert is_away(model[0].weight)
    assert not is_away(model[0].weight)
    assert in_a_thread(lambda: offloaded(model, device=device).__enter__().reload()) is None


def test_another_thread_gets_the_named_error(device: str, model: nn.Module) -> None:
    with offloaded(model, device=device):
        error = in_a_thread(lambda: model(torch.ones(3, 4, device=device)))
    assert isinstance(error, OffloadedTensorError)
    assert "Sequential.0." in str(error)


def test_transitions_of_several_threads_exclude_each_other(device: str) -> None:
    models = [nn.Linear(16, 16, device=device) for _ in range(4)]
    portraits = [Portrait.of(each.weight) for each in models]

    def cycle(each: nn.Module) -> None:
        off = Offloader(each, device=device)
        for _ in range(20):
            off.offload()
            off.reload()

    threads = [threading.Thread(target=cycle, args=(each,)) for each in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for portrait in portraits:
        portrait.check()


def test_a_prepared_offload_waits_for_its_commit(device: str, model: nn.Module) -> None:
    off = Offloader(model, device=device)
    portraits = [Portrait.of(p) for p in model.parameters()]
    token = off.prepare()
    assert off.residency["params"] is Residency.RESIDENT
    assert not is_away(model[0].weight)
    with pytest.raises(OffloadedTensorError, match=r"Sequential\.0\.weight.*prepared.*abandon"):
        model[0].weight.sum()
    with pytest.raises(OffloadedTensorError, match="prepared"):
        model[0].weight.cpu()
    for call in (off.offload, off.reload, off.prepare, Offloader(nn.Linear(1, 1), device=device).offload):
        with pytest.raises(TransitionError, match=r"commit\(\) or abandon\(\)"):
            call()
    token.abandon()
    for portrait in portraits:
        portrait.check()
    token = off.prepare()
    report = token.commit()
    assert report is off.report
    assert is_away(model[0].weight)
    for call in (token.commit, token.abandon):
        with pytest.raises(TransitionError, match="before"):
            call()
    off.reload()
    for portrait in portraits:
        portrait.check()


def test_a_target_may_die_before_its_commit(device: str) -> None:
    model = nn.Linear(2, 2, device=device)
    weight, wanted = model.weight, model.weight.detach().clone()
    off = Offloader(model, device=device)
    prepared = off.prepare()
    del model
    gc.collect()
    prepared.commit()
    assert is_away(weight)
    reload(weight)
    assert torch.equal(weight, wanted)


def test_the_policy_is_that_of_the_call_that_offloads(device: str) -> None:
    model = nn.Linear(2, 2, device=device)
    model(torch.ones(1, 2, device=device)).sum().backward()
    with offloaded(model, device=device), resident(model, device=device):
        pass
    assert model.weight.grad.eq(1).all()
    with offloaded(model, device=device), resident(model, grads="discard", device=device):
        pass
    assert not model.weight.grad.any()


def test_a_dropped_token_is_an_abandon(device: str, model: nn.Module) -> None:
    off = Offloader(model, device=device)
    token = off.prepare()
    del token
    gc.collect()
    assert off.reload().nbytes == 0
    assert not list(ledger.entries())
    assert type(model[0].weight) is nn.Parameter


def test_an_unknown_component_names_those_there_are(device: str, model: nn.Module) -> None:
    off = Offloader(model, device=device)
    for call in (off.offload, off.reload, off.prepare, off.offloaded, off.resident):
        with pytest.raises(ValueError, match=r"'optimizer'.*'params', 'grads', 'buffers'"):
            call(["params", "optimizer"])


def test_dropping_the_offloader_loses_nothing(device: str, model: nn.Module) -> None:
    portraits = [Portrait.of(p) for p in model.parameters()]
    Offloader(model, device=device).offload()
    gc.collect()
    assert is_away(model[0].weight)
    assert Offloader(model, device=device).residency["params"] is Residency.OFFLOADED
    Offloader(model, device=device).reload()
    for portrait in portraits:
        portrait.check()


@pytest.mark.gpu
def test_refused_while_the_stream_captures() -> None:
    model = nn.Linear(4, 4, device="cuda")
    off = Offloader(model)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        model.weight * 2
        with pytest.raises(TransitionError, match="capturing"):
            off.offload()
    off.offload()
    off.reload()


def test_overlapping_contexts_put_back_each_storage(device: str) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).to(device)
    with offloaded(model, device=device), resident(model[0], device=device):
        with resident(model, device=device):
            assert not is_away(model[1].weight)
        assert not is_away(model[0].weight)
        assert is_away(model[1].weight)
    assert not is_away(model[1].weight)


def test_an_exit_is_not_a_new_request(device: str) -> None:
    """Gradients made in the body of `resident` are no reason to refuse the exit."""
    model = nn.Linear(3, 3, device=device)
    with offloaded(model, device=device, grads="refuse"), resident(model, device=device, grads="refuse"):
        model(torch.ones(1, 3, device=device)).sum().backward()
    assert model.weight.grad is not None


def test_a_failed_entry_leaves_the_last_report(device: str) -> None:
    model = nn.Linear(3, 3, device=device)
    off = Offloader(model, device=device)
    report = off.offload()
    off.reload()
    last = off.report
    with failing(Seam.CHECKSUM), pytest.raises(InjectedError):
        off.offloaded().__enter__()
    assert off.report is last
    assert report.direction == "offload"


def test_contexts_that_are_dropped_or_left_twice(device: str) -> None:
    model = nn.Linear(3, 3, device=device)
    context = offloaded(model, device=device)
    context.__enter__()
    del context
    gc.collect()
    Offloader(model, device=device).reload()
    with offloaded(model, device=device) as off:
        pass
    context = off.offloaded()
    with pytest.raises(TransitionError, match="more often"):
        context.__exit__(None, None, None)
    with pytest.raises(TypeError, match="decorates functions"):
        context(3)


def test_tasks_inside_a_context_may_open_their_own(device: str) -> None:
    model = nn.Linear(2, 2, device=device)
    off = Offloader(model, device=device)

    async def sync() -> bool:
        with off.resident("params"):
            return is_away(model.weight)

    async def rollout() -> list[bool]:
        with off.offloaded():
            return [await asyncio.create_task(sync()), await asyncio.wait_for(sync(), None), is_away(model.weight)]

    assert asyncio.run(rollout()) == [False, False, True]
    with off.offloaded():
        assert asyncio.run(sync()) is False
    assert not is_away(model.weight)


class Phase:
    """Somebody's own context around one."""

    def __init__(self, context: Any) -> None:
        self._context = context

    def __enter__(self) -> None:
        self._context.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)


def _in_a_stack(inner: Any) -> None:
    contextlib.ExitStack().enter_context(inner)


def _plain(outer: Any, cut: Callable[[], None]) -> None:
    with outer:
        cut()


def _stack(outer: Any, cut: Callable[[], None]) -> None:
    with contextlib.ExitStack() as stack:
        stack.enter_context(outer)
        cut()


def _helper(outer: Any, cut: Callable[[], None]) -> None:
    with Phase(outer):
        cut()


def _generator(outer: Any, cut: Callable[[], None]) -> None:
    @contextlib.contextmanager
    def phase() -> Iterator[None]:
        with outer:
            yield

    with phase():
        cut()


def _wrapped(outer: Any, cut: Callable[[], None]) -> None:
    with outer:
        try:
            cut()
        except BaseException as error:
            raise KeyboardInterrupt from error


@pytest.mark.parametrize("shape", [_plain, _stack, _helper, _generator, _wrapped])
@pytest.mark.parametrize("entered_by", [lambda inner: inner.__enter__(), _in_a_stack])
def test_an_inner_context_that_was_cut_while_it_was_left_does_not_stop_the_outer(device: str, shape, entered_by) -> None:
    model = nn.Linear(2, 2, device=device)
    off = Offloader(model, device=device)
    inner = off.offloaded("grads")

    def cut() -> None:
        entered_by(inner)
        raise KeyboardInterrupt  # on the first instruction of the inner one's exit

    with pytest.raises(KeyboardInterrupt):
        shape(off.offloaded("params"), cut)
    assert not is_away(model.weight)
    assert set(off.residency.values()) == {Residency.RESIDENT}
    with pytest.raises(TransitionError, match="reverse order"):
        inner.__exit__(None, None, None)
    with off.offloaded():
        assert is_away(model.weight)
