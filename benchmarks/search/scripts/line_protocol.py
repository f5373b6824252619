"""What the scripts of this folder share: the problem, and JSON lines in and out.

`benchmarks.search.external` says what the lines hold. A script is given to the Python of an
environment with one sampler's package, so this module uses the standard library only.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

#: Launches that are swept before a model chooses.
START = 3


@dataclass(frozen=True)
class Problem:
    """A finite space.

    Attributes:
        knobs: levels of each knob, in order.
        configurations: all of them; the place of one is its number.
        seed: of every draw.
    """

    knobs: dict[str, list[Any]]
    configurations: list[dict[str, Any]]
    seed: int

    def ordered(self, knob: str) -> bool:
        """Return True if the knob's levels are numbers."""
        return all(isinstance(level, (int, float)) for level in self.knobs[knob])

    def nearest(self, proposed: dict[str, Any], still_open: Sequence[int]) -> int:
        """Return the open configuration with the fewest knobs and then the fewest levels changed.

        Args:
            proposed: a level of each knob.
            still_open: numbers of configurations, at least one.
        """

        def distance(number: int) -> tuple[int, int]:
            steps = [
                abs(levels.index(self.configurations[number][name]) - levels.index(proposed[name]))
                for name, levels in self.knobs.items()
            ]
            return sum(step > 0 for step in steps), sum(steps)

        return min(still_open, key=distance)


class Sampler(Protocol):
    """A sampler of whole configurations."""

    def tell(self, number: int, energy_J: float, time_s: float) -> None:
        """Receive the measurement of a configuration, proposed or not."""

    def ask(self, still_open: Sequence[int]) -> int:
        """Return the number of an open configuration, whose launch is swept next."""


def serve(make: Callable[[Problem], Sampler]) -> None:
    """Answer with a sampler until the input ends. What the sampler prints goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    first = json.loads(sys.stdin.readline())
    sampler = make(Problem(first["knobs"], first["configurations"], first["seed"]))
    for line in sys.stdin:
        message = json.loads(line)
        for number, energy_J, time_s in message["tell"]:
            sampler.tell(number, energy_J, time_s)
        answers.write(json.dumps({"ask": sampler.ask(message["open"])}) + "\n")
        answers.flush()
