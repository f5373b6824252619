"""The meter of a study: two never share a front, and a twin's figures are never a GPU's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import tuner
from tuner.executors.local import SimulatedExecutor
from tuner.results.result import Result
from tuner.search_spaces.errors import InputError
from tuner.testing.studies import LONG_JOB, ModelRunner
from tuner.workload.probe import MeterInfo

REAL = MeterInfo("nvml", "gpu", "NVML total-energy counter of 8 GPUs")
TWIN = replace(REAL, source="NVML total-energy counter of 8 twin GPUs", twin=True)


def study(meter: MeterInfo, runs_dir: Path, probes: int) -> Result:
    runner = ModelRunner(meter=meter)
    return tuner.optimize(
        LONG_JOB,
        cluster="cpu-2",
        report=False,
        executor=SimulatedExecutor(runner),
        search=tuner.SearchSettings(max_probes=probes),
        name="one",
        runs_dir=runs_dir,
    )


def test_a_study_on_a_twin_is_marked_and_continues_on_no_other_meter(tmp_path: Path) -> None:
    result = study(TWIN, tmp_path, 2)
    assert {p.meter.mark for p in result.points} == {"twin"}
    assert "(twin)" in result.choice.sentence
    assert result.to_json()["points"][0]["meter"]["twin"] is True
    with pytest.raises(InputError, match=r"scope, twin\).*scope, metered\); give another"):
        study(REAL, tmp_path, 3)
    again = tuner.load_result("one", runs_dir=tmp_path)
    assert {p.meter.mark for p in again.points} == {"twin"}
