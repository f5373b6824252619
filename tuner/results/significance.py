"""Is one measured configuration better than another, by how much, and how sure is that?

Launches are the repeats: the windows of one launch share its effect, so they are averaged first.
Launches of both are compared by Student's t test of the logarithms with one spread for both; one
launch of each cannot be tested. A difference is called one only where its 95 % interval leaves out
zero; otherwise the answer says that none was shown, and how small a difference could have been.
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
        word = "less" if self.relative < 0 else "more"
        change = f"{100 * abs(self.relative):.2f} % {word}"
        if math.isnan(self.p_value):
            by = "" if math.isnan(self.relative) else f"{change} by {self.method}, "
            return f"{what}: {by}too few repeats to tell"
        why = f"{self.interval_text} ({self.p_text}, {self.method})"
        if not self.shown:
            return f"{what}: no difference shown; if any, within {why}"
        return f"{what}: {change}, {why}"

    @property
    def reversed(self) -> Difference:
        """The difference from `b` to `a`."""

        def inverse(relative: float) -> float:
            return -relative / (1 + relative) if -1 < relative < math.inf else -relative

        relative, low, high = map(inverse, (self.relative, self.high, self.low))
        return replace(self, relative=relative, low=max(low, -1.0), high=high)

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
        basis: the launches that were compared, in a sentence; "" if not stated.
    """

    a: str
    b: str
    step_time: Difference
    energy: Difference
    meter: MeterInfo
    basis: str = ""

    def lines(self) -> list[str]:
        """Return the comparison as lines."""
        label = self.meter.label
        return [
            f"from  {self.a}",
            f"to    {self.b}",
            self.step_time.sentence,
            f"{self.energy.sentence}; {self.meter.scope} scope, {label} ({self.meter.source})",
            *([self.basis] if self.basis else []),
        ]

    def to_json(self) -> dict[str, Any]:
        """Return the comparison as JSON values."""
        parts = {
            name: {**vars(part), "shown": part.shown, "sentence": part.sentence}
            for name, part in (("step_time", self.step_time), ("energy", self.energy))
        }
        meter = dict(vars(self.meter))
        return {"a": self.a, "b": self.b, **parts, "meter": meter, "basis": self.basis}


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


def _launch_means(side: Sequence[Measurement], launches: Sequence[int]) -> np.ndarray:
    """Return the mean log step time and log energy of each launch's windows, (2, launches)."""
    log = np.log([(m.step_time_s, m.energy_per_step_J) for m in side])
    each = np.asarray(launches)
    return np.array([log[each == launch].mean(axis=0) for launch in dict.fromkeys(launches)]).T


def _pooled(x: np.ndarray, y: np.ndarray, quantity: str, level: float = LEVEL / 2) -> Difference:
    """Compare the logarithms of launches with one spread for both (see `compare_launches`)."""
    freedom = x.size + y.size - 2
    apart = float(y.mean() - x.mean())
    if freedom == 0:
        return _of_variance(apart, math.nan, freedom, quantity, "one launch of each", level)
    squares = float(np.sum((x - x.mean()) ** 2) + np.sum((y - y.mean()) ** 2))
    variance = squares / freedom * (1 / x.size + 1 / y.size)
    method = f"t on {x.size} and {y.size} launches"
    return _of_variance(apart, variance, freedom, quantity, method, level)


def compare_measurements(
    a: Sequence[Measurement],
    b: Sequence[Measurement],
    launches: tuple[Sequence[int], Sequence[int]],
    *,
    names: tuple[str, str] = ("a", "b"),
    meters: tuple[MeterInfo, MeterInfo],
) -> Comparison:
    """Compare two configurations by all windows that measured them, with launches as the repeats.

    The logarithms of a launch's windows are averaged, and the launches are compared as in
    `compare_launches`. With one launch of each, their spread is unknown and no difference is shown.

    Args:
        a, b: the windows of each.
        launches: number of the launch that made each window of `a` and of `b`.
        names: for people.
        meters: scope and source of each one's energy.

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
    (a_time, a_energy), (b_time, b_energy) = (
        _launch_means(side, made) for side, made in zip((a, b), launches, strict=True)
    )
    return Comparison(
        *names,
        _pooled(a_time, b_time, "step_time"),
        _pooled(a_energy, b_energy, "energy_per_step"),
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
        return _pooled(x, y, quantity, level)

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
