"""Errors of the analytic models against published measurements.

`data/known_error.toml` keeps the figures of `benchmarks.published` by device kind, so that a
prediction is shown with its error. For other kinds the error is unknown, and is shown so.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from importlib import resources

from tuner.search_spaces.cluster import Device

__all__ = ["Check", "known_error_lines", "known_errors"]


@dataclass(frozen=True)
class Check:
    """Comparison of the models with measurements.

    Attributes:
        devices: the device kinds it holds for.
        what: the figure that was compared.
        median, worst: median and largest absolute error, as shares of the measured figure.
        held_out: True if no constant was fitted to these measurements.
        against: source of the measurements.
    """

    devices: tuple[str, ...]
    what: str
    median: float
    worst: float
    held_out: bool
    against: str

    @property
    def sentence(self) -> str:
        """Description of the errors for the user."""
        fitted = "" if self.held_out else ", partly calibrated on it"
        return (
            f"{self.what}: median {100 * self.median:.1f} %, worst {100 * self.worst:.0f} % "
            f"({self.against}{fitted})"
        )


def known_errors(device: Device) -> tuple[Check, ...]:
    """Return the checks that hold for this kind of device."""
    source = resources.files("tuner.models") / "data" / "known_error.toml"
    data = tomllib.loads(source.read_text(encoding="utf-8"))["check"]
    checks = (Check(**{**each, "devices": tuple(each["devices"])}) for each in data)
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
