"""Two runs side by side: what was asked, today and the choice of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tuner.formatting import Units, change, common_mark, label, settings_text
from tuner.results.parts import Point
from tuner.results.result import Result


@dataclass(frozen=True)
class RunDifference:
    """Difference of two runs."""

    names: tuple[str, str]
    rows: tuple[tuple[str, str, str], ...]
    # why their figures must not be compared, a phrase each; empty if they may be.
    obstacles: tuple[str, ...]
    choices: tuple[Point | None, Point | None]

    @property
    def sentence(self) -> str:
        """What the second run's recommendation takes against the first one's."""
        first, second = self.choices
        if self.obstacles:
            return f"Their figures cannot be compared: {'; '.join(self.obstacles)}."
        if first is None or second is None:
            return "One of them measured nothing."
        estimated = label(common_mark([first.meter, second.meter]))
        energy = change(
            second.energy_to_solution_kJ, first.energy_to_solution_kJ, "less energy", "more energy"
        )
        time = change(second.time_to_solution_s, first.time_to_solution_s, "less time", "more time")
        return f"{self.names[1]} against {self.names[0]}: {energy}{estimated} and {time}."

    def to_json(self) -> dict[str, Any]:
        """Return the difference as JSON values."""
        return {
            "runs": list(self.names),
            "rows": [list(row) for row in self.rows],
            "obstacles": list(self.obstacles),
            "recommended": [p.to_json() if p else None for p in self.choices],
            "sentence": self.sentence,
        }


def run_difference(first: Result, second: Result) -> RunDifference:
    """Put two runs side by side."""
    obstacles = tuple(_obstacles(first, second))

    def costs(result: Result, point: Point | None) -> str:
        if point is None:
            return ""
        # What cannot be compared need not have one unit.
        units = Units.of(result.points if obstacles else (*first.points, *second.points))
        return (
            f"{units.time_text(point.time_to_solution_s)}, "
            f"{units.energy_text(point.energy_to_solution_kJ)}{label(point.meter.mark)}"
        )

    def settings(result: Result) -> str:
        point, today = result.recommended, result.baseline
        if point is None:
            return ""
        if today is not None and point.configuration == today.configuration:
            return "today"
        return settings_text(point.configuration, today.configuration if today else None)

    def texts(result: Result) -> dict[str, str]:
        limits = ", ".join(f"{name}={value:g}" for name, value in result.constraints.items())
        return {
            "job": _job(result),
            "cluster": result.cluster.name if result.cluster else "",
            "limits": limits,
            "probes": str(result.spent.probes),
            "on the front": str(len(result.front_points)),
            "today": costs(result, result.baseline),
            "recommended": settings(result),
            "it takes": costs(result, result.recommended),
        }

    of_second = texts(second)
    rows = tuple((n, text or "none", of_second[n] or "none") for n, text in texts(first).items())
    names = first.name, second.name
    return RunDifference(names, rows, obstacles, (first.recommended, second.recommended))


def _job(result: Result) -> str:
    recorded = result.about.get("recorded", {})
    name = result.job.name if result.job else str(recorded.get("table", ""))
    length = f"{result.steps:,} steps" if result.length_known else "of unknown length"
    return f"{name}, {length}".removeprefix(", ")


def _obstacles(first: Result, second: Result) -> list[str]:
    found = []
    if _job(first) != _job(second):
        found.append(f"they train {_job(first)} and {_job(second)}")
    batches = [result.job.global_batch if result.job else None for result in (first, second)]
    if None not in batches and batches[0] != batches[1]:
        found.append(f"a step trains a global batch of {batches[0]} and of {batches[1]}")
    meters = [{p.meter.scope for p in result.points} for result in (first, second)]
    if all(meters) and meters[0] != meters[1]:
        scopes = [" and ".join(sorted(each)) for each in meters]
        found.append(f"their energy has the scopes {scopes[0]} and {scopes[1]}")
    sources = [{p.source for p in result.points} for result in (first, second)]
    if all(sources) and sources[0] != sources[1]:
        found.append("one was measured and the other was predicted")
    return found
