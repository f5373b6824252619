"""Declared knobs of real scripts: those of a launch, and live ones, which a launch visits."""

from __future__ import annotations

import csv
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.scripts import inspected
from tests.support.studies import run_optimize
from tuner.api import load_result
from tuner.cli.main import main
from tuner.result import Result
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
SCRIPTS = Path(__file__).parents[2] / "scripts"
ATTENTION = Knob("attn", ("naive", "fused"))
PRECISION = Knob(
    "precision", ("fp32", "bf16"), how="conf.yaml:model.precision", changes_training=True
)


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    folder = tmp_path / "repo"
    folder.mkdir()
    shutil.copy(SCRIPTS / "own_knobs.py", folder / "train.py")
    (folder / "conf.yaml").write_text("model:\n  precision: fp32  # as ever\n")
    return folder


def test_each_way_of_a_knob_reaches_the_script(
    repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GLOO_OWN_PAUSE_MS", raising=False)
    knobs = (
        ATTENTION,
        PRECISION,
        Knob("prefetch", (2, 4)),
        Knob("pause", (1, 2), how="env:GLOO_OWN_PAUSE_MS"),
    )
    command = "train.py --attn {attn=naive} --config conf.yaml"
    script = Script(command, cwd=repo, knobs=knobs)
    with inspected(script, CLUSTER, tmp_path / "run") as (runner, job):
        assert job.baseline.short.endswith("attn=naive precision=fp32 prefetch=2")
        values = {"attn": "fused", "precision": "bf16", "prefetch": 4, "pause": 1}
        launch = Settings({**job.baseline.launch, **values})
        record = runner.run(ProbeRequest("p", launch, window=QUICK, time_limit_s=60.0))
    assert record.ok, record.failure
    logs = [
        (tmp_path / "run" / "probes" / name / "rank0.log").read_text()
        for name in ("inspection", "p")
    ]
    assert [re.findall(r"^knobs (.*)$", log, re.M)[-1] for log in logs] == [
        "naive fp32 2 0",
        "fused bf16 4 1",
    ]
    assert (repo / "conf.yaml").read_text() == "model:\n  precision: fp32  # as ever\n"
    assert sorted(path.name for path in repo.iterdir()) == ["conf.yaml", "train.py"]


def searched(script: Script, knobs: Sequence[Knob], **more: Any) -> Result:
    """Search a script's own knobs here, without clocks and without verification."""
    return run_optimize(
        script,
        knobs=knobs,
        cluster=CLUSTER,
        executor="inline",
        clocks=False,
        verify=False,
        window=QUICK,
        **more,
    )


@pytest.mark.long
def test_a_deliberately_slow_setting_is_found_out(repo: Path, tmp_path: Path) -> None:
    script = Script("train.py --attn {attn=naive} --config conf.yaml", cwd=repo, steps=10**7)
    knobs = [ATTENTION, PRECISION]
    result = searched(
        script, knobs, runs_dir=tmp_path, name="slow", max_probes=4, allow_changed_training=True
    )
    assert result.baseline is not None
    assert result.baseline.configuration.get("attn") == "naive"
    fastest = min(result.points, key=lambda point: point.time_to_solution_s)
    assert fastest.configuration.get("attn") == "fused"
    assert fastest.time_to_solution_s < 0.5 * result.baseline.time_to_solution_s
    assert result.best is not None
    assert result.best.configuration.get("attn") == "fused"
    # Wherever it is shown, a point that learns something else says so.
    changed = [p for p in result.points if p.configuration.get("precision") == "bf16"]
    assert changed
    assert all(p.configuration.get("training") == "changed" for p in changed)
    stored = load_result("slow", runs_dir=tmp_path)
    assert [p.configuration for p in stored.points] == [p.configuration for p in result.points]
    report = (tmp_path / "slow" / "report.html").read_text()
    assert "Points marked training=changed learn something else than today" in report
    table = tmp_path / "points.csv"
    assert (
        main(["export", "slow", "--runs-dir", str(tmp_path), "--to", "csv", "--out", str(table)])
        == 0
    )
    with table.open() as file:
        rows = list(csv.DictReader(file))
    assert {(row["precision"], row["training"]) for row in rows} == {
        ("fp32", ""),
        ("bf16", "changed"),
    }


# ---- live knobs

PAUSE = Knob("pause_ms", (30, 0, 99), live=True)
UNREAD = Knob("unread", (1, 2), live=True, baseline=1)


@pytest.fixture
def live_repo(tmp_path: Path) -> Path:
    folder = tmp_path / "repo"
    folder.mkdir()
    shutil.copy(SCRIPTS / "live_knobs.py", folder / "train.py")
    return folder


def test_one_launch_visits_the_values_and_puts_them_back(live_repo: Path, tmp_path: Path) -> None:
    script = Script("train.py", cwd=live_repo, knobs=(PAUSE, UNREAD))
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


def test_a_knob_that_the_script_never_registers_is_refused(live_repo: Path, tmp_path: Path) -> None:
    script = Script("train.py", cwd=live_repo, knobs=(Knob("depth", (1, 2), live=True),))
    why = r"registers no live knob 'depth'.*hook\.live\('depth'"
    with pytest.raises(InputError, match=why), inspected(script, CLUSTER, tmp_path / "run"):
        pass


@pytest.mark.long
def test_the_best_value_is_found_in_one_launch(live_repo: Path, tmp_path: Path) -> None:
    script = Script("train.py", cwd=live_repo, steps=10**7)
    knobs = [replace(PAUSE, values=(30, 60, 0))]
    # With a space that is named, no knob of torch is searched beside it.
    result = searched(
        script, knobs, space="micro-batch", runs_dir=tmp_path, name="live", max_probes=3
    )
    # One launch told the values apart, as it does clocks.
    records = read_trace(tmp_path / "live" / "trace" / "probes.jsonl").records
    visited = [{m.live["pause_ms"] for m in record.measurements} for record in records]
    assert max(map(len, visited)) >= 2
    assert result.best is not None
    assert result.best.configuration.live["pause_ms"] == 0
    assert result.baseline is not None
    assert result.baseline.configuration.live["pause_ms"] == 30
