"""The prepared hour on a borrowed GPU, rehearsed on the twin: nothing is set, all is kept."""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.gpu_hour.conditions import QUESTIONS, read_back
from benchmarks.gpu_hour.figures import energy_at_end_J
from benchmarks.gpu_hour.hour import Hour
from benchmarks.gpu_hour.knobs import CASES
from benchmarks.gpu_hour.nvml_recording import NvmlRecording
from benchmarks.gpu_hour.runs import lag_s, update_periods_s
from tests.support.commands import finished
from tests.twin import TwinGpu, TwinNode
from tests.twin.specimens import CORE_GPU
from tuner.search_spaces.cluster import load_cluster
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.rules import broken_rules, unrunnable

ROOT = Path(__file__).parents[2]
#: Pulses of 1000 W over 100 W at rest.
SPANS = [(1.0, 2.0), (2.5, 3.0), (3.5, 3.7)]
LAG_S, PERIOD_S = 0.15, 0.02


def true_J(time_s: float) -> float:
    loaded_s = sum(max(0.0, min(time_s, end) - begin) for begin, end in SPANS)
    return 100 * time_s + 900 * loaded_s


#: A counter with a period and a lag, read every 5 ms.
READINGS = [
    (i * 0.005, true_J(i * 0.005 // PERIOD_S * PERIOD_S - LAG_S) if i > 60 else 0.0)
    for i in range(1000)
]


def test_the_counters_period_and_lag_are_found() -> None:
    periods_s = sorted(update_periods_s(READINGS[61:]))
    assert periods_s[len(periods_s) // 2] == pytest.approx(PERIOD_S, abs=0.006)
    assert lag_s(READINGS[61:], SPANS) == pytest.approx(LAG_S, abs=PERIOD_S)


def test_the_energy_of_a_window_is_read_once_the_counter_has_settled() -> None:
    at_end_J = energy_at_end_J(READINGS, 3.7)
    assert at_end_J == pytest.approx(true_J(3.7) - 100 * LAG_S, rel=0.002)


def test_every_case_is_one_that_the_rules_know(tmp_path: Path) -> None:
    """One GPU has nothing to shard; nothing else may be wrong with a case."""
    hour = Hour(tmp_path)
    cluster = load_cluster("h200-8")
    assert len({case.name for case in CASES}) == len(CASES) == 16
    for case in CASES:
        job = hour.job(case.job, **case.values)
        launch = {"data_parallel": 1, "micro_batch": 4, **case.knobs}
        configuration = Configuration.of(launch)
        wrong = [*broken_rules(configuration, job, cluster), *unrunnable(configuration, job)]
        assert all("shard" in reason for reason in wrong), (case.name, wrong)


@pytest.mark.long
@pytest.mark.real
@pytest.mark.needs("cc")
@pytest.mark.timeout(300)
def test_a_part_is_rehearsed_and_sets_nothing(tmp_path: Path) -> None:
    node = TwinNode(tmp_path / "node", [CORE_GPU], virtual_time=False)
    words = ("runs", tmp_path / "out", "--rehearse", "--only", "latency", "idle", "first", "wave")
    try:
        command = [sys.executable, "-m", "benchmarks.gpu_hour", *words]
        done = finished(command, cwd=ROOT, env=os.environ | node.environment())
        assert done.returncode == 0, done.stderr
        assert node.log == []  # no setter went through, though root may set
    finally:
        node.close()
    summary = (tmp_path / "out" / "summary.txt").read_text()
    assert "FAILED" not in summary, summary
    assert "first probe: ok, step" in summary
    (record,) = (tmp_path / "out" / "records.jsonl").read_text().splitlines()
    assert json.loads(record)["measurements"][0]["energy_J"] > 0
    for name in ("nvml-idle.json", "nvml-load.json"):
        rows = NvmlRecording.read(tmp_path / "out" / name).rows[0]
        assert all(a[0] < b[0] for a, b in itertools.pairwise(rows))
    assert len(json.loads((tmp_path / "out" / "wave.json").read_text())) == 5
    assert (tmp_path / "out" / "evidence.tar.gz").stat().st_size > 1000


@pytest.mark.needs("cc")
def test_the_conditions_of_a_gpu_are_read_back(twin_node: Callable[..., TwinNode]) -> None:
    plain = TwinGpu()
    other = TwinGpu(
        smoothing=1, tells_limit=False, tells_memory=False, has_counter=False, fabric_state=3
    )
    node = twin_node(plain, other)
    text = read_back()
    first, second = text.split("GPU 1 ")
    assert "13 power smoothing: not supported" in first
    assert "13 power smoothing: on" in second
    assert "20 power limit (mW): 400000" in first
    assert "20 power limit (mW): not told" in second
    assert "4 energy counter (mJ): not told" in second
    assert "15 state of the fabric: 3" in second
    assert len(first.splitlines()) == len(second.splitlines()) == 1 + len(QUESTIONS)
    assert node.log == []
