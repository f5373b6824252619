"""`tuner.replay`: a search that a recording answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from tuner.api import receiver, request_of, result_of_answer, shown_in
from tuner.executors.local import SimulatedExecutor
from tuner.problem.constraints import Constraints, LimitOptions
from tuner.problem.run_folder import RunFolder, new_name
from tuner.problem.settings import SearchSettings
from tuner.recordings.problem import recorded_problem
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.errors import InputError
from tuner.study.callbacks import Notify
from tuner.study.request import StudyRequest

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
            lambda run, announce: executor,
            replace(request, search=settings),
            run=run,
            show=shown_in(run, report),
            notify=notify,
        )
        return result_of_answer(session.run())


def _in_recorded_order(
    request: StudyRequest, problem: Problem, runner: RecordingRunner
) -> StudyRequest:
    if request.sampler is not None or request.try_first:
        raise InputError("recorded_order gives the order; leave sampler and try_first out")
    from tuner.search.planner import RecordedOrder

    return replace(request, sampler=RecordedOrder(problem.candidates, runner.probes))
