"""A plan: every configuration predicted, the front of the models, and the choice on it.

The front is exact for the models. How far they may be wrong is in the intervals and in the
probability of being on the front (`tuner.models.analytic.model`). Nothing is measured. The
run folder keeps the table, of which a result is made again under any constraints.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np

from tuner.answer.answer import Answer
from tuner.answer.choice import front_of
from tuner.answer.judge import Judge
from tuner.answer.parts import (
    Attainment,
    PlanFacts,
    Point,
    ResolvedRequest,
    SearchCost,
    SizeOfPlan,
)
from tuner.answer.posterior import attainment_of
from tuner.api import receiver, request_of, result_of_answer, writer_in
from tuner.models.analytic.constants import UNMODELLED, Constants
from tuner.models.analytic.model import (
    AnalyticModel,
    ModelError,
    Spread,
    error_parts,
    known_error_lines,
    most_informative,
)
from tuner.pareto import knee, probability_nondominated
from tuner.planner.evaluate import (
    Correction,
    Evaluation,
    charged,
    correction,
    evaluate,
    measured_windows,
    require_end,
    with_failures,
)
from tuner.problem.constraints import Constraints, LimitOptions
from tuner.problem.from_job import (
    CHANGES,
    ProblemParts,
    cluster_to_predict,
    does_not_fit,
    not_predicted,
    not_searched,
    problem_parts,
)
from tuner.problem.job_request import JobRequest
from tuner.problem.problem import Problem, in_job_steps, versions
from tuner.problem.run_folder import RunFolder, find_run, new_name
from tuner.problem.settings import NoVerdict, StopReason
from tuner.problem.study_spec import SessionEnd, StudySpec, parse_space
from tuner.search_spaces.cluster import Cluster, enlarged
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.errors import InputError, reason
from tuner.search_spaces.fields import read_fields, strict_json
from tuner.search_spaces.job import TrainingJob
from tuner.search_spaces.model_facts import facts_of
from tuner.search_spaces.safe_files import read_bytes, write_text
from tuner.search_spaces.space import Candidates, SearchSpace, without_defaults
from tuner.simulated.runner import simulated_meter
from tuner.study.events import Notify, Progress, WriteFiles
from tuner.study.load import load_spec
from tuner.workload.records.probe import Basis


@dataclass(frozen=True)
class PlanRequest(JobRequest):
    """Arguments of `tuner.plan`, which documents them."""

    gpus: Sequence[int] = ()
    run: str | Path | None = None
    name: str | None = None
    runs_dir: str | Path = "runs"


#: Joint draws: the standard error of a probability is at most 0.022.
DRAWS = 500
#: Number of probes that a plan names.
PROBES = 10
#: A configuration is kept as possibly on the front up to this many standard deviations of the own
#: part of the error of a difference.
HOPE = 2.0

#: Name of the file in a run folder.
PLAN_FILE = "plan.json"
#: Version of the file.
SCHEMA = 1
#: Most that is read of it.
MAX_BYTES = 256 * 2**20


@dataclass(frozen=True)
class PlanRow:
    """One configuration; every figure but the memory is of a logarithm.

    Attributes:
        log_time, log_power: of a step, s and W.
        time_ratio_sd, energy_ratio_sd: of the ratio to the baseline.
        p_nondominated: probability of being on the front.
    """

    configuration: Configuration
    log_time: float
    log_power: float
    time_se: float
    power_se: float
    time_ratio_sd: float
    energy_ratio_sd: float
    p_nondominated: float
    memory_bytes: float


@dataclass(frozen=True)
class PlanTable:
    """The table of a plan.

    Attributes:
        baseline: number of the baseline's row.
        configurations, fitting: how many were predicted, and how many of them fit in memory.
        probes: rows whose measurement would teach most, the baseline first.
        doubts: sentences on what of the model no formula describes (`ModelFacts.doubts`).
    """

    rows: tuple[PlanRow, ...]
    baseline: int
    configurations: int
    fitting: int
    seconds: float
    gpus: tuple[int, ...]
    probes: tuple[int, ...]
    attainment: Mapping[str, Any]
    parameter_count: int | None = None
    doubts: tuple[str, ...] = ()


def write_plan(table: PlanTable, folder: Path) -> None:
    """Write the table into a run folder."""
    rows = [{**vars(row), "configuration": row.configuration.to_json()} for row in table.rows]
    data = {"schema": SCHEMA, **vars(table), "rows": rows}
    write_text(folder / PLAN_FILE, json.dumps(strict_json(data)) + "\n")


def read_plan(folder: Path) -> PlanTable:
    """Read the table of a run folder.

    Raises:
        InputError: it is no table of a plan, or a newer release wrote it.
    """
    path = folder / PLAN_FILE
    try:
        text = read_bytes(path, MAX_BYTES)
        if len(text) > MAX_BYTES:
            raise ValueError(f"it holds more than {MAX_BYTES // 2**20} MiB")
        data = json.loads(text)
        if data["schema"] != SCHEMA:
            raise InputError(f"{path} was written by a newer joulefront; this one reads {SCHEMA}")
        table = read_fields(PlanTable, data, "plan", rows=_rows, attainment=_attainment)
        for number in (table.baseline, *table.probes):
            if not 0 <= number < len(table.rows):
                raise ValueError(f"it has no row {number}")
    except (
        OSError,
        KeyError,
        TypeError,
        ValueError,
        AttributeError,
        OverflowError,
        RecursionError,
    ) as error:
        raise InputError(f"cannot read the plan {path}: {reason(error)}") from error
    return table


def _rows(data: Iterable[Any]) -> tuple[PlanRow, ...]:
    read = Configuration.from_json
    return tuple(read_fields(PlanRow, row, "row of a plan", configuration=read) for row in data)


def _attainment(data: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: int(value)
        if name == "draws"
        else tuple(math.inf if number is None else float(number) for number in value)
        for name, value in data.items()
    }


def plan_table(
    job: TrainingJob,
    cluster: Cluster,
    space: SearchSpace,
    baseline: Configuration,
    *,
    gpus: Sequence[int] = (),
    correction: Correction | None = None,
    seed: int = 0,
) -> PlanTable:
    """Predict every configuration of a space, on one cluster or on several of its sizes.

    Raises:
        InputError: the job's model is unknown, nothing fits, or a size cannot be had.
    """
    started = time.perf_counter()
    if not job.is_modelled:
        raise InputError(
            f"a plan needs the model and sequence length of job {job.name!r}, which are not known"
        )
    sizes = tuple(sorted(set(gpus)))
    require_end(enlarged(cluster, sizes[-1]) if sizes else cluster)
    constants = None if correction is None else correction.constants
    parts = [
        evaluate(
            job,
            cluster if size is None else enlarged(cluster, size),
            space,
            gpus=size,
            slack=_slack(),
            seed=seed,
            constants=constants,
        )
        for size in sizes or (None,)
    ]
    for size, part in zip(sizes or (cluster.devices,), parts, strict=True):
        if not part.count:
            raise InputError(
                f"space {space.name!r} has no configuration of job {job.name!r} on {size} GPUs; a "
                f"larger global batch than {job.global_batch} feeds more"
            )
    if not any(part.fitting for part in parts):
        smallest = min(parts, key=lambda part: part.least_bytes)
        raise InputError(does_not_fit(job, cluster, space, smallest.count, smallest.least_bytes))
    found, today = _with_baseline(job, cluster, baseline, _joined(parts), constants)
    if correction is not None:
        found = replace(
            found,
            log_time=found.log_time + correction.log_time,
            log_power=found.log_power + correction.log_power,
        )
    error = ModelError(
        found.configurations,
        time=Spread.of("step time", cluster.device),
        power=Spread.of("power", cluster.device),
        # On a CPU a rank computes while it dispatches, and little is hidden anyway.
        sequence_length=(job.sequence_length or 0) * cluster.device.is_gpu,
    )
    table = _table(today, found, error, job.steps or 1, sizes, seed, started)
    facts = facts_of(job)
    return replace(table, parameter_count=facts.parameters, doubts=facts.doubts)


def _slack() -> float:
    own = math.hypot(Spread.of("step time").own, Spread.of("power").own)
    return HOPE * math.sqrt(2) * own


def _joined(parts: Sequence[Evaluation]) -> Evaluation:
    arrays = ("log_time", "log_power", "memory_bytes", "listed")
    joined: dict[str, Any] = {n: np.concatenate([getattr(p, n) for p in parts]) for n in arrays}
    return Evaluation(
        configurations=tuple(c for part in parts for c in part.configurations),
        count=sum(part.count for part in parts),
        fitting=sum(part.fitting for part in parts),
        least_bytes=min(part.least_bytes for part in parts),
        **joined,
    )


def _table(
    today: int,
    found: Evaluation,
    error: ModelError,
    steps: int,
    sizes: tuple[int, ...],
    seed: int,
    started: float,
) -> PlanTable:
    time_error, power_error = error.draw(DRAWS, seed)
    log_time = found.log_time + time_error
    log_energy = log_time + found.log_power + power_error
    probability = probability_nondominated(log_energy, log_time)
    probes = most_informative(error.energy_features(), probability, today, PROBES)
    listed = found.listed.copy()
    listed[[today, *probes]] = True
    rows = np.flatnonzero(listed)
    place = {int(row): i for i, row in enumerate(rows)}
    time_ratio, energy_ratio = error.ratio_sd(today)
    columns = (  # as `PlanRow` has them
        *(found.log_time, found.log_power, error.time_sd, error.power_sd),
        *(time_ratio, energy_ratio, probability, found.memory_bytes),
    )
    return PlanTable(
        rows=tuple(
            PlanRow(found.configurations[row], *(float(column[row]) for column in columns))
            for row in rows
        ),
        baseline=place[today],
        configurations=found.count,
        fitting=found.fitting,
        seconds=time.perf_counter() - started,
        gpus=sizes,
        probes=tuple(place[row] for row in probes),
        attainment=vars(attainment_of(log_energy, log_time, steps)),
    )


def _with_baseline(
    job: TrainingJob,
    cluster: Cluster,
    baseline: Configuration,
    found: Evaluation,
    constants: Constants | None,
) -> tuple[Evaluation, int]:
    own = without_defaults(baseline.launch)
    for row, each in enumerate(found.configurations):
        if each.live == baseline.live and without_defaults(each.launch) == own:
            # Under the baseline's own name.
            named = (*found.configurations[:row], baseline, *found.configurations[row + 1 :])
            return replace(found, configurations=named), row
    alone = AnalyticModel(job, cluster, constants=constants).predict([baseline])
    prediction = with_failures(alone, lambda: np.array([baseline.world_size]), cluster)
    added = replace(
        found,
        configurations=(*found.configurations, baseline),
        log_time=np.append(found.log_time, np.log(prediction.step_time_s)),
        log_power=np.append(found.log_power, np.log(prediction.power_W)),
        memory_bytes=np.append(found.memory_bytes, prediction.memory_bytes),
        listed=np.append(found.listed, True),
    )
    return added, len(found.configurations)


def plan_result(spec: StudySpec, table: PlanTable) -> Answer:
    """Return the result of a plan under the constraints of its specification."""
    problem, cluster = spec.problem, spec.problem.cluster
    assert cluster is not None
    meter = simulated_meter(cluster)
    points = tuple(
        Point.from_logs(
            row.configuration,
            [
                *(row.log_time, row.time_se, row.log_power, row.power_se),
                math.hypot(row.time_se, row.power_se),
            ],
            steps=problem.steps,
            source=Basis.PREDICTED,
            windows=0,
            meter=meter,
            p_nondominated=math.nan if table.doubts else row.p_nondominated,
            peak_memory_bytes=int(row.memory_bytes),
        )
        for row in table.rows
    )
    baseline = points[table.baseline]
    limit = cluster.device.memory_limit_bytes or math.inf
    if table.rows[table.baseline].memory_bytes > limit:
        # It would run out of memory: shown for comparison, never chosen.
        points = tuple(p for p in points if p is not baseline)
    constraints = replace(spec.constraints, baseline_time_s=baseline.time_to_solution_s)
    ratios = {r.configuration: (r.time_ratio_sd, r.energy_ratio_sd) for r in table.rows}
    judge = Judge(points, baseline, constraints, problem.steps, ratio_sd=ratios)
    best, choice = judge.choose()
    return Answer(
        name=spec.name,
        run_dir=spec.run_dir,
        front_points=front_of(points),
        points=points,
        best=best,
        choice=choice,
        baseline=baseline,
        spent=SearchCost(0.0, 0.0, 0, 0, 0, None, None),
        steps=problem.steps,
        request=ResolvedRequest(constraints),
        about=_about(spec, table, cluster),
        attainment=Attainment(**table.attainment),
        job=problem.job,
        cluster=cluster,
        plan=PlanFacts(
            table.configurations,
            table.fitting,
            table.seconds,
            _sizes(points, constraints, table.gpus, problem.steps),
            tuple(table.rows[row].configuration for row in table.probes),
            table.parameter_count,
            table.doubts,
        ),
        judge=judge,
    )


def _sizes(
    points: Sequence[Point], constraints: Constraints, gpus: Sequence[int], steps: int
) -> tuple[SizeOfPlan, ...]:
    found = []
    for size in gpus:
        here = [point for point in points if point.configuration.world_size == size]
        front = front_of(here)
        best, choice = Judge(here, None, constraints, steps).choose()
        if best is not None:
            least = min(front, key=lambda point: point.energy_to_solution_kJ)
            found.append(SizeOfPlan(size, best, choice, front[0], least))
    if len(found) > 1:
        both = [(s.best.energy_to_solution_kJ, s.best.time_to_solution_s) for s in found]
        bend = knee(both)
        found[bend] = replace(found[bend], is_knee=True)
    return tuple(found)


def _about(spec: StudySpec, table: PlanTable, cluster: Cluster) -> dict[str, Any]:
    notes = ["every figure is the analytic models' prediction: nothing is measured"]
    notes += [f"known error: {line}" for line in known_error_lines(cluster.device)]
    parts = error_parts("step time")
    if cluster.device.name not in parts.devices:
        notes.append(
            f"how errors are divided is not known for {cluster.device.name}: the intervals take "
            "the known error of step time there, if there is one, and otherwise the errors found "
            f"on other devices: {parts.against}"
        )
    return {
        **{name: dict(section) for name, section in spec.problem.identity.items()},
        "unit_of_work": spec.problem.unit_of_work,
        "candidates": table.configurations,
        "versions": versions(),
        "notes": notes,
    }


def run_plan(
    request: PlanRequest, show: Callable[[RunFolder], WriteFiles | None], notify: Notify
) -> Answer:
    """Make a plan, keep it in a run folder and return its result."""
    corrects, gpus = None, request.gpus
    if request.run is not None:
        request, corrects = _of_run(request, request.run)
    job, cluster = request.named_job, cluster_to_predict(request.cluster)
    parts = problem_parts(replace(request, job=job, cluster=cluster, predicted=True))
    job, cluster = parts.job, parts.cluster
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
    for sentence in _notes(parts, corrects):
        notify(Progress("note", None, sentence))
    if left_out := not_searched(parts.whole):
        notify(Progress("note", None, left_out, detail=True))
    table = plan_table(
        job,
        cluster,
        parts.space,
        parts.baseline.configuration,
        gpus=gpus,
        correction=corrects,
    )
    spec = StudySpec(
        name=run.name,
        run_dir=run.path,
        problem=parts.problem(
            Candidates((), ()),
            {"name": parts.space_name, "configurations": table.configurations},
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


def _notes(parts: ProblemParts, corrects: Correction | None) -> list[str]:
    """Return notes on the searched and predicted knobs, and on the correction of the models."""
    every = parts.whole.choices
    kept = (name for name in every if name not in parts.space.choices)
    sentences = [
        *parts.notes,
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
        return result_of_answer(run_plan(request, lambda run: writer_in(run, report), notify))
