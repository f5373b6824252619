"""Time and power of one configuration over clocks or power limits, fitted to a few settings.

One configuration on one kind of device: T(x) = T1 (1 - d + d/x) and P(x) = S + (P1 - S) g(x)/g(1),
with x the clock as a share of the highest, g(x) = x V(x)^2, d the share of the time that the clock
scales, and S what is drawn whatever the clock (idle, memory). A limit L lets through
(P1^-n + (e L)^-n)^(-1/n): all of P1 far above it, e L far below, and something between where a step
has phases of more and of less power; the clock is the one that draws it. A configuration has four
unknowns (T1, P1, d, S); e, n and the voltage's knee and floor belong to the device and are shared
by all of its configurations, so that three settings of each are enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

_GRID = np.linspace(0.05, 1.0, 400)


@dataclass(frozen=True)
class DeviceCurve:
    """What all configurations on one kind of device share.

    Attributes:
        let_through: e, the power obtained over the limit where the limit binds.
        sharpness: n, how sharply power turns from the limit to its own level.
        knee: share of the highest clock up to which the voltage is flat.
        floor: the flat voltage as a share of the highest.
        idle_W: the least that anything on the device draws.
    """

    let_through: float
    sharpness: float
    knee: float
    floor: float
    idle_W: float

    def shape(self, x: np.ndarray) -> np.ndarray:
        """g(x) = x V(x)^2 over g(1)."""
        rise = np.clip((x - self.knee) / (1 - self.knee), 0.0, None)
        return np.asarray(x * (self.floor + (1 - self.floor) * rise) ** 2)


@dataclass(frozen=True)
class Setting:
    """One measured setting: a clock (share of the highest) or a limit (W), with what it gave."""

    time_s: float
    power_W: float
    clock: float | None = None
    limit_W: float | None = None


@dataclass(frozen=True)
class Curve:
    """One configuration on a device.

    Attributes:
        device: what it shares.
        time_s, power_W: at the highest clock, uncapped.
        scaled: d, the share of the time that the clock scales.
        static_W: S, drawn whatever the clock.
    """

    device: DeviceCurve
    time_s: float
    power_W: float
    scaled: float
    static_W: float

    def predict(
        self, *, clock: np.ndarray | None = None, limit_W: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """(seconds, watts) at clocks or under limits, each of the argument's shape."""
        power = self.static_W + (self.power_W - self.static_W) * self.device.shape(_GRID)
        if clock is None:
            assert limit_W is not None
            n = self.device.sharpness
            limit = self.device.let_through * np.asarray(limit_W, dtype=float)
            watts = (self.power_W**-n + limit**-n) ** (-1 / n)
            x = np.interp(watts, power, _GRID)
        else:
            x = np.asarray(clock, dtype=float)
            watts = np.interp(x, _GRID, power)
        return self.time_s * (1 - self.scaled + self.scaled / x), np.asarray(watts)


def fit_curve(device: DeviceCurve, settings: Sequence[Setting]) -> tuple[Curve, float]:
    """The curve through a few settings, and the sum of its squared log errors.

    Raises:
        ValueError: fewer than two settings, or clocks mixed with limits.
    """
    from scipy.optimize import least_squares

    by_clock = [setting.clock is not None for setting in settings]
    if len(settings) < 2 or len(set(by_clock)) > 1:
        raise ValueError("a curve needs two settings or more, all clocks or all limits")
    at = np.array([s.clock if by_clock[0] else s.limit_W for s in settings], dtype=float)
    time = np.log([s.time_s for s in settings])
    power = np.log([s.power_W for s in settings])
    top_W, least_W = float(np.exp(power.max())), float(np.exp(power.min()))
    idle = min(device.idle_W, 0.9 * least_W)
    # S lies between idle and the least power seen: as a share of the way.
    low, high = [min(time) - 1.0, np.log(top_W) - 0.05, 0.0, 0.0], [min(time) + 0.1, 7.5, 1.2, 0.95]
    start = np.array([min(time), np.log(top_W) + 0.05, 0.5, 0.5])

    def curve(x: np.ndarray) -> Curve:
        static = idle + x[3] * (least_W - idle)
        return Curve(device, float(np.exp(x[0])), float(np.exp(x[1])), float(x[2]), float(static))

    def residual(x: np.ndarray) -> np.ndarray:
        key = {"clock": at} if by_clock[0] else {"limit_W": at}
        seconds, watts = curve(x).predict(**key)
        # What three settings leave open stays near its usual value.
        usual = [0.01 * (x[2] - 0.5), 0.01 * (x[3] - 0.5), 0.01 * (x[1] - np.log(top_W))]
        return np.concatenate([np.log(seconds) - time, np.log(watts) - power, usual])

    found = least_squares(residual, start, bounds=(low, high), max_nfev=60)
    return curve(found.x), float(2 * found.cost)


def fit_device(
    curves: Sequence[Sequence[Setting]],
    *,
    idle_W: float,
    let_through: Sequence[float] = (0.9, 0.95, 1.0, 1.05),
    sharpness: Sequence[float] = (3.0, 5.0, 8.0),
    knees: Sequence[float] = (0.3, 0.5, 0.7),
    floors: Sequence[float] = (0.5, 0.6, 0.7, 0.8),
) -> DeviceCurve:
    """What all configurations of one kind of device share, by the settings given alone.

    Args:
        curves: the settings of each configuration.
        idle_W: the device's idle power.
        let_through, sharpness, knees, floors: the values tried.
    """
    tried = [
        DeviceCurve(*values, idle_W) for values in product(let_through, sharpness, knees, floors)
    ]
    return min(tried, key=lambda device: sum(fit_curve(device, c)[1] for c in curves))
