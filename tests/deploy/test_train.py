"""Training under a point: drift detection, and a real job on this machine's cores."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import tuner
from tests.support.studies import METER, FormulaRunner, run_optimize
from tests.waiting import wait_until
from tuner.deploy.train import LEAST_BLOCKS, ConfidenceSequence, DriftMonitor, Expectation
from tuner.executors.simulated_time import SimulatedExecutor
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.errors import InputError

EXPECTED = Expectation("data_parallel=2", 0.5, 100.0, (0.495, 0.505), (98.0, 102.0), 1000, METER)


def drifts(monitor: DriftMonitor, times: np.ndarray, powers: np.ndarray) -> list[str]:
    return [
        drift.quantity
        for time_s, power_W in zip(times, powers, strict=True)
        for drift in monitor.add_block(10, 10 * time_s, 10 * time_s * power_W)
    ]


def test_a_confidence_sequence_holds_at_all_times_together() -> None:
    """Looked at after each of 400 values, it leaves out the mean in few of many series."""
    rng = np.random.default_rng(0)
    left_out = 0
    for _ in range(200):
        sequence, ever = ConfidenceSequence(0.05), False
        for value in rng.normal(0, 0.02, 400):
            sequence.add(value)
            low, high = sequence.interval
            ever |= not low <= 0 <= high
        left_out += ever
    assert left_out <= 20  # 5 % of 200 is 10; the few first values are only nearly normal


def test_no_drift_is_reported_of_a_job_that_runs_as_expected() -> None:
    rng = np.random.default_rng(1)
    monitor = DriftMonitor(EXPECTED)
    times = 0.5 * np.exp(rng.normal(0, 0.01, 300))
    assert drifts(monitor, times, np.full(300, 100.0)) == []
    summary = monitor.summary()
    assert summary.steps == 3000
    assert summary.observed["step_time_s"] == pytest.approx(0.5, rel=0.01)
    assert "No drift" in summary.sentence
    assert "(estimated)" in summary.sentence
    json.dumps(summary.to_json())


def test_a_slower_job_is_reported_once_and_soon() -> None:
    rng = np.random.default_rng(2)
    monitor = DriftMonitor(EXPECTED)
    times = 0.55 * np.exp(rng.normal(0, 0.01, 100))
    found = []
    for i, time_s in enumerate(times):
        found += [(i, d) for d in monitor.add_block(10, 10 * time_s, 1000 * time_s)]
    ((when, drift),) = found
    assert drift.quantity == "step time"
    assert LEAST_BLOCKS - 1 <= when < 20
    assert drift.low < 0.10 < drift.high
    assert "10." in drift.sentence or "9." in drift.sentence


def test_a_drift_that_begins_late_is_detected() -> None:
    rng = np.random.default_rng(3)
    monitor = DriftMonitor(EXPECTED)
    power = np.concatenate([np.full(400, 100.0), np.full(80, 115.0)]) * np.exp(
        rng.normal(0, 0.01, 480)
    )
    assert drifts(monitor, np.full(480, 0.5), power)[:1] == ["power"]


def test_nothing_is_reported_of_too_few_blocks() -> None:
    monitor = DriftMonitor(EXPECTED)
    assert drifts(monitor, np.full(LEAST_BLOCKS - 1, 2.0), np.full(LEAST_BLOCKS - 1, 300.0)) == []
    assert "too short to tell" in monitor.summary().sentence
    assert "could be compared" in DriftMonitor(EXPECTED).summary().sentence


# ---- a real job


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of this machine whose figures are a model's: no machine runs as expected."""
    result = run_optimize(
        executor=SimulatedExecutor(FormulaRunner()),
        runs_dir=tmp_path / "runs",
        name="study",
        report=False,
        max_probes=3,
        verify=False,
        baseline=Configuration.of(data_parallel=1, micro_batch=2),
    )
    assert result.run_dir is not None
    return Path(result.run_dir)


def test_what_cannot_be_started_is_refused(run: Path) -> None:
    from tuner.deploy.train import train

    result = tuner.load_result(run)
    with pytest.raises(InputError, match="without a launcher"):
        train(result, program=["srun", "python", __file__])
    with pytest.raises(InputError, match="mpirun starts ranks itself"):
        train(result, program=["mpirun", "train.py"])
    with pytest.raises(InputError, match="there is no script"):
        train(result, program=["nowhere.py"])
    with pytest.raises(InputError, match="measured point"):
        train(result, "99")


@pytest.mark.slow  # a whole training, twice metered; the shorter ones below start the same ranks
@pytest.mark.real
def test_a_real_job_trains_to_its_end_and_is_compared(run: Path, monkeypatch) -> None:
    from tuner.deploy import train as module

    monkeypatch.setattr(module, "BLOCK_S", 0.2)
    output, said = io.StringIO(), []
    done = module.train(
        tuner.load_result(run), "baseline", steps=20, announce=said.append, output=output
    )
    assert done.failure is None, done.failure
    assert not done.interrupted
    assert "step 0 loss" in output.getvalue()
    assert "step 10 loss" in output.getvalue()
    summary = done.summary
    assert 0 < summary.steps < 20
    assert summary.joules > 0
    # The meter's joules over the steps' seconds are watts that this machine could draw.
    assert summary.observed["power_W"] == pytest.approx(summary.joules / summary.seconds)
    assert done.wall_s > summary.seconds
    assert json.loads(json.dumps(done.to_json()))["kept"]["steps"] == summary.steps


@pytest.mark.long
@pytest.mark.real
def test_a_job_too_short_to_compare_has_not_failed(run: Path) -> None:
    from tuner.deploy.train import train

    output = io.StringIO()
    done = train(tuner.load_result(run), "baseline", steps=1, output=output)
    assert done.failure is None, done.failure
    assert "step 0 loss" in output.getvalue()
    assert "could be compared" in done.lines()[0]


@pytest.mark.real
@pytest.mark.slow
def test_ctrl_c_ends_the_job_and_prints_the_comparison_so_far(run: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "tuner.cli.main", "run", str(run), "--point", "baseline"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None
    lines = []
    for line in process.stdout:  # until it trains
        lines.append(line)
        if "step 10 loss" in line:
            break
    process.send_signal(signal.SIGINT)
    out, error = process.communicate(timeout=120)
    assert process.returncode == 130, error
    assert "Interrupted" in out
    # No rank outlives it.
    wait_until(lambda: not _ranks(run))


def _ranks(run: Path) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"{run}/probes".encode() in (path.parent / "cmdline").read_bytes():
                found.append(path.parent.name)
        except OSError:
            continue
    return found
