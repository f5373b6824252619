"""A launch that is up is gone on with: every executor asks, and only windows are paid."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optuna
import pytest

from tests.support.studies import measured, run_replay, write_table
from tuner.executors.base import Executor
from tuner.executors.local import InlineExecutor
from tuner.executors.simulated_time import SimulatedExecutor
from tuner.recordings.table import TableRunner, load_table
from tuner.search.candidate_planner import CandidatePlanner
from tuner.search.planner import PlanningState, ProbePlan
from tuner.search.question import Question
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.search_spaces.space import Candidates
from tuner.workload.node.probe_run import Probe
from tuner.workload.records.probe import (
    Measurement,
    MeterInfo,
    ProbeRecord,
    ProbeRequest,
    WindowPolicy,
)
from tuner.workload.records.trace import read_trace

optuna.logging.set_verbosity(optuna.logging.ERROR)

SPEEDS = tuple(Settings(speed=speed) for speed in (3, 1, 5))


def request(name: str = "p0000", shape: int = 1, *, extendable: bool = True) -> ProbeRequest:
    return ProbeRequest(name, Settings(shape=shape), SPEEDS[:1], extendable=extendable)


@pytest.fixture
def runner(tmp_path: Path) -> TableRunner:
    return TableRunner(load_table(write_table(tmp_path)))


# -- asking, executor by executor ------------------------------------------------------------------


class Asked:
    """Goes on with one setting after the other, and remembers what it was told."""

    def __init__(self, *more: Settings) -> None:
        self.left, self.told = list(more), list[tuple[str, tuple[Settings, ...]]]()

    def __call__(
        self, request: ProbeRequest, measurements: Sequence[Measurement]
    ) -> tuple[Settings, ...]:
        self.told.append((request.probe_id, tuple(m.live for m in measurements)))
        return (self.left.pop(0),) if self.left else ()


def test_a_request_says_in_json_that_it_is_open() -> None:
    assert ProbeRequest.from_json(request().to_json()) == request()
    assert "open" not in request(extendable=False).to_json()


@pytest.mark.parametrize("kind", [InlineExecutor, SimulatedExecutor])
def test_an_open_probe_is_one_launch_and_one_record(kind: type, runner: TableRunner) -> None:
    executor: Executor = kind(runner)
    asked = Asked(*SPEEDS[1:])
    executor.submit(request(), asked)
    record = executor.wait()
    assert asked.told == [("p0000", SPEEDS[:n]) for n in (1, 2, 3)]
    assert record.request.live == SPEEDS
    assert record == runner.run(record.request)
    powers = [runner._points[c].power_W for c in record.request.configurations()]
    assert record.energy_J == pytest.approx(runner.table.cost.energy_J(powers))
    assert executor.in_flight == 0
    executor.submit(request("p0001", extendable=False), asked)
    executor.wait()
    assert len(asked.told) == 3


def test_in_simulated_time_a_probe_is_asked_about_when_its_windows_end(runner: TableRunner) -> None:
    executor = SimulatedExecutor(runner, capacity=2)
    told: list[tuple[str, float, int]] = []

    def next_settings(
        request: ProbeRequest, windows: Sequence[Measurement]
    ) -> tuple[Settings, ...]:
        told.append((request.probe_id, executor.now_s(), executor.in_flight))
        return SPEEDS[1:] if len(windows) == 1 and request.probe_id == "p0000" else ()

    executor.submit(request(), next_settings)
    executor.submit(request("p0001", shape=2), next_settings)
    cost = runner.table.cost
    first, second = executor.wait(), executor.wait()
    assert [first.request.probe_id, second.request.probe_id] == ["p0001", "p0000"]
    assert told == [
        ("p0000", cost.wall_s(1), 2),
        ("p0001", cost.wall_s(1), 2),
        ("p0000", cost.wall_s(3), 1),
    ]
    assert executor.now_s() == second.wall_s == cost.wall_s(3)


def test_a_probe_that_failed_is_not_asked_about(runner: TableRunner) -> None:
    executor = SimulatedExecutor(runner)
    asked = Asked(*SPEEDS)
    executor.submit(request(shape=99), asked)
    record = executor.wait()
    assert not record.ok
    assert asked.told == []


# -- in the agent ----------------------------------------------------------------------------------


class KeyCheck:
    """Stands for the node: notes what it is asked to allow."""

    def __init__(self) -> None:
        self.allowed: list[ProbeRequest] = []

    def check(self, request: ProbeRequest, nodes: int) -> None:
        self.allowed.append(request)


class Visited(Probe):
    """The agent's probe without ranks: a visit takes no time and measures what it is told."""

    def __init__(self, request: ProbeRequest) -> None:
        self.node = KeyCheck()  # type: ignore[assignment]
        self.meter = SimpleNamespace(info=MeterInfo("counter", "gpu", "a count"))  # type: ignore
        self.request, self.measurements = request, []
        self._began_s = time.monotonic()
        self.visits: list[Settings] = []

    def _visit(self, live: Settings, *_: object) -> float:
        self.visits.append(live)
        self.measurements.append(measured(live))
        return 1.0


NO_DRIFT = WindowPolicy(check_drift=False)


def test_the_agent_goes_on_until_it_is_told_nothing_more() -> None:
    probe = Visited(replace(request(), window=NO_DRIFT))
    probe._next_settings = asked = Asked(*SPEEDS[1:])
    probe.measure(None, None, 1.0, ())  # type: ignore[arg-type]
    assert probe.visits == list(SPEEDS)
    assert probe.request.live == SPEEDS
    assert [live for _, live in asked.told] == [SPEEDS[:n] for n in (1, 2, 3)]
    assert [r.live for r in probe.node.allowed] == [SPEEDS[:2], SPEEDS]  # type: ignore[attr-defined]


def test_drift_is_checked_once_at_the_very_end() -> None:
    probe = Visited(request())
    probe._time_for_one_more = lambda: True  # type: ignore[method-assign]
    probe._next_settings = Asked(*SPEEDS[1:])
    probe.measure(None, None, 1.0, ())  # type: ignore[arg-type]
    assert probe.visits == [*SPEEDS, SPEEDS[0]]


def test_what_is_not_open_is_visited_in_an_order_of_its_own_and_nobody_asked() -> None:
    orders = set()
    for number in range(12):
        probe = Visited(ProbeRequest(f"p{number}", Settings(shape=1), SPEEDS, NO_DRIFT))
        probe._next_settings = asked = Asked(Settings(speed=4))
        probe.measure(None, None, 1.0, ())  # type: ignore[arg-type]
        assert set(probe.visits) == set(SPEEDS)
        assert asked.told == []
        orders.add(tuple(probe.visits))
    assert len(orders) > 1


# -- the sampler -----------------------------------------------------------------------------------


def planner_of(runner: TableRunner) -> CandidatePlanner:
    every = Candidates.from_configurations(point.configuration for point in runner.group.points)
    return CandidatePlanner(every, seed=0)


def measured_shapes(runner: TableRunner, *shapes: int) -> PlanningState:
    """A study that knows three settings of each of these shapes."""
    asked = (ProbeRequest(f"q{n}", Settings(shape=shape), SPEEDS) for n, shape in enumerate(shapes))
    return PlanningState(tuple(map(runner.run, asked)))


def test_a_good_launch_is_gone_on_with_and_a_poor_one_left(runner: TableRunner) -> None:
    # Shape 4 is the best of this table, and its neighbours say that it may be.
    state = measured_shapes(runner, 3, 6)
    plan = planner_of(runner).plan_continuation(state, runner.run(request(shape=4)))
    assert plan.launch == Settings(shape=4)
    assert SPEEDS[0] not in plan.live
    assert math.isfinite(plan.cost_J)
    state, poor = measured_shapes(runner, 3, 4, 6), runner.run(request(shape=1))
    assert planner_of(runner).plan_continuation(state, poor) is None


def test_asking_about_a_running_probe_changes_no_later_plan(runner: TableRunner) -> None:
    state, record = measured_shapes(runner, 1, 2), runner.run(request(shape=4))
    asked, fresh = planner_of(runner), planner_of(runner)
    asked.plan_continuation(state, record)
    later = replace(state, records=(*state.records, record))
    plans = [asked.plan(later), fresh.plan(later)]
    assert plans[0].configurations == plans[1].configurations
    assert plans[0].score == pytest.approx(plans[1].score)


def test_a_launch_begins_with_one_setting(runner: TableRunner) -> None:
    opened = planner_of(runner).plan(PlanningState())
    assert opened.extendable
    assert len(opened.live) == 1


# -- the study -------------------------------------------------------------------------------------


def test_a_study_goes_on_in_its_launches_and_tells_every_trial(
    runner: TableRunner, tmp_path: Path
) -> None:
    said: list[str] = []
    result = run_replay(
        runner.table.folder,
        runs_dir=tmp_path / "runs",
        name="study",
        report=False,
        max_probes=6,
        on_progress=lambda event: said.append(event.message) if event.kind == "note" else None,
    )
    records = read_trace(tmp_path / "runs" / "study" / "trace" / "probes.jsonl").records
    grown = [r for r in records if r.request.extendable and len(r.request.live) > 1]
    assert grown
    assert sum("continues with" in sentence for sentence in said) >= len(grown)
    assert all(len(r.measurements) == len(r.request.live) for r in records)
    study = optuna.load_study(
        study_name="study",
        storage=optuna.storages.JournalStorage(
            optuna.storages.journal.JournalFileBackend(
                str(tmp_path / "runs" / "study" / "study.journal")
            )
        ),
    )
    assert {t.state.name for t in study.trials} == {"COMPLETE"}
    assert len(study.trials) == sum(len(r.request.live) for r in records)
    assert result.spent.probes == len(records)


def test_the_launch_of_today_goes_on_and_is_not_made_again_for_its_other_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Question | None] = []
    continuation = CandidatePlanner.plan_continuation

    def watched(
        planner: CandidatePlanner, state: PlanningState, so_far: ProbeRecord
    ) -> ProbePlan | None:
        asked.append(state.question)
        return continuation(planner, state, so_far)

    monkeypatch.setattr(CandidatePlanner, "plan_continuation", watched)
    table = write_table(tmp_path / "table", shapes=(1, 2))

    def searched(name: str, **more: Any) -> list[ProbeRecord]:
        run_replay(table, runs_dir=tmp_path, name=name, report=False, max_probes=6, **more)
        return list(read_trace(tmp_path / name / "trace" / "probes.jsonl").records)

    first, *others = searched("whole")
    assert first.request.purpose == "baseline"
    assert first.request.live[0] == Settings(speed=5)
    assert len(first.request.live) > 1
    again = [each.request for each in others if each.request.launch == first.request.launch]
    assert {each.purpose for each in again} <= {"verify"}
    assert asked[0] is None
    # A limit relative to today is known as soon as its first window is, before the launch ends.
    asked.clear()
    searched("slowdown", max_slowdown=0.05)
    assert asked[0] is not None


def test_a_probe_goes_on_only_with_what_the_budget_still_holds(
    runner: TableRunner, tmp_path: Path
) -> None:
    whole_kJ = sum(runner.table.cost.energy_J([p.power_W]) for p in runner.group.points) / 1000
    budget_kJ = whole_kJ / 8
    result = run_replay(
        runner.table.folder,
        runs_dir=tmp_path / "runs",
        name="study",
        report=False,
        probe_budget_kJ=budget_kJ,
    )
    # What a probe will take is an estimate, that of a new launch by the launches before it.
    assert result.spent.energy_kJ <= 1.05 * budget_kJ


def test_a_probe_that_may_go_on_has_time_for_it(runner: TableRunner, tmp_path: Path) -> None:
    """After short probes the limit is a minute; a sweep of eight windows takes longer."""
    run_replay(runner.table.folder, runs_dir=tmp_path, name="study", report=False, max_probes=6)
    records = read_trace(tmp_path / "study" / "trace" / "probes.jsonl").records
    later = [r.request for r in records if r.request.purpose == "search"][2:]
    window, longest_s = later[0].window, max(record.wall_s for record in records)
    assert {r.extendable for r in later} >= {True}
    for asked in later:
        room_s = 8 * (window.settle_s + window.max_s) if asked.extendable else 0.0
        assert asked.time_limit_s >= 60.0 + room_s
        assert asked.time_limit_s <= max(60.0, 5 * longest_s) + room_s


# -- several in flight -----------------------------------------------------------------------------


def test_a_probe_waits_while_those_in_flight_would_teach_much(runner: TableRunner) -> None:
    planner = planner_of(runner)
    one, two = (Configuration(Settings(shape=shape), SPEEDS[0]) for shape in (1, 2))
    assert not planner.better_to_wait(PlanningState())
    assert planner.better_to_wait(PlanningState(in_flight=(one,)))
    records = (runner.run(request(shape=1)),)
    assert not planner.better_to_wait(PlanningState(records))
    assert planner.better_to_wait(PlanningState(records, (two,)))


def test_waiting_is_weighed_against_what_an_idle_node_draws(runner: TableRunner) -> None:
    planner = planner_of(runner)
    shapes = [Configuration(Settings(shape=shape), SPEEDS[0]) for shape in (1, 2, 3, 4)]
    records = (runner.run(request(shape=1)),)

    def waits(in_flight: int, idle_share: float) -> bool:
        flying = tuple(shapes[1 : 1 + in_flight])
        state = PlanningState(records, flying, idle_share=idle_share)
        return planner.better_to_wait(state)

    assert waits(1, idle_share=0.0)
    assert waits(1, idle_share=0.1)
    assert not waits(1, idle_share=0.8)
    # However much it draws, one result is not enough for many probes.
    assert waits(2, idle_share=1.0)
