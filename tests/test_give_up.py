"""Early end: what the first window of a sweep leaves to visit, from the sampler to the study."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import optuna
import pytest
from study_tools import write_table

from search_spaces.candidates import Candidates
from search_spaces.configuration import Configuration, Settings
from tuner.decide import Constraints
from tuner.sampler import CandidateSampler
from tuner.settings import SamplerDesign
from tuner.study import StudyBook
from tuner.sweep import Sweep, finish, grow
from workload.agent import Probe
from workload.probe import GiveUp, Measurement, ProbeRecord, ProbeRequest, WindowPolicy
from workload.replay import TableRunner
from workload.table import load_table

optuna.logging.set_verbosity(optuna.logging.ERROR)

SPEEDS = tuple(Settings(speed=speed) for speed in (3, 1, 5))


def window(step_time_s: float, power_W: float) -> Measurement:
    return Measurement(SPEEDS[0], 1, step_time_s, step_time_s, step_time_s * power_W, power_W)


def test_a_setting_is_passed_over_only_where_one_point_beats_its_hope_on_both_axes() -> None:
    rule = GiveUp(front=((1.0, 100.0), (2.0, 50.0)), reach=((1.0, 1.0), (0.5, 1.0), (1.0, 0.9)))
    assert rule.worth_visiting(SPEEDS, window(4.0, 100.0)) == []  # 2 s, 200 J and 4 s, 360 J
    assert rule.worth_visiting(SPEEDS, window(1.9, 60.0)) == [SPEEDS[1]]  # 0.95 s; 1.9 s, 103 J
    assert rule.worth_visiting(SPEEDS, window(2.1, 24.0)) == [SPEEDS[1], SPEEDS[2]]


def test_a_request_and_its_record_keep_it_in_json() -> None:
    rule = GiveUp(front=((1.0, 100.0),), reach=((1.0, 1.0), (0.5, 1.0), (1.0, 0.9)))
    request = ProbeRequest("p0000", Settings(shape=1), SPEEDS, give_up=rule)
    assert ProbeRequest.from_json(request.to_json()) == request
    assert "give_up" not in ProbeRequest("p0000", Settings(shape=1)).to_json()


@pytest.fixture
def runner(tmp_path: Path) -> TableRunner:
    return TableRunner(load_table(write_table(tmp_path)))


def probe(runner: TableRunner, front: tuple[tuple[float, float], ...]) -> ProbeRecord:
    rule = GiveUp(front, ((1.0, 1.0),) * len(SPEEDS))
    return runner.run(ProbeRequest("p0000", Settings(shape=1), SPEEDS, give_up=rule))


def test_a_replayed_probe_pays_only_for_what_it_visits(runner: TableRunner) -> None:
    whole, beaten = probe(runner, ()), probe(runner, ((1e-9, 1e-9),))
    assert [m.live for m in whole.measurements] == list(SPEEDS)
    assert whole.given_up == ()
    assert [m.live for m in beaten.measurements] == [SPEEDS[0]]
    assert beaten.given_up == SPEEDS[1:]
    assert beaten.ok
    cost, power_W = runner.table.cost, runner._points[beaten.request.configurations()[0]].power_W
    assert beaten.energy_J == pytest.approx(cost.energy_J([power_W]))
    assert ProbeRecord.from_json(whole.to_json()).given_up == ()


def test_what_was_passed_over_may_be_proposed_again(runner: TableRunner) -> None:
    configurations = [point.configuration for point in runner.group.points]
    sampler = CandidateSampler(Candidates.from_configurations(configurations), seed=0)
    book = StudyBook(
        name="give up",
        storage=optuna.storages.InMemoryStorage(),
        sampler=sampler,
        steps=1,
        constraints=Constraints(),
        driver="test",
        identity="test",
    )
    record = probe(runner, ((1e-9, 1e-9),))
    book.ask(record.request)
    book.tell(record)
    failures = [trial.user_attrs.get("failure") for trial in book.study.trials]
    assert sorted(failures, key=str) == [None, "given_up", "given_up"]
    seen = sampler._read(book.study)
    assert [sampler._configurations[i].live for i in seen.closed] == [SPEEDS[0]]
    assert not seen.failed_launches


# -- building a sweep ------------------------------------------------------------------------------


def sweep_of(level: float, *, front: float = 0.0, rule: bool = True) -> Sweep:
    """Five settings along a trade-off, at `level` in log time and energy from a front's point."""
    rng = np.random.default_rng(0)
    own = rng.normal(0, 0.1, (128, 1)) + level
    slope = np.linspace(-0.1, 0.1, 5) + rng.normal(0, 0.005, (128, 5))
    point = np.array([[front, front]])
    return Sweep(
        own + slope,
        own - slope,
        point,
        np.array([1.0, 1.0]),
        beaten_by=point if rule else None,
    )


def test_a_launch_that_is_surely_good_is_visited_whole_and_one_that_is_bad_hardly() -> None:
    good, bad = sweep_of(-0.8), sweep_of(0.8)
    for sweep in (good, bad):
        sweep.add(sweep.decisive(np.ones(5)))
    assert good.chance.min() == 1.0
    assert sorted(bad.chance)[:4] == [0.0] * 4
    assert bad.gains().max() == 0.0


def test_the_joules_of_a_sweep_are_those_that_are_expected_to_be_spent() -> None:
    sweep, whole = sweep_of(0.1), sweep_of(0.1, rule=False)
    _, joules = grow(sweep, 10.0, np.ones(5), 5, 1.0)
    joules += finish(sweep, 10.0, np.ones(5), 5)
    assert joules == pytest.approx(10 + sweep.chance[sweep.added].sum())
    _, all_joules = grow(whole, 10.0, np.ones(5), 5, 1.0)
    all_joules += finish(whole, 10.0, np.ones(5), 5)
    assert joules < all_joules == 10 + len(whole.added)
    assert sweep.give_up() is not None
    assert whole.give_up() is None


def test_what_would_be_come_back_for_is_visited_now_where_launches_are_dear() -> None:
    cheap, dear = sweep_of(-0.3, rule=False), sweep_of(-0.3, rule=False)
    for sweep, launch_J in ((cheap, 0.0), (dear, 1000.0)):
        sweep.add(0)
        finish(sweep, launch_J, np.ones(5), 5)
    assert len(dear.added) == 5
    assert len(cheap.added) <= len(dear.added)


# -- several in flight -----------------------------------------------------------------------------


def test_a_probe_waits_while_those_in_flight_would_teach_much(runner: TableRunner) -> None:
    configurations = [point.configuration for point in runner.group.points]
    candidates = Candidates.from_configurations(configurations)
    sampler = CandidateSampler(candidates, seed=0)
    greedy = CandidateSampler(candidates, design=SamplerDesign(in_flight_share=math.inf))
    study = optuna.create_study(directions=["minimize", "minimize"], sampler=sampler)

    def ask(shape: int) -> optuna.Trial:
        trial = study.ask(sampler.distributions())
        trial.set_user_attr("configuration", Configuration(Settings(shape=shape), SPEEDS[0]).key)
        return trial

    assert not sampler.better_to_wait(study)
    trial = ask(1)
    assert sampler.better_to_wait(study)
    assert not greedy.better_to_wait(study)
    trial.set_user_attr("step_time_s", 1.0)
    trial.set_user_attr("power_W", 10.0)
    study.tell(trial, [10.0, 1.0])
    assert not sampler.better_to_wait(study)
    ask(2)
    assert sampler.better_to_wait(study)


# -- in the agent ----------------------------------------------------------------------------------


class Visited(Probe):
    """The agent's probe without ranks: a visit takes no time and measures what it is told."""

    def __init__(self, request: ProbeRequest) -> None:
        self._request, self._measurements, self._given_up = request, [], ()
        self.visits: list[Settings] = []

    def _visit(self, live: Settings, *_: object) -> float:
        self.visits.append(live)
        self._measurements.append(replace(window(1.0, 100.0), live=live))
        return 1.0


@pytest.mark.parametrize(
    ("front", "left"), [(((0.5, 50.0),), ()), (((2.0, 200.0),), SPEEDS[1:]), ((), SPEEDS[1:])]
)
def test_the_agent_visits_the_deciding_setting_first(front: tuple, left: tuple) -> None:
    rule = GiveUp(front, ((1.0, 1.0),) * len(SPEEDS))
    policy = WindowPolicy(check_drift=False)
    probe = Visited(ProbeRequest("p0000", Settings(shape=1), SPEEDS, policy, give_up=rule))
    probe.measure(None, None, 1.0, ())  # type: ignore[arg-type]
    assert probe.visits[0] == SPEEDS[0]
    assert set(probe.visits[1:]) == set(left)
    assert set(probe._given_up) == set(SPEEDS[1:]) - set(left)


def test_without_a_rule_the_agent_visits_all_in_an_order_of_its_own() -> None:
    orders = set()
    for number in range(12):
        probe = Visited(
            ProbeRequest(f"p{number}", Settings(shape=1), SPEEDS, WindowPolicy(check_drift=False))
        )
        probe.measure(None, None, 1.0, ())  # type: ignore[arg-type]
        assert set(probe.visits) == set(SPEEDS)
        orders.add(tuple(probe.visits))
    assert len(orders) > 1
