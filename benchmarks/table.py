"""A table of a result file, for the README: ``python -m benchmarks.table FILE``."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def table(found: Mapping[str, Any]) -> str:
    """Markdown, one row for each scenario and way, in GB/s (1e9 bytes a second)."""
    rows = [
        "| scenario | way | first offload | later offloads | reload | host bytes for one byte | left on the device |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, scenario in found.items():
        if "ways" not in scenario:
            continue
        limit = scenario["limit_gb_per_s"]
        title = f"{name}, {scenario['nbytes'] / 2**30:.2f} GiB"
        rows.append(f"| {title} | the link's limit | | {limit['offload']:.1f} | {limit['reload']:.1f} | | |")
        for way, each in scenario["ways"].items():
            speeds = " | ".join(f"{each[f'{what}_gb_per_s']:.1f}" for what in ("first", "offload", "reload"))
            beside_gpu = each["device_bytes_left"] is not None
            rest = f"{each['host_bytes_per_byte']:.2f} | {each['device_bytes_left'] / 2**20:.0f} MiB" if beside_gpu else " | "
            rows.append(f"| | {way} | {speeds} | {rest} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(table(json.loads(Path(sys.argv[1]).read_text())))
