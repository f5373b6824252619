"""Real probes: DeepSpeed processes over gloo on this machine, driven by the node agent."""

from __future__ import annotations

import json
import textwrap
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tuner.search_spaces.configuration import Configuration, Settings
from tuner.search_spaces.errors import InvalidConfiguration
from tuner.search_spaces.job import load_job
from tuner.workload.node import probe_run
from tuner.workload.node.platforms import detect_cluster
from tuner.workload.node.rank_group import ServerError
from tuner.workload.node.runner import LocalRunner
from tuner.workload.records.probe import ProbeRecord, ProbeRequest, WindowPolicy
from tuner.workload.records.trace import PHASE_NAME, read_phase, write_phase

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("one_fork_server")]

QUICK = WindowPolicy(min_s=0.5, min_steps=3, max_s=1.0)
CLUSTER = detect_cluster()


def request(name: str, time_limit_s: float = 300.0, **knobs: object) -> ProbeRequest:
    launch = Configuration.of(knobs).launch
    return ProbeRequest(name, launch, window=QUICK, time_limit_s=time_limit_s)


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalRunner]:
    folder = tmp_path_factory.mktemp("run")
    runner = LocalRunner(load_job(), CLUSTER, run_dir=folder)
    yield runner
    runner.close()


@pytest.mark.slow
def test_a_running_probe_tells_its_phases(
    runner: LocalRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, seen = runner.node.run_dir, [""]

    def write_and_read(run_dir: Path, probe_id: str, phase: str) -> None:
        write_phase(run_dir, probe_id, phase)
        if (told := read_phase(folder, "phases")) != seen[-1]:
            seen.append(told)

    monkeypatch.setattr(probe_run, "write_phase", write_and_read)
    launch = Settings(data_parallel=1, micro_batch=4)
    asked = (Settings(),) * 2
    record = runner.run(ProbeRequest("phases", launch, live=asked, window=QUICK))
    assert [m.live for m in record.measurements] == list(asked)
    assert record.measurements[1].started_s > record.measurements[0].started_s
    steps = ["launching", "warming up", "measuring 1 of 2", "measuring 2 of 2", "ending"]
    assert [phase for phase in seen if phase] == steps
    assert not (folder / "probes" / "phases" / PHASE_NAME).exists()


@pytest.mark.extra("tuner.workload.program.built_in_job")
def test_a_probe_measures_one_launch(runner: LocalRunner) -> None:
    """Its figures agree with each other, and its power samples are on its own clock."""
    from tuner.workload.records.trace import read_power

    record = runner.run(request("power", data_parallel=1, micro_batch=4))
    assert record.ok, record.failure
    (measurement,) = record.measurements
    assert measurement.steps >= 3
    assert measurement.window_s >= 0.5
    assert measurement.energy_J == pytest.approx(measurement.power_W * measurement.window_s)
    assert measurement.step_time_s == pytest.approx(measurement.window_s / measurement.steps)
    assert 0 < record.launch_s < record.wall_s
    assert record.energy_J > measurement.energy_J
    config = record.environment["deepspeed_config"]
    assert config["train_batch_size"] == load_job().global_batch
    again = ProbeRecord.from_json(json.loads(json.dumps(record.to_json())))
    assert again.request == record.request
    assert again.measurements[0].step_time_s == measurement.step_time_s

    samples = read_power(runner.node.run_dir / "trace" / "power" / "power.csv.gz")[0]
    assert len(samples) > 5
    assert 0 <= samples[0].time_s < samples[-1].time_s <= record.wall_s + 0.5
    (window,) = record.measurements
    marks = read_power(runner.node.run_dir / "trace" / "power" / "power.csv.gz")[1]
    phases = {"data", "forward", "backward", "communication", "optimizer"}
    assert {name for _, name in marks} == {*phases, "boundary"}
    closed_s = window.started_s + window.window_s
    inside = [name for at_s, name in marks if window.started_s <= at_s <= closed_s]
    assert inside.count("optimizer") == window.steps
    # The phases make up the steps; waits at boundaries belong to none.
    assert set(window.phases_s) == phases
    assert 0 < sum(window.phases_s.values()) <= window.step_time_s
    assert record.idle_W is not None
    assert record.idle_W > 0
    assert record.waiting_devices == CLUSTER.devices_per_node - 1
    assert record.environment["warm_up_steps"] >= 2
    assert len(window.power_blocks_W) >= 1


@pytest.mark.slow
def test_a_fresh_interpreter_measures_the_same_job(tmp_path: Path) -> None:
    runner = LocalRunner(load_job(), CLUSTER, run_dir=tmp_path, new_interpreter=True)
    try:
        record = runner.run(request("fresh", data_parallel=1, micro_batch=4))
        assert record.ok, record.failure
        assert record.environment["fresh_interpreter"] is True
    finally:
        runner.close()


@pytest.mark.extra("tuner.workload.program.built_in_job")
@pytest.mark.parametrize(
    ("knobs", "reason"),
    [
        ({"data_parallel": 1024, "micro_batch": 1}, "devices"),
        ({"data_parallel": 1, "micro_batch": 3}, "global batch"),
        ({"data_parallel": 1, "micro_batch": 1, "expert_parallel": 2}, "mixture-of-experts"),
    ],
)
def test_what_cannot_run_is_refused_with_the_reason(
    runner: LocalRunner, knobs: dict[str, object], reason: str
) -> None:
    with pytest.raises(InvalidConfiguration, match=reason):
        runner.run(request("never", **knobs))


def program(tmp_path: Path, body: str) -> Path:
    """A training program of the test's own: `body` runs once a step, after a real engine step."""
    path = tmp_path / "program.py"
    path.write_text(
        textwrap.dedent(
            """
            import argparse, json, os, signal, sys, time, torch, deepspeed, deepspeed.ops
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
            parser = argparse.ArgumentParser()
            parser.add_argument("--deepspeed_config")
            config = json.load(open(parser.parse_known_args()[0].deepspeed_config))
            deepspeed.init_distributed()
            rank = torch.distributed.get_rank()
            model = torch.nn.Linear(4, 4)
            engine, *_ = deepspeed.initialize(
                model=model, model_parameters=model.parameters(), config=config)
            for step in range(10**9):
                for _ in range(engine.gradient_accumulation_steps()):
                    engine.backward(engine(torch.ones(2, 4)).sum())
                    engine.step()
                time.sleep(0.02)
            """
        )
        + textwrap.indent(textwrap.dedent(body), "    ")
    )
    return path


@pytest.mark.slow
def test_deepspeeds_refusal_is_told_from_a_crash(tmp_path: Path) -> None:
    path = program(tmp_path, "pass")
    path.write_text(
        path.read_text().replace("rank = torch", "config['train_batch_size'] = 7; rank = torch")
    )
    runner = LocalRunner(load_job(), CLUSTER, run_dir=tmp_path, program=path)
    try:
        record = runner.run(request("refused", data_parallel=1, micro_batch=2))
        assert record.failure is not None
        assert record.failure.kind == "refused"
        assert "batch" in record.failure.message
    finally:
        runner.close()


@pytest.mark.extra("tuner.workload.program.built_in_job")
def test_what_is_compiled_waits_for_the_probe_that_needs_it_and_is_none_of_its_time(
    runner: LocalRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A baseline without offload once waited three minutes for CPU Adam."""
    built: list[Sequence[str]] = []

    def build(ops: Sequence[str]) -> float:
        built.append(tuple(ops))
        raise ServerError("no compiler")

    monkeypatch.setattr(runner.node.server, "load_ops", build)
    runner.prepare()
    assert built == []
    offload = {"optimizer_offload": "cpu", "zero_stage": 1}
    failed = runner.run(request("built", data_parallel=1, micro_batch=4, **offload))
    assert built == [("CPUAdamBuilder",)]
    assert failed.failure is not None
    assert failed.failure.message == "ranks could not be started: no compiler"

    monkeypatch.setattr("tuner.workload.node.probe_run.ops_needed", lambda launch, job: ("Slow",))
    monkeypatch.setattr(runner.node.server, "load_ops", lambda ops: time.sleep(1.0))
    began = time.monotonic()
    record = runner.run(request("late", data_parallel=1, micro_batch=4))
    assert record.ok
    assert record.wall_s < time.monotonic() - began - 0.9
    assert record.built_s > 0.9


@pytest.mark.slow
def test_cancel_ends_a_probe_from_another_thread(runner: LocalRunner) -> None:
    runner.prepare()
    threading.Timer(2.5, runner.cancel).start()
    long = WindowPolicy(min_s=60.0, max_s=60.0)
    launch = Settings(data_parallel=1, micro_batch=4)
    record = runner.run(ProbeRequest("cancelled", launch, window=long))
    assert record.failure is not None
    assert record.failure.kind == "cancelled"
    assert record.wall_s < 30
