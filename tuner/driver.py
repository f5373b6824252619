"""One session of a study, from its run folder to its answer.

Opens the run folder (lock, study.toml, trace, study), lets `tuner.search` run, and answers from the
trace. Who answers the probes, real processes or a recording, is the executor's business. A run
folder can be opened again: the same question goes on where it stopped, another one is refused in a
sentence.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from search_spaces.errors import InputError, UnknownName
from tuner.answer import build_result
from tuner.decide import Constraints
from tuner.executors import Executor, InlineExecutor, SimulatedExecutor
from tuner.job_steps import in_job_steps
from tuner.problem import Problem, versions
from tuner.progress import Progress
from tuner.result import Result
from tuner.runs import STUDY_SCHEMA, RunFolder, plain
from tuner.search import Search
from tuner.settings import SearchSettings
from tuner.standing import answer, chosen_before
from tuner.stock_samplers import SamplerAsked, check_sampler, make_sampler
from tuner.storage import open_storage
from tuner.study import StudyBook, new_driver_id, next_probe_number
from tuner.verify import verify
from workload.probe import ProbeRecord
from workload.trace import TraceWriter, kept_records, lean, read_trace

if TYPE_CHECKING:
    from models.analytic import Prior

__all__ = [
    "Interrupted",
    "check_executor",
    "new_name",
    "real_executor",
    "run_study",
    "simulated_executor",
]

EXECUTORS = ("ray", "inline", "simulated")
Notify = Callable[[Progress], None]
MakeExecutor = Callable[[RunFolder, Callable[[str], None]], Executor]


class Interrupted(KeyboardInterrupt):
    """A study was interrupted; everything told is kept.

    Attributes:
        run: its folder: the same question under the same name goes on there.
    """

    def __init__(self, run: RunFolder) -> None:
        super().__init__(run.name)
        self.run = run


def new_name(stem: str, runs_dir: str | Path) -> str:
    """A name that no run bears: the stem and the time."""
    tidy = re.sub(r"[^A-Za-z0-9_-]+", "-", stem).strip("-")[:60] or "study"
    name = first = f"{tidy}-{datetime.now():%Y%m%d-%H%M%S}"
    number = 2
    while (Path(runs_dir) / name).exists():
        name, number = f"{first}-{number}", number + 1
    return name


def check_executor(asked: str | Executor | None) -> None:
    """Refuse a name that no executor bears, before anything is touched."""
    if isinstance(asked, str) and asked not in EXECUTORS:
        raise UnknownName("executor", asked, EXECUTORS)


def simulated_executor(
    problem: Problem, *, capacity: int | None = None, seed: int = 0
) -> SimulatedExecutor:
    """A cluster that is not there: the models' answers on simulated time.

    Args:
        capacity: probes in flight; as many as the nodes hold of the baseline when not given.

    Raises:
        InputError: `capacity` is below 1.
    """
    from models.simulated import SimulatedRunner

    assert problem.job is not None
    assert problem.cluster is not None
    cluster = problem.cluster
    if capacity is None:
        ranks = problem.baseline.world_size if problem.baseline else cluster.devices
        capacity = max(1, cluster.nodes // -(-ranks // cluster.devices_per_node))
    runner = SimulatedRunner(problem.job, cluster, seed=seed)
    return SimulatedExecutor(runner, capacity=capacity)


def real_executor(
    asked: str | Executor | None,
    problem: Problem,
    run: RunFolder,
    say: Callable[[str], None],
    *,
    ray_address: str | None = None,
) -> Executor:
    """The executor that was asked for; Ray by default where it is installed.

    Args:
        ray_address: a Ray cluster to join; None starts Ray here.
    """
    if asked is not None and not isinstance(asked, str):
        return asked
    if asked is None:
        asked = "ray"
        if importlib.util.find_spec("ray") is None:
            say("Ray is not installed, so probes run inline, one at a time.")
            asked = "inline"
    assert problem.job is not None
    assert problem.cluster is not None
    if asked == "simulated":
        return simulated_executor(problem)
    ops = _ops(problem)
    if asked == "ray":
        from tuner.ray_executor import RayExecutor

        cluster = RayExecutor(
            problem.job, problem.cluster, run_dir=run.path, address=ray_address, say=say
        )
        try:
            cluster.prepare(ops)
        except BaseException:
            cluster.close()
            raise
        return cluster
    from workload.agent import LocalRunner
    from workload.ranks import ServerError

    runner = LocalRunner(problem.job, problem.cluster, run_dir=run.path, say=say, keep=True)
    try:
        runner.prepare(ops)
    except BaseException as error:
        runner.close()
        if isinstance(error, ServerError):
            raise InputError(f"this node cannot prepare for training: {error}") from error
        raise
    return InlineExecutor(runner, keep_in=run.path)


def _ops(problem: Problem) -> tuple[str, ...]:
    """DeepSpeed ops that some candidate needs: built before the first probe, not inside one."""
    from workload.deepspeed_config import ops_needed

    launches = [*problem.candidates.launches]
    if problem.baseline is not None:  # which may be measured without being a candidate
        launches.append(problem.baseline.launch)
    return tuple(dict.fromkeys(op for launch in launches for op in ops_needed(launch)))


def _differences(now: Mapping[str, Any], before: Mapping[str, Any], where: str = "") -> list[str]:
    """What differs between two nested tables, as "job.global_batch was 8 and is 16"."""
    found = []
    for key in dict.fromkeys((*before, *now)):
        old, new = before.get(key), now.get(key)
        name = f"{where}{key}"
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            found += _differences(new, old, f"{name}.")
        elif old != new:
            short = [str(value) if value is not None else "not given" for value in (old, new)]
            same = any(len(text) > 60 for text in short)
            found.append(f"{name} differs" if same else f"{name} was {short[0]} and is {short[1]}")
    return found


def _same_question(run: RunFolder, problem: Problem, before: Mapping[str, Any]) -> None:
    """Raise InputError where the run stands for another job, cluster or space."""
    names = ("job", "cluster", "recorded", "space")
    found = _differences(
        {name: problem.asked[name] for name in names if name in problem.asked},
        {name: before[name] for name in names if name in before},
    )
    if found:
        raise InputError(
            f"the run {run.name!r} is about another question ({found[0]}); "
            "give another name, or ask the same"
        )


def _check_meter(executor: Executor, records: list[ProbeRecord], run: RunFolder) -> None:
    """Two meters never share a front."""
    for record in records:
        then, now = record.meter, executor.meter
        if (then.name, then.scope, then.estimated) != (now.name, now.scope, now.estimated):
            raise InputError(
                f"the run {run.name!r} was measured by {then.name} ({then.scope} scope) and here "
                f"the meter is {now.name} ({now.scope} scope); give another name"
            )


def _adopt(run: RunFolder, writer: TraceWriter, records: list[ProbeRecord]) -> tuple[str, ...]:
    """Write down what probes measured and their session never did; what was done, said."""
    known = {record.request.probe_id for record in records}
    found = [r for r in kept_records(run.path) if r.request.probe_id not in known]
    for record in found:
        writer.append(record)
        records.append(record)
    if not found:
        return ()
    names = ", ".join(record.request.probe_id for record in found)
    now = "is" if len(found) == 1 else "are"
    return (f"an earlier session ended before it recorded {names}, which {now} now in the trace",)


def _write_end(run: RunFolder, asked: Mapping[str, Any]) -> None:
    """Write study.toml once more. Where an error is on its way out already, that one is told."""
    failing = sys.exc_info()[0] is not None
    try:
        run.write_asked(asked)
    except InputError:
        if not failing:
            raise


def run_study(
    problem: Problem,
    make_executor: MakeExecutor,
    *,
    constraints: Constraints,
    settings: SearchSettings,
    storage: str | None,
    run: RunFolder,
    report: bool,
    notify: Notify | None,
    sampler: SamplerAsked = None,
    transfer: Sequence[str | Path] = (),
) -> Result:
    """One session of a study, from its folder to its answer."""
    check_sampler(sampler, transfer=bool(transfer))
    earlier: tuple[Prior, ...] = ()
    if transfer:
        from tuner.transfer import earlier_priors

        earlier, said = earlier_priors(
            transfer, problem, runs_dir=run.path.parent, seed=settings.seed
        )
        problem = replace(problem, notes=(*problem.notes, *said))
    notify = notify or (lambda event: None)
    before = run.read_asked()
    if before is not None:
        _same_question(run, problem, before)
    opened = open_storage(storage, run.journal)
    with run.locked():
        before = run.read_asked() or {}
        driver = str(before.get("driver") or new_driver_id())
        asked = {
            "schema": STUDY_SCHEMA,
            "name": run.name,
            "driver": driver,
            "created": before.get("created") or datetime.now().isoformat(timespec="seconds"),
            "constraints": constraints.stated,
            "settings": plain(settings.to_json()),
            **problem.asked,
            "versions": versions(),
            **({"transfer": {"from": [str(one) for one in transfer]}} if transfer else {}),
        }
        ended = before.get("ended", {})
        run.write_asked({**asked, "ended": ended})
        with closing(TraceWriter(run.trace)) as writer:
            records = list(read_trace(run.trace).records)
            adopted = _adopt(run, writer, records)
            records = [in_job_steps(record, problem.job) for record in records]
            records = [lean(r) if r.request.purpose == "search" else r for r in records]
            planner = make_sampler(
                sampler,
                problem.candidates,
                prior=problem.prior,
                earlier=earlier,
                steps=problem.steps,
                cost=problem.cost,
                memory_bytes=problem.device_memory_bytes,
                seed=settings.seed,
            )
            book = StudyBook(
                name=run.name,
                storage=opened,
                sampler=planner,
                steps=problem.steps,
                constraints=constraints,
                driver=driver,
                identity=str(problem.asked["space"]["digest"]),
            )
            mended = (*writer.notes, *problem.notes, *adopted, *book.reconcile(records))
            executor = make_executor(run, lambda sentence: notify(Progress("note", None, sentence)))

            def so_far() -> tuple[Result, list[ProbeRecord]]:
                said = "The search goes on."
                known = build_result(
                    problem,
                    records,
                    constraints,
                    name=run.name,
                    run_dir=run.path,
                    stopped=said,
                    time_s=sum(record.wall_s for record in records),
                    seed=settings.seed,
                    unverified=said,
                )
                return known, records

            with closing(executor):
                _check_meter(executor, records, run)
                search = Search(
                    problem=problem,
                    executor=executor,
                    sampler=planner,
                    book=book,
                    writer=writer,
                    settings=settings,
                    constraints=constraints,
                    records=records,
                    first_number=next_probe_number(records, book.study, driver),
                    spent_s=float(ended.get("time_s", sum(r.wall_s for r in records))),
                    notify=_with_dashboard(notify, book, driver, run, so_far) if report else notify,
                )
                book.follow(records, search.note)
                for sentence in (_opening(problem, executor, run, records), *mended):
                    search.note(sentence)
                stopped, unfinished = "It was interrupted.", ""
                key = chosen_before(ended.get("chosen", {}), constraints)
                chosen: dict[str, Any] = {"key": key, "constraints": constraints.stated}

                def settle_on(key: str) -> None:
                    chosen["key"] = key
                    run.write_asked({**asked, "ended": {**ended, "chosen": chosen}})

                try:
                    stopped = search.run()
                    if settings.verify:
                        unfinished = verify(
                            search,
                            problem,
                            constraints,
                            settings,
                            run_dir=run.path,
                            prefer=chosen.get("key", ""),
                            settle_on=settle_on,
                        )
                except KeyboardInterrupt:
                    raise Interrupted(run) from None
                finally:
                    ended = {
                        "stopped": stopped,
                        "time_s": search.elapsed_s,
                        "unfinished": unfinished,
                        "chosen": chosen,
                    }
                    _write_end(run, {**asked, "ended": ended})
        # The search kept of each record what it needs; the answer is from all that was measured.
        measured = read_trace(run.trace).records
        result = answer(run, problem, measured, {**asked, "ended": ended})
        return _show(result, measured, book, run) if report else result


def _with_dashboard(
    notify: Notify,
    book: StudyBook,
    driver: str,
    run: RunFolder,
    so_far: Callable[[], tuple[Result, list[ProbeRecord]]],
) -> Notify:
    """`notify`, and the study's page in optuna-dashboard kept up to date where it is installed."""
    if importlib.util.find_spec("optuna_dashboard") is None:
        return notify
    from tuner.dashboard import Follower

    follow = Follower(book.study, driver, run.path, so_far)
    book.on_finish = follow.attach

    def both(event: Progress) -> None:
        notify(event)
        record = event.record
        if event.kind == "finished" and record is not None:
            book.patiently(lambda: follow(record, event.probes))

    return both


def _opening(
    problem: Problem, executor: Executor, run: RunFolder, records: list[ProbeRecord]
) -> str:
    """The first sentence: what is searched, where, by which meter."""
    candidates = problem.candidates
    where = f" on {problem.cluster.name} ({problem.cluster.devices} x " if problem.cluster else ""
    where += f"{problem.cluster.device.name})" if problem.cluster else ""
    meter = executor.meter
    how = "estimated" if meter.estimated else "metered"
    energy = f"{meter.scope} scope, {how} ({meter.source})"
    again = f"; {len(records)} probes stand in {run.path}" if records else f"; run {run.path}"
    return (
        f"{problem.name}{where}: {len(candidates)} configurations, {len(candidates.launches)} "
        f"launch settings; energy: {energy}{again}"
    )


def _show(
    result: Result, records: Sequence[ProbeRecord], book: StudyBook, run: RunFolder
) -> Result:
    """Write what shows the answer: report, launch files, figures in the dashboard."""
    from tuner.report import write_report

    result = replace(result, report_path=run.report)
    write_report(result, run.report, records=records)
    if result.best is not None and result.about.get("job"):
        from tuner.launch_files import write_launch_files

        write_launch_files(result, run.path / "best")
    if importlib.util.find_spec("optuna_dashboard") is not None:
        from tuner.dashboard import publish

        book.patiently(lambda: publish(book.study, result, records))
    return result
