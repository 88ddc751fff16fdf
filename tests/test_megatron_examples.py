"""The examples on real megatron-core: alone, and over two ranks as torchrun starts them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("megatron.core")
ROOT = Path(__file__).parents[1]


def output_of(*command: str, device: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    done = subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    return done.stdout


def test_flat_buffers_go_and_come_back_and_the_policy_learns(device: str) -> None:
    lines = output_of("examples/megatron_flat_buffers.py", device=device).splitlines()
    found = [
        re.match(r"step \d: loss (\S+); offload DistributedDataParallel \+ AdamW .*: (\S+ \S+) \((\S+ \S+) copied\)", line)
        for line in lines
    ]
    assert len(found) == 5
    losses = [float(each[1]) for each in found]
    assert losses == sorted(losses, reverse=True)
    assert all(each[2] != each[3] for each in found)  # discarded gradients are not copied


def test_the_trainer_learns(device: str) -> None:
    output = output_of("examples/trainer.py", device=device)
    first, last = re.search(r"mean reward: (\S+) in the first round, (\S+) in the last", output).groups()
    assert float(first) < 0.4 < 0.9 < float(last)
    assert "left" not in output


@pytest.mark.ranks(1, 2)
def test_ranks_train_as_if_nothing_had_moved(device: str, ranks: int) -> None:
    command = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "examples/multi_rank.py"]
    output = output_of(*command, device=device)
    assert f"{ranks} ranks: losses and parameters are identical" in output


def test_the_drop_in_for_verl_exports_and_goes_back(device: str) -> None:
    output = output_of("examples/verl_drop_in.py", device=device)
    losses = [
        float(each)
        for each in re.findall(r"loss (\S+), 3 tensors exported while offloaded|loss (\S+),", output)
        for each in each
        if each
    ]
    assert len(losses) == 5
    assert losses == sorted(losses, reverse=True)
    assert "back at the start: True" in output
