"""The recorder: what it writes is what the replayer reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from tuner.search_spaces.cluster import load_cluster
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.job import load_job
from tuner.search_spaces.space import load_space
from tuner.testing.studies import ModelRunner, TalliedRunner, run_replay
from tuner.workload.probe import Failure
from tuner.workload.record_table import record_space
from tuner.workload.replay import TableRunner, TraceRunner
from tuner.workload.table import load_table
from tuner.workload.trace import read_trace

SHIPPED = Path(__file__).parents[1] / "data" / "cpu-tiny-gpt"
NAMES = {"workload": "tiny-gpt", "hardware": "2 x cpu-core"}


@pytest.fixture
def candidates():
    return load_space("default").candidates(load_job(), load_cluster("cpu-2"))


def test_a_recording_replays_as_what_was_measured(tmp_path, candidates):
    runner = ModelRunner()
    records, rows = record_space(runner, candidates, tmp_path / "t", sample=12, **NAMES)
    assert rows == 12
    table = load_table(tmp_path / "t")
    (group,) = table.groups
    assert len(group.points) == 12
    again = TableRunner(table, group.name, seed=0)
    for record in records:
        (told,) = record.measurements
        (point,) = [p for p in group.points if p.configuration.launch == record.request.launch]
        assert point.time_s == pytest.approx(told.step_time_s, rel=1e-5)
        assert point.power_W == pytest.approx(told.power_W, rel=1e-5)
        assert again.run(record.request).ok


def test_a_recording_that_was_cut_short_goes_on(tmp_path, candidates):
    first = TalliedRunner(ModelRunner())
    record_space(first, candidates, tmp_path / "t", sample=4, seed=3, **NAMES)
    second = TalliedRunner(ModelRunner())
    _, rows = record_space(second, candidates, tmp_path / "t", sample=9, seed=3, **NAMES)
    assert len(second.asked) == 5
    assert not {r.launch for r in first.asked} & {r.launch for r in second.asked}
    assert rows == 9


def test_failed_probes_are_kept_in_the_trace_and_get_no_row(tmp_path, candidates):
    def spoil(request):
        return Failure("crash", "boom") if request.launch.get("zero_stage") == 3 else None

    runner = TalliedRunner(ModelRunner(), spoil)
    records, rows = record_space(runner, candidates, tmp_path / "t", **NAMES)
    failed = [record for record in records if not record.ok]
    assert failed
    assert rows == len(candidates) - len(failed)


@pytest.mark.parametrize("sample", [0, -1, True])
def test_a_sample_must_be_a_count(tmp_path, candidates, sample):
    with pytest.raises(InputError, match="sample is"):
        record_space(ModelRunner(), candidates, tmp_path / "t", sample=sample, **NAMES)


def test_the_shipped_recording_was_really_made_here():
    """Recorded on CPU by `tuner dev record`: each record holds what was rendered and every step."""
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
