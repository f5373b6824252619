"""Launches that learn something else than the baseline, by a declared knob or a standard one.

They are searched only if the user allows it, and carry a mark wherever they are shown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from tuner.search_spaces.knobs import KNOBS, Value

if TYPE_CHECKING:
    from tuner.search_spaces.declared import Knob

#: Setting that marks a launch which learns something else than the baseline, wherever it is shown.
CHANGED, MARK = "training", "changed"
#: The standard knobs that do so.
_STANDARD = tuple(knob for knob in KNOBS.values() if knob.changes_training)


def changed_training(launch: Mapping[str, Value], knobs: Sequence[Knob]) -> tuple[str, ...]:
    """Return the values by which a launch learns something else than the baseline.

    Args:
        knobs: the declared knobs of the job. A standard knob learns the same at its default.
    """
    standard = [
        f"{knob.name}={launch[knob.name]}"
        for knob in _STANDARD
        if launch.get(knob.name, knob.default) != knob.default
    ]
    values = {knob: launch.get(knob.name) for knob in knobs if knob.changes_training}
    declared = [
        f"{knob.name}={value}"
        for knob, value in values.items()
        if value not in (None, knob.baseline)
    ]
    return (*standard, *declared)


def marked(launch: Mapping[str, Value], knobs: Sequence[Knob]) -> dict[str, Value]:
    """Return the settings of a launch, with the mark if it learns something else."""
    mark = {CHANGED: MARK} if changed_training(launch, knobs) else {}
    return {**launch, **mark}
