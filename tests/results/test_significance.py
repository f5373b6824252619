"""Comparing two measured points: a difference is called one only where it is."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from tuner.results.significance import (
    Comparison,
    compare_launches,
    compare_measurements,
    compare_paired,
)
from tuner.search_spaces.configuration import Settings
from tuner.search_spaces.errors import InputError, UnknownName
from tuner.testing.results import large_result
from tuner.workload.probe import Measurement, MeterInfo

GPU = MeterInfo("nvml", "gpu", "NVML total-energy counter of 1 GPU")
MODULE = MeterInfo("hwmon", "module", "hwmon module power of socket 0")


def series(rng: np.random.Generator, mean: float, cv: float, n: int, phi: float) -> np.ndarray:
    """An AR(1) series with this mean and coefficient of variation."""
    values = np.empty(n)
    values[0] = rng.standard_normal()
    for i in range(1, n):
        values[i] = phi * values[i - 1] + math.sqrt(1 - phi**2) * rng.standard_normal()
    return mean * (1 + cv * values)


def window(
    rng: np.random.Generator,
    step_time_s: float = 0.25,
    power_W: float = 300.0,
    *,
    cv: float = 0.03,
    phi: float = 0.5,
) -> Measurement:
    times = series(rng, step_time_s, cv, 60, phi)
    powers = series(rng, power_W, cv, 20, phi)
    return Measurement(
        Settings(),
        steps=60,
        window_s=float(times.sum()),
        step_time_s=float(times.mean()),
        energy_J=float(times.sum() * powers.mean()),
        power_W=float(powers.mean()),
        step_times_s=tuple(times),
        power_blocks_W=tuple(powers),
    )


def compare(a: list[Measurement], b: list[Measurement], **more: object) -> Comparison:
    return compare_measurements(a, b, meters=(GPU, GPU), **more)  # type: ignore[arg-type]


def called(windows: int, rng: np.random.Generator, rounds: int = 200) -> tuple[float, float]:
    """How often a difference of step time and of energy is called between two of the same."""
    time = energy = 0
    for _ in range(rounds):
        a, b = ([window(rng) for _ in range(windows)] for _ in range(2))
        result = compare(a, b)
        time += result.step_time.shown
        energy += result.energy.shown
    return time / rounds, energy / rounds


def test_equal_points_are_rarely_called_different() -> None:
    """5 % is the level; correlated blocks of 20 are few, so a little more is granted."""
    for windows in (1, 4):
        time, energy = called(windows, np.random.default_rng(windows))
        assert time <= 0.12
        assert energy <= 0.12


def test_a_test_that_ignores_the_correlation_would_call_them() -> None:
    rng = np.random.default_rng(5)
    from scipy import stats

    wrong = sum(
        stats.ttest_ind(window(rng).step_times_s, window(rng).step_times_s, equal_var=False).pvalue
        < 0.05
        for _ in range(200)
    )
    assert wrong / 200 > 0.15


@pytest.mark.parametrize("windows", [1, 4])
def test_a_real_difference_is_shown_with_its_interval(windows: int) -> None:
    rng = np.random.default_rng(11)
    a = [window(rng, 0.25, 300.0) for _ in range(windows)]
    b = [window(rng, 0.275, 240.0) for _ in range(windows)]
    result = compare(a, b)
    assert result.step_time.shown
    assert result.step_time.low < 0.10 < result.step_time.high
    assert result.step_time.low > 0.0
    assert result.energy.shown
    assert result.energy.low < 1.1 * 0.8 - 1 < result.energy.high < 0.0
    assert "more" in result.step_time.sentence
    assert "less" in result.energy.sentence
    assert f"Welch on {windows}" in result.step_time.method or windows == 1


def test_no_difference_is_called_none() -> None:
    rng = np.random.default_rng(2)
    lines = compare([window(rng)], [window(rng)], names=("old", "new")).lines()
    assert lines[:2] == ["from  old", "to    new"]
    assert lines[2].startswith("step time: no difference shown; if any, within [")
    assert "gpu scope, metered (NVML total-energy counter of 1 GPU)" in lines[3]


def test_the_spread_between_launches_counts_where_windows_are_single() -> None:
    rng = np.random.default_rng(3)
    a, b = [window(rng, 0.25, cv=0.005)], [window(rng, 0.26, cv=0.005)]
    assert compare(a, b).step_time.shown
    assert not compare(a, b, spread=(0.05, 0.05)).step_time.shown


def test_two_scopes_are_not_compared() -> None:
    rng = np.random.default_rng(4)
    with pytest.raises(InputError, match="energies of two scopes"):
        compare_measurements([window(rng)], [window(rng)], meters=(GPU, MODULE))
    with pytest.raises(InputError, match="b has no measurement"):
        compare([window(rng)], [])


def test_a_record_without_steps_tells_too_little() -> None:
    bare = Measurement(Settings(), 3, 5.0, 1.6, 1500.0, 300.0)
    result = compare([bare], [bare])
    assert not result.step_time.shown
    assert result.step_time.sentence == "step time: too few repeats to tell"


def test_windows_that_keep_no_steps_are_compared_by_their_stated_errors() -> None:
    a = Measurement(Settings(), 3, 5.0, 1.60, 1500.0, 300.0, 0.01, 3.0)
    b = replace(a, step_time_s=1.80)
    result = compare([a], [b])
    assert result.step_time.method == "normal, by the windows' stated errors"
    assert result.step_time.shown
    assert not compare([a], [replace(a, step_time_s=1.61)]).step_time.shown
    # z of a difference of 12.5 % with 0.625 % and 0.556 % on its sides
    assert result.step_time.low == pytest.approx(0.125 - 1.96 * 1.125 * 0.00836, abs=3e-4)


def test_pairs_cancel_the_drift_they_share() -> None:
    rng = np.random.default_rng(6)
    drift = np.linspace(1.0, 1.5, 20)
    a = drift * (1 + 0.002 * rng.standard_normal(20))
    b = drift * 1.01 * (1 + 0.002 * rng.standard_normal(20))
    difference = compare_paired(list(a), list(b), "step_time")
    assert difference.shown
    assert difference.low < 0.01 < difference.high
    assert difference.high - difference.low < 0.005
    with pytest.raises(InputError, match="cannot be paired"):
        compare_paired([1.0], [1.0, 2.0], "step_time")


def test_a_result_compares_its_points_by_name() -> None:
    rng = np.random.default_rng(7)
    result = large_result()
    assert result.best is not None
    assert result.baseline is not None
    pairs = {
        result.best.configuration: (window(rng, 0.25, 240.0),),
        result.baseline.configuration: (window(rng, 0.25, 300.0),),
    }
    result = replace(result, windows=pairs)
    comparison = result.compare()
    assert result.best is not None
    assert comparison.b == result.best.configuration.short
    assert comparison.energy.relative == pytest.approx(-0.2, abs=0.03)
    assert result.compare(result.best.configuration, "baseline").energy.relative > 0.2
    with pytest.raises(UnknownName, match="baseline"):
        result.compare("nothing")


def launches(
    rng: np.random.Generator, count: int, level: float, spread: float
) -> list[Measurement]:
    return [
        Measurement(
            Settings(),
            steps=10,
            window_s=10.0 * seconds,
            step_time_s=seconds,
            energy_J=100.0 * seconds,
            power_W=10.0,
        )
        for seconds in level * np.exp(rng.normal(0, spread, count))
    ]


def test_two_launches_each_have_a_sensible_interval() -> None:
    """Welch's degrees of freedom fall to 1 where one side agrees by luck: -98.8 to +2,108 %."""
    a = [replace(launches(np.random.default_rng(0), 1, 1.0, 0.0)[0], step_time_s=t) for t in (1, 1)]
    b = [replace(a[0], step_time_s=t) for t in (0.8, 1.4)]
    welch = compare_measurements(a, b, meters=(GPU, GPU)).step_time
    pooled = compare_launches(a, b, meter=GPU).step_time
    assert welch.high > 10
    assert pooled.high < 3
    assert "2 and 2 launches" in pooled.method


def test_a_stricter_level_widens_the_interval_and_the_p_value() -> None:
    rng = np.random.default_rng(3)
    a, b = launches(rng, 4, 1.0, 0.01), launches(rng, 4, 0.97, 0.01)
    usual = compare_launches(a, b, meter=GPU).step_time
    strict = compare_launches(a, b, meter=GPU, level=0.005).step_time
    assert usual.shown
    assert not strict.shown
    assert strict.low < usual.low < usual.high < 0 < strict.high
    assert strict.p_value == pytest.approx(5 * usual.p_value)
    nothing = compare_launches(a, b, meter=GPU, level=0.0).step_time
    assert nothing.p_value == 1.0
    assert not nothing.shown


def test_one_launch_each_is_refused() -> None:
    rng = np.random.default_rng(0)
    with pytest.raises(InputError, match="at least 2"):
        compare_launches(launches(rng, 1, 1, 0.1), launches(rng, 2, 1, 0.1), meter=GPU)
