"""The benchmark of the frameworks: its samples here, and one release from the registry."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.frameworks import Sample, contract, driver_of, figures, measure, samples
from tuner.workload.scripts.frameworks import shipped_drivers

pytestmark = pytest.mark.usefixtures("launchers_here")


def test_every_driver_has_a_sample() -> None:
    named = [driver_of(sample) for sample in samples()]
    assert sorted(map(id, named)) == sorted(map(id, shipped_drivers()))


@pytest.mark.parametrize("sample", samples(), ids=lambda sample: f"{sample.name}{sample.versions}")
def test_a_sample_is_recognised_and_its_baseline_changes_nothing(
    sample: Sample, tmp_path: Path
) -> None:
    empty = tmp_path / "none"
    row = contract(sample, {sample.name: empty}, tmp_path, tmp_path)
    assert row.recognised
    assert "changes the command" not in row.why
    assert not row.complete  # nothing was verified


@pytest.mark.long  # downloads a wheel
def test_a_release_has_the_keys(capsys: pytest.CaptureFixture[str]) -> None:
    rows = measure({}, ["torchtitan"])
    if any("cannot be downloaded" in row.why for row in rows):
        pytest.skip("no package registry")
    found = {figure.name: figure.value for figure in figures(rows)}
    assert found["frameworks_by_contract"] == 2
    assert found["keys_gone"] == 0
    assert found["keys_verified"] >= 30
    assert re.search(r"\d\d keys in 0\.2\.\d, 0 gone", capsys.readouterr().out)
