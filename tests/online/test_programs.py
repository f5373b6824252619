"""Trainings of others' libraries under `tuner run --tune`: their losses are those without it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.online.test_agent import ROOT, TORCHRUN, gpus, run, tuner_run

HERE = Path(__file__).parent
__all__ = ["gpus"]
pytestmark = [
    pytest.mark.needs("cc"),
    pytest.mark.real,
    pytest.mark.quiet,
    pytest.mark.long,
    pytest.mark.timeout(500),
]


def losses_of(words: list[str], environ: dict[str, str]) -> tuple[list[str], str]:
    done = run(words, environ)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = (done.stdout + done.stderr).splitlines()
    return [line for line in lines if line.startswith("loss ")], done.stdout


def tuned_as_untuned(gpus: Any, launch: list[str], steps: int, path: str) -> None:
    plain, _ = losses_of(launch, {"PYTHONPATH": path})
    assert len(plain) == steps
    environ = {**gpus.environment(), "PYTHONPATH": f"{ROOT}:{path}"}
    command = tuner_run("--max-slowdown", "8%", "--json", "--", *launch)
    tuned, answer = losses_of(command, environ)
    outcome = json.loads(answer)
    assert tuned == plain
    assert (outcome["ended"], outcome["kept"]) == ("", True)
    assert sum(outcome["seconds_at"][1:]) > 5
    assert [gpus.locked_MHz(each) for each in range(2)] == [None, None]


def test_deepspeed_with_zero_2_learns_the_same(gpus: Any) -> None:
    script = str(HERE / "train_deepspeed.py")
    tuned_as_untuned(gpus, [str(TORCHRUN), "--nproc-per-node", "2", script, "550"], 550, "")


def test_trls_trainer_learns_the_same(gpus: Any, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "trl==1.16.0"]
    target = ["--target", str(tmp_path / "trl")]
    done = subprocess.run([*command, *target], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no registry: {done.stderr.strip()[-200:]}")
    script = [str(HERE / "train_sft.py"), "550", str(tmp_path / "out")]
    tuned_as_untuned(
        gpus, [str(TORCHRUN), "--nproc-per-node", "2", *script], 550, str(tmp_path / "trl")
    )
