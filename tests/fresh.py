"""Scripts in an interpreter of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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


def output_of(script: str, *, warnings: str = "error") -> str:
    """What a script prints, run in the repository's root without anything imported; it must end well."""
    command = [sys.executable, "-W", warnings, "-c", script]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout
