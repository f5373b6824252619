"""Counts and sizes of a plan, and the probes that would test it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tuner.search_spaces.configuration import Configuration

if TYPE_CHECKING:
    from tuner.results.parts import Choice, Point


@dataclass(frozen=True)
class SizeOfPlan:
    """The answer on one number of GPUs."""

    gpus: int
    best: Point
    choice: Choice
    least_time: Point
    least_energy: Point
    # True for the size beyond which more GPUs buy time dearest: the knee of the curve of energy
    # over time through the choices.
    is_knee: bool = False


@dataclass(frozen=True)
class PlanFacts:
    """Facts of a plan."""

    configurations: int
    fitting: int
    seconds: float
    sizes: tuple[SizeOfPlan, ...] = ()
    # configurations whose measurement would reduce the uncertainty of the front most, the baseline
    # first.
    probes: tuple[Configuration, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the facts as JSON values; a size with its points by what they take."""

        def figures(point: Point) -> dict[str, Any]:
            return {
                "configuration": point.configuration.to_json(),
                "time_to_solution_s": point.time_to_solution_s,
                "energy_to_solution_kJ": point.energy_to_solution_kJ,
            }

        sizes = [
            {
                "gpus": size.gpus,
                "met": size.choice.met,
                "is_knee": size.is_knee,
                "best": figures(size.best),
                "least_time": figures(size.least_time),
                "least_energy": figures(size.least_energy),
            }
            for size in self.sizes
        ]
        return {
            **vars(self),
            "sizes": sizes,
            "probes": [configuration.to_json() for configuration in self.probes],
        }
