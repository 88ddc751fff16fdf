"""The examples run as their docstrings say, and do what they claim."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import os
import re
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from torch_offload import OffloadedTensorError, Offloader, Strategy, TransitionReport, strategy_for

ROOT = Path(__file__).parents[1]
STEPS = 5


def output_of(name: str, device: str, *arguments: str) -> str:
    """What ``python examples/<name>`` prints."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    command = [sys.executable, f"examples/{name}", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def rollout_phase() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():  # transformers may warn while it is imported
        warnings.simplefilter("ignore")
        patch.syspath_prepend(ROOT / "examples")  # as for a script
        return importlib.import_module("rollout_phase")


@pytest.fixture(scope="module")
def timeline(rollout_phase: ModuleType) -> ModuleType:
    return sys.modules[rollout_phase.Timeline.__module__]


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


# todays_way ------------------------------------------------------------------------------------------------------------


def test_todays_way_changes_no_reward(rollout_phase: ModuleType, device: str) -> None:
    def run(**options: Any) -> list[float]:
        return rollout_phase.train(STEPS, seed=3, device=device, log=lambda *_: None, **options)

    assert run(offloader=rollout_phase.TodaysWay) == run()


def test_todays_way_puts_back_what_was_away_at_the_entry(rollout_phase: ModuleType, device: str) -> None:
    module = torch.nn.Linear(4, 4, device=device)
    values = module.weight.tolist()
    today = rollout_phase.TodaysWay(module, device=device)
    moved = []

    with contextlib.suppress(ZeroDivisionError), today.offloaded(["params"]):
        moved.append(today.report)
        with today.resident():
            moved.append(today.report)
            assert module.weight.tolist() == values
        moved.append(today.report)
        raise ZeroDivisionError
    moved.append(today.report)

    assert [(each.direction, each.nbytes) for each in moved] == [("offload", 80), ("reload", 80)] * 2
    assert module.weight.tolist() == values
    assert module.weight.device.type == device


# timeline --------------------------------------------------------------------------------------------------------------


def test_a_timeline_samples_by_a_thread_until_the_body_ends(timeline: ModuleType) -> None:
    sizes, enough = itertools.count(), threading.Event()

    def nbytes() -> tuple[int, int]:
        size = next(sizes)
        if size > 5:
            enough.set()
        return size, 2 * size

    def run() -> None:
        with memory:
            assert enough.wait(60)
            raise ZeroDivisionError

    memory = timeline.Timeline(nbytes, every_s=0.001)
    with pytest.raises(ZeroDivisionError):
        run()
    assert not [thread for thread in threading.enumerate() if thread.name == "timeline"]
    found = memory.as_dict()
    assert found["device_nbytes"] == list(range(next(sizes)))
    assert found["host_nbytes"] == [2 * size for size in found["device_nbytes"]]
    assert found["seconds"] == sorted(found["seconds"])


def test_calls_are_phases_only_of_a_timeline_that_runs(timeline: ModuleType) -> None:
    @timeline.phase("work")
    def work(result: int) -> int:
        return 1 // result

    with timeline.Timeline(lambda: (1, 2)) as memory:
        assert work(1) == 1
        with pytest.raises(ZeroDivisionError):
            work(0)
    assert work(1) == 1
    assert len(memory.as_dict()["seconds"]) == 6  # the ends of the block and of two phases
    (_, begun, ended), (_, begun_again, ended_again) = memory.as_dict()["phases"]
    assert begun <= ended <= begun_again <= ended_again


# pictures --------------------------------------------------------------------------------------------------------------

_pictures: dict[str, tuple[Path, str]] = {}


@pytest.fixture
def picture(device: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Of three steps of both ways; and what was printed."""
    if device not in _pictures:
        path = tmp_path_factory.mktemp("picture") / "new" / "memory.png"
        sizes = ["--steps", "3", "--hidden", "256", "--layers", "4"]
        printed = output_of("rollout_phase.py", device, *sizes, "--way", "both", "--plot", str(path))
        _pictures[device] = path, printed
    return _pictures[device]


@pytest.mark.xdist_group("picture")
def test_the_picture_shows_both_ways_beside_each_other(timeline: ModuleType, picture: tuple[Path, str]) -> None:
    path, _ = picture
    image = drawn(path)
    left, right = np.array_split(image, 2, axis=1)

    assert image.shape[1] >= 1000
    for half in (left, right):
        assert all(has_color(half, color) for color in timeline._LINES.values())


@pytest.mark.xdist_group("picture")
def test_both_ways_of_a_picture_earn_the_same(picture: tuple[Path, str]) -> None:
    _, printed = picture
    first, second = re.findall(r"^mean reward: .*$", printed, re.MULTILINE)

    assert re.findall(r"^-- .*$", printed, re.MULTILINE) == ["-- torch_offload", "-- today"]
    assert first == second


@pytest.mark.xdist_group("picture")
@pytest.mark.parametrize("way", ["torch_offload", "today"])
def test_the_numbers_beside_the_picture(picture: tuple[Path, str], way: str) -> None:
    path, _ = picture
    found = json.loads(path.with_suffix(".json").read_text())[way]

    assert [name for name, _, _ in found["phases"]] == ["sync", "rollout", "score", "update"] * 3
    ends = [time for _, *times in found["phases"] for time in times]
    assert ends == sorted(ends)
    assert found["seconds"] == sorted(found["seconds"])
    assert max(during(found, "rollout", "device_nbytes")) < max(during(found, "update", "device_nbytes"))


def test_one_timeline_is_drawn_without_a_warning(timeline: ModuleType, tmp_path: Path) -> None:
    sizes = {"device_nbytes": [2**30, 2**31, 2**30], "host_nbytes": [0, 0, 2**30]}
    phases = [["work", 1.0, 2.0], ["rest", 2.0, 2.001]]
    timeline.draw({"one": {"seconds": [1.0, 2.0, 3.0], **sizes, "phases": phases}}, tmp_path / "one.png")
    timeline.draw({"none": {"seconds": [1.0, 2.0, 3.0], **sizes, "phases": []}}, tmp_path / "none.png")

    with_phases, without = drawn(tmp_path / "one.png"), drawn(tmp_path / "none.png")
    assert has_color(with_phases, timeline._LINES["device"])
    assert not np.array_equal(with_phases, without)


def test_a_missing_matplotlib_is_told_before_anything_runs(
    rollout_phase: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=re.escape("-e '.[plot]'")):
        rollout_phase.main(["--plot", str(tmp_path / "memory.png")])

    assert capsys.readouterr().out == ""
    assert not list(tmp_path.iterdir())


def during(timeline: dict[str, Any], phase: str, series: str) -> list[int]:
    """The samples of a phase, all times it came."""
    times = [(start, end) for name, start, end in timeline["phases"] if name == phase]
    samples = zip(timeline["seconds"], timeline[series], strict=True)
    return [nbytes for second, nbytes in samples if any(start <= second <= end for start, end in times)]


def drawn(path: Path) -> np.ndarray:
    """The pixels: floats of shape (height, width, 4)."""
    import matplotlib.image

    return matplotlib.image.imread(path)


def has_color(pixels: np.ndarray, color: str) -> bool:
    wanted = [int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    return bool((abs(pixels[..., :3] - wanted).max(axis=-1) < 1 / 255).any())


# ---------------------------------------------------------------------------------------------------------------------


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
