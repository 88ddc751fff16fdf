"""Scripts in an interpreter of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]

MEMORY = """
import ctypes, gc

def status(field):
    "A size in /proc/self/status, in bytes."
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(field + ":"))

def rss():
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what the C library keeps for itself is nobody's
    return status("VmRSS")
"""


def output_of(script: str, *, warnings: str = "error", timeout: float = 300) -> str:
    """What a script prints, run in the repository's root without anything imported; it must end well."""
    command = [sys.executable, "-W", warnings, "-c", script]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stderr
    return done.stdout


def actor(*args: str, device: str = "cuda") -> dict[str, Any]:
    """What tests/actor.py finds."""
    script = ROOT / "tests" / "actor.py"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    environment |= {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    command = [sys.executable, "-W", "ignore", str(script), *args]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
