"""Live declared knobs on real ranks: several settings of one launch, confirmed and put back."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.scripts import inspected
from tests.support.studies import run_optimize
from tuner.search_spaces.configuration import Settings
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.knob_declarations import Knob
from tuner.workload.node.platforms import detect_cluster
from tuner.workload.records.probe import ProbeRequest, WindowPolicy
from tuner.workload.records.trace import read_trace
from tuner.workload.scripts.command import Script

CLUSTER = detect_cluster()
pytestmark = [
    pytest.mark.real,
    pytest.mark.quiet,
    pytest.mark.slow,
    pytest.mark.usefixtures("one_fork_server"),
    pytest.mark.skipif(CLUSTER.devices_per_node < 2, reason="needs two cores"),
]
CLUSTER = replace(CLUSTER, devices_per_node=2)
QUICK = WindowPolicy(min_s=0.2, min_steps=3, max_s=0.3, settle_s=0.1, check_drift=False)
SCRIPT = Path(__file__).parents[2] / "scripts" / "live_knobs.py"
PAUSE = Knob("pause_ms", (30, 0, 99), live=True)
UNREAD = Knob("unread", (1, 2), live=True, baseline=1)


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    folder = tmp_path / "repo"
    folder.mkdir()
    shutil.copy(SCRIPT, folder / "train.py")
    return folder


def test_one_launch_visits_the_values_and_puts_them_back(repo: Path, tmp_path: Path) -> None:
    script = Script("train.py", cwd=repo, knobs=(PAUSE, UNREAD))
    with inspected(script, CLUSTER, tmp_path / "run") as (runner, job):
        assert dict(job.baseline.live) == {"pause_ms": 30, "unread": 1}
        today = dict(job.baseline.live)
        lives = [{}, {"pause_ms": 0}, {"pause_ms": 99}, {"unread": 2}]
        settings = tuple(Settings({**today, **live}) for live in lives)
        record = runner.run(
            ProbeRequest("p", job.baseline.launch, settings, window=QUICK, time_limit_s=60.0)
        )
    assert record.ok, record.failure
    assert [missed.live["pause_ms"] for missed in record.missed] == [99]
    assert "refused 99: ValueError: 99 ms are too long" in record.missed[0].message
    times = {m.live: m.step_time_s for m in record.measurements}
    slow, one = (times[Settings({**today, **live})] for live in lives[:2])
    assert slow > one + 0.02
    flags = {flag for m in record.measurements for flag in m.flags}
    assert "unread was set by the script, and nothing reads it back" in flags
    assert not any("pause_ms" in flag for flag in flags)


def test_a_knob_that_the_script_never_registers_is_refused(repo: Path, tmp_path: Path) -> None:
    script = Script("train.py", cwd=repo, knobs=(Knob("depth", (1, 2), live=True),))
    why = r"registers no live knob 'depth'.*hook\.live\('depth'"
    with pytest.raises(InputError, match=why), inspected(script, CLUSTER, tmp_path / "run"):
        pass


@pytest.mark.long
def test_the_best_value_is_found_in_one_launch(repo: Path, tmp_path: Path) -> None:
    result = run_optimize(
        Script("train.py", cwd=repo, steps=10**7),
        knobs=[replace(PAUSE, values=(30, 60, 0))],
        cluster=CLUSTER,
        executor="inline",
        clocks=False,
        max_probes=3,
        verify=False,
        name="live",
        runs_dir=tmp_path,
        window=QUICK,
    )
    # One launch told the values apart, as it does clocks.
    records = read_trace(tmp_path / "live" / "trace" / "probes.jsonl").records
    visited = [{m.live["pause_ms"] for m in record.measurements} for record in records]
    assert max(map(len, visited)) >= 2
    assert result.best is not None
    assert result.best.configuration.live["pause_ms"] == 0
    assert result.baseline is not None
    assert result.baseline.configuration.live["pause_ms"] == 30
