"""Errors of the analytic models against published measurements.

`data/known_error.toml` keeps the figures of `benchmarks.published` by device kind, so that a
prediction is shown with its error. For other kinds the error is unknown, and is shown so.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from importlib import resources
from typing import Any

from tuner.search_spaces.cluster import Device


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
    """Parts of the models' error, as standard deviations of the logarithm."""

    devices: tuple[str, ...]
    what: str
    # of what all configurations of one job on one cluster share, which moves a front and leaves the
    # order of its points.
    shared: float
    own: float  # of a configuration's own, which changes the order
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


def known_error_lines(device: Device) -> list[str]:
    """Return sentences on the models' error on this kind of device."""
    checks = known_errors(device)
    if not checks:
        return [
            f"unknown: the models were not compared with measurements on {device.name}; "
            "for other kinds see benchmarks.published",
        ]
    return [check.sentence for check in checks]
