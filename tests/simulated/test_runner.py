"""The simulated runner: a runner like the others, predicted and never measured."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.studies import run_optimize as optimize
from tuner.api import load_result
from tuner.executors.base import ExecutorKind, Opening
from tuner.executors.simulated_time import SimulatedExecutor
from tuner.models.analytic.model import AnalyticModel
from tuner.search_spaces.cluster import load_cluster
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.search_spaces.errors import UnknownName
from tuner.search_spaces.job import load_job
from tuner.simulated import KIND
from tuner.simulated.runner import Conditions, SimulatedRunner
from tuner.testing.executors import ExecutorContract
from tuner.workload.records.probe import ProbeRecord, ProbeRequest, Runner

JOB = load_job("opt-350m")
CLUSTER = load_cluster("gh200-32")


class TestSimulated(ExecutorContract):
    def kind(self) -> ExecutorKind:
        return KIND

    def opening(self, run_dir: Path) -> Opening:
        return Opening(JOB, CLUSTER, run_dir, print, ranks=8)

    def request(self) -> ProbeRequest:
        launch = Configuration.of({"data_parallel": 8, "micro_batch": 2}).launch
        return ProbeRequest("p0001", launch, (Settings(),), time_limit_s=1000)


QUIET = Conditions(
    time_noise=0, power_noise=0, step_noise=0, first_window=0, warm_up=0, crash_rate=0
)


def ask(
    runner: SimulatedRunner, probe_id: str = "p0001", live: Any = ({},), **knobs: Any
) -> ProbeRecord:
    launch = Configuration.of({"data_parallel": 8, "micro_batch": 2, **knobs}).launch
    lives = tuple(Settings(each) for each in live)
    return runner.run(ProbeRequest(probe_id, launch, lives, time_limit_s=1000))


def runner(**conditions: float) -> SimulatedRunner:
    return SimulatedRunner(JOB, CLUSTER, conditions=replace(QUIET, **conditions))


def test_it_is_a_runner_that_says_it_measured_nothing() -> None:
    simulated = SimulatedRunner(JOB, CLUSTER)
    assert isinstance(simulated, Runner)
    assert simulated.meter.name == "simulated"
    assert simulated.meter.estimated
    assert "nothing was measured" in simulated.meter.source
    record = ask(simulated)
    # Plain numbers, that a toml or a JSON file can hold.
    for value in (record.wall_s, record.launch_s, record.energy_J):
        assert type(value) is float
    assert record.meter == simulated.meter
    assert "predicted, not measured" in record.measurements[0].flags
    assert ProbeRecord.from_json(record.to_json()).measurements[0].steps > 0
    module = SimulatedRunner(load_job("qwen2.5-7b"), load_cluster("jupiter-32"))
    assert (simulated.meter.scope, module.meter.scope) == ("gpu", "module")


def test_without_noise_it_answers_the_models() -> None:
    live = ({"clock_MHz": 1980}, {"clock_MHz": 1230})
    record = ask(runner(), live=live)
    said = AnalyticModel(JOB, CLUSTER).predict(list(record.request.configurations()))
    for i, measurement in enumerate(record.measurements):
        assert measurement.step_time_s == pytest.approx(said.step_time_s[i])
        assert measurement.power_W == pytest.approx(said.power_W[i])
        joules = measurement.power_W * measurement.window_s
        assert measurement.energy_J == pytest.approx(joules)
        assert measurement.peak_memory_bytes == int(said.memory_bytes[i])
        assert measurement.window_s >= record.request.window.min_s
        assert measurement.delivered["clock_MHz"] == pytest.approx(live[i]["clock_MHz"])


def test_time_and_energy_of_a_probe_add_up() -> None:
    record = ask(runner(), live=({"clock_MHz": 1980}, {"clock_MHz": 1230}))
    first, second = record.measurements
    settle = record.request.window.settle_s
    assert first.started_s == pytest.approx(record.launch_s + settle)
    assert second.started_s == pytest.approx(first.started_s + first.window_s + settle)
    assert record.wall_s == pytest.approx(second.started_s + second.window_s)
    windows = first.energy_J + second.energy_J
    assert (
        windows
        < record.energy_J
        < windows + record.launch_s * first.power_W + (2 * settle * first.power_W)
    )


def test_draws_depend_on_the_probe_and_nothing_else() -> None:
    noisy = SimulatedRunner(JOB, CLUSTER, seed=3)
    again = SimulatedRunner(JOB, CLUSTER, seed=3)
    ask(again, "p0000")  # what ran before does not matter
    assert ask(noisy).to_json() == ask(again).to_json()
    assert ask(noisy, "p0002").energy_J != ask(noisy).energy_J
    assert ask(SimulatedRunner(JOB, CLUSTER, seed=4)).energy_J != ask(noisy).energy_J


@pytest.mark.slow
def test_the_noise_is_as_large_as_it_says() -> None:
    noisy = runner(power_noise=0.02)
    watts = [ask(noisy, f"p{i:04d}").measurements[0].power_W for i in range(300)]
    mean = sum(watts) / len(watts)
    spread = math.sqrt(sum((w / mean - 1) ** 2 for w in watts) / (len(watts) - 1))
    assert spread == pytest.approx(0.02, rel=0.15)
    assert mean == pytest.approx(ask(runner()).measurements[0].power_W, rel=0.005)


def test_the_first_window_reads_low_and_devices_warm_up() -> None:
    live = ({"clock_MHz": 1980},) * 2
    first, second = ask(runner(first_window=0.05), live=live).measurements
    assert first.power_W == pytest.approx(0.95 * second.power_W)
    first, second = ask(runner(warm_up=0.2, warm_up_s=20.0), live=live).measurements
    assert first.power_W < second.power_W


def test_what_does_not_fit_runs_out_of_memory_at_a_launchs_cost() -> None:
    big = SimulatedRunner(load_job("qwen2.5-7b"), CLUSTER)
    record = ask(big, data_parallel=1)
    assert record.failure.kind == "out_of_memory"
    assert "device" in record.failure.message
    assert record.wall_s > 0
    assert record.energy_J > 0
    little = replace(CLUSTER, host_memory_bytes=10**10)
    hosted = SimulatedRunner(load_job("qwen2.5-7b"), little)
    record = ask(hosted, zero_stage=2, optimizer_offload="cpu", micro_batch=1)
    assert "host" in record.failure.message


def test_other_failures() -> None:
    crashed = ask(runner(crash_rate=1.0)).failure
    assert crashed.kind == "crash"
    refused = ask(runner(), data_parallel=7)
    assert refused.failure.kind == "refused"
    assert refused.energy_J == refused.wall_s == 0
    launch = Configuration.of(data_parallel=8, micro_batch=2).launch
    limit_s = runner().run(ProbeRequest("p1", launch)).wall_s + 5
    late = runner().run(
        ProbeRequest("p1", launch, (Settings(), Settings(clock_MHz=345)), time_limit_s=limit_s)
    )
    assert late.failure.kind == "time_limit"
    assert len(late.measurements) == 1  # what it had measured is kept
    with pytest.raises(UnknownName, match="comm_sm_number"):
        runner().run(ProbeRequest("p1", Settings(comm_sm_number=3)))


def test_a_cluster_can_depart_from_the_models_the_same_way_every_time() -> None:
    off = runner(model_error=0.2)
    times = [ask(off, f"p{i}").measurements[0].step_time_s for i in range(2)]
    assert times[0] == pytest.approx(times[1])
    assert times[0] != pytest.approx(ask(runner()).measurements[0].step_time_s, rel=0.01)


def test_many_probes_run_together_on_simulated_time() -> None:
    alone = ask(runner()).wall_s
    executor = SimulatedExecutor(runner(), capacity=16)
    launch = Configuration.of(data_parallel=8, micro_batch=2).launch
    for i in range(16):
        executor.submit(ProbeRequest(f"p{i:04d}", launch))
    while executor.wait() is not None:
        pass
    assert executor.now_s() < 2 * alone


def test_a_cluster_of_another_kind_is_planned_and_says_so(tmp_path: Any) -> None:
    said: list[str] = []
    result = optimize(
        "qwen2.5-7b",
        cluster="jupiter-32",
        executor="simulated",
        max_probes=6,
        runs_dir=tmp_path,
        on_progress=lambda event: said.append(event.message),
    )
    assert result.points
    assert all(point.meter.name == "simulated" for point in result.points)
    assert any("prediction" in sentence for sentence in said)
    assert any("known error" in sentence for sentence in said)
    page = result.report_path.read_text(encoding="utf-8")
    assert "predicted, nothing was measured" in page
    again = load_result(result.run_dir)
    assert {p.configuration for p in again.points} == {p.configuration for p in result.points}
    memory = load_cluster("jupiter-32").device.memory_bytes
    assert all((point.peak_memory_bytes or 0) <= memory for point in result.points)
