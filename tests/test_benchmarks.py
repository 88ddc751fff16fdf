"""The benchmarks run, small, and their numbers become the tables that are shown."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.table import table

pytest.importorskip("megatron.core")
ROOT = Path(__file__).parents[1]
RATES = {"first_gb_per_s", "offload_gb_per_s", "reload_gb_per_s"}


def test_every_scenario_runs_and_results_merge(tmp_path: Path) -> None:
    out = tmp_path / "new" / "results.json"
    for scenario in ("flat buffer", "reference model", "Megatron actor"):
        command = [sys.executable, "-m", "benchmarks", "--gib", "0.01", "--only", scenario, "--out", str(out)]
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        if scenario != "Megatron actor":
            assert f"| {scenario}, 0.01 GiB | the link's limit |" in done.stdout
    found = json.loads(out.read_text())
    assert set(found) == {"machine", "flat buffer", "reference model", "Megatron actor"}
    assert found["Megatron actor"] == {"left out": "Megatron-core's own calls move what is on a GPU"}
    for scenario, peer in (("flat buffer", "pin_memory=True buffers"), ("reference model", 'per-parameter .to("cpu")')):
        assert set(found[scenario]["ways"]) == {"torch_offload", peer, f"{peer}, no gc.collect()"}
    for scenario in ("flat buffer", "reference model"):
        assert found[scenario]["nbytes"] == pytest.approx(0.01 * 2**30, rel=0.25)
        for way in found[scenario]["ways"].values():
            assert way.keys() >= RATES
            assert all(way[rate] > 0 for rate in RATES)
            assert way["offload_gb_per_s"] * way["offload_s"] == pytest.approx(found[scenario]["nbytes"] / 1e9)


def test_the_readme_shows_what_the_result_file_holds() -> None:
    found = json.loads((ROOT / "benchmarks" / "results" / "h200.json").read_text())
    readme = " ".join((ROOT / "README.md").read_text().split("## How fast it is")[1].split())
    assert " ".join(table(found).split()) in readme
    assert f"one {found['machine']['device']} (torch {found['machine']['torch']})" in readme
    pinned, actor = found["flat buffer"]["ways"]["pin_memory=True buffers"], found["Megatron actor"]["ways"]["torch_offload"]
    assert f"at {pinned['host_bytes_per_byte']:.1f} times the host memory" in readme
    assert f"gradients, {100 * (1 - actor['host_bytes_per_byte']):.0f} % of its bytes" in readme


def test_the_table_shows_what_was_measured() -> None:
    way = {"first_gb_per_s": 9.87, "offload_gb_per_s": 51.04, "reload_gb_per_s": 49.96, "host_bytes_per_byte": 1.004}
    way["device_bytes_left"] = 3 * 2**20
    limit = {"offload": 55.25, "reload": 55.35}
    found = {"machine": {}, "x": {"nbytes": 2**31, "limit_gb_per_s": limit, "ways": {"ours": way}}, "y": {"left out": "why"}}
    assert table(found).splitlines()[2:] == [
        "| x, 2.00 GiB | the link's limit | | 55.2 | 55.4 | | |",
        "| | ours | 9.9 | 51.0 | 50.0 | 1.00 | 3 MiB |",
    ]
