"""Difference of one quantity between two configurations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tuner.formatting import percent
from tuner.workload.records.probe import MeterInfo

#: A difference is called one at this level.
LEVEL = 0.05


@dataclass(frozen=True)
class Difference:
    """Difference of one quantity from `a` to `b`."""

    quantity: str  # "step_time", "power" or "energy_per_step"
    relative: float  # b / a - 1; -0.05 is 5 % less
    low: float
    high: float
    p_value: float  # two-sided, of no difference at all; not shown of a prediction
    method: str
    predicted: bool = False  # by models, whose known error the interval is

    @property
    def shown(self) -> bool:
        """True if the interval leaves out zero."""
        return self.p_value < LEVEL

    @property
    def sentence(self) -> str:
        """The difference in words; a difference that is not significant is not called one."""
        quantity = self.quantity.replace("_", " ")
        word = "less" if self.relative < 0 else "more"
        if self.predicted:
            ends = f"{100 * self.low:+.0f} to {100 * self.high:+.0f} %"
            return f"{quantity}: {percent(abs(self.relative))} {word} ({ends}), predicted"
        change = f"{100 * abs(self.relative):.2f} % {word}"
        interval = f"[{100 * self.low:+.2f}, {100 * self.high:+.2f}] %"
        # A smaller one than a few launches can tell is only bounded.
        p = f"p = {self.p_value:.2g}" if self.p_value >= 1e-4 else "p < 0.0001"
        why = f"{interval} ({p}, {self.method})"
        if not self.shown:
            return f"{quantity}: no difference shown; if any, within {why}"
        return f"{quantity}: {change}, {why}"

    def to_json(self) -> dict[str, Any]:
        values = {**vars(self)}
        if values.pop("predicted"):
            values |= {"p_value": None, "method": "known error of the models"}
        return values


@dataclass(frozen=True)
class Comparison:
    """Changes from `a` to `b`."""

    a: str
    b: str
    step_time: Difference
    energy: Difference
    meter: MeterInfo
    basis: str = ""

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> list[str]:
        label = self.meter.label
        energy = f"{self.energy.sentence}; {self.meter.scope} scope, {label} ({self.meter.source})"
        return [
            f"from  {self.a}",
            f"to    {self.b}",
            self.step_time.sentence,
            self.meter.shown(energy) or self.meter.sentence,
            *([self.basis] if self.basis else []),
        ]

    def to_json(self) -> dict[str, Any]:
        parts = {
            name: {**part.to_json(), "shown": part.shown, "sentence": part.sentence}
            for name, part in (("step_time", self.step_time), ("energy", self.energy))
        }
        meter = dict(vars(self.meter))
        data = {"a": self.a, "b": self.b, **parts, "meter": meter, "basis": self.basis}
        return self.meter.known(data)
