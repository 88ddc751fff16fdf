"""The examples run as their docstrings say, and do what they claim."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from torch_offload import OffloadedTensorError, Offloader, Strategy, TransitionReport, strategy_for

ROOT = Path(__file__).parents[1]
STEPS = 5


def output_of(name: str, device: str) -> str:
    """What ``python examples/<name>`` prints."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    command = [sys.executable, f"examples/{name}"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def rollout_phase() -> ModuleType:
    spec = importlib.util.spec_from_file_location("rollout_phase", ROOT / "examples" / "rollout_phase.py")
    module = importlib.util.module_from_spec(spec)
    with warnings.catch_warnings():  # transformers may warn while it is imported
        warnings.simplefilter("ignore")
        spec.loader.exec_module(module)
    return module


def nbytes(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def shown(size: int) -> str:
    return f"{size / 2**20:.2f} MiB" if size >= 2**20 else f"{size / 2**10:.2f} KiB"


# minimal ---------------------------------------------------------------------------------------------------------------


def test_minimal_moves_model_gradients_and_optimizer_state_and_trains_on(device: str) -> None:
    printed = output_of("minimal.py", device)

    parameters = (1024 * 1024 + 1024) * 4
    steps = 2 * 4 if device == "cpu" else 0
    assert f"({shown(4 * parameters + steps)})" in printed  # parameters, gradients and two moments
    before, after = (float(loss) for loss in re.findall(r"^loss \w+: +(\S+)$", printed, re.MULTILINE))
    assert 0 < after < before
    assert "left" not in printed


# custom_strategy -------------------------------------------------------------------------------------------------------


def test_custom_strategy_guards_its_object_and_brings_it_back(device: str) -> None:
    printed = output_of("custom_strategy.py", device)

    assert re.search(r"^touched while offloaded: lerp_ .*'WeightAverage\.flat', which is offloaded", printed, re.MULTILINE)
    assert "same values: True\n" in printed
    assert "moved by the next update: 0.10\n" in printed  # a tenth of the 1 that was added
    assert "the model stayed and works: (1, 10)\n" in printed


def test_custom_strategy_moves_the_average_once_and_alone_if_asked_to(device: str) -> None:
    printed = output_of("custom_strategy.py", device)

    weights = (256 * 512 + 512 + 512 * 10 + 10) * 4
    assert re.search(rf"^storages +5 \({re.escape(shown(2 * weights))}\)$", printed, re.MULTILINE)
    assert f"offload Sequential + WeightAverage (average): {shown(weights)} in 1 storage, " in printed


# rollout_phase ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_rollout_phase_learns(rollout_phase: ModuleType, device: str, seed: int) -> None:
    rewards = rollout_phase.train(seed=seed, device=device, log=lambda *_: None)

    first, last = rollout_phase.first_and_last_fifth(rewards)
    assert first == pytest.approx(sum(rewards[:8]) / 8)
    assert last == pytest.approx(sum(rewards[-8:]) / 8)
    assert last > first + 0.2


def test_rollout_phase_moves_exactly_what_each_phase_does_not_need(rollout_phase: ModuleType, device: str) -> None:
    reports: list[tuple[str, TransitionReport]] = []
    rollout_phase.train(STEPS, device=device, log=lambda phase, report: reports.append((phase, report)))

    model = rollout_phase.build_policy("cpu")
    weights = nbytes(model.parameters()) + nbytes(model.buffers())
    state = 2 * nbytes(model.parameters())  # AdamW's moments, and on the CPU a float32 step beside each pair
    state += 4 * len(list(model.parameters())) if device == "cpu" else 0
    states = [0, *[state] * (STEPS - 1)]  # there is none before the first optimizer step
    assert [report.nbytes for phase, report in reports if phase == "sync"] == states
    assert [report.nbytes for phase, report in reports if phase == "rollout"] == [weights] * STEPS
    assert [report.nbytes for phase, report in reports if phase == "score"] == [weights] * STEPS
    assert [report.nbytes for phase, report in reports if phase == "update"] == states
    assert not [report.left for _, report in reports if report.left]


@pytest.mark.gpu
def test_rollout_phase_frees_the_memory_of_the_gpu(rollout_phase: ModuleType) -> None:
    reports: list[TransitionReport] = []
    rollout_phase.train(STEPS, device="cuda", log=lambda _, report: reports.append(report))

    moved = [report for report in reports if report.nbytes]
    assert len(moved) == 4 * STEPS - 2
    assert all(report.measured_nbytes >= report.nbytes for report in moved)


def test_rollout_phase_has_on_the_device_what_each_phase_needs(
    rollout_phase: ModuleType, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategies: list[Strategy] = []
    found: dict[str, list[bool]] = {}

    def recording_offloader(*targets: Any, **policy: Any) -> Offloader:
        strategies.extend(strategy_for(target) for target in targets)
        return Offloader(*targets, **policy)

    def recording(phase: str) -> Callable[..., Any]:
        function = getattr(rollout_phase, phase)

        def recorded(*args: Any) -> Any:
            found[phase] = [is_resident(strategy) for strategy in strategies]
            return function(*args)

        return recorded

    for phase in ("sync_weights", "rollout", "score", "update"):
        monkeypatch.setattr(rollout_phase, phase, recording(phase))
    monkeypatch.setattr(rollout_phase, "Offloader", recording_offloader)
    rollout_phase.train(2, device=device, log=lambda *_: None)

    assert found == {  # actor, optimizer, rollout copy, reference, in the last step
        "sync_weights": [True, False, True, False],
        "rollout": [False, False, True, False],
        "score": [True, False, False, True],
        "update": [True, True, False, False],
    }


def test_offloading_changes_no_reward(rollout_phase: ModuleType, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> list[float]:
        return rollout_phase.train(STEPS, seed=3, device=device, log=lambda *_: None)

    with_offloading = run()
    monkeypatch.setattr(rollout_phase, "Offloader", Stays)

    assert run() == with_offloading
    assert len(set(with_offloading)) > 1


def test_rollout_phase_prints_a_line_for_each_phase(
    rollout_phase: ModuleType, device: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rollout_phase.main(["--steps", str(STEPS), "--seed", "1", "--device", device])

    *lines, last = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["sync", "rollout", "score", "update"] * STEPS
    assert [line.split()[1] for line in lines] == ["offload", "offload", "reload", "reload"] * STEPS
    assert re.fullmatch(r"mean reward: 0\.\d+ in the first fifth of the steps, 0\.\d+ in the last", last)


def is_resident(strategy: Strategy) -> bool:
    """Whether every tensor can be read."""
    try:
        return bool([claim.tensor.detach().sum() for claim in strategy.claims()])
    except OffloadedTensorError:
        return False


class Stays:
    """An Offloader that moves nothing."""

    report = None

    def __init__(self, *targets: Any, **policy: Any) -> None:
        del targets, policy

    def offloaded(self, components: Any = None) -> contextlib.AbstractContextManager[None]:
        del components
        return contextlib.nullcontext()

    resident = offloaded
