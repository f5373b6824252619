"""`tuner dev calibrate` for real, and what a later report says of it."""

from __future__ import annotations

import json
import math
import platform
from dataclasses import replace
from pathlib import Path

import pytest

from tuner.results.calibration import FILE, Calibration, calibrate, last_calibration
from tuner.results.parts import as_json
from tuner.results.significance import compare_paired
from tuner.search_spaces.errors import InputError
from tuner.workload.probe import MeterInfo

METER = MeterInfo("nvml", "gpu", "NVML total-energy counter of 1 GPU", host="none of the host")
FOUND = Calibration(
    host=platform.node(),
    made_at="2026-01-02T03:04:05+00:00",
    meter=METER,
    overhead=compare_paired([1.0, 1.01, 0.99], [1.001, 1.012, 0.99], "step_time"),
    pairs=3,
    core_share=0.0038,
    samples=90,
    lost=0,
    idle_W=61.5,
    update_period_s=0.1,
    disagreement=-0.012,
)


def keep(folder: Path, found: Calibration) -> None:
    (folder / FILE).write_text(json.dumps(as_json(found)))


def test_says_what_it_found() -> None:
    text = "\n".join(FOUND.lines())
    for part in ("gpu scope", "none of the host", "paired t on 3 pairs", "0.38 % of one core"):
        assert part in text
    assert "integrated power is -1.20 % off the energy counter" in text
    assert "one source only" in "\n".join(replace(FOUND, disagreement=None).lines())


def test_a_report_carries_that_of_its_own_machine_only(tmp_path: Path) -> None:
    assert last_calibration(tmp_path) == {}
    keep(tmp_path, FOUND)
    told = last_calibration(tmp_path)
    assert told["made_at"] == FOUND.made_at
    assert "sampling takes 0.38 % of one core" in told["overhead"]
    assert last_calibration(tmp_path, host="another machine") == {}
    (tmp_path / FILE).write_text("{}")
    assert last_calibration(tmp_path) == {}


def test_one_pair_says_nothing() -> None:
    with pytest.raises(InputError, match="at least 2"):
        calibrate(pairs=1)


@pytest.mark.slow
@pytest.mark.real
@pytest.mark.quiet
def test_runs_for_real(tmp_path: Path) -> None:
    found = calibrate(runs_dir=tmp_path, pairs=2, block_s=0.5)
    assert found.pairs == 2
    assert math.isfinite(found.overhead.relative)
    assert found.overhead.low < found.overhead.high
    assert found.idle_W is not None
    assert found.idle_W > 0
    assert found.samples > 5
    assert found.core_share < 0.1
    assert last_calibration(tmp_path)["made_at"] == found.made_at
