"""Which probes are told what the front reaches, so that their windows may end early."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.studies import LONG_JOB, FormulaRunner, TalliedRunner, record, run_optimize
from tuner.answer.choice import front_of
from tuner.answer.posterior import LaunchPosterior, Windows
from tuner.answer.state import points_of
from tuner.executors.simulated_time import SimulatedExecutor
from tuner.problem.constraints import Constraints
from tuner.search_spaces.configuration import Settings
from tuner.search_spaces.job import TrainingJob
from tuner.study.rules import front_to_beat
from tuner.workload.records.probe import ProbeRequest

pytestmark = pytest.mark.usefixtures("next_candidates")


def asked(folder: Path, job: TrainingJob = LONG_JOB, **options: object) -> list[ProbeRequest]:
    runner = TalliedRunner(FormulaRunner())
    run_optimize(
        job,
        cluster="cpu-2",
        executor=SimulatedExecutor(runner),
        runs_dir=folder,
        report=False,
        max_probes=8,
        **options,
    )
    # A launch that is extended is simulated anew with the longer list.
    return list({request.probe_id: request for request in runner.asked}.values())


def test_only_probes_of_the_search_may_end_early(tmp_path: Path) -> None:
    requests = asked(tmp_path)
    assert {r.purpose for r in requests} >= {"baseline", "search", "verify"}
    for request in requests:
        assert bool(request.front) == (request.purpose == "search")


def test_a_training_of_unknown_length_has_figures_of_a_step_to_beat(tmp_path: Path) -> None:
    baseline, first, *_ = asked(tmp_path, replace(LONG_JOB, steps=None))
    (today,) = FormulaRunner().run(baseline).measurements
    ((step_time_s, energy_J),) = first.front
    assert step_time_s == pytest.approx(today.step_time_s, rel=0.3)
    assert energy_J == pytest.approx(today.energy_per_step_J, rel=0.3)


def test_under_a_limit_of_power_every_window_is_measured_to_its_target(tmp_path: Path) -> None:
    assert not any(request.front for request in asked(tmp_path, power_cap_W=1000.0))


def test_what_the_front_reaches_is_of_one_step_and_of_the_upper_ends() -> None:
    points = points_of(LaunchPosterior.of(Windows.of([record()])), 100)
    front = front_of(points)
    ((step_time_s, energy_J),) = front_to_beat(Constraints(), front, 100)
    assert step_time_s == pytest.approx(points[0].inferred.time_interval_s.high / 100)
    assert step_time_s > 0.5
    assert energy_J > 0.5 * 20.0
    # Steps at twice the batch are half as many, and each takes twice as much.
    ((twice_s, _),) = front_to_beat(Constraints(), front, 50)
    assert twice_s == pytest.approx(2 * step_time_s)


@pytest.mark.parametrize(
    "constraints",
    [
        Constraints(power_cap_W=100.0),
        Constraints(peak_power_W=100.0),
        Constraints(objective="cost", price_per_gpu_hour=2.0),
    ],
)
def test_where_a_beaten_configuration_may_be_the_choice_there_is_no_front_to_beat(
    constraints: Constraints,
) -> None:
    front = front_of(points_of(LaunchPosterior.of(Windows.of([record()])), 100))
    assert front_to_beat(constraints, front, 100) == ()
    assert ProbeRequest("p0", Settings(data_parallel=1)).front == ()
