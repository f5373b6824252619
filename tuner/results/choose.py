"""Another choice on an existing front: other limits or another objective, without any probe."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Any, Literal

from tuner.formatting import Units, change, label, number, short
from tuner.problem.constraints import Constraints
from tuner.results.choice import decide, decide_likely, front_of
from tuner.results.limit_probability import Chance, of_point, of_surrogates
from tuner.results.parts import Choice, Point
from tuner.results.recommendation import against_baseline
from tuner.results.result import Result
from tuner.results.significance import Difference
from tuner.results.unmeasured import with_unmeasured
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.errors import InputError

__all__ = ["AnotherChoice", "choose", "not_refuted", "point_name"]

Evidence = Literal["verified", "refuted", "baseline", "measured", "predicted"]

_EVIDENCE: dict[Evidence, str] = {
    "verified": "Verified: fresh launches of it and of the baseline showed that it is better.",
    "refuted": "Refuted: fresh launches of it and of the baseline did not show that it is better.",
    "baseline": "It is the baseline, so there is nothing to verify.",
    "measured": "Not verified: it was measured in the search only.",
    "predicted": "A prediction by the analytic models: nothing was measured.",
}


@dataclass(frozen=True)
class AnotherChoice:
    """A choice among the points of a run.

    Attributes:
        run: the run's name.
        name: name of the point for `--point`: its number on the front, or its knobs.
        point: the configuration, with what it costs.
        choice: the rule, whether it is met, and the sentence.
        baseline: what is used today; None if it was not measured.
        evidence: "verified" or "refuted" (fresh launches decided), "baseline" (it is the baseline),
            "measured" (in the search only) or "predicted" (by a simulated cluster).
        energy, time: difference from the baseline; None for the baseline itself, or without one.
    """

    run: str
    name: str
    point: Point
    choice: Choice
    baseline: Point | None
    evidence: Evidence
    energy: Difference | None = None
    time: Difference | None = None

    @property
    def met(self) -> bool:
        """True if the point meets what was asked."""
        return self.choice.met

    def to_json(self) -> dict[str, Any]:
        """Return the choice as JSON values."""
        return {
            "run": self.run,
            "name": self.name,
            "point": self.point.to_json(),
            "choice": {**vars(self.choice), "p_met": dict(self.choice.p_met)},
            "baseline": self.baseline.to_json() if self.baseline else None,
            "evidence": self.evidence,
            "energy": dict(vars(self.energy)) if self.energy else None,
            "time": dict(vars(self.time)) if self.time else None,
        }

    def lines(self) -> list[str]:
        """Return the choice for people: the answer, today beside it, the evidence, next step."""
        point, today = self.point, self.baseline
        units = Units.of([point, *([today] if today else [])])
        estimated = label(point.meter.mark)
        rows = [("today", today)] if today else []
        lines = [self.choice.sentence]
        for name, each in [*rows, ("choice", point)]:
            before = today.configuration if today and each is not today else None
            text = f"{units.time_text(each.time_to_solution_s):>10}  "
            text += f"{units.energy_text(each.energy_to_solution_kJ):>12}{estimated}  "
            text += f"{number(each.power_W)} W"
            lines.append(f"  {name:<7}{text}  {short(each.configuration, baseline=before)}")
        if self.energy is not None and self.time is not None:
            energy = change(1 + self.energy.relative, 1, "less energy", "more energy")
            time = change(1 + self.time.relative, 1, "less time", "more time")
            lines.append(f"Against today: {energy}{estimated} and {time}.")
        lines.append(_EVIDENCE[self.evidence])
        lines.append(f"Launch files: tuner apply {self.run} --point {shlex.quote(self.name)}")
        return lines


def point_name(result: Result, point: Point) -> str:
    """Return the name of a point for `Result.point`: its number on the front, or its knobs."""
    front = [each.configuration for each in result.front_points]
    if point.configuration in front:
        return str(front.index(point.configuration) + 1)
    return point.configuration.short


def _survived(result: Result) -> dict[Configuration, bool]:
    """Return which configurations a verification tried, and whether they survived it."""
    attempts = result.verification.attempts if result.verification is not None else ()
    return {each.configuration: each.survived for each in attempts}


def not_refuted(result: Result) -> list[Point]:
    """Return the measured points that no verification refuted; all of them if it refuted each."""
    survived = _survived(result)
    left = [point for point in result.points if survived.get(point.configuration, True)]
    return left or list(result.points)


def choose(result: Result, constraints: Constraints) -> AnotherChoice:
    """Choose among the measured points of a result.

    A configuration that a verification refuted is chosen only if no other one was measured.

    Args:
        result: the run's.
        constraints: limits and objective.

    Raises:
        InputError: nothing was measured, or the slowdown is limited and the baseline was not
            measured.
    """
    baseline = result.baseline
    if constraints.max_slowdown is not None and baseline is None:
        raise InputError(
            f"the slowdown is relative to the baseline, which run {result.name!r} did not measure; "
            "give a deadline instead"
        )
    survived = _survived(result)
    points = not_refuted(result)
    limits = constraints.relative_to(baseline.time_to_solution_s if baseline else None)
    units = Units.of([*points, *([baseline] if baseline else [])])
    chance: Chance = of_point
    if result.surrogates is not None:
        chance = of_surrogates(result.surrogates, result.steps)
    if result.verification is None or result.verification.status == "off":
        best, choice = decide_likely(points, limits, units, chance)
    else:
        best, choice = decide(points, front_of(points), limits, units, chance=chance)
    if best is None:
        raise InputError(f"run {result.name!r} measured nothing, so there is nothing to choose")
    choice = with_unmeasured(choice, limits, result.surrogates, result.unmeasured, result.steps)
    evidence: Evidence = "measured"
    if best.meter.name == "simulated":
        evidence = "predicted"
    elif baseline is not None and best.configuration == baseline.configuration:
        evidence = "baseline"
    elif best.configuration in survived:
        evidence = "verified" if survived[best.configuration] else "refuted"
    energy, time = against_baseline(result, best) or (None, None)
    name = point_name(result, best)
    return AnotherChoice(result.name, name, best, choice, baseline, evidence, energy, time)
