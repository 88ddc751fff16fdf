"""Measure some scenarios and merge what was found into a JSON file.

python -m benchmarks --only "flat buffer" --out benchmarks/results/machine.json
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import torch_offload

from .measure import compare, device_nbytes, link_limit, warm_host_pages
from .scenarios import APART, SCENARIOS, LeftOutError, one_rank
from .table import table
from .ways import empty_cache, free_pinned

GIB = 2**30


def machine(device: torch.device) -> dict[str, Any]:
    return {
        "torch_offload": torch_offload.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "CPU",
    }


def measured(name: str, device: torch.device, nbytes: int, way: str | None) -> dict[str, Any]:
    """What one scenario shows; of one way alone, if that is given."""
    warm_host_pages(nbytes if way else 3 * nbytes)
    limit = link_limit(device)
    free_pinned()  # of the scenario before, and of the limit: or whoever is first would find it
    empty_cache()
    empty = device_nbytes()
    try:
        moved, ways = SCENARIOS[name](device, nbytes)
    except LeftOutError as reason:
        return {"left out": str(reason)}
    chosen = [(each, made) for each, made in ways if way in (None, each)]
    repeats = {"rounds": 1, "cycles": 2} if way else {}
    return {"nbytes": moved, "limit_gb_per_s": limit, "ways": compare(chosen, moved, empty=empty, **repeats)}


def apart(name: str, arguments: Sequence[str]) -> dict[str, Any]:
    """What one scenario shows when each way has a process of its own."""
    found: dict[str, Any] = {}
    for way in APART[name]:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "way.json"
            command = [sys.executable, "-m", "benchmarks", *arguments, "--only", name, "--way", way, "--out", str(out)]
            subprocess.run(command, check=True)
            alone = json.loads(out.read_text())[name]
        if "left out" in alone:
            return alone
        found = {**alone, "ways": found.get("ways", {}) | alone["ways"]}
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=SCENARIOS, default=list(SCENARIOS), help="scenarios; all by default")
    parser.add_argument("--way", help="one way only, in this process; for scenarios that start one for each")
    parser.add_argument("--gib", type=float, help="how much is moved: 5 on a GPU (the actor 40), 0.06 without one")
    parser.add_argument("--out", type=Path, help="a JSON file to merge the results into")
    args = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    found: dict[str, Any] = json.loads(args.out.read_text()) if args.out and args.out.exists() else {}
    found["machine"] = machine(device)
    print(json.dumps(found["machine"]))
    for name in args.only:
        default = 0.06 if device.type == "cpu" else 40 if name in APART else 5
        if name in APART and args.way is None:
            found[name] = apart(name, ["--gib", str(args.gib)] if args.gib else [])
        else:
            with one_rank() as missing:
                is_missing = missing and name != "reference model"
                alone = (
                    {"left out": missing} if is_missing else measured(name, device, int((args.gib or default) * GIB), args.way)
                )
            found[name] = alone
        if args.out:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(found, indent=1) + "\n")
        print(table({name: found[name]}), flush=True)


if __name__ == "__main__":
    sys.exit(main())
