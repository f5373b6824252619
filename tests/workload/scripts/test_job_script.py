"""Job scripts of the shell: recognised, compared with the machine, and their lines told."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.scripts import CPU
from tuner.search_spaces.cluster import load_cluster
from tuner.workload.scripts.command import Script
from tuner.workload.scripts.job_script import JobScript

TEXT = """#!/bin/bash
#SBATCH --nodes=4 --gpus-per-node=8
#SBATCH -J x
echo prepare

torchrun train.py
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.sbatch").write_text(TEXT)
    (tmp_path / "run").write_text("#!/usr/bin/env bash\npython train.py\n")
    (tmp_path / "train.py").write_text("#!/usr/bin/env python\n")
    return tmp_path


@pytest.mark.parametrize(
    ("command", "line"),
    [
        ("train.sbatch a b", "bash {}/train.sbatch a b"),
        ("bash -x train.sbatch", "bash {}/train.sbatch"),
        ("sbatch --exclusive -p debug -N 4 train.sbatch --lr 1", "bash {}/train.sbatch --lr 1"),
        ("./run", "bash {}/run"),
        ("bash -c 'python train.py'", "bash -c 'python train.py'"),
        ("python train.py", "python train.py"),
        ("bash train.sbatch > log", "bash train.sbatch > log"),
        ("bash gone.sh", "bash gone.sh"),
    ],
)
def test_a_job_script_is_run_here_by_bash(folder: Path, command: str, line: str) -> None:
    assert Script(command, cwd=folder).line == line.format(folder)


def test_what_it_asks_of_slurm_is_compared_with_the_machines_here(folder: Path) -> None:
    script = JobScript.of(["train.sbatch"], folder)
    assert script is not None
    assert script.requested_resources() == {"nodes": 4, "GPUs a node": 8}
    said = script.differences(CPU)
    assert said == (
        "train.sbatch asks Slurm for 4 nodes, 8 GPUs a node; here it runs on 1 node of 2 cores"
    )
    assert "for 4 nodes; here" in script.differences(load_cluster("a100-8"))
    other = JobScript.of(["./run"], folder)
    assert other is not None
    assert other.differences(CPU) == ""


def test_the_line_before_the_first_rank_started_it(folder: Path, tmp_path: Path) -> None:
    script = JobScript.of(["train.sbatch"], folder)
    assert script is not None
    log = tmp_path / "lines.txt"
    path = folder / "train.sbatch"
    log.write_text(f"10.0 4 {path}\n11.5 6 {path}\n11.6 9 /etc/other.sh\n14.0 7 {path}\n")
    assert script.ran(log, 13.0, 5.25) == (
        "line 6 of train.sbatch started the ranks (torchrun train.py); 1 other line ran before it, "
        "in 1.5 s; the first step came after 5.2 s"
    )
    assert script.ran(log, 9.0, 5.0) == ""
    log.write_text("what is this\n")
    assert script.ran(log, 13.0, 5.0) == ""
    assert script.ran(tmp_path / "gone", 13.0, 5.0) == ""
