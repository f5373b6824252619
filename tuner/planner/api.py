"""The public function `plan`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from tuner.api import receiver, request_of, result_of_answer, shown_in
from tuner.planner.plan_run import run_plan
from tuner.planner.request import PlanRequest
from tuner.problem.constraints import Constraints, LimitOptions
from tuner.search_spaces.cluster import Cluster
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.job import TrainingJob
from tuner.study.callbacks import Notify

if TYPE_CHECKING:
    from tuner.result import Result


def plan(
    job: TrainingJob | str | Path | None = None,
    *,
    cluster: Cluster | str = "auto",
    space: str | None = None,
    gpus: Sequence[int] = (),
    constraints: Constraints | None = None,
    baseline: Configuration | str | Path | Sequence[str | Path] | None = None,
    allow_changed_training: bool = False,
    run: str | Path | None = None,
    name: str | None = None,
    runs_dir: str | Path = "runs",
    report: bool = True,
    progress: bool = True,
    on_progress: Notify | None = None,
    **limits: Unpack[LimitOptions],
) -> Result:
    """Predict every configuration of a space, and choose on the exact front of the models.

    Nothing is measured, and every point has the source "predicted". Its intervals hold the known
    error of the models.

    Args:
        gpus: numbers of GPUs to compare (`Result.plan.sizes`), up to the cluster's, with whole
            nodes; if none is given, every number up to the cluster's may be used.
        run: plan for `gpus` what this run tuned, up to more GPUs than it probed, with the models
            corrected by its probes; it says job, cluster and space.

    The other arguments are those of `optimize`.

    Raises:
        InputError: the input is wrong, or nothing fits; one sentence.
    """
    request = request_of(locals(), PlanRequest)
    return plan_for(request, report=report, progress=progress, on_progress=on_progress)


def plan_for(
    request: PlanRequest,
    *,
    report: bool = True,
    progress: bool = True,
    on_progress: Notify | None = None,
) -> Result:
    """Return the plan of a request, as `plan` does of its arguments."""
    with receiver(progress, on_progress) as notify:
        return result_of_answer(run_plan(request, lambda run: shown_in(run, report), notify))
