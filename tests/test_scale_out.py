"""From few GPUs to many: the correction, and intervals that widen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.scale_out import HERE, OWN, PER_DOUBLING, Z90, ScaleOut
from search_spaces.cluster import load_cluster
from search_spaces.configuration import Configuration
from search_spaces.errors import InvalidValue
from search_spaces.job import load_job
from tuner.api import optimize
from tuner.cli import main
from tuner.predict import enlarged, forecast


def test_without_probes_the_interval_is_what_is_not_known() -> None:
    said = ScaleOut([], [], []).correct([1, 16], [2.0, 2.0])
    assert said.median == pytest.approx([2.0, 2.0])
    wide = np.sqrt(HERE**2 + OWN**2 + (np.array([0, 4]) * PER_DOUBLING) ** 2)
    assert np.log(said.high / said.median) / Z90 == pytest.approx(wide)


def test_probes_at_one_size_correct_it_and_the_interval_widens_with_every_doubling() -> None:
    line = ScaleOut([8] * 20, [1.0] * 20, [1.2] * 20)
    said = line.correct([8, 16, 64, 512], [1.0] * 4)
    assert said.median == pytest.approx([1.2] * 4, rel=0.02)
    width = np.log(said.high / said.low)
    assert (np.diff(width) > 0).all()
    assert width[0] < np.log(1.2)  # far narrower than before any probe


def test_probes_at_several_sizes_tell_the_trend() -> None:
    gpus = [4, 8, 16, 32] * 6
    line = ScaleOut(gpus, [1.0] * 24, [1 + 0.05 * np.log2(n / 4) for n in gpus])
    said = line.correct([64], [1.0])
    alone = ScaleOut([4] * 24, [1.0] * 24, [1.0] * 24).correct([64], [1.0])
    assert said.median[0] > 1.1
    assert said.high[0] / said.low[0] < alone.high[0] / alone.low[0]


def test_its_intervals_hold_nine_of_ten() -> None:
    rng = np.random.default_rng(1)
    held = []
    for _ in range(400):
        a, b = HERE * rng.standard_normal(), PER_DOUBLING * rng.standard_normal()
        gpus = np.array([4, 4, 8, 8])
        # The slope counts from the middle of what was probed.
        off = a + b * (np.log2(gpus) - 2.5) + OWN * rng.standard_normal(4)
        line = ScaleOut(gpus.tolist(), [1.0] * 4, np.exp(off).tolist())
        said = line.correct([128], [1.0])
        true = np.exp(a + b * (7 - 2.5) + OWN * rng.standard_normal())
        held.append(said.low[0] <= true <= said.high[0])
    assert 0.85 <= np.mean(held) <= 0.95


def test_it_refuses_what_makes_no_sense() -> None:
    with pytest.raises(ValueError, match="as many"):
        ScaleOut([8], [1.0, 2.0], [1.0])
    with pytest.raises(ValueError, match="above 0"):
        ScaleOut([8], [0.0], [1.0])
    with pytest.raises(InvalidValue, match="target_gpus"):
        enlarged(load_cluster("gh200-32"), 511)
    assert enlarged(load_cluster("gh200-32"), 512).devices == 512


def test_a_run_corrects_a_prediction_on_more_gpus(tmp_path: Path, capsys: Any) -> None:
    optimize(
        "opt-350m",
        cluster="gh200-32",
        max_probes=4,
        runs_dir=tmp_path,
        name="few",
        report=False,
    )
    code = main(
        [
            "predict",
            "opt-350m",
            "data_parallel=512",
            "micro_batch=2",
            "--cluster",
            "gh200-32",
            "--target-gpus",
            "512",
            "--run",
            "few",
            "--runs-dir",
            str(tmp_path),
        ]
    )
    out = capsys.readouterr().out
    assert code == 0
    assert "corrected by" in out
    assert "Known error" in out
    said = forecast(
        load_job("opt-350m"),
        enlarged(load_cluster("gh200-32"), 512),
        Configuration.of(data_parallel=512, micro_batch=2),
    )
    assert not said.corrected
    assert main(["predict", "opt-350m", "data_parallel=7", "--cluster", "gh200-32"]) == 2
