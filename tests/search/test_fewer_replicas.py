"""Launches on fewer replicas first: which, what they foretell, and how its error is learned."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

import tuner
from tests.search.test_sampler import plan_of, study_of
from tuner.models.analytic.model import Prediction
from tuner.search.fewer_replicas import COMMON_SD, LAUNCH_SD, FewerReplicas
from tuner.search.observations import Observation
from tuner.search.sampler import CandidateSampler
from tuner.search_spaces.candidates import Candidates
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.errors import InputError
from tuner.study.callbacks import Progress
from tuner.testing.studies import write_table
from tuner.workload.trace import read_trace

CLOCKS = (800, 1100, 1400)
CANDIDATES = Candidates.from_configurations(
    Configuration.of(data_parallel=d, micro_batch=b, clock_MHz=c)
    for d in (2, 4, 8, 16)
    for b in (1, 2, 4, 8)
    for c in CLOCKS
)
CONFIGURATIONS = CANDIDATES.configurations
MEMBERS = [np.array(CANDIDATES.indices_of_launch(launch)) for launch in CANDIDATES.launches]
LAUNCH_OF = np.repeat(np.arange(len(MEMBERS)), len(CLOCKS))
OPEN = np.zeros(len(CONFIGURATIONS), dtype=bool)
#: Truth over the models: what 8 and 16 replicas take longer and draw more than predicted.
OFF = np.array([0.2, 0.1])


class Models:
    """Models that are right but for what more than 4 replicas cost besides."""

    def predict(self, configurations: Sequence[Configuration]) -> Prediction:
        replicas = np.array([c.data_parallel for c in configurations], dtype=float)
        batch = np.array([c.micro_batch for c in configurations], dtype=float)
        clock = np.array([c.get("clock_MHz") for c in configurations], dtype=float) / 1400
        time_s = 100 / replicas**0.9 * (1 + 1 / batch) * (0.4 + 0.6 / clock)
        power_W = replicas * (100 + 250 * clock**2.5)
        return Prediction(time_s, power_W, np.full(len(replicas), 1e9))


def index(replicas: int, batch: int, clock: int) -> int:
    wanted = Configuration.of(data_parallel=replicas, micro_batch=batch, clock_MHz=clock)
    return CONFIGURATIONS.index(wanted)


def predicted_log() -> np.ndarray:
    said = Models().predict(CONFIGURATIONS)
    return np.log(np.column_stack([said.step_time_s, said.power_W]))


def observed(candidate: int) -> Observation:
    configuration = CONFIGURATIONS[candidate]
    log = predicted_log()[candidate] + OFF * (configuration.data_parallel > 4)
    time_s, power_W = np.exp(log)
    return Observation(candidate, configuration, float(time_s), float(power_W), 0.001, math.nan)


def fewer() -> FewerReplicas:
    return FewerReplicas(CONFIGURATIONS, MEMBERS, LAUNCH_OF, predicted_log())


def test_a_quarter_of_the_replicas_is_tried_first_and_never_one() -> None:
    tried, pair = fewer(), [observed(index(8, 1, 800)), observed(index(2, 1, 800))]
    assert tried.first(index(8, 2, 1100), pair, [], OPEN) == index(2, 2, 1100)
    # Half of the joules are not worth a probe, since the full launch often follows.
    assert fewer().first(index(4, 2, 800), pair, [], OPEN) is None
    assert fewer().first(index(2, 2, 800), pair, [], OPEN) is None


def test_the_first_pair_is_made_of_a_launch_that_is_measured() -> None:
    measured = [observed(index(8, 1, 800))]
    assert fewer().first(index(8, 2, 800), measured, [], OPEN) == index(2, 1, 800)
    closed = OPEN.copy()
    closed[index(2, 1, 800)] = True  # failed, or in flight
    assert fewer().first(index(8, 2, 800), measured, [], closed) is None
    assert fewer().first(index(16, 2, 800), measured, [], OPEN) is None  # nothing at 16 replicas


def test_launches_that_are_measured_in_flight_or_tried_are_launched_in_full() -> None:
    pair = [observed(index(8, 1, 800)), observed(index(2, 1, 800))]
    assert fewer().first(index(8, 1, 1100), pair, [], OPEN) is None
    assert fewer().first(index(8, 2, 800), pair, [index(8, 2, 1100)], OPEN) is None
    tried = fewer()
    assert tried.first(index(8, 2, 800), pair, [], OPEN) is not None
    assert tried.first(index(8, 2, 800), pair, [], OPEN) is None


def test_it_stops_where_the_full_launch_follows_every_time() -> None:
    tried = fewer()
    measured = [observed(index(d, 1, 800)) for d in (2, 4, 8, 16)]
    for batch in (2, 4):
        assert tried.first(index(16, batch, 800), measured, [], OPEN) is not None
        measured += [observed(index(4, batch, 800)), observed(index(16, batch, 800))]
    assert tried.first(index(16, 8, 800), measured, [], OPEN) is None  # 3 of 4 will, and 1 / 4


def test_a_smaller_launch_foretells_the_full_one_with_the_learned_error() -> None:
    tried, pair = fewer(), [observed(index(8, 1, 800)), observed(index(2, 1, 800))]
    small = tried.first(index(8, 2, 1100), pair, [], OPEN)
    assert small is not None
    measured = [*pair, observed(small)]
    (row,) = tried.foretold(measured)
    true = observed(index(8, 2, 1100))
    assert row.candidate == true.candidate
    assert row.delivered == true.delivered
    # One pair is believed up to the spread between launches.
    weight = COMMON_SD**2 / (COMMON_SD**2 + LAUNCH_SD**2)
    left = (1 - weight) * OFF
    assert math.log(true.step_time_s / row.step_time_s) == pytest.approx(left[0])
    assert math.log(true.power_W / row.power_W) == pytest.approx(left[1])
    sd = math.sqrt(LAUNCH_SD**2 + (1 - weight) * COMMON_SD**2)
    assert row.step_time_rse == pytest.approx(math.hypot(sd, 0.001))
    assert row.power_rse == pytest.approx(sd)
    # The full launch's own windows replace it, and its pair narrows the error.
    assert tried.foretold([*measured, true]) == []
    assert tried.first(index(8, 4, 1100), [*measured, true], [], OPEN) == index(2, 4, 1100)
    (narrower,) = tried.foretold([*measured, true, observed(index(2, 4, 1100))])
    assert narrower.power_rse < row.power_rse


def test_a_smaller_launch_that_is_measured_needs_no_probe() -> None:
    tried = fewer()
    measured = [observed(index(d, b, 800)) for d, b in ((8, 1), (2, 1), (2, 2))]
    assert not fewer().prefer_measured(index(8, 2, 800), measured[:1])  # no pair
    assert not fewer().prefer_measured(index(8, 1, 800), measured)  # measured itself
    assert tried.prefer_measured(index(8, 2, 800), measured)
    assert [row.candidate for row in tried.foretold(measured)] == [index(8, 2, 800)]
    assert not tried.prefer_measured(index(8, 2, 800), measured)


def test_a_full_launch_waits_for_its_smaller_one() -> None:
    tried, pair = fewer(), [observed(index(8, 1, 800)), observed(index(2, 1, 800))]
    small = tried.first(index(8, 2, 800), pair, [], OPEN)
    assert small is not None
    assert tried.held([]) == []
    assert sorted(tried.held([small])) == [index(8, 2, clock) for clock in CLOCKS]


def search(most: int, fewer_replicas_first: bool) -> tuple[list[Configuration], set[str]]:
    """Return what a search probes, and its reasons."""
    sampler = CandidateSampler(
        CANDIDATES, prior=Models(), seed=0, fewer_replicas_first=fewer_replicas_first
    )
    study = study_of(sampler)
    probed: list[Configuration] = []
    reasons: set[str] = set()
    while len(probed) < most:
        plan = plan_of(sampler, study)
        reasons.add(plan.reason)
        for configuration in plan.configurations:
            trial = study.ask(sampler.distributions())
            one = observed(CONFIGURATIONS.index(configuration))
            trial.set_user_attr("configuration", configuration.key)
            trial.set_user_attr("step_time_s", one.step_time_s)
            trial.set_user_attr("power_W", one.power_W)
            trial.set_user_attr("step_time_rse", 0.001)
            study.tell(trial, [one.step_time_s * one.power_W, one.step_time_s])
            probed.append(configuration)
    return probed, reasons


def test_a_search_tries_fewer_replicas_only_if_asked() -> None:
    probed, reasons = search(8, fewer_replicas_first=True)
    assert "fewer replicas first" in reasons
    assert len(set(probed)) == len(probed)
    assert "fewer replicas first" not in search(8, fewer_replicas_first=False)[1]


def test_a_study_tries_fewer_replicas_first(tmp_path: Path) -> None:
    space = tmp_path / "space.toml"
    space.write_text(
        "[knobs]\ndata_parallel = [2, 8]\nmicro_batch = [2, 4, 8]\nzero_stage = [0, 1, 2]\n"
        "clock_MHz = { count = 2, lowest_share = 0.6 }\n"
    )
    events: list[Progress] = []
    result = tuner.optimize(
        "opt-350m",
        cluster="a100-8",
        space=str(space),
        executor="simulated",
        search=tuner.SearchSettings(max_probes=7, verify=False, fewer_replicas_first=True),
        runs_dir=tmp_path / "runs",
        report=False,
        on_progress=events.append,
    )
    started = [e for e in events if e.kind == "started" and "fewer replicas" in e.message]
    assert started
    for event in started:
        assert event.request is not None
        assert event.request.launch["data_parallel"] == 2
    probed = {
        configuration.key
        for record in read_trace(tmp_path / "runs" / result.name / "trace" / "probes.jsonl").records
        for configuration in record.request.configurations()
    }
    assert {point.configuration.key for point in result.front_points} <= probed


def test_it_needs_our_sampler_and_the_models(tmp_path: Path) -> None:
    table, settings = (
        write_table(tmp_path / "table"),
        tuner.SearchSettings(max_probes=4, fewer_replicas_first=True),
    )
    with pytest.raises(InputError, match="--fewer-replicas-first is for the sampler joulefront"):
        tuner.replay(table, search=settings, sampler="random", runs_dir=tmp_path / "runs")
    with pytest.raises(InputError, match="needs predictions of the models"):
        tuner.replay(table, search=settings, runs_dir=tmp_path / "runs")
