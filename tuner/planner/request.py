"""Arguments of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tuner.problem.job_request import JobRequest


@dataclass(frozen=True)
class PlanRequest(JobRequest):
    """Arguments of `tuner.plan`, which documents them."""

    gpus: Sequence[int] = ()
    run: str | Path | None = None
    name: str | None = None
    runs_dir: str | Path = "runs"
