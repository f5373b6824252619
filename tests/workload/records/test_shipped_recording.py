"""The shipped recording of a space on two cores, and a study on it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.studies import run_replay
from tuner.recordings.table import TraceRunner
from tuner.workload.records.trace import read_trace

SHIPPED = Path(__file__).parents[2] / "data" / "cpu-tiny-gpt"


def test_the_shipped_recording_was_really_made_here():
    """Recorded on CPU: each record holds what was rendered and every step."""
    records = read_trace(SHIPPED / "trace" / "probes.jsonl").records
    assert len(records) >= 20
    for record in records:
        assert record.meter.estimated
        assert record.environment["deepspeed_config"]["train_batch_size"] == 8
        for m in record.measurements:
            assert len(m.step_times_s) == m.steps >= 3
            assert sum(m.step_times_s) == pytest.approx(m.window_s, rel=0.02)
            assert m.energy_J == pytest.approx(m.power_W * m.window_s, rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["trace/probes.jsonl", ""])
def test_the_shipped_recording_drives_a_whole_study(tmp_path, what):
    result = run_replay(
        SHIPPED / what, runs_dir=tmp_path, steps=2000, max_probes=16, budget_kJ=25.0
    )
    assert result.front_points
    assert result.best is not None
    assert result.best.energy_to_solution_kJ <= 25.0
    assert all(point.meter.estimated for point in result.points)
    truth = TraceRunner(SHIPPED / "trace" / "probes.jsonl")
    launches = {
        record.request.launch for record in read_trace(SHIPPED / "trace" / "probes.jsonl").records
    }
    assert {point.configuration.launch for point in result.points} <= launches
    assert truth.meter.scope == "node"
