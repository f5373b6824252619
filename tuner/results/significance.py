"""Is one measured configuration better than another, by how much, and how sure is that?

Step times are compared by Welch's test on the windows' means where both were measured several
times, else on blocks of neighbouring steps; energy by blocks of whole steps, since power readings
that follow each other are alike. Blocks that are still correlated count for fewer. A difference is
called one only where its 95 % interval leaves out zero; otherwise the answer says that none was
shown, and how small a difference could have been. Fresh launches made in turn are compared with
their own spread (`compare_launches`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tuner.search_spaces.errors import InputError
from tuner.workload.probe import Measurement, MeterInfo

__all__ = [
    "Comparison",
    "Difference",
    "compare_launches",
    "compare_measurements",
    "compare_paired",
]

#: A difference is called one at this level.
LEVEL = 0.05
#: Limit on the blocks of steps; fewer if a window has fewer steps.
BLOCKS = 20


@dataclass(frozen=True)
class Difference:
    """Difference of one quantity from `a` to `b`.

    Attributes:
        quantity: "step_time", "power" or "energy_per_step".
        relative: b / a - 1; -0.05 is 5 % less.
        low, high: its 95 % interval.
        p_value: two-sided, of no difference at all.
        method: the test, in words.
    """

    quantity: str
    relative: float
    low: float
    high: float
    p_value: float
    method: str

    @property
    def shown(self) -> bool:
        """True if the interval leaves out zero."""
        return self.p_value < LEVEL

    @property
    def sentence(self) -> str:
        """The difference in words; a difference that is not significant is not called one."""
        what = self.quantity.replace("_", " ")
        if math.isnan(self.p_value):
            return f"{what}: too few repeats to tell"
        why = f"{self.interval_text} ({self.p_text}, {self.method})"
        if not self.shown:
            return f"{what}: no difference shown; if any, within {why}"
        word = "less" if self.relative < 0 else "more"
        return f"{what}: {100 * abs(self.relative):.2f} % {word}, {why}"

    @property
    def interval_text(self) -> str:
        """ "[-3.10, -1.25] %": the 95 % interval."""
        return f"[{100 * self.low:+.2f}, {100 * self.high:+.2f}] %"

    @property
    def p_text(self) -> str:
        """ "p = 0.031"; a smaller one than a few launches can tell is only bounded."""
        return f"p = {self.p_value:.2g}" if self.p_value >= 1e-4 else "p < 0.0001"


@dataclass(frozen=True)
class Comparison:
    """Changes from `a` to `b`.

    Attributes:
        a, b: names of the two.
        step_time, energy: the differences; `energy` is of one optimizer step.
        meter: scope and source of the energy.
    """

    a: str
    b: str
    step_time: Difference
    energy: Difference
    meter: MeterInfo

    def lines(self) -> list[str]:
        """Return the comparison as lines."""
        label = self.meter.label
        return [
            f"from  {self.a}",
            f"to    {self.b}",
            self.step_time.sentence,
            f"{self.energy.sentence}; {self.meter.scope} scope, {label} ({self.meter.source})",
        ]

    def to_json(self) -> dict[str, Any]:
        """Return the comparison as JSON values."""
        parts = {
            name: {**vars(part), "shown": part.shown, "sentence": part.sentence}
            for name, part in (("step_time", self.step_time), ("energy", self.energy))
        }
        return {"a": self.a, "b": self.b, **parts, "meter": dict(vars(self.meter))}


@dataclass(frozen=True)
class _Mean:
    """A mean of logarithms with its squared error and the degrees of freedom behind that."""

    log: float
    variance: float
    freedom: float


def _mean(values: Sequence[float] | np.ndarray) -> _Mean:
    """Return the mean of a series in time.

    The lag-1 correlation widens its error, because it leaves fewer independent values
    (n (1 - r) / (1 + r); see `tuner.workload.measure.statistics.standard_error`).
    """
    log = np.log(np.asarray(values, dtype=float))
    if log.size < 2:
        return _Mean(float(log.mean()), math.nan, math.nan)
    centred = log - log.mean()
    squares = float(centred @ centred)
    lag1 = float(centred[1:] @ centred[:-1]) / squares if squares > 0 else 0.0
    lag1 = min(max(lag1, 0.0), 0.95)
    effective = max(log.size * (1 - lag1) / (1 + lag1), 1.0)
    variance = squares / (log.size - 1) / effective
    return _Mean(float(log.mean()), variance, max(effective - 1, 1.0))


def _between(a: _Mean, b: _Mean, quantity: str, method: str) -> Difference:
    """Welch's test of two means (Welch 1947; Satterthwaite's degrees of freedom)."""
    variance = a.variance + b.variance
    shares = a.variance**2 / a.freedom + b.variance**2 / b.freedom
    freedom = variance**2 / shares if shares > 0 else math.inf
    return _of_variance(b.log - a.log, variance, freedom, quantity, method)


def _of_variance(
    difference: float,
    variance: float,
    freedom: float,
    quantity: str,
    method: str,
    level: float = LEVEL / 2,
) -> Difference:
    """Student's t test of a difference of logarithms with this squared error."""
    relative = _share(difference)
    if not variance > 0:
        if variance == 0 and difference != 0:
            return Difference(quantity, relative, relative, relative, 0.0, method)
        return Difference(quantity, relative, -math.inf, math.inf, math.nan, method)
    from scipy import stats

    error = math.sqrt(variance)
    reach = float(stats.t.isf(level, freedom)) * error
    one_sided = float(stats.t.sf(abs(difference) / error, freedom))
    p_value = min(1.0, one_sided * LEVEL / level) if level > 0 else 1.0
    low, high = _share(difference - reach), _share(difference + reach)
    return Difference(quantity, relative, low, high, p_value, method)


def _share(log: float) -> float:
    """Return the relative difference of a difference of logarithms; infinite on overflow."""
    return math.expm1(log) if log < 700 else math.inf


def _blocks(values: Sequence[float]) -> np.ndarray:
    """Means of at most `BLOCKS` equal runs of neighbours; what does not fill a run is left out."""
    series = np.asarray(values, dtype=float)
    if not series.size:
        return series
    each = max(1, series.size // BLOCKS)
    whole = series.size // each * each
    return series[:whole].reshape(-1, each).mean(axis=1)


def _stated(means: Sequence[float], errors: Sequence[float], spread: float) -> _Mean:
    """Windows that keep no blocks: their means, with the errors they state taken as known."""
    relative = np.asarray(errors, dtype=float) / np.asarray(means, dtype=float)
    variance = float(np.mean(relative**2) + spread**2) / len(means)
    return _Mean(float(np.log(means).mean()), variance, math.inf)


def _time(side: Sequence[Measurement], spread: float) -> _Mean:
    if all(len(m.step_times_s) > 1 for m in side):
        return _joined([_blocks(m.step_times_s) for m in side], spread, len(side))
    return _stated([m.step_time_s for m in side], [m.step_time_se_s for m in side], spread)


def _power(side: Sequence[Measurement], spread: float) -> _Mean:
    if all(len(m.power_blocks_W) > 1 for m in side):
        return _joined([np.asarray(m.power_blocks_W) for m in side], spread, len(side))
    return _stated([m.power_W for m in side], [m.power_se_W for m in side], spread)


def _method(counts: Sequence[int], of: str) -> str:
    if not all(counts):
        return "normal, by the windows' stated errors"
    return f"Welch on {counts[0]} and {counts[1]} blocks of {of}"


def _joined(blocks: Sequence[np.ndarray], spread: float, windows: int) -> _Mean:
    """Blocks of one or several windows in their order, and what windows differ by besides."""
    mean = _mean(np.concatenate(blocks))
    return replace(mean, variance=mean.variance + spread**2 / windows)


def compare_measurements(
    a: Sequence[Measurement],
    b: Sequence[Measurement],
    *,
    names: tuple[str, str] = ("a", "b"),
    meters: tuple[MeterInfo, MeterInfo],
    spread: tuple[float, float] = (0.0, 0.0),
) -> Comparison:
    """Compare two configurations by the windows that measured them.

    With two or more windows each, the windows are the repeats: what differs from launch to launch
    is then in the error. With one window the blocks inside it are, which cannot know how launches
    differ: `spread` adds that.

    Args:
        a, b: the windows of each, in the order of measuring.
        names: for people.
        meters: scope and source of each one's energy.
        spread: relative standard deviation of step time and of power from window to window, as the
            study's surrogates found it; it is taken as known.

    Raises:
        InputError: one has no window, or they charge different scopes of energy.
    """
    if not a or not b:
        raise InputError(f"{names[0] if not a else names[1]} has no measurement to compare")
    if meters[0].scope != meters[1].scope:
        raise InputError(
            f"{names[0]} charges the {meters[0].scope} and {names[1]} the {meters[1].scope}; "
            "energies of two scopes cannot be compared"
        )
    if min(len(a), len(b)) >= 2:
        method = f"Welch on {len(a)} and {len(b)} windows"
        times = [_mean([m.step_time_s for m in side]) for side in (a, b)]
        energies = [_mean([m.energy_per_step_J for m in side]) for side in (a, b)]
        time_method = energy_method = method
    else:
        times = [_time(side, spread[0]) for side in (a, b)]
        powers = [_power(side, spread[1]) for side in (a, b)]
        # Energy of a step is power x time; their errors are taken as independent.
        energies = [
            _Mean(t.log + p.log, t.variance + p.variance, min(t.freedom, p.freedom))
            for t, p in zip(times, powers, strict=True)
        ]
        counts = [sum(_blocks(m.step_times_s).size for m in side) for side in (a, b)]
        time_method = _method(counts, "steps")
        counts = [sum(len(m.power_blocks_W) for m in side) for side in (a, b)]
        energy_method = _method(counts, "power")
    return Comparison(
        *names,
        _between(times[0], times[1], "step_time", time_method),
        _between(energies[0], energies[1], "energy_per_step", energy_method),
        meters[0],
    )


def compare_launches(
    a: Sequence[Measurement],
    b: Sequence[Measurement],
    *,
    names: tuple[str, str] = ("a", "b"),
    meter: MeterInfo,
    level: float = LEVEL / 2,
) -> Comparison:
    """Compare two configurations by a few fresh launches of each, one window a launch.

    Two or three launches hardly tell their own spread: with Welch's degrees of freedom, which fall
    to 1, an interval reached from -98.8 to +2,108 %. So one spread is taken for both (Student
    1908): with x the logarithm of a window's figure,

        s^2 = sum over both groups g and launches i of (x_gi - mean_g)^2 / f,  f = n_a + n_b - 2,

    and (mean_b - mean_a) / (s sqrt(1/n_a + 1/n_b)) is compared with Student's t with f degrees of
    freedom. Other launches of the study do not enter: a machine that was calmer before would let
    chance through.

    Args:
        a, b: the windows of each, at least two, one a launch.
        names: for people.
        meter: scope and source of the energy.
        level: one-sided error that this comparison may make; 0 shows nothing. The p-value is
            multiplied by `LEVEL / level`, and the interval is as wide, so that a difference is
            shown at `LEVEL` where the one-sided p-value is below `level`. 2.5 %, the default, is
            the usual two-sided test at 5 %.

    Raises:
        InputError: one of the two has fewer than two windows.
    """
    for name, side in zip(names, (a, b), strict=True):
        if len(side) < 2:
            raise InputError(f"{name} has {len(side)} launches; at least 2 are compared")

    def difference(quantity: str) -> Difference:
        energy = quantity == "energy_per_step"
        x, y = (
            np.log([m.energy_per_step_J if energy else m.step_time_s for m in side])
            for side in (a, b)
        )
        freedom = x.size + y.size - 2
        squares = float(np.sum((x - x.mean()) ** 2) + np.sum((y - y.mean()) ** 2))
        variance = squares / freedom * (1 / x.size + 1 / y.size)
        method = f"t on {len(a)} and {len(b)} launches"
        apart = float(y.mean() - x.mean())
        return _of_variance(apart, variance, freedom, quantity, method, level)

    return Comparison(*names, difference("step_time"), difference("energy_per_step"), meter)


def compare_paired(a: Sequence[float], b: Sequence[float], quantity: str) -> Difference:
    """Compare two series measured in turn (a, b, a, b, ...): the paired t-test on logarithms.

    Drift that both members of a pair share cancels.

    Raises:
        InputError: the series differ in length.
    """
    if len(a) != len(b):
        raise InputError(f"{len(a)} values cannot be paired with {len(b)}")
    method = f"paired t on {len(a)} pairs"
    ratio = np.log(np.asarray(b, dtype=float)) - np.log(np.asarray(a, dtype=float))
    if ratio.size < 2:
        return Difference(quantity, math.nan, -math.inf, math.inf, math.nan, method)
    mean, variance = float(ratio.mean()), float(ratio.var(ddof=1)) / ratio.size
    if variance == 0 and mean == 0:
        return Difference(quantity, 0.0, 0.0, 0.0, math.nan, method)
    return _of_variance(mean, variance, ratio.size - 1, quantity, method)
