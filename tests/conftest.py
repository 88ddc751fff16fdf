"""Fixtures for every test: a device, deterministic numbers, tables that start empty and end empty."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Iterator

import hypothesis
import pytest
import torch

from torch_offload import interrupts, ledger

hypothesis.settings.register_profile(
    "default", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow], max_examples=150
)
hypothesis.settings.register_profile("ci", hypothesis.settings.get_profile("default"), derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "default")

torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # the scripts that tests start; beside other workers, more threads are slower
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts what runs in its background with SIGINT ignored
gc.freeze()  # the checker looks at every object on the heap; those of the imports need not be among them


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", choices=["cpu", "cuda"], help="run the device fixture on this device only")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "device" in metafunc.fixturenames:
        only = metafunc.config.getoption("--device")
        devices = [only] if only else ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
        several = metafunc.definition.get_closest_marker("ranks")
        if several is None:
            metafunc.parametrize("device", devices)
        else:  # NCCL wants a GPU for each rank
            most = {"cpu": max(several.args), "cuda": torch.cuda.device_count()}
            each = [(device, ranks) for device in devices for ranks in sorted({min(n, most[device]) for n in several.args})]
            metafunc.parametrize(("device", "ranks"), each)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def _fresh_tables() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    gc.collect()
    left = [entry.name for entry in ledger.entries()]
    ledger.clear()
    assert not left, f"the test left storages offloaded: {left}"


@pytest.fixture
def _after_cuts() -> Iterator[None]:
    """A cut where no signal arrives in real life, between a `with` block's last line and its exit or twice in a row while
    handlers are set again, leaves the lock held or a handler exchanged."""
    before = {number: signal.getsignal(number) for number in interrupts._SIGNALS}
    yield
    ledger.LOCK = threading.RLock()
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def _megatron_rank() -> Iterator[None]:
    """Megatron-core's process groups, for a test module."""
    import mcore

    with mcore.ranks():
        yield
