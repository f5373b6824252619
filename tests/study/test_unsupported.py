"""A knob that the devices refuse is fixed for the rest of a study, and every other one searched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.studies import LONG_JOB, FormulaRunner, run_optimize
from tuner.executors.simulated_time import SimulatedExecutor
from tuner.problem.run_folder import RunFolder
from tuner.result import Result
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.space import SearchSpace
from tuner.study.load import answer_of_run
from tuner.workload.records.probe import Failure, ProbeRecord, ProbeRequest, UnappliedSetting
from tuner.workload.records.trace import read_trace

WHY = "clock_MHz cannot be set: NVIDIA X takes no lock of its clock"
SPACE = SearchSpace(
    name="clocks and micro-batches",
    choices={
        "data_parallel": (1,),
        "micro_batch": (1, 2, 4),
        "activation_checkpointing": ("none", "full"),
        "clock_MHz": (705, 1005, 1410),
    },
)


class Refusing(FormulaRunner):
    """Runner on devices that take no value of some knobs."""

    def __init__(self, refused: Sequence[str] = ("clock_MHz",)) -> None:
        super().__init__()
        self._refused = refused

    def run(self, request: ProbeRequest) -> ProbeRecord:
        record = super().run(request)
        missed = tuple(
            UnappliedSetting(m.live, WHY, unsupported=tuple(self._refused))
            for m in record.measurements
            if any(name in m.live for name in self._refused)
        )
        kept = {m.live for m in missed}
        measurements = tuple(m for m in record.measurements if m.live not in kept)
        failure = None if measurements else Failure("not_taken", WHY)
        return replace(record, measurements=measurements, missed=missed, failure=failure)


def searched(runs: Path, runner: FormulaRunner, **more: Any) -> Result:
    options = {"space": SPACE, "cluster": "a100-8", "name": "study", "report": False, **more}
    executor = SimulatedExecutor(runner)
    return run_optimize(LONG_JOB, executor=executor, runs_dir=runs, **options)


def records_of(runs: Path) -> list[ProbeRecord]:
    return list(read_trace(runs / "study" / "trace" / "probes.jsonl").records)


def measured(runs: Path) -> set[Configuration]:
    return {
        Configuration(record.request.launch, m.live)
        for record in records_of(runs)
        for m in record.measurements
    }


def test_a_refused_clock_costs_one_probe_and_no_other_knob(tmp_path: Path) -> None:
    """Three refusals of the clock ended the search with nothing measured."""
    result = searched(tmp_path, Refusing(), max_probes=9)
    missing = [record for record in records_of(tmp_path) if record.missed]
    assert len(missing) == 1
    found = measured(tmp_path)
    assert not any("clock_MHz" in c.live for c in found)
    assert len({c.get("micro_batch") for c in found}) == 3
    assert not any("clock_MHz" in p.configuration.live for p in (*result.points, *result.predicted))
    assert result.choice is not None


def test_a_study_that_continues_does_not_try_the_clock_again(tmp_path: Path) -> None:
    searched(tmp_path, Refusing(), max_probes=3)
    result = searched(tmp_path, Refusing(), max_probes=8)
    assert len([record for record in records_of(tmp_path) if record.missed]) == 1
    again = answer_of_run(RunFolder(tmp_path / "study"))
    assert [p.configuration for p in again.points] == [p.configuration for p in result.points]
    assert not any("clock_MHz" in p.configuration.live for p in again.predicted)


def test_a_knob_that_is_taken_is_searched_on(tmp_path: Path) -> None:
    """Only what was refused is fixed: the clock is searched beside a refused power limit."""
    choices = {**SPACE.choices, "power_limit_W": (250, 300)}
    space = replace(SPACE, choices=choices)
    searched(tmp_path, Refusing(["power_limit_W"]), max_probes=9, space=space)
    found = measured(tmp_path)
    assert any("clock_MHz" in c.live for c in found)
    assert not any("power_limit_W" in c.live for c in found)


def test_a_setting_that_was_missed_once_refuses_no_knob(tmp_path: Path) -> None:
    """A clock that was not reached, or that another process changed, may be reached elsewhere."""

    class MissingItem(Refusing):
        def run(self, request: ProbeRequest) -> ProbeRecord:
            record = super().run(request)
            return replace(record, missed=tuple(replace(m, unsupported=()) for m in record.missed))

    searched(tmp_path, MissingItem(), max_probes=6)
    assert len([record for record in records_of(tmp_path) if record.missed]) > 1


def test_todays_own_clock_that_is_refused_leaves_the_rest(tmp_path: Path) -> None:
    """A baseline that sets the clock cannot be measured; what else is there still is."""
    today = Configuration.of(data_parallel=1, micro_batch=2, clock_MHz=1005)
    searched(tmp_path, Refusing(), max_probes=6, baseline=today)
    assert len(measured(tmp_path)) > 1


@pytest.mark.parametrize("knobs", [(), ("clock_MHz",)])
def test_a_missed_setting_keeps_what_was_refused(knobs: tuple[str, ...], tmp_path: Path) -> None:
    (record, *_) = [Refusing().run(ProbeRequest("p", Configuration.of(micro_batch=1).launch))]
    missed = UnappliedSetting(Configuration.of(clock_MHz=705).live, WHY, unsupported=knobs)
    again = ProbeRecord.from_json(replace(record, missed=(missed,)).to_json())
    assert again.missed[0].unsupported == knobs


class Otherwise(FormulaRunner):
    """Runner of a job that trains otherwise with checkpointing, as its first probe shows."""

    def run(self, request: ProbeRequest) -> ProbeRecord:
        record = super().run(request)
        if request.launch["activation_checkpointing"] == "none":
            return record
        knobs = ("activation_checkpointing",)
        missed = tuple(UnappliedSetting(live, WHY, unsupported=knobs) for live in request.live)
        failure = Failure("not_taken", WHY)
        return replace(record, measurements=(), missed=missed, failure=failure)


def test_a_launch_knob_that_trains_otherwise_costs_one_probe(tmp_path: Path) -> None:
    result = searched(tmp_path, Otherwise(), max_probes=9)
    records = records_of(tmp_path)
    tried = [r.request.launch["activation_checkpointing"] for r in records]
    assert tried.count("full") == 1
    assert [bool(r.measurements) for r in records] == [way == "none" for way in tried]
    assert tried[tried.index("full") + 1 :], "the other knobs are searched on"
    every = {p.configuration.get("activation_checkpointing") for p in result.points}
    assert every == {"none"}
    again = answer_of_run(RunFolder(tmp_path / "study"))
    assert {p.configuration.get("activation_checkpointing") for p in again.points} == {"none"}


class Withdrawn(Refusing):
    """Runner on devices whose clocks may be set in the first probe alone."""

    def run(self, request: ProbeRequest) -> ProbeRecord:
        if request.probe_id == "p0000":
            return FormulaRunner.run(self, request)
        return super().run(request)


def test_a_clock_that_can_no_longer_be_set_is_not_launched_again_to_verify_it(
    tmp_path: Path,
) -> None:
    space = replace(SPACE, choices={**SPACE.choices, "data_parallel": (8,)})  # as today
    result = searched(tmp_path, Withdrawn(), max_probes=12, space=space)
    first, *others = records_of(tmp_path)
    assert any("clock_MHz" in live for live in first.request.live)
    assert len([record for record in others if record.missed]) == 1
    assert result.best is not None
    assert "clock_MHz" in result.best.configuration.live  # what was measured still counts
