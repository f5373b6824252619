"""A run's power against a wall meter: offset, gain and rest are found, and nonsense is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest

from benchmarks.wall import compare_with_wall, main, read_wall
from tuner.problem.run_folder import RunFolder
from tuner.search_spaces.errors import InputError
from tuner.workload.meters.base import PowerSample
from tuner.workload.trace import write_power_samples

BEGAN = datetime(2026, 3, 1, 12, tzinfo=UTC)
PROBES, PROBE_S, GAP_S = 4, 40.0, 7.0


def scope_W(time_s: np.ndarray) -> np.ndarray:
    """Power of the scope at a time since BEGAN: levels of 3 to 9 s that never repeat."""
    rng = np.random.default_rng(5)
    edges = np.cumsum(rng.uniform(3, 9, 60))
    return rng.uniform(150, 700, 61)[np.searchsorted(edges, time_s)]


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A run of four metered probes with power at ten samples a second."""
    folder = RunFolder(tmp_path / "runs" / "metered")
    folder.path.mkdir(parents=True)
    folder.study_file.write_text('name = "metered"\n')
    lines = []
    source = Path(__file__).resolve().parents[1] / "data" / "measured"
    record = json.loads((source / "trace" / "probes.jsonl").read_text().splitlines()[0])
    record["meter"] |= {"name": "nvml", "scope": "gpu", "source": "NVML", "estimated": False}
    for number in range(PROBES):
        began_s = number * (PROBE_S + GAP_S)
        at = np.arange(0, PROBE_S, 0.1)
        samples = [
            PowerSample(float(t), float(p), {})
            for t, p in zip(at, scope_W(began_s + at), strict=True)
        ]
        write_power_samples(folder.path, f"p{number:04d}", samples)
        record["request"]["probe_id"] = f"p{number:04d}"
        record["started_at"] = (BEGAN + timedelta(seconds=began_s)).isoformat()
        lines.append(json.dumps(record))
    folder.trace.write_text("\n".join(lines) + "\n")
    return folder


def wall_file(
    path: Path,
    *,
    offset_s: float = 0.0,
    gain: float = 1.12,
    rest_W: float = 340.0,
    noise_W: float = 3.0,
    period_s: float = 2.0,
    column: str = "power_W",
    power: Callable[[np.ndarray], np.ndarray] = scope_W,
) -> Path:
    """Write the readings of a wall meter: means over its period, by a clock that is ahead."""
    fine = np.arange(0, PROBES * (PROBE_S + GAP_S), 0.05)
    per = round(period_s / 0.05)
    ends = fine[per::per]
    means = power(fine)[: len(ends) * per].reshape(-1, per).mean(1)
    noise = np.random.default_rng(1).normal(0, noise_W, len(ends))
    value = gain * means[: len(ends)] + rest_W + noise
    if "kWh" in column:
        value = 5.0 + np.cumsum(value * period_s) / 3.6e6
    rows = [
        f"{(BEGAN + timedelta(seconds=float(t) + offset_s)).isoformat()},{v:.9f}"
        for t, v in zip(ends, value, strict=True)
    ]
    path.write_text(f"timestamp,{column}\n" + "\n".join(rows) + "\n")
    return path


@pytest.mark.parametrize("offset_s", [0.0, 37.3, -211.0])
@pytest.mark.parametrize(("column", "period_s"), [("power_W", 1.0), ("Energy (kWh)", 5.0)])
def test_offset_gain_and_rest_are_found(
    run: RunFolder, tmp_path: Path, offset_s: float, column: str, period_s: float
) -> None:
    wall = wall_file(tmp_path / "w.csv", offset_s=offset_s, column=column, period_s=period_s)
    found = compare_with_wall(run, wall)
    assert found.offset_s == pytest.approx(offset_s, abs=max(0.2, 2 * found.offset_error_s))
    assert found.gain == pytest.approx(1.12, abs=max(4 * found.gain_se, 0.02))
    assert found.rest_W == pytest.approx(340, abs=12)
    assert found.coverage == pytest.approx(found.scope_W / (1.12 * found.scope_W + 340), rel=0.01)


def test_another_machines_meter_is_refused(run: RunFolder, tmp_path: Path) -> None:
    other = wall_file(
        tmp_path / "w.csv",
        power=lambda t: 300 + 200 * np.sin(t / 3.1) * np.sin(t / 17),
    )
    with pytest.raises(InputError, match="do not follow"):
        compare_with_wall(run, other)
    with pytest.raises(InputError, match="same day and time zone"):
        compare_with_wall(run, wall_file(tmp_path / "late.csv", offset_s=5000))


def test_an_estimated_run_is_refused(run: RunFolder, tmp_path: Path) -> None:
    run.trace.write_text(run.trace.read_text().replace('"estimated": false', '"estimated": true'))
    with pytest.raises(InputError, match="not metered"):
        compare_with_wall(run, wall_file(tmp_path / "w.csv"))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "no readings"),
        ("when,power_W\n1,2\n", "one column of time"),
        ("time,power\n1,2\n", "unit"),
        ("time,a_W,b_W\n1,2,3\n", "a_W, b_W"),
        ("time,power_W\nyesterday,2\n", "line 2"),
        ("time,power_W\n1,2\n", "fewer than"),
        ("time,kWh\n" + "\n".join(f"{i},{-i}" for i in range(20)), "falls"),
    ],
)
def test_a_file_that_is_no_series_is_one_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "w.csv"
    path.write_text(text)
    with pytest.raises(InputError, match=sentence):
        read_wall(path)


def test_the_command(
    run: RunFolder,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wall = str(wall_file(tmp_path / "w.csv"))
    words = ["benchmarks.wall", "metered", wall, "--runs-dir", str(run.path.parent)]
    monkeypatch.setattr("sys.argv", words)
    main()
    out = capsys.readouterr().out
    assert "the scope counted" in out
    assert "figure wall_gain 1.1" in out
