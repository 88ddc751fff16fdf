"""Device and host memory over time, with the phases of a loop: sampled, kept as plain data, drawn side by side."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_running: list[Timeline] = []


class Timeline:
    """Samples memory while the block runs: at the beginning and the end of each phase, and in between by a thread if asked to.

    Args:
        nbytes: gives device memory and host memory now, in bytes.
        every_s: seconds between two samples of the thread; None for no thread.
    """

    def __init__(self, nbytes: Callable[[], tuple[int, int]], *, every_s: float | None = None) -> None:
        self._nbytes, self._every_s = nbytes, every_s
        self._samples: list[tuple[float, int, int]] = []
        self._phases: list[list[Any]] = []
        self._stop, self._lock = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._sample_on, name="timeline")

    def __enter__(self) -> Timeline:
        self._start_s = time.perf_counter()
        self.sample()
        if self._every_s is not None:
            self._thread.start()
        _running.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _running.remove(self)
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        self.sample()

    def sample(self) -> float:
        """Returns the time of it, in seconds since the beginning."""
        with self._lock:
            now_s = time.perf_counter() - self._start_s
            self._samples.append((now_s, *self._nbytes()))
            return now_s

    def _sample_on(self) -> None:
        while not self._stop.wait(self._every_s):
            self.sample()

    def add_phase(self, name: str, start_s: float, end_s: float) -> None:
        self._phases.append([name, start_s, end_s])

    def as_dict(self) -> dict[str, Any]:
        """``seconds``, ``device_nbytes`` and ``host_nbytes`` of each sample; ``phases`` as [name, start, end], in seconds."""
        seconds, device, host = (list(column) for column in zip(*self._samples, strict=True))
        return {"seconds": seconds, "device_nbytes": device, "host_nbytes": host, "phases": self._phases}


def phase(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorates a function each call of which is a phase, on the timelines that run meanwhile."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def marked(*args: Any, **kwargs: Any) -> Any:
            started = [(timeline, timeline.sample()) for timeline in _running]
            try:
                return function(*args, **kwargs)
            finally:
                for timeline, start_s in started:
                    timeline.add_phase(name, start_s, timeline.sample())

        return marked

    return decorate


def resident_nbytes() -> int:
    """The resident set of this process, from the Linux kernel."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def require_matplotlib() -> None:
    """Raise an ImportError that names the command, unless matplotlib can be imported."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError("pictures are drawn with matplotlib: python3 -m pip install -c constraints.txt -e '.[plot]'")


def keep(timelines: Mapping[str, Mapping[str, Any]], picture: Path) -> None:
    """Draw the picture, and put the numbers beside it, as .json."""
    picture.parent.mkdir(parents=True, exist_ok=True)
    picture.with_suffix(".json").write_text(json.dumps(timelines))
    draw(timelines, picture)


# The picture -----------------------------------------------------------------------------------------------------------

_LINES = {"device": "#1f4e9c", "host": "#d1600a"}
_BANDS = ("#d5dae1", "#c9ead2", "#f8ecc0", "#e7d8f2")


def draw(timelines: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """One panel for each timeline, under its title, all on the same scales. Phases are bands; between them, moves."""
    require_matplotlib()
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    longest = max(each["seconds"][-1] for each in timelines.values())
    most = max(max(*each["device_nbytes"], *each["host_nbytes"]) for each in timelines.values())
    unit, size = ("GiB", 2**30) if most >= 2**30 else ("MiB", 2**20)
    names = dict.fromkeys(name for each in timelines.values() for name, _, _ in each["phases"])
    colors = {name: _BANDS[index % len(_BANDS)] for index, name in enumerate(names)}
    figure = Figure(figsize=(10, 4.2), dpi=150, layout="constrained")
    panels = figure.subplots(1, len(timelines), sharey=True, squeeze=False)[0]
    for panel, (title, timeline) in zip(panels, timelines.items(), strict=True):
        for name, start_s, end_s in timeline["phases"]:
            panel.axvspan(start_s, end_s, color=colors[name], linewidth=0)
        for index, (label, color) in enumerate(_LINES.items()):
            values = [nbytes / size for nbytes in timeline[f"{label}_nbytes"]]
            panel.plot(timeline["seconds"], values, color=color, linewidth=1.6, label=f"{label} memory")
            peak = f"{label}: at most {max(values):.1f} {unit}"
            panel.text(0.98, 0.97 - 0.07 * index, peak, color=color, ha="right", va="top", transform=panel.transAxes)
        panel.set(title=title, xlabel="seconds", xlim=(0, longest))
    panels[0].set(ylabel=unit, ylim=(0, 1.25 * most / size))
    bands = [Patch(facecolor=color, label=name) for name, color in colors.items()]
    handles = [*panels[0].get_lines()[: len(_LINES)], *bands, Patch(facecolor="white", edgecolor="#bbbbbb", label="moves")]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    figure.savefig(path)
