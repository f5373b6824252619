"""Another choice on an existing front: other limits or another objective, without any probe."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from typing import Any

from tuner.formatting import Units, change, label, number, probability, short
from tuner.problem.constraints import Constraints
from tuner.results.parts import Choice, Evidence, Point
from tuner.results.recommendation import advise, evidence_of
from tuner.results.result import Result
from tuner.results.significance import Difference
from tuner.results.unmeasured import with_unmeasured
from tuner.search_spaces.errors import InputError


@dataclass(frozen=True)
class AnotherChoice:
    """A choice among the points of a run.

    Attributes:
        run: the run's name.
        name: name of the point for `--point`: its number on the front, or its knobs.
        point: the configuration, with what it costs.
        choice: the rule, whether it is met, and the sentence.
        baseline: what is used today; None if it was not measured.
        evidence: what is known of it.
        p_better: probability that it is better than the baseline in what was asked; None if that
            is unknown or it is the baseline.
        energy, time: difference from the baseline; None for the baseline itself, or without one.
    """

    run: str
    name: str
    point: Point
    choice: Choice
    baseline: Point | None
    evidence: Evidence
    p_better: float | None = None
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
            "evidence": self.evidence.value,
            "p_better": self.p_better,
            "energy": dict(vars(self.energy)) if self.energy else None,
            "time": dict(vars(self.time)) if self.time else None,
        }

    def __str__(self) -> str:
        return "\n".join(self.lines())

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
        lines.append(self._evidence())
        lines.append(f"Launch files: tuner apply {self.run} --point {shlex.quote(self.name)}")
        return lines

    def _evidence(self) -> str:
        if self.evidence is Evidence.PREDICTED:
            return "A prediction by the analytic models: nothing was measured."
        if self.p_better is None:
            return "It is what runs today." if self.baseline is not None else "Measured."
        sure = f"Better than today with a probability of {probability(self.p_better)}"
        if self.evidence is Evidence.VERIFIED:
            return f"{sure}, by launches made after it was chosen."
        return f"{sure}, by the launches of the search."


def point_name(result: Result, point: Point) -> str:
    """Return the name of a point for `Result.point`: its number on the front, or its knobs."""
    front = [each.configuration for each in result.front_points]
    if point.configuration in front:
        return str(front.index(point.configuration) + 1)
    return point.configuration.short


def choose(result: Result, constraints: Constraints) -> AnotherChoice:
    """Choose among the measured points of a result.

    Without constraints it is what the run recommends. With some it is what is best under them, and
    `p_better` tells how sure that is.

    Args:
        result: the run's.
        constraints: limits and objective.

    Raises:
        InputError: nothing was measured, the slowdown is limited and the baseline was not measured,
            or a limit is on the whole training, whose length is unknown.
    """
    baseline = result.baseline
    if constraints.max_slowdown is not None and baseline is None:
        raise InputError(
            f"the slowdown is relative to today, which run {result.name!r} did not measure; "
            "give a deadline instead"
        )
    if not result.length_known:
        constraints.require_limits_of_a_step()
    limits = constraints.relative_to(baseline.time_to_solution_s if baseline else None)
    own = result.judged
    judge = own if not constraints.given else replace(own, constraints=limits)
    best, choice = judge.choose()
    if best is None:
        raise InputError(f"run {result.name!r} measured nothing, so there is nothing to choose")
    if not constraints.given:
        advised = advise(judge, best, met=choice.met).point
        if advised.configuration != best.configuration:
            best, choice = advised, replace(judge.choose([advised])[1], sentence=result.headline)
    today = baseline is not None and best.configuration == baseline.configuration
    energy, time = judge.differences(best) or (None, None)
    return AnotherChoice(
        result.name,
        point_name(result, best),
        best,
        with_unmeasured(choice, limits, result.surrogates, result.unmeasured, result.steps),
        baseline,
        evidence_of(judge, best),
        None if baseline is None or today else judge.p_better(best),
        energy,
        time,
    )
