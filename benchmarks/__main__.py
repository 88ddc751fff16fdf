"""Measure some scenarios and merge what was found into a JSON file.

python -m benchmarks --only "flat buffer" --out benchmarks/results/machine.json
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import torch_offload

from .measure import compare, link_limit, warm_host_pages
from .scenarios import SCENARIOS, one_rank
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


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=SCENARIOS, default=list(SCENARIOS), help="scenarios; all by default")
    parser.add_argument("--gib", type=float, help="how much is moved: 5 on a GPU, 0.06 without one")
    parser.add_argument("--out", type=Path, help="a JSON file to merge the results into")
    args = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    nbytes = int((args.gib or (5 if device.type == "cuda" else 0.06)) * GIB)
    found: dict[str, Any] = json.loads(args.out.read_text()) if args.out and args.out.exists() else {}
    found["machine"] = machine(device)
    print(json.dumps(found["machine"]))
    with one_rank() as missing:
        for name in args.only:
            if missing and name == "flat buffer":
                found[name] = {"left out": missing}
                continue
            warm_host_pages(3 * nbytes)
            limit = link_limit(device)
            empty_cache(), free_pinned()  # or whoever is first would find what the limit was measured with
            moved, ways = SCENARIOS[name](device, nbytes)
            found[name] = {"nbytes": moved, "limit_gb_per_s": limit, "ways": compare(ways, moved)}
            del ways
            if args.out:
                args.out.parent.mkdir(parents=True, exist_ok=True)
                args.out.write_text(json.dumps(found, indent=1) + "\n")
            print(table({name: found[name]}), flush=True)


if __name__ == "__main__":
    sys.exit(main())
