"""The receipt as a comment on the job in Slurm's accounting (`sacct -o Comment`)."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping

from tuner.formatting import number
from tuner.receipt.receipt import Receipt

#: Time that Slurm's controller has to answer, seconds.
LIMIT_S = 20.0
#: Beginning of our comment.
_OURS = "energy"


def comment_of(receipt: Receipt) -> str:
    """Return the line: `energy_J=... scope=... meter=... time_s=... steps=...`."""
    figures = {
        f"{_OURS}_J": f"{receipt.energy_J:.0f}",
        "scope": receipt.meter.scope,
        "meter": receipt.meter.label,
        "time_s": f"{receipt.time_s:.1f}",
        "mean_W": f"{receipt.mean_W:.0f}",
        "steps": str(receipt.steps),
    }
    if len(receipt.trainings) == 1:
        only = receipt.trainings[0]
        energies = {"J_per_step": only.step_energy_J, "J_per_sample": only.sample_energy_J}
        figures |= {
            name: number(value).replace(",", "") for name, value in energies.items() if value > 0
        }
    return " ".join(f"{name}={value}" for name, value in figures.items())


def write_comment(receipt: Receipt, environ: Mapping[str, str] = os.environ) -> str:
    """Set the comment of this process's Slurm job; return a sentence on the outcome."""
    job = environ.get("SLURM_JOB_ID")
    if not job:
        return "--slurm-comment wrote nothing: this is no Slurm job (SLURM_JOB_ID is not set)."
    if shutil.which("scontrol", path=environ.get("PATH")) is None:
        return f"--slurm-comment wrote nothing on job {job}: scontrol is not on the PATH."
    ours = comment_of(receipt)
    if environ.get("SLURM_NNODES", "1") != "1":
        ours = f"node={receipt.host} {ours}"
    comment = "; ".join(filter(None, [_present(job, environ), ours]))
    words = ["scontrol", "update", f"JobId={job}", f"Comment={comment}"]
    code, output = _run(words, environ)
    if code != 0:
        why = output or f"exit code {code}"
        return f"--slurm-comment wrote nothing on job {job}: scontrol said: {why}"
    return f"The comment of Slurm job {job} is now: {comment}"


def _present(job: str, environ: Mapping[str, str]) -> str:
    # The comment that the job has, which stays in front.
    code, output = _run(["squeue", "--noheader", f"--jobs={job}", "--format=%k"], environ)
    return "" if code or output in ("(null)", "N/A") else output


def _run(words: list[str], environ: Mapping[str, str]) -> tuple[int, str]:
    try:
        done = subprocess.run(
            words,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=LIMIT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return 1, str(error)
    return done.returncode, " ".join(done.stdout.split())
