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
        "| scenario | way | first offload | later offloads | reload | host bytes for one byte |",
        "|---|---|---|---|---|---|",
    ]
    for name, scenario in found.items():
        if "ways" not in scenario:
            continue
        limit = scenario["limit_gb_per_s"]
        title = f"{name}, {scenario['nbytes'] / 2**30:.2f} GiB"
        rows.append(f"| {title} | the link's limit | | {limit['offload']:.1f} | {limit['reload']:.1f} | |")
        for way, each in scenario["ways"].items():
            speeds = " | ".join(f"{each[f'{what}_gb_per_s']:.1f}" for what in ("first", "offload", "reload"))
            host = each["host_bytes_per_byte"]
            rows.append(f"| | {way} | {speeds} | {'' if host is None else f'{host:.2f}'} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(table(json.loads(Path(sys.argv[1]).read_text())))
