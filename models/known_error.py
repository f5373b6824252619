"""How wrong the analytic models were wherever they could be checked.

`data/known_error.toml` keeps what `benchmarks.published` printed, by device kind, so that a
prediction can be shown with its known error beside it. A kind that nobody could check says so.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from importlib import resources

from search_spaces.cluster import Device

__all__ = ["Check", "known_error_lines", "known_errors"]


@dataclass(frozen=True)
class Check:
    """One check of the models against something measured.

    Attributes:
        devices: the device kinds it holds for.
        what: the figure that was compared.
        median, worst: of the absolute error, shares of the measured figure.
        held_out: whether nothing of it was fitted to what it was compared with.
        against: what it was compared with.
    """

    devices: tuple[str, ...]
    what: str
    median: float
    worst: float
    held_out: bool
    against: str

    @property
    def sentence(self) -> str:
        fitted = "" if self.held_out else ", partly calibrated on it"
        return (
            f"{self.what}: median {100 * self.median:.1f} %, worst {100 * self.worst:.0f} % "
            f"({self.against}{fitted})"
        )


def known_errors(device: Device) -> tuple[Check, ...]:
    """The checks that hold for this kind of device."""
    source = resources.files("models") / "data" / "known_error.toml"
    data = tomllib.loads(source.read_text(encoding="utf-8"))["check"]
    checks = (Check(**{**each, "devices": tuple(each["devices"])}) for each in data)
    return tuple(check for check in checks if device.name in check.devices)


def known_error_lines(device: Device) -> list[str]:
    """What is known of the models' error on this kind of device, a sentence a line."""
    checks = known_errors(device)
    if not checks:
        return [
            f"unknown: nothing measured on {device.name} was at hand to hold the models against; "
            "for other kinds see benchmarks.published",
        ]
    return [check.sentence for check in checks]
