"""Knobs of the search, as `data/catalogue/knobs.toml` declares them.

A *launch* knob needs a new process to change; a *live* knob changes while the job runs. A recorded
table may have knobs that are not listed here; its own toml gives their kind. So may a job, whose
user declares them (`tuner.search_spaces.declared`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tuner.search_spaces.data_files import catalogue
from tuner.search_spaces.errors import InvalidValue, UnknownName, check_integer

#: Value of a knob. A tuple has one value per pipeline stage.
Value = int | float | str | tuple[int, ...]
#: Upper limit of every degree, batch, clock and limit, so that products of them fit a float.
LARGEST = 10**9


@dataclass(frozen=True)
class StandardKnob:
    """Dimension of the search that joulefront knows.

    Attributes:
        scale: distance between values: "log2" (degrees, batches), "linear" (clocks, watts) or
            "category" (no order).
        default: the value if a configuration does not give one; None for a live knob, which is
            left to the device, and for the global batch, which is the job's.
    """

    name: str
    kind: Literal["launch", "live"]
    scale: Literal["log2", "linear", "category"]
    default: Value | None
    what: str
    choices: tuple[Value, ...] = ()
    minimum: int | None = None
    changes_training: bool = False
    affixes: tuple[str, str] = ("", "")
    device: str = ""
    always: bool = False
    degree: bool = False
    argument: bool = False

    def check(self, value: object) -> Value:
        """Return `value` if it is legal, else raise InvalidValue with the legal range."""
        if self.choices:
            # By type too: 1.0 and True equal 1, but a degree or a stage is an integer.
            if not any(value == choice and type(value) is type(choice) for choice in self.choices):
                raise InvalidValue(self.name, value, "one of " + ", ".join(map(str, self.choices)))
            return value  # type: ignore[return-value]
        if isinstance(value, tuple | list):
            if self.kind == "live" and value and all(type(part) is int for part in value):
                for part in value:
                    self.check(part)
                return tuple(value)
            raise InvalidValue(self.name, value, f"an integer of at least {self.minimum}")
        return check_integer(self.name, value, least=self.minimum or 0, most=LARGEST)


def _standard(name: str, table: Mapping[str, Any]) -> StandardKnob:
    live, choices = table.get("kind") == "live", tuple(table.get("choices", ()))
    before, _, after = table["short"].partition("{}")
    default = choices[0] if choices else 1
    return StandardKnob(
        name,
        kind="live" if live else "launch",
        scale="linear" if live else "category" if choices else "log2",
        default=default if table.get("default", True) else None,
        what=table["what"],
        choices=choices,
        minimum=None if choices else 1,
        changes_training=table.get("changes_training", False),
        affixes=(before, after),
        device=table.get("device", ""),
        always=table.get("always", False),
        degree=table.get("degree", False),
        argument=table.get("argument", False),
    )


KNOBS: Mapping[str, StandardKnob] = {
    name: _standard(name, table) for name, table in catalogue("knobs")["knobs"].items()
}


def knob_named(name: str) -> StandardKnob:
    """Return the standard knob of this name."""
    try:
        return KNOBS[name]
    except KeyError:
        raise UnknownName("knob", name, KNOBS) from None


def parse_value(name: str, text: str) -> Value:
    """Read a knob's value from the command line ("2", "cpu", "1200", "1200,1410")."""
    knob = knob_named(name)
    value: object = text
    try:
        parts = [int(part) for part in text.split(",")]
        value = parts[0] if len(parts) == 1 else tuple(parts)
    except ValueError:
        pass
    return knob.check(value)
