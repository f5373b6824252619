"""One session of a study, from its run folder to its result.

A session opens the run folder (lock, study.toml, trace, study), searches (`tuner.study.loop`),
verifies the choice, and answers from the trace. Whether real processes or a recording answer the
probes is the executor's business. A run folder can be opened again: the same question continues
where it stopped, and another one is refused in a sentence.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from datetime import datetime
from typing import Any

from optuna.storages import BaseStorage
from threadpoolctl import threadpool_limits

from tuner.answer.answer import Answer
from tuner.answer.configuration_names import first_tries
from tuner.answer.parts import Point
from tuner.answer.state import answer_of_study
from tuner.executors.base import Executor
from tuner.formatting import varying_knobs
from tuner.problem.constraints import Constraints
from tuner.problem.problem import Problem, in_job_steps, without_unsupported
from tuner.problem.run_folder import RunFolder
from tuner.problem.settings import NoVerdict, StopReason
from tuner.problem.study_spec import StudySpec, why_unverified
from tuner.search.candidate_planner import CandidatePlanner
from tuner.search.planner import ProbePlanner
from tuner.search.sampler import StockPlanner, check_stock
from tuner.search_spaces.errors import InputError
from tuner.study.events import Notify, WriteFiles, announcing
from tuner.study.forecast import forecast
from tuner.study.load import read_end
from tuner.study.loop import SearchLoop
from tuner.study.recorder import StudyRecorder, open_storage, storage_name
from tuner.study.request import StudyRequest
from tuner.study.rules import launches_to_verify
from tuner.workload.node.clocks.base import LIVE
from tuner.workload.node.meters.base import TAKEN
from tuner.workload.records.probe import Announce, Basis, MeterInfo, ProbeRecord
from tuner.workload.records.trace import TraceWriter, compact, read_trace, recover_pending

#: Share by which the memory of the same machine may differ from one session to the next.
MEMORY_SHARE, _ABOUT_EQUAL = 0.1, ("host_memory_bytes", "memory_bytes")
#: Where a device's figures come from makes no other device.
_NO_QUESTION = ("sources",)

#: Settings of a search that the user does not expect to change from one session to the next.
_RUN_SETTINGS = ("seed", "window", "verify")

#: A launch that the node spoiled (no fault of the configuration) is made again so often.
SPOILED = 2

MakeExecutor = Callable[[Announce], Executor]


class Interrupted(KeyboardInterrupt):
    """A study was interrupted; every finished probe is kept in the folder `run`."""

    def __init__(self, run: RunFolder) -> None:
        super().__init__(run.name)
        self.run = run


class Session:
    """One session of a study.

    Args:
        make_executor: returns the executor, given a receiver of sentences.

    Raises:
        InputError: the sampler cannot search for two objectives, or the run folder holds another
            question.
    """

    def __init__(
        self,
        problem: Problem,
        make_executor: MakeExecutor,
        request: StudyRequest | None = None,
        *,
        run: RunFolder,
        show: WriteFiles | None = None,
        notify: Notify | None = None,
    ) -> None:
        self._request = request = request or StudyRequest()
        _check_sampler(request)
        _check_peaks(request.constraints, problem)
        self._first = first_tries(problem.candidates, request.try_first)
        settings = request.search
        self._run, self._make_executor = run, make_executor
        self._notify = notify or (lambda event: None)
        self._show = show
        before = run.read_study() or {}
        _check_same_study(run, problem, before)
        storage = storage_name(request.storage)
        self._spec = StudySpec(
            name=run.name,
            run_dir=run.path,
            problem=problem,
            constraints=request.constraints,
            settings=settings,
            unverified=why_unverified(settings.verify, problem),
            created=str(before.get("created") or datetime.now().isoformat(timespec="seconds")),
            ended=read_end(before.get("ended", {})),
            storage=storage,
        )
        self._changes = _changes(self._spec.to_toml(), before) if before else ()

    def run(self) -> Answer:
        """Search, verify and answer.

        Raises:
            Interrupted: on a KeyboardInterrupt; every finished probe is kept.
            InputError: a file, the storage or the node failed; every finished probe is kept.
        """
        storage = open_storage(self._request.storage, self._run.journal)
        with self._run.locked():
            self._write_study()
            self._run.stop_file.unlink(missing_ok=True)
            writer = TraceWriter(self._run.trace)
            with closing(writer), self._open(writer, storage) as loop:
                self._search(loop)
            # Threads of small products wait for each other, and take cores from the probes.
            with threadpool_limits(limits=1):
                return self._answer()

    @contextmanager
    def _open(self, writer: TraceWriter, storage: BaseStorage) -> Iterator[SearchLoop]:
        spec, run = self._spec, self._run
        problem = spec.problem
        records = list(read_trace(run.trace).records)
        adopted = _adopt(run, writer, records)
        records = [in_job_steps(record, problem.job) for record in records]
        records = [compact(r) if r.request.purpose == "search" else r for r in records]
        # The study's parameters are those of the whole problem, whatever of it is still searched.
        searched = replace(spec, problem=without_unsupported(problem, records))
        with closing(self._make_executor(announcing(self._notify))) as executor:
            _check_meter(executor, records, run)
            _check_knobs(executor.meter, problem)
            recorder = StudyRecorder(
                name=run.name,
                storage=storage,
                candidates=problem.candidates,
                steps=problem.steps,
                constraints=spec.constraints,
                has_energy=executor.meter.has_energy,
            )
            shared = self._request.storage is not None
            notes = (
                *self._changes,
                *writer.notes,
                *adopted,
                *recorder.catch_up(records, shared=shared),
            )
            spent_s = spec.ended.time_s
            loop = SearchLoop(
                spec=searched,
                executor=executor,
                planner_of=self._planner,
                recorder=recorder,
                records=records,
                trace=writer,
                notify=self._notify,
                first_number=recorder.next_probe_number(run.probe_names(records)),
                spent_s=sum(r.wall_s for r in records) if spent_s is None else spent_s,
            )
            for sentence in (*_opening(spec, executor, run, records), *notes):
                loop.note(sentence)
            if problem.basis is Basis.MEASURED and not records and problem.job and problem.cluster:
                expected = forecast(problem, spec.settings)
                if not executor.meter.has_energy:
                    expected = replace(expected, energy_kJ=None)
                loop.note(expected.sentence)
            for sentence in problem.notes:
                loop.note(sentence, detail=problem.recording is None)
            yield loop

    def _planner(self, problem: Problem) -> ProbePlanner:
        seed, sampler = self._spec.settings.seed, self._request.sampler
        if isinstance(sampler, ProbePlanner):
            return sampler
        if sampler is not None:
            return StockPlanner(problem.candidates, sampler, seed=seed)
        return CandidatePlanner(
            problem.candidates,
            prior=problem.prior,
            memory_bytes=problem.device_memory_bytes,
            seed=seed,
            first=self._first,
        )

    def _search(self, loop: SearchLoop) -> None:
        stop, no_verdict = StopReason("interrupted"), None
        try:
            stop = loop.run()
            if not all(record.meter.has_energy for record in loop.records):
                stop = stop.of_time()
            if stop.kind == "stopped":
                no_verdict = NoVerdict("stopped")
            elif self._spec.settings.verify and self._spec.unverified is None:
                no_verdict = _verify(loop)
        except KeyboardInterrupt:
            raise Interrupted(self._run) from None
        finally:
            before = self._spec.ended
            ended = replace(before, stop=stop, time_s=loop.elapsed_s, no_verdict=no_verdict)
            self._spec = replace(self._spec, ended=ended)
            self._write_study()

    def _write_study(self) -> None:
        failing = sys.exc_info()[0] is not None
        try:
            self._run.write_study(self._spec.to_toml())
        except InputError:
            if not failing:
                raise

    def _answer(self) -> Answer:
        records = read_trace(self._run.trace).records
        result = answer_of_study(self._spec, records)
        return result if self._show is None else self._show(result, records)


def _verify(search: SearchLoop) -> NoVerdict | None:
    # Launch the choice and the baseline again, one at a time, until the choice is sure or no launch
    # is worth its energy; return why no more were made although they were worth it. All windows so
    # far say which is next, so that a study that continues needs no memory of its own.
    spoiled = announced_launches = 0
    reported_choice: Point | None = None
    while True:
        state = search.state
        choice, more = launches_to_verify(state, search.cost.expected_kJ)
        if more is None or choice is None:
            return None
        today = state.judge.today_point
        subject, owner = (today, "today's") if more.of_baseline else (choice, "the choice")
        if (limit := search.limit_on(subject.configuration)) is not None:
            return NoVerdict("limits_reached", limit=limit.kind)
        count = f"{more.launches} launch{'es' * (more.launches != 1)}"
        if reported_choice is None or reported_choice.configuration != choice.configuration:
            reported_choice, announced_launches = choice, more.launches
            search.note(
                f"{choice.configuration.short} and today's are launched again until the "
                f"choice is sure: about {count}"
            )
        elif not announced_launches:
            announced_launches = more.launches
            search.note(f"the choice is not sure yet: about {more.launches} more")
        announced_launches -= 1
        record = search.verify(subject.configuration, f"{owner} again")
        if record.failure is not None and record.failure.type.too_short:
            return NoVerdict("too_short")
        if record.failure is not None and not record.failure.blames_configuration:
            spoiled += 1
            if spoiled > SPOILED:
                return NoVerdict("spoiled", message=record.failure.message)


def _differences(now: Mapping[str, Any], before: Mapping[str, Any], where: str = "") -> list[str]:
    found = []
    for key in dict.fromkeys((*before, *now)):
        old, new = before.get(key), now.get(key)
        name = f"{where}{key}"
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            found += _differences(new, old, f"{name}.")
        elif old == new or (key not in before and not new):  # an older study lacks what is not used
            continue
        elif key in _ABOUT_EQUAL and old and new and abs(new - old) < MEMORY_SHARE * old:
            continue  # the kernel and a display take some of it
        elif key not in _NO_QUESTION:
            short = [str(value) if value is not None else "not given" for value in (old, new)]
            same = any(len(text) > 60 for text in short)
            found.append(f"{name} differs" if same else f"{name} was {short[0]} and is {short[1]}")
    return found


def _changes(now: Mapping[str, Any], before: Mapping[str, Any]) -> Sequence[str]:
    """Return a sentence on settings of the run that this session does not take up, if any.

    The limits of a session are not among them: each session has its own.
    """
    found = _differences(_settings_of(now), _settings_of(before))
    journal = "the journal in the run folder"
    storages = [study.get("storage", journal) for study in (before, now)]
    if storages[0] != storages[1]:
        found.append(f"its storage was {storages[0]} and is {storages[1]}")
    if not found:
        return ()
    again = "; all measurements are in the trace and are kept"
    return (f"this session of the run differs from the last one: {', '.join(found)}{again}",)


def _settings_of(study: Mapping[str, Any]) -> dict[str, Any]:
    settings, constraints = study.get("settings", {}), study.get("constraints", {})
    return {
        **{name: settings.get(name) for name in _RUN_SETTINGS},
        **(constraints if isinstance(constraints, Mapping) else {}),
    }


def _check_sampler(request: StudyRequest) -> None:
    if request.sampler is None:
        return
    if not isinstance(request.sampler, ProbePlanner):
        check_stock(request.sampler)
    if request.try_first:
        raise InputError("try_first is for joulefront's own search; leave sampler out")


def _check_peaks(constraints: Constraints, problem: Problem) -> None:
    """Raise InputError if no probe could show that it meets a cap on peak power.

    Peaks are read from the power samples of real probes; a recording and the models give a mean.
    """
    if constraints.peak_power_W is None:
        return
    if problem.basis is Basis.MEASURED:
        return
    predicts = problem.basis is Basis.PREDICTED
    source = "the models predict" if predicts else "a recording holds"
    raise InputError(
        f"no probe of {problem.name} can show its peak power: {source} mean power only; "
        "cap that by --power-cap instead of --peak-power"
    )


def _check_same_study(run: RunFolder, problem: Problem, before: Mapping[str, Any]) -> None:
    if "plan" in before:
        raise InputError(f"the run {run.name!r} is a plan; give the study another name")
    names = ("job", "cluster", "recorded", "space", "request")
    now, then = (
        {name: study[name] for name in names if name in study}
        for study in (problem.identity, before)
    )
    if before and (found := _differences(now, then)):
        raise InputError(
            f"the run {run.name!r} is about another question ({found[0]}); "
            "give another name, or ask the same"
        )


def _check_meter(executor: Executor, records: list[ProbeRecord], run: RunFolder) -> None:
    for record in records:
        then, now = record.meter, executor.meter
        if (then.name, then.scope, then.mark) != (now.name, now.scope, now.mark):
            raise InputError(
                f"the run {run.name!r} was measured by {then.name} ({then.scope} scope, "
                f"{then.label}) and here the meter is {now.name} ({now.scope} scope, "
                f"{now.label}); {_with_meter(then)}give another name"
            )


def _check_knobs(meter: MeterInfo, problem: Problem) -> None:
    """Raise InputError if clocks or power limits are searched without a source of energy."""
    live = {name for c in problem.candidates.configurations for name in c.live}
    clocks = [knob for knob in LIVE if knob in live]
    if clocks and not meter.has_energy:
        raise InputError(
            f"{clocks[0]} is not a knob where energy is not measured ({meter.source}), since the "
            "highest is the fastest; add --no-clocks"
        )


def _with_meter(then: MeterInfo) -> str:
    return "" if then.name in TAKEN else "name the same meter (--meter), or "


def _adopt(run: RunFolder, writer: TraceWriter, records: list[ProbeRecord]) -> tuple[str, ...]:
    probe_ids = {record.request.probe_id for record in records}
    found = [r for r in recover_pending(run.path) if r.request.probe_id not in probe_ids]
    for record in found:
        writer.append(record)
        records.append(record)
    if not found:
        return ()
    names = ", ".join(record.request.probe_id for record in found)
    now = "is" if len(found) == 1 else "are"
    return (f"an earlier session ended before it recorded {names}, which {now} now in the trace",)


def _opening(
    spec: StudySpec, executor: Executor, run: RunFolder, records: list[ProbeRecord]
) -> list[str]:
    """Return notes on the space, the measurement and the expected cost."""
    problem, meter = spec.problem, executor.meter
    count, cluster = len(problem.candidates), problem.cluster
    lines = []
    if problem.recording is not None:
        lines.append(
            f"Replaying {count:,} recorded configuration{'s' * (count != 1)} of "
            f"{problem.recording.name}: nothing is started, spent or set."
        )
    if problem.basis is Basis.PREDICTED:
        lines.append(
            "nothing is measured: this search tries its probes on predictions of the models; "
            f"`tuner plan` predicts all {count:,} configurations at once"
        )
    where = f" on {cluster.name} ({cluster.devices} x {cluster.device.name})" if cluster else ""
    knobs = ", ".join(varying_knobs(problem.candidates.configurations)) or "no knob"
    again = f"{len(records)} probes are in {run.path}" if records else f"run {run.path}"
    lines.append(
        f"{problem.name}{where}: {count:,} configuration{'s' * (count != 1)} of {knobs}; "
        f"{meter.sentence}; {again}"
    )
    if problem.recording is None or problem.job is None:  # told when its command was started
        return lines
    today = problem.job.today_facts(problem.baseline)
    return [*lines, *(today.lines if today is not None else ())]
