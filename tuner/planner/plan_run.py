"""A plan as a run: predicted, kept in its folder, and shown as a study is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from tuner.answer.answer import Answer
from tuner.models.analytic.constants import UNMODELLED
from tuner.planner.correction import Correction, correction
from tuner.planner.plan import plan_result, plan_table, write_plan
from tuner.planner.predict import charged, measured_windows
from tuner.planner.request import PlanRequest
from tuner.problem.from_job import (
    CHANGES,
    Question,
    cluster_to_predict,
    not_predicted,
    not_searched,
    question_of,
)
from tuner.problem.problem import Problem, in_job_steps
from tuner.problem.run_folder import RunFolder, find_run, new_name
from tuner.problem.settings import NoVerdict, StopReason
from tuner.problem.study_spec import SessionEnd, StudySpec, parse_space
from tuner.search_spaces.cluster import enlarged
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.space import Candidates
from tuner.study.callbacks import Notify, Progress, Show
from tuner.study.load import load_spec


def run_plan(
    request: PlanRequest, show: Callable[[RunFolder], Show | None], notify: Notify
) -> Answer:
    """Make a plan, keep it in a run folder and return its result."""
    corrects, gpus = None, request.gpus
    if request.run is not None:
        request, corrects = _of_run(request, request.run)
    job, cluster = request.named_job, cluster_to_predict(request.cluster)
    question = question_of(replace(request, job=job, cluster=cluster), plan=True)
    job, cluster = question.job, question.cluster
    if most := [number for number in gpus if number > cluster.devices]:
        raise InputError(
            f"--gpus {most[0]} is more than the {cluster.devices} GPUs of cluster {cluster.name!r};"
            " name a cluster of that size, such as a copy of its file with more nodes"
        )
    run = RunFolder.named(
        request.runs_dir, request.name or new_name(f"plan-{job.name}", request.runs_dir)
    )
    if run.read_study() is not None:
        raise InputError(f"there is a run {run.name!r} already; give the plan another name")
    for sentence in _notes(question, corrects):
        notify(Progress("note", None, sentence))
    if left_out := not_searched(question.whole):
        notify(Progress("note", None, left_out, detail=True))
    table = plan_table(
        job,
        cluster,
        question.space,
        question.today.configuration,
        gpus=gpus,
        correction=corrects,
    )
    spec = StudySpec(
        name=run.name,
        run_dir=run.path,
        problem=question.problem(
            Candidates((), ()),
            {"name": question.space_name, "configurations": table.configurations},
            identity={"plan": {"gpus": list(table.gpus), "seconds": table.seconds}},
        ),
        constraints=request.constraints,
        unverified=NoVerdict("prediction"),
        created=datetime.now().isoformat(timespec="seconds"),
        ended=SessionEnd(StopReason("plan"), time_s=table.seconds),
    )
    with run.locked():
        run.write_study(spec.to_toml())
        write_plan(table, run.path)
        result = plan_result(spec, table)
        shown = show(run)
        return result if shown is None else shown(result, ())


def _notes(question: Question, corrects: Correction | None) -> list[str]:
    """Return notes on the searched and predicted knobs, and on the correction of the models."""
    every = question.whole.choices
    kept = (name for name in every if name not in question.space.choices)
    sentences = [
        *question.notes,
        *not_predicted(every, UNMODELLED),
        *(f"not in play: {name}: {CHANGES}" for name in kept),
        corrects.sentence if corrects else "",
    ]
    return [sentence for sentence in sentences if sentence]


def _of_run(request: PlanRequest, probed: str | Path) -> tuple[PlanRequest, Correction]:
    if not request.gpus:
        raise InputError("--run needs --gpus, the numbers of GPUs to predict")
    folder = find_run(probed, request.runs_dir)
    records = folder.records()
    spec = load_spec(folder, records)
    problem = spec.problem
    if problem.job is None or problem.cluster is None:
        raise InputError("a recording names no job and cluster, which the models need")
    windows = measured_windows([in_job_steps(record, problem.job) for record in records])
    cluster = charged(problem.cluster, windows.records[0].meter)
    launches = [record.request.launch.key for record in windows.records]
    question = replace(
        request,
        job=problem.job,
        cluster=enlarged(cluster, max(request.gpus)),
        space=parse_space(problem.identity),
        allow_changed_training=problem.identity["request"]["allow_changed_training"],
        constraints=request.constraints if request.constraints.given else spec.constraints,
    )
    return question, correction(problem.job, cluster, windows.as_delivered, windows.logs, launches)


def probes_of_plan(plan: Answer, problem: Problem) -> tuple[tuple[Configuration, ...], Problem]:
    """Return the probes of a plan that a problem has, without its baseline, which comes first."""
    if plan.plan is None:
        raise InputError(f"the run {plan.name!r} is a study, not a plan; tuner plan makes one")
    wanted = [each for each in plan.plan.probes if each != problem.baseline]
    found = tuple(each for each in wanted if each in problem.candidates)
    if wanted and not found:
        raise InputError(
            f"none of the {len(wanted)} probes of plan {plan.name!r} is a candidate here; plan for "
            "this job, space and cluster"
        )
    if len(found) < len(wanted):
        note = (
            f"{len(wanted) - len(found)} of the {len(wanted)} probes of plan {plan.name!r} are "
            "left out: they are not candidates here"
        )
        problem = replace(problem, notes=(*problem.notes, note))
    return found, problem
