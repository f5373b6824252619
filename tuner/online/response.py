"""Model of how step time and power respond to the live setting, relative to the highest setting.

For each of the two quantities, with x the logarithm of the highest setting's value over this one's,

    log y(setting, epoch) = level(epoch) + f(x) + d(x, epoch) + noise,    f(0) = d(0, epoch) = 0.

f is a power law of unknown exponent (step time grows as the clock falls, power falls with it) plus
a smooth deviation from it; d is a smaller one of the epoch alone. An epoch lasts from one change of
the job or the machine to the next: the level is then unknown again, while the response is kept as
far as the new measurements agree with it. All terms are Gaussian, so the posterior is that of a
Gaussian process with a few dozen observations (Rasmussen and Williams 2006, section 2.7).

Of t seconds below the highest setting, t (1 - exp(-f)) are lost by f of the step time. f is
uncertain; the promise is kept on its upper end. The run may end after any step, so the loss so far
must at all times be within the slowdown that the time so far allows.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import add
from typing import Literal

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

#: Windows of one setting that count; older ones are forgotten.
MEMORY = 40
#: Epochs that are kept.
EPOCHS = 4
#: Windows that tell what is drawn lately.
LATELY = 4
#: Pairs of neighbouring windows by which their noise is estimated.
PAIRS = 60
#: Windows that are near enough in time to share slow noise, and the prior of its relative size.
BLOCK, COMMON = 10, 0.002
#: Relative drift from one window to the next within an epoch (standard deviation).
WANDER = 0.0003
#: Variance of slow noise over half that of the difference of neighbouring blocks, which share some
#: of it: for an exponential correlation over one block, 1 / (1 - 1/e), of short visits 1.36 times.
SHARED = 2.15
#: Prior standard deviation of what a value of a declared knob changes at all clocks.
DECLARED = 0.1
#: Prior standard deviation of a level: unknown.
LEVEL = 10.0
#: Slowdown that stands for no limit.
UNLIMITED = 1e6
#: Standard deviations to the upper end: one-sided 95 % is 1.64; the rest covers the model.
SURE = 2.0
#: Share of the allowance that is kept in reserve.
RESERVE = 0.05


@dataclass(frozen=True)
class Prior:
    """Prior of one quantity's response: the exponent of its power law by x, the deviation from it
    far from the highest setting and the noise of a window (standard deviations), and the size of an
    epoch's own response as a share of the common one."""

    quantity: Literal["step_time_s", "power_W"]
    exponent: float
    exponent_sd: float
    deviation: float
    epoch: float = 0.25
    noise: float = 0.01


#: Step time by the clock or a limit: from not at all (bound by memory) to in proportion.
STEP_TIME = Prior("step_time_s", 0.4, 0.4, 0.08)
#: Power by the clock or a limit: from not at all (the limit does not bind) to about the square.
POWER = Prior("power_W", -0.8, 0.6, 0.08, noise=0.02)


@dataclass(frozen=True)
class StudiedSetting:
    """Earlier measurement of a setting; `error` is the relative standard error of both figures."""

    step_time_s: float
    power_W: float
    error: float = 0.01


@dataclass
class _Visits:
    # Windows of one setting in one epoch: logarithms and window numbers.
    values: deque[float] = field(default_factory=lambda: deque(maxlen=MEMORY))
    numbers: deque[int] = field(default_factory=lambda: deque(maxlen=MEMORY))
    error: float | None = None  # of an earlier measurement

    @property
    def blocks(self) -> int:
        # Number of stretches of BLOCK windows that its windows come from.
        found, last = 0, -BLOCK
        for number in self.numbers:
            if number - last >= BLOCK:
                found, last = found + 1, number
        return found

    def difference(self) -> float | None:
        # Of the means of the last two complete blocks in a row, every BLOCK windows.
        if len(self.numbers) < 2 * BLOCK or (self.numbers[-1] + 1) % BLOCK:
            return None
        if self.numbers[-1] - self.numbers[-2 * BLOCK] > 3 * BLOCK:
            return None
        values = list(self.values)[-2 * BLOCK :]
        return (sum(values[BLOCK:]) - sum(values[:BLOCK])) / BLOCK

    def unseen(self, now: int) -> float:
        # Variance of the mean of a random walk until `now` that the visits leave open, in units of
        # a step's: of g steps between two visits g/12 (a Brownian bridge), of g steps after the
        # last one g/3, each weighted by the square of its share of the time.
        numbers = list(self.numbers)
        gaps = [(b - a, 12) for a, b in pairwise(numbers)]
        gaps.append((now - numbers[-1], 3))
        whole = max(1, now - numbers[0])
        return sum((gap / whole) ** 2 * gap / part for gap, part in gaps)


class Response:
    """Posterior of one quantity, with the `studied` values as an epoch before the first.

    `x` is, of each setting, the logarithm of the highest value over its own, `declared` the values
    of the declared knobs: the highest setting, and today's values, come first.
    """

    def __init__(
        self,
        x: Sequence[float],
        prior: Prior,
        studied: Mapping[int, StudiedSetting],
        declared: Sequence[tuple[object, ...]] = (),
    ) -> None:
        self._x = np.asarray(x, dtype=float)
        self._prior = prior
        far = np.minimum(1.0, np.abs(self._x) / 0.2)
        near = np.exp(-0.5 * (np.subtract.outer(self._x, self._x) / 0.3) ** 2)
        self._common = prior.exponent_sd**2 * np.outer(self._x, self._x)
        self._common += prior.deviation**2 * np.outer(far, far) * near
        for knob in zip(*declared, strict=True):
            # Two settings share what the values do that both have and today has not.
            own = np.asarray(list(map(str, knob)))
            self._common += DECLARED**2 * np.equal.outer(own, own) * (own != own[0])
        self._own = prior.epoch**2 * self._common
        self._epochs: dict[int, dict[int, _Visits]] = {-1: {}, 0: {}}
        for i, each in studied.items():
            value = math.log(getattr(each, prior.quantity))
            self._epochs[-1][i] = _Visits(deque([value]), deque([0]), each.error)
        self._squares: deque[float] = deque(maxlen=PAIRS)
        self._slow_squares, self._slow_pairs = 3 * COMMON**2, 3.0
        self.epoch = 0

    @property
    def noise(self) -> float:
        """Relative standard deviation of a window about its setting's mean."""
        count = len(self._squares)
        if not count:
            return self._prior.noise
        # Of many pairs the median, which a few large differences (a change, a stall) do not move;
        # that of a squared normal deviate is 0.455.
        many = count >= 8
        typical = statistics.median(self._squares) / 0.455 if many else sum(self._squares) / count
        # Few pairs may be alike by chance: three more of their size are added.
        return math.sqrt((self._prior.noise**2 + (count + 3) * typical) / (1 + count))

    @property
    def common(self) -> float:
        """Relative standard deviation of the slow noise that neighbouring windows share."""
        return math.sqrt(self._slow_squares / self._slow_pairs)

    def drop_studied(self) -> None:
        """Forget the earlier measurements."""
        self._epochs.pop(-1, None)

    def add(self, setting: int, number: int, value: float) -> None:
        """Add the mean of a window; `number` counts the windows of the run."""
        visits = self._epochs[self.epoch].setdefault(setting, _Visits())
        if visits.values and number - visits.numbers[-1] <= 2:
            # Neighbouring windows differ by noise alone.
            self._squares.append((math.log(value) - visits.values[-1]) ** 2 / 2)
        visits.values.append(math.log(value))
        visits.numbers.append(number)
        if (apart := visits.difference()) is not None:
            slow = max(0.0, apart**2 / 2 - self.noise**2 / BLOCK)
            self._slow_squares += min(slow, 9 * self._slow_squares / self._slow_pairs)
            self._slow_pairs += 1

    def forget(self, since: int) -> None:
        """Forget the windows of this epoch from number `since` on."""
        for visits in self._epochs[self.epoch].values():
            while visits.numbers and visits.numbers[-1] >= since:
                visits.numbers.pop()
                visits.values.pop()

    def begin(self, epoch: int) -> None:
        """Begin an epoch, without windows."""
        self._epochs[epoch] = {}
        self.epoch = epoch
        for old in sorted(self._epochs)[:-EPOCHS]:
            del self._epochs[old]

    def _observations(self, now: int, past: bool) -> tuple[list[int], list[int], Array, Array]:
        settings, epochs, means, variances = [], [], [], []
        for epoch, visited in self._epochs.items():
            for setting, visits in visited.items():
                if not visits.values:
                    continue
                count = len(visits.values)
                slow = (SHARED if past else 1.0) * self.common**2 / visits.blocks
                if epoch == self.epoch:
                    age = now - sum(visits.numbers) / count
                    slow += WANDER**2 * (visits.unseen(now) if past else max(0.0, age))
                variance = self.noise**2 / count + slow
                settings.append(setting)
                epochs.append(epoch)
                means.append(sum(visits.values) / count)
                variances.append(variance if visits.error is None else visits.error**2)
        return settings, epochs, np.asarray(means), np.asarray(variances)

    def posterior(self, now: int, *, past: bool = False) -> Posterior:
        """Return the posterior in this epoch at window `now`, or of its mean until then (past)."""
        settings, epochs, means, variances = self._observations(now, past)
        count, x = len(self._x), self._x
        mean = self._prior.exponent * x
        # The last row is the level of this epoch; the others are the response.
        prior = np.zeros((count + 1, count + 1))
        prior[:count, :count] = self._common + self._own
        prior[count, count] = LEVEL**2
        if not settings:
            return Posterior(np.append(mean, 0.0), prior)
        at, same = np.asarray(settings), np.equal.outer(epochs, epochs)
        within = self._common[np.ix_(at, at)] + same * (self._own[np.ix_(at, at)] + LEVEL**2)
        now_here = np.asarray(epochs) == self.epoch
        across = np.zeros((count + 1, len(settings)))
        across[:count] = self._common[:, at] + now_here * self._own[:, at]
        across[count] = now_here * LEVEL**2
        centre = float(np.mean(means))
        gain = np.linalg.solve(within + np.diag(variances), across.T).T
        response = gain @ (means - centre - mean[at])
        response[:count] += mean
        response[count] += centre
        return Posterior(response, prior - gain @ across.T)

    def lately(self, setting: int) -> float:
        """Return how much its latest windows are above its mean, a logarithm; 0 if it has none."""
        values = self.here(setting)
        return statistics.fmean(values[-LATELY:]) - statistics.fmean(values) if values else 0.0

    def here(self, setting: int) -> list[float]:
        """Return the logarithms of a setting's windows in this epoch."""
        return list(self._epochs[self.epoch].get(setting, _Visits()).values)


@dataclass(frozen=True)
class Posterior:
    """Posterior mean and covariance of the response at each setting, and of the level (last), of
    shape (settings + 1) and (settings + 1, settings + 1); logarithms."""

    mean: Array
    covariance: Array

    def relative(self, setting: int) -> tuple[float, float]:
        """Return mean and standard deviation of log(value / value at the highest setting)."""
        variance = float(self.covariance[setting, setting])
        return float(self.mean[setting]), math.sqrt(max(0.0, variance))

    def value(self, setting: int) -> tuple[float, float]:
        """Return mean and standard deviation of the logarithm of the value."""
        pick = np.zeros(len(self.mean))
        pick[setting] = pick[-1] = 1.0
        return float(pick @ self.mean), math.sqrt(max(0.0, float(pick @ self.covariance @ pick)))


@dataclass(frozen=True)
class Views:
    """Posteriors of both quantities."""

    time: Posterior
    power: Posterior

    def energy(self, setting: int) -> tuple[float, float]:
        """Return mean and standard deviation of the log energy ratio to the highest setting."""
        slow, slow_sd = self.time.relative(setting)
        less, less_sd = self.power.relative(setting)
        return slow + less, math.hypot(slow_sd, less_sd)


@dataclass(frozen=True)
class Balance:
    """Loss and saving against the run at the highest setting; an estimate and its 90 % interval.

    `exploring_J` is of windows run to learn, beyond that of the same steps at the chosen setting.
    """

    seconds: float = 0.0
    energy_J: float = 0.0
    lost_s: tuple[float, ...] = (0.0, 0.0, 0.0)
    saved_J: tuple[float, ...] = (0.0, 0.0, 0.0)
    exploring_J: float = 0.0

    def __add__(self, other: Balance) -> Balance:
        # Ends are added as if all errors had one cause, which is the wider interval.
        return Balance(
            self.seconds + other.seconds,
            self.energy_J + other.energy_J,
            tuple(map(add, self.lost_s, other.lost_s)),
            tuple(map(add, self.saved_J, other.saved_J)),
            self.exploring_J + other.exploring_J,
        )

    @property
    def slowdown(self) -> tuple[float, ...]:
        """Slowdown of the run: (low, estimate, high)."""
        return tuple(lost_s / max(self.seconds - lost_s, 1e-9) for lost_s in self.lost_s)


def balance(spent: Array, views: Views, chosen: int, sure: float) -> Balance:
    """Return the balance of an epoch, whose ends are `sure` standard deviations off.

    `spent`, of shape (3, settings), is time, energy and the part of it in windows run to learn.
    """
    lost, saved, exploring_J = [0.0, 0.0, 0.0], [0.0, 0.0, 0.0], 0.0
    here = views.energy(chosen)[0]
    for setting in np.flatnonzero(spent[0]).tolist():
        seconds, energy_J, tried_J = map(float, spent[:, setting])
        slow, slow_sd = views.time.relative(setting)
        energy, energy_sd = views.energy(setting)
        for end, side in enumerate((-sure, 0.0, sure)):
            # To be faster than at the highest setting earns nothing: it may be a phase of the job.
            least = 0.0 if side > 0 else -math.inf
            lost[end] += seconds * max(least, -math.expm1(-(slow + side * slow_sd)))
            saved[end] += energy_J * math.expm1(min(-(energy - side * energy_sd), 5.0))
        exploring_J += max(0.0, -tried_J * math.expm1(here - energy))
    total_s, total_J = map(float, spent[:2].sum(1))
    return Balance(total_s, total_J, tuple(lost), tuple(saved), exploring_J)


def available_s(seconds: float, lost_s: float, max_slowdown: float) -> float:
    """Return the time that may still be lost, seconds, after `seconds` of which `lost_s` are lost.

    The allowance is `max_slowdown` of the time at the highest setting, seconds - lost_s.
    """
    return (1 - RESERVE) * max_slowdown * (seconds - lost_s) - lost_s
