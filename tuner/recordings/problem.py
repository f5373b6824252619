"""Problems of recorded tables and traces, with the runners that answer them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from tuner.api import receiver, request_of, result_of_answer, writer_in
from tuner.executors.simulated_time import SimulatedExecutor
from tuner.problem.constraints import Constraints, LimitOptions
from tuner.problem.problem import (
    REAL_COST,
    ProbeCost,
    Problem,
    Recording,
    baseline_section,
    space_section,
)
from tuner.problem.run_folder import RunFolder, is_archive, new_name, unpacked
from tuner.problem.settings import SearchSettings
from tuner.problem.study_spec import parse_cluster, parse_job
from tuner.recordings.table import RecordedTable, load_table
from tuner.search.planner import PlanningState, ProbePlan, ProbePlanner
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.data_files import plain
from tuner.search_spaces.errors import InputError, check_integer
from tuner.search_spaces.knobs import stage_values
from tuner.search_spaces.space import Candidates
from tuner.study.events import Notify
from tuner.study.request import StudyRequest

if TYPE_CHECKING:
    from tuner.recordings.table import RecordingRunner


def _rank(value: Any) -> tuple[int, float]:
    values = stage_values(value)
    numbers = bool(values) and all(isinstance(each, int | float) for each in values)
    return (0, sum(values) / len(values)) if numbers else (1, 0.0)


def _table_baseline(table: RecordedTable, configurations: Sequence[Configuration]) -> Configuration:
    """Return the table's baseline; else its first launch, at full clock and power.

    An untuned device runs at its highest clock and power limit, so among the first row's
    launch the highest live setting is taken. No measured value is looked at.
    """
    given = table.baseline.items() if table.baseline else ()
    found = (c for c in configurations if all(c.get(name) == value for name, value in given))
    if given and (named := next(found, None)):
        return named
    first = [c for c in configurations if c.launch == configurations[0].launch]
    return max(first, key=lambda c: [_rank(value) for value in c.live.values()])


def table_problem(
    folder: Path, group: str | None, steps: int | None, *, seed: int = 0
) -> tuple[Problem, RecordingRunner]:
    """Return the problem of a recorded table's group, and the runner that answers it."""
    from tuner.recordings.table import TableRunner

    table = load_table(folder)
    runner = TableRunner(table, group, seed=seed)
    points = runner.group.points
    candidates = Candidates.from_configurations(point.configuration for point in points)
    baseline = _table_baseline(table, [point.configuration for point in points])
    noise = table.noise.time_cv > 0 or table.noise.power_cv > 0
    spread = noise or any(len(p.repeats) > 1 or p.time_sd_s or p.power_sd_W for p in points)
    recording = Recording(
        path=str(folder.resolve()),
        table=table.name,
        group=runner.group.name,
        steps=steps or 1,
        unit_of_work=table.unit_of_work,
        varies=bool(spread),
    )
    own, first = (
        "the recorded table's",
        "the table's first launch, left at its highest live settings",
    )
    problem = Problem(
        name=table.name,
        candidates=candidates,
        steps=steps or 1,
        baseline=baseline,
        cost=ProbeCost(**asdict(table.cost)),
        identity=_identity(
            "table", recording, candidates, baseline, own if table.baseline else first
        ),
        recording=recording,
        unit_of_work=table.unit_of_work,
        notes=table.notes,
    )
    return problem, runner


def _identity(
    subject: str,
    recorded: Recording,
    candidates: Candidates,
    baseline: Configuration,
    name: str,
    **more: Any,
) -> Any:
    space = space_section(f"recorded {subject}", candidates)
    of_baseline = baseline_section(name, baseline)
    return plain({**more, "recorded": recorded.to_json(), "space": space, "baseline": of_baseline})


def _trace_problem(path: Path, steps: int | None, seed: int) -> tuple[Problem, RecordingRunner]:
    from tuner.recordings.table import TraceRunner

    archived = is_archive(path)
    runner = TraceRunner(unpacked(path) if archived else path, seed=seed)
    source = path if archived else runner.path
    study = RunFolder(runner.path.parent.parent).read_study() or {}
    job, cluster = parse_job(study), parse_cluster(study)
    launch_s = sorted(record.launch_s for record in runner.records)[len(runner.records) // 2]
    baselines = [r for r in runner.records if r.request.purpose == "baseline"]
    baseline = [*baselines, *runner.records][0].request.configurations()[0]
    candidates = Candidates.from_configurations(runner.configurations)
    job = job.lasting(steps) if job else None
    length = steps or (job.steps if job else 1)
    recording = Recording(str(source.resolve()), steps=length)
    name = "that of the recorded study" if baselines else "the first probe's"
    more = {key: study[key] for key in ("job", "cluster") if key in study}
    problem = Problem(
        name=job.name if job else source.stem,
        candidates=candidates,
        steps=length or 1,
        baseline=baseline,
        cost=replace(REAL_COST, launch_s=launch_s),
        identity=_identity("trace", recording, candidates, baseline, name, **more),
        recording=recording,
        job=job,
        cluster=cluster,
        notes=runner.notes,
    )
    return problem, runner


def recorded_problem(
    path: str | Path, *, group: str | None = None, steps: int | None = None, seed: int = 0
) -> tuple[Problem, RecordingRunner]:
    """Return the problem of a group of a recorded table, or of a trace, and its runner."""
    path = Path(path)
    if steps is not None:
        check_integer("steps", steps)
    table = path if path.is_dir() else path.parent
    if (table / "table.toml").is_file() and path.suffix != ".jsonl":
        return table_problem(table, group, steps, seed=seed)
    if path.is_file() or (path / "trace" / "probes.jsonl").is_file():
        if group is not None:
            raise InputError(f"{path} is a trace; only a recorded table has groups")
        return _trace_problem(path, steps, seed)
    raise InputError(
        f"{path} is nothing to replay; it must be a folder with table.toml and table.csv, "
        "a run folder or its zip file, or a trace (probes.jsonl)"
    )


if TYPE_CHECKING:
    from optuna.samplers import BaseSampler

    from tuner.problem.problem import Problem
    from tuner.recordings.table import RecordingRunner
    from tuner.result import Result
    from tuner.search.planner import ProbePlanner


def replay(
    path: str | Path,
    *,
    group: str | None = None,
    steps: int | None = None,
    recorded_order: bool = False,
    in_flight: int = 1,
    constraints: Constraints | None = None,
    search: SearchSettings | None = None,
    try_first: Sequence[str | Configuration] = (),
    sampler: BaseSampler | ProbePlanner | None = None,
    storage: str | None = None,
    name: str | None = None,
    runs_dir: str | Path = "runs",
    report: bool = True,
    progress: bool = True,
    on_progress: Notify | None = None,
    **limits: Unpack[LimitOptions],
) -> Result:
    """Search a recorded run or table: nothing is started, and a call repeats its result.

    Args:
        path: a run folder, a trace, or a recorded table's folder.
        group: the search problem of a table that holds several.
        steps: units of work that make the solution; the steps of a run's own job, or 1, if not
            given.
        recorded_order: make the recorded probes again in their order, after that of today's
            configuration, until the recording or a limit ends; otherwise the search chooses.
        in_flight: number of probes that run together on simulated time.

    The other arguments are those of `optimize`; `search.search_s` is on simulated time, and without
    any limit the search ends when no probe is worth its energy.

    Raises:
        InputError: the recording cannot be read, or an argument is wrong; one sentence, with the
            file and line. It is a ValueError.
    """
    request = request_of(locals(), StudyRequest)
    from tuner.study.session import Session

    settings = request.search
    problem, runner = recorded_problem(path, group=group, steps=steps, seed=settings.seed)
    if recorded_order:
        request = _in_recorded_order(request, problem, runner)
    # Without any spread a second measurement would only repeat the first one.
    assert problem.recording is not None
    settings = replace(settings, verify=settings.verify and problem.recording.varies)
    executor = SimulatedExecutor(runner, capacity=in_flight)
    run = RunFolder.named(runs_dir, name or new_name(f"replay-{problem.name}", runs_dir))
    with receiver(progress, on_progress) as notify:
        session = Session(
            problem,
            lambda announce: executor,
            replace(request, search=settings),
            run=run,
            show=writer_in(run, report),
            notify=notify,
        )
        return result_of_answer(session.run())


class RecordedOrder(ProbePlanner):
    """Planner of the recorded probes, oldest first; a configuration is visited once.

    It estimates nothing: a search ends with the recording, or at a limit.
    """

    def __init__(self, candidates: Candidates, probes: Sequence[Sequence[Configuration]]) -> None:
        super().__init__(candidates)
        self._probes = [[candidates.index_of(c) for c in probe] for probe in probes]

    def plan(self, state: PlanningState) -> ProbePlan | None:
        """Plan what is open of the next recorded probe; None at the end of the recording."""
        closed = self._closed(self._observe(state))
        for probe in self._probes:
            if still_open := [index for index in dict.fromkeys(probe) if not closed[index]]:
                return self._plan_of(still_open, "next in the recording")
        return None


def _in_recorded_order(
    request: StudyRequest, problem: Problem, runner: RecordingRunner
) -> StudyRequest:
    if request.sampler is not None or request.try_first:
        raise InputError("recorded_order gives the order; leave sampler and try_first out")
    return replace(request, sampler=RecordedOrder(problem.candidates, runner.probes))
