"""Errors of the analytic models: those known from published measurements, and joint ones.

`data/known_error.toml` keeps the figures of `benchmarks.published` by device kind, so that a
prediction is shown with its error. For other kinds the error is unknown, and is shown so.

The part of the error that is a configuration's own is taken as a sum over the launch knobs: each
value of each knob that varies has an error of its own, all of one size. To that a clock or power
limit adds an error that grows with the distance from the highest one. All errors are normal and
independent, so what a probe tells of the others is linear regression.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import numpy as np

from tuner.models.analytic.constants import origin_of
from tuner.search_spaces.cluster import Device
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.knobs import stage_values

#: Live knobs whose error grows as their value falls.
_FALLING = ("clock_MHz", "power_limit_W")
#: Standard deviation of one measured launch (log): launches of one configuration differ by 0.5 to
#: 1 % in the recorded tables with repeats.
LAUNCH_SD = 0.01
#: Tokens of one GPU in one pass below which a step is less well known, and the standard deviations
#: (log) of time and power that this adds, one error for all such configurations of a job: how much
#: of gathering and launching is exposed depends on the program as much as on the device. The times
#: of the four runs of 512 tokens in `benchmarks.validation.sfttrainer` are off by 0.18 (root mean
#: square of the log).
FEW_TOKENS, FEW_TOKENS_SD = 1024, (0.2, 0.2)
#: Median of the absolute value of a standard normal variable.
NORMAL_MEDIAN = 0.674


@dataclass(frozen=True)
class Check:
    """Comparison of the models with measurements."""

    devices: tuple[str, ...]
    what: str
    median: float
    worst: float
    held_out: bool  # True if no constant was fitted to these measurements
    against: str
    case: str = ""

    @property
    def sentence(self) -> str:
        """Description of the errors for the user."""
        fitted = "" if self.held_out else ", partly calibrated on it"
        what = f"{self.what}, {self.case}" if self.case else self.what
        return (
            f"{what}: median {100 * self.median:.1f} %, worst {100 * self.worst:.0f} % "
            f"({self.against}{fitted})"
        )


@dataclass(frozen=True)
class ErrorParts:
    """Parts of the models' error, as standard deviations of the logarithm.

    What all configurations of one job on one cluster share moves a front and leaves the order of
    its points; a configuration's own error changes the order.
    """

    devices: tuple[str, ...]
    what: str
    shared: float
    own: float
    against: str


def error_parts(what: str) -> ErrorParts:
    """Return the parts of the error of "step time" or of "power"."""
    return next(each for each in (ErrorParts(**e) for e in _tables("parts")) if each.what == what)


def _tables(name: str) -> list[dict[str, Any]]:
    source = resources.files("tuner.models") / "data" / "known_error.toml"
    data = tomllib.loads(source.read_text(encoding="utf-8"))[name]
    return [
        {key: tuple(value) if isinstance(value, list) else value for key, value in each.items()}
        for each in data
    ]


def known_errors(device: Device) -> tuple[Check, ...]:
    """Return the checks that hold for this kind of device."""
    checks = (Check(**each) for each in _tables("check"))
    return tuple(check for check in checks if device.name in check.devices)


#: What the origin of a device's constants says of their errors.
_ORIGINS = {
    "published": "its constants were set to published runs on it",
    "scaled": "its constants are those of all NVIDIA GPUs, scaled by its data sheet",
    "guessed": "its constants are those of NVIDIA GPUs, a guess, scaled by its data sheet",
    "estimated": "its constants are estimates",
}


def known_error_lines(device: Device) -> list[str]:
    """Return sentences on the models' error on this kind of device."""
    return [check.sentence for check in known_errors(device)] or [
        f"unknown: the models were not compared with measurements on {device.name}; "
        f"{_ORIGINS[origin_of(device)]} (for other kinds see benchmarks.published)",
    ]


@dataclass(frozen=True)
class Spread:
    """Standard deviations (log) of the shared and the own part of the error."""

    shared: float
    own: float

    @classmethod
    def of(cls, what: str, device: Device | None = None) -> Spread:
        """Return the known parts of the error of "step time" or "power".

        On a kind of device whose errors are known but not divided, what they exceed the own part by
        is shared: a normal error of median m has the standard deviation m / 0.674.
        """
        parts = error_parts(what)
        total = 0.0
        if device is not None and device.name not in parts.devices:
            checks = (c for c in known_errors(device) if c.what == what and not c.case)
            total = max((check.median / NORMAL_MEDIAN for check in checks), default=0.0)
        shared = math.sqrt(max(parts.shared**2, total**2 - parts.own**2))
        return cls(shared, parts.own)


class ModelError:
    """Joint error of the predictions of some configurations.

    Args:
        sequence_length: of the job, tokens; 0 if unknown.
    """

    def __init__(
        self,
        configurations: Sequence[Configuration],
        *,
        time: Spread | None = None,
        power: Spread | None = None,
        sequence_length: int = 0,
    ) -> None:
        self.time, self.power = time or Spread.of("step time"), power or Spread.of("power")
        self._own = _features(configurations)
        self._few = np.array([has_few_tokens(c, sequence_length) for c in configurations], float)

    @property
    def time_sd(self) -> np.ndarray:
        """Standard deviation of the log of each step time, (n,)."""
        return self._sd(self.time, FEW_TOKENS_SD[0])

    @property
    def power_sd(self) -> np.ndarray:
        """Standard deviation of the log of each power, (n,)."""
        return self._sd(self.power, FEW_TOKENS_SD[1])

    def _sd(self, spread: Spread, few: float) -> np.ndarray:
        own = spread.own**2 * (self._own**2).sum(axis=1)
        return np.asarray(np.sqrt(spread.shared**2 + own + (few * self._few) ** 2))

    def ratio_sd(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the standard deviations of log time and log energy over those of one row, (n,)."""
        own = np.sqrt(((self._own - self._own[row]) ** 2).sum(axis=1))
        few = np.abs(self._few - self._few[row])
        time = np.hypot(self.time.own * own, FEW_TOKENS_SD[0] * few)
        both = math.hypot(self.time.own, self.power.own)
        return time, np.hypot(both * own, math.hypot(*FEW_TOKENS_SD) * few)

    def draw(self, draws: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """Return joint draws of the errors of log time and log power, (draws, n) each."""
        rng = np.random.default_rng(seed)
        time, power = (self._drawn(rng, draws, each) for each in (self.time, self.power))
        if not self._few.any():
            return time, power
        few = rng.standard_normal((2, draws, 1)) * self._few
        return time + FEW_TOKENS_SD[0] * few[0], power + FEW_TOKENS_SD[1] * few[1]

    def _drawn(self, rng: np.random.Generator, draws: int, spread: Spread) -> np.ndarray:
        own = rng.standard_normal((draws, self._own.shape[1])) @ self._own.T
        return np.asarray(spread.shared * rng.standard_normal((draws, 1)) + spread.own * own)

    def energy_features(self) -> np.ndarray:
        """Return features (n, k) with standard normal weights; their sum is the energy's error."""
        shared = math.hypot(self.time.shared, self.power.shared)
        own = math.hypot(self.time.own, self.power.own)
        columns = [np.full((len(self._own), 1), shared), own * self._own]
        if self._few.any():
            columns.append(math.hypot(*FEW_TOKENS_SD) * self._few[:, None])
        return np.hstack(columns)


def has_few_tokens(configuration: Configuration, sequence_length: int) -> bool:
    """Return True if a pass of one GPU has fewer than `FEW_TOKENS` tokens.

    Args:
        sequence_length: tokens; 0 if unknown, of which nothing is said.
    """
    tokens = configuration.micro_batch * sequence_length / configuration.sequence_parallel
    return 0 < tokens < FEW_TOKENS


def _features(configurations: Sequence[Configuration]) -> np.ndarray:
    if not configurations:
        return np.empty((0, 0))
    names = sorted({name for c in configurations for name in c.launch})
    values = {name: [c.get(name) for c in configurations] for name in names}
    varying = [name for name in names if len(set(values[name])) > 1]
    columns = []
    for name in varying:
        for value in sorted(set(values[name]), key=str):
            here = np.array([each == value for each in values[name]], dtype=float)
            columns.append(here / math.sqrt(len(varying)))
    for name in _FALLING:
        column = _depth(configurations, name)
        if column.any():
            columns.append(column)
    return np.column_stack(columns) if columns else np.zeros((len(configurations), 1))


def _depth(configurations: Sequence[Configuration], name: str) -> np.ndarray:
    means = []
    for configuration in configurations:
        value = configuration.live.get(name)
        numbers = [float(v) for v in stage_values(value) if isinstance(v, int | float)]
        means.append(sum(numbers) / len(numbers) if numbers else math.nan)
    found = np.array(means)
    if np.isnan(found).all() or np.nanmin(found) == np.nanmax(found):
        return np.zeros(len(configurations))
    top, low = np.log(np.nanmax(found)), np.log(np.nanmin(found))
    return np.nan_to_num((top - np.log(found)) / (top - low))


def most_informative(features: np.ndarray, weight: np.ndarray, first: int, count: int) -> list[int]:
    """Return the probes, one after the other, that reduce the weighted variance most.

    Greedy design for linear regression on `features` (n, k) with standard normal weights.
    """
    covariance = np.eye(features.shape[1])
    wanted = features[weight > 0]
    shares = weight[weight > 0]
    chosen: list[int] = []
    for _ in range(min(count, len(features))):
        spread = features @ covariance
        variance = np.einsum("ij,ij->i", spread, features) + LAUNCH_SD**2
        gain = shares @ (wanted @ spread.T) ** 2 / variance
        gain[chosen] = -1.0
        best = int(np.argmax(gain)) if chosen else first
        chosen.append(best)
        covariance = covariance - np.outer(spread[best], spread[best]) / variance[best]
    return chosen
