"""The public functions: `optimize` and `load_result`.

They turn their arguments into a `tuner.study.request.StudyRequest` and run a
`tuner.study.session.Session`. NumPy, Optuna and Ray are imported only when a study runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

from tuner.executors.local import ThisNode
from tuner.problem.constraints import Constraints
from tuner.problem.job_request import JobRequest
from tuner.problem.run_folder import RunFolder, find_run
from tuner.problem.settings import SearchSettings
from tuner.search_spaces.job import TrainingJob
from tuner.study.events import Notify
from tuner.study.request import StudyOptions, StudyRequest
from tuner.workload.node.meters.base import own_meter
from tuner.workload.node.meters.gpus import time_alone
from tuner.workload.records.probe import Announce
from tuner.workload.scripts.command import Script

if TYPE_CHECKING:
    from tuner.answer.answer import Answer
    from tuner.executors.base import Executor
    from tuner.result import Result
    from tuner.study.events import WriteFiles
    from tuner.workload.records.probe import ProbeRecord

__all__ = ["load_result", "optimize", "search_for"]

#: Arguments of `optimize` on what it shows and writes.
_SHOWN = ("report", "progress", "on_progress")
Request = TypeVar("Request", bound=JobRequest)


@contextmanager
def receiver(progress: bool, on_progress: Notify | None) -> Iterator[Notify]:
    """Yield the receiver of progress events: a live view, and the caller's own."""
    from tuner.display.progress import ProgressLogger, shown

    with shown() if progress else nullcontext() as view:
        yield ProgressLogger(view, on_progress)


@contextmanager
def metered(request: StudyRequest) -> Iterator[None]:
    """Let a request be measured by its own meter, or by time alone, inside."""
    time_only = not request.constraints.need_energy and request.search.probe_budget_kJ is None
    with own_meter(request.meter), time_alone(time_only):
        yield


def request_of(given: dict[str, Any], kind: type[Request]) -> Request:
    """Return the request of a function's arguments by their names, its `limits` included."""
    job = given.get("job")
    if job is not None and not isinstance(job, str | Path):  # a name is found later
        given = {**given, **job.request_fields}
    values = {item.name: given[item.name] for item in fields(kind) if item.name in given}
    values["constraints"] = (given.get("constraints") or Constraints()).limited(**given["limits"])
    if "search" in values:
        values["search"] = values["search"] or SearchSettings()
    return kind(**values)


def optimize(
    job: TrainingJob | Script | str | Path | None = None, **options: Unpack[StudyOptions]
) -> Result:
    """Tune a training job for energy and time on this machine or cluster.

    Examples:
        Tune a shipped job here; then a script of your own, at most 5 % slower than today:

        >>> result = tuner.optimize("tiny-gpt")
        >>> result = tuner.optimize(tuner.Script("train.py --data DIR"), max_slowdown="5%")
        >>> result.recommended.configuration.short
        'dp2 mb8 zero0'

        Ask again without searching:

        >>> result.choose(deadline="2h").point

    Args:
        job: a `TrainingJob`, a shipped job's name, or a job file; None is the default job. Or your
            own training script as a `tuner.workload.scripts.command.Script`: it is started once
            to see which knobs can be turned on it (docs/your-script.md).
        options: where it trains, what is searched and limited, and what is shown, as keywords
            (`tuner.study.request.StudyOptions`).

    Returns:
        The front, the choice, and the cost of the search.

    Raises:
        InputError: the input is wrong; one sentence.
        Interrupted: a KeyboardInterrupt came; the run folder holds every finished probe.
    """
    given: dict[str, Any] = {"job": job, **options}
    shown = {name: given.pop(name) for name in _SHOWN if name in given}
    limits = given.keys() - {item.name for item in fields(StudyRequest)}
    given["limits"] = {name: given[name] for name in limits}
    return search_for(request_of(given, StudyRequest), **shown)


def search_for(
    request: StudyRequest,
    *,
    report: bool = True,
    progress: bool = True,
    on_progress: Notify | None = None,
) -> Result:
    """Return the result of a request, as `optimize` does of its arguments.

    Raises:
        InputError: the input is wrong; one sentence.
        Interrupted: a KeyboardInterrupt came; the run folder holds every finished probe.
    """
    with (
        metered(request),
        receiver(progress, on_progress) as notify,
        closing(ThisNode()) as node,
    ):
        problem, run, request = request.resolved(notify).inspected_problem(notify, node)
        # Not before: a command that fails at once is told of at once.
        from tuner.executors.base import Opening
        from tuner.executors.choose import open_executor
        from tuner.study.session import Session

        if request.plan is not None:
            from tuner.answer.views import view_named

            plan = load_result(request.plan, runs_dir=request.runs_dir)
            planned, problem = view_named("plan").first_probes(plan, problem)
            request = replace(request, try_first=(*request.try_first, *planned))

        def make_executor(announce: Announce) -> Executor:
            if request.executor is not None and not isinstance(request.executor, str):
                return request.executor
            assert problem.job is not None
            assert problem.cluster is not None
            opening = Opening(
                problem.job,
                problem.cluster,
                run.path,
                announce,
                address=request.ray_address,
                ranks=problem.baseline.world_size,
                seed=request.search.seed,
                node=node,
            )
            return open_executor(request.executor, opening)

        session = Session(
            problem,
            make_executor,
            request,
            run=run,
            show=writer_in(run, report),
            notify=notify,
        )
        return result_of_answer(session.run())


def load_result(run: str | Path | None = None, *, runs_dir: str | Path = "runs") -> Result:
    """Return the result of an existing run, from its folder alone; of the latest if unnamed.

    Raises:
        InputError: there is no such run, or its files cannot be read.
    """
    from tuner.study.load import answer_of_run

    return result_of_answer(answer_of_run(find_run(run, runs_dir)))


def result_of_answer(answer: Answer) -> Result:
    """Return the public result of an answer."""
    from tuner.result import Result

    return Result(**{item.name: getattr(answer, item.name) for item in fields(answer)})


def writer_in(run: RunFolder, report: bool = True) -> WriteFiles | None:
    """Return the receiver of an answer that lets the views write their files into a run."""

    from tuner.answer.views import views

    def write(answer: Answer, records: Sequence[ProbeRecord]) -> Answer:
        for view in views():
            answer = view.write(run, answer, records)
        return answer

    return write if report else None
