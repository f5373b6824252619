"""Comparing two measured points: a difference is called one only where it is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from tuner.results.parts import Attempt, Verification
from tuner.results.result import Result
from tuner.results.significance import (
    Comparison,
    Difference,
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


def compare(
    a: list[Measurement],
    b: list[Measurement],
    launches: tuple[Sequence[int], Sequence[int]] | None = None,
    **more: object,
) -> Comparison:
    """Compare windows, each of a launch of its own unless their launches are given."""
    numbers = launches or (range(len(a)), range(len(b)))
    return compare_measurements(a, b, numbers, meters=(GPU, GPU), **more)  # type: ignore[arg-type]


def launched(
    rng: np.random.Generator, count: int, windows: int, spread: float = 0.02
) -> tuple[list[Measurement], list[int]]:
    """Launches that differ by `spread`, with several windows of each, which differ by little."""
    made, numbers = [], []
    for launch in range(count):
        seconds = 0.25 * math.exp(rng.normal(0, spread))
        made += [window(rng, seconds, cv=0.005) for _ in range(windows)]
        numbers += [launch] * windows
    return made, numbers


@pytest.mark.parametrize("windows", [1, 4])
def test_equal_points_are_rarely_called_different(windows: int) -> None:
    """However many windows the launches have: 5 % is the level, and 0.015 its standard error."""
    rng = np.random.default_rng(windows)
    time = energy = 0
    for _ in range(200):
        (a, of_a), (b, of_b) = launched(rng, 3, windows), launched(rng, 2, windows)
        result = compare(a, b, (of_a, of_b))
        time += result.step_time.shown
        energy += result.energy.shown
    assert time / 200 <= 0.10
    assert energy / 200 <= 0.10


def test_windows_as_the_repeats_would_call_them() -> None:
    rng = np.random.default_rng(5)
    wrong = 0
    for _ in range(100):
        a, b = (launched(rng, 2, 4)[0] for _ in range(2))
        wrong += compare(a, b).step_time.shown
    assert wrong / 100 > 0.25


def test_the_windows_of_a_launch_are_averaged() -> None:
    rng = np.random.default_rng(8)
    a, b = [window(rng) for _ in range(3)], [window(rng, 0.28) for _ in range(3)]
    found = compare(a, b, ((0, 1, 0), (4, 4, 7))).step_time
    times = [[m.step_time_s for m in side] for side in (a, b)]
    of_a = [math.sqrt(times[0][0] * times[0][2]), times[0][1]]
    of_b = [math.sqrt(times[1][0] * times[1][1]), times[1][2]]
    expected = stats.ttest_ind(np.log(of_b), np.log(of_a))
    assert found.p_value == pytest.approx(expected.pvalue)
    assert found.method == "t on 2 and 2 launches"


def test_a_real_difference_is_shown_with_its_interval() -> None:
    rng = np.random.default_rng(11)
    a = [window(rng, 0.25, 300.0) for _ in range(4)]
    b = [window(rng, 0.275, 240.0) for _ in range(4)]
    result = compare(a, b)
    assert result.step_time.shown
    assert 0.0 < result.step_time.low < 0.10 < result.step_time.high
    assert result.energy.shown
    assert result.energy.low < 1.1 * 0.8 - 1 < result.energy.high < 0.0
    assert "more" in result.step_time.sentence
    assert "less" in result.energy.sentence
    assert "4 and 4 launches" in result.step_time.sentence


def test_no_difference_is_called_none() -> None:
    rng = np.random.default_rng(2)
    windows = [window(rng) for _ in range(4)]
    lines = compare(windows[:2], windows[2:], names=("old", "new")).lines()
    assert lines[:2] == ["from  old", "to    new"]
    assert lines[2].startswith("step time: no difference shown; if any, within [")
    assert "gpu scope, metered (NVML total-energy counter of 1 GPU)" in lines[3]


def test_one_launch_each_has_a_difference_and_no_p_value() -> None:
    rng = np.random.default_rng(3)
    a, b = [window(rng, 0.25) for _ in range(3)], [window(rng, 0.30) for _ in range(2)]
    found = compare(a, b, ((5, 5, 5), (6, 6))).step_time
    assert math.isnan(found.p_value)
    assert not found.shown
    assert found.relative == pytest.approx(0.2, abs=0.03)
    assert found.sentence.endswith("% more by one launch of each, too few repeats to tell")


def test_a_difference_can_be_turned_round() -> None:
    rng = np.random.default_rng(4)
    a, b = [window(rng) for _ in range(3)], [window(rng, 0.3) for _ in range(3)]
    there, back = compare(a, b).step_time, compare(b, a).step_time
    for name in ("relative", "low", "high", "p_value"):
        assert getattr(there.reversed, name) == pytest.approx(getattr(back, name))
    unknown = compare(a[:1], b[:1]).step_time.reversed
    assert (unknown.low, unknown.high) == (-1.0, math.inf)


def test_two_scopes_are_not_compared() -> None:
    rng = np.random.default_rng(4)
    with pytest.raises(InputError, match="energies of two scopes"):
        compare_measurements([window(rng)], [window(rng)], ([0], [0]), meters=(GPU, MODULE))
    with pytest.raises(InputError, match="b has no measurement"):
        compare([window(rng)], [])


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


def of_two_points(rng: np.random.Generator) -> Result:
    """A result with three windows of its choice, in two launches, and two of its baseline."""
    result = large_result()
    assert result.best is not None
    assert result.baseline is not None
    best, today = result.best.configuration, result.baseline.configuration
    return replace(
        result,
        windows={
            best: tuple(window(rng, 0.25, 240.0) for _ in range(3)),
            today: tuple(window(rng, 0.25, 300.0) for _ in range(2)),
        },
        launches={best: (1, 1, 2), today: (0, 3)},
        verification=None,
    )


def test_a_result_compares_its_points_by_name() -> None:
    result = of_two_points(np.random.default_rng(7))
    assert result.best is not None
    comparison = result.compare()
    assert comparison.b == result.best.configuration.short
    assert comparison.energy.relative == pytest.approx(-0.2, abs=0.03)
    assert comparison.energy.method == "t on 2 and 2 launches"
    assert "the search's included" in comparison.lines()[-1]
    assert result.compare(result.best.configuration, "baseline").energy.relative > 0.2
    with pytest.raises(UnknownName, match="baseline"):
        result.compare("nothing")
    unknown = replace(result, launches={}).compare()
    assert math.isnan(unknown.energy.p_value)


def test_the_verification_is_compared_with_the_figures_of_the_report() -> None:
    result = of_two_points(np.random.default_rng(7))
    assert result.best is not None
    time = Difference("step_time", 0.08, 0.07, 0.09, 1e-5, "t on 3 and 3 launches")
    energy = Difference("energy_per_step", -0.2, -0.25, -0.15, 1e-3, "t on 3 and 3 launches")
    attempt = Attempt(result.best.configuration, 3, time, energy, True, "less energy shown", "")
    result = replace(result, verification=Verification("confirmed", "", (attempt,), 6, 12.0))
    comparison = result.compare()
    assert (comparison.step_time, comparison.energy) == (time, energy)
    assert "3 fresh launches of each" in comparison.lines()[-1]
    back = result.compare("best", "baseline")
    assert back.energy.relative == pytest.approx(0.25)
    assert (back.energy.low, back.energy.high) == pytest.approx((1 / 0.85 - 1, 1 / 0.75 - 1))
    assert back.a == comparison.b


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
    pooled = compare_launches(a, b, meter=GPU).step_time
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
