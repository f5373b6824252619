"""Explanation of a point: its time and energy by part and its knobs' effects.

Where time and energy go is the analytic model's breakdown, scaled to what was measured, with the
model's error beside it. What a knob bought is the surrogates' difference between the point and the
same point with that knob at another value, drawn from their joint posterior, so that what the two
share does not widen the interval.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from tuner.formatting import knob_text, label, number, ordered_knobs, percent, value_text
from tuner.results.parts import Point
from tuner.results.result import Result
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.search_spaces.knobs import KNOBS, Value
from tuner.search_spaces.rules import broken_rules

#: Joint draws behind an interval.
DRAWS = 1000
#: CpuContention that are drawn together at most.
MOST_NEIGHBOURS = 150


class RelativeChange(NamedTuple):
    """Relative change with its 90 % interval; -0.1 is 10 % less."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class KnobEffect:
    """Effect of one knob's value at the point, against another value, all else equal.

    Attributes:
        knob: its name.
        value: at the point.
        instead_of: the other value.
        time, energy, power: what the value changes.
        measured: the point with the other value was itself measured.
        of_baseline: the other value is the baseline's.
    """

    knob: str
    value: Value | None
    instead_of: Value | None
    time: RelativeChange
    energy: RelativeChange
    power: RelativeChange
    measured: bool
    of_baseline: bool

    @property
    def sentence(self) -> str:
        """ "micro_batch=4 instead of 1 (today's): time -12 % [-14, -10], energy ..." """

        def text(change: RelativeChange) -> str:
            middle, low, high = (100 * share for share in change)
            return f"{middle:+.1f} % [{low:+.1f}, {high:+.1f}]"

        other = value_text(self.instead_of)
        whose = " (today's)" if self.of_baseline else ""
        how = "" if self.measured else "; predicted"
        return (
            f"{knob_text(self.knob, self.value)} instead of {other}{whose}: "
            f"time {text(self.time)}, energy {text(self.energy)}{how}"
        )


@dataclass(frozen=True)
class Explanation:
    """Explanation of a point.

    Attributes:
        point: the point.
        time_s: where a step's time goes, seconds by part, largest first: the model's shares of the
            measured step. Empty where no model knows the job.
        energy_J: where a step's energy goes, joules by part, likewise.
        model_error: the model's own step time and energy as shares of the measured ones, minus 1.
        knobs: what each knob bought, the baseline's values first, then by how much energy it moves.
        mark: the mark of the energy's meter, e.g. "estimated"; empty if it was metered.
        notes: what could not be explained, a sentence each.
    """

    point: Point
    time_s: Mapping[str, float] = field(default_factory=dict)
    energy_J: Mapping[str, float] = field(default_factory=dict)
    model_error: Mapping[str, float] = field(default_factory=dict)
    knobs: tuple[KnobEffect, ...] = ()
    mark: str = ""
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the explanation as JSON values."""
        return {
            **vars(self),
            "point": self.point.to_json(),
            "time_s": dict(self.time_s),
            "energy_J": dict(self.energy_J),
            "model_error": dict(self.model_error),
            "knobs": [{**vars(effect), "sentence": effect.sentence} for effect in self.knobs],
        }

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> list[str]:
        """Return the explanation as lines."""
        estimated = label(self.mark)
        told = [self.point.configuration.short]
        told.append(f"  {self.point.how_measured}")
        for title, parts, unit in (
            (
                "Where the time of a step goes (the model's shares of what was measured)",
                self.time_s,
                "s",
            ),
            (f"Where the energy of a step goes (likewise){estimated}", self.energy_J, "J"),
        ):
            if not parts:
                continue
            total = math.fsum(parts.values())
            wide = max(len(name) for name in parts)
            told += ["", title]
            told += [
                f"  {name:<{wide}}  {number(value):>9} {unit}  {percent(value / total):>6}"
                for name, value in parts.items()
            ]
        if self.model_error:
            pairs = ", ".join(
                f"{name} {100 * share:+.0f} %" for name, share in self.model_error.items()
            )
            told.append(f"  The model alone would have been off by: {pairs}.")
        if self.knobs:
            told += ["", "What each knob bought here, all else equal (90 % intervals)"]
            told += [f"  {effect.sentence}" for effect in self.knobs]
        return [*told, *([""] if self.notes else []), *self.notes]


def _replaced(configuration: Configuration, knob: str, value: Value | None) -> Configuration:
    """Return the configuration with one knob changed; None leaves a live knob to the device."""
    live = KNOBS[knob].kind == "live" if knob in KNOBS else knob in configuration.live
    half = dict(configuration.live if live else configuration.launch)
    if value is None:
        half.pop(knob, None)
    else:
        half[knob] = value
    if live:
        return Configuration(configuration.launch, Settings(half))
    return Configuration(Settings(half), configuration.live)


def _neighbours(result: Result, point: Point) -> list[tuple[str, Value | None, Configuration]]:
    """Return the point's variants with one knob at another value that was measured somewhere."""
    job, cluster = result.job, result.cluster
    measured = {p.configuration for p in result.points}
    found = []
    for knob in ordered_knobs(p.configuration for p in result.points):
        mine = point.configuration.get(knob)
        seen = {p.configuration.get(knob) for p in result.points}
        for value in sorted(seen - {mine}, key=lambda each: (str(type(each)), str(each))):
            other = _replaced(point.configuration, knob, value)
            able = job is None or cluster is None or not broken_rules(other, job, cluster)
            if other in measured or able:
                found.append((knob, value, other))
    return found[:MOST_NEIGHBOURS]


def _effects(result: Result, point: Point) -> tuple[KnobEffect, ...]:
    """Estimate each knob's effect at the point from the surrogates' joint posterior."""
    neighbours = _neighbours(result, point)
    windows = sum(map(len, result.windows.values()))
    surrogates = result.surrogates
    if not neighbours or surrogates is None or windows < 3:
        return ()
    drawn = [point.configuration, *(other for _, _, other in neighbours)]
    normals = np.random.default_rng(0).standard_normal((DRAWS, 2, len(drawn)))
    time, power = surrogates.sample(drawn, normals)
    measured = {p.configuration for p in result.points}
    baseline = result.baseline.configuration if result.baseline else None

    def change(log: np.ndarray, column: int) -> RelativeChange:
        quantiles = np.quantile(log[:, 0] - log[:, column], [0.5, 0.05, 0.95])
        middle, low, high = (float(value) for value in np.expm1(quantiles))
        return RelativeChange(middle, low, high)

    effects = [
        KnobEffect(
            knob=knob,
            value=point.configuration.get(knob),
            instead_of=value,
            time=change(time, column),
            energy=change(time + power, column),
            power=change(power, column),
            measured=other in measured,
            of_baseline=baseline is not None and baseline.get(knob) == value,
        )
        for column, (knob, value, other) in enumerate(neighbours, start=1)
    ]
    return tuple(sorted(effects, key=lambda e: (not e.of_baseline, -abs(e.energy[0]))))


def _where(
    result: Result, point: Point
) -> tuple[dict[str, float], dict[str, float], dict[str, float], str]:
    """Time and energy by part, scaled to the measured step; the model's error; or why not."""
    job, cluster = result.job, result.cluster
    if job is None or cluster is None:
        return {}, {}, {}, "Where time and energy go is not told: no job or cluster is known."
    if not job.is_modelled:
        return {}, {}, {}, "Where time and energy go is not told: the model's sizes are not known."
    from tuner.models.analytic.model import AnalyticModel
    from tuner.problem.batch_scaling import steps_a_job_step

    said = AnalyticModel(job, cluster).breakdown(point.configuration)
    step_s = point.time_to_solution_s / result.steps
    step_J = 1000 * point.energy_to_solution_kJ / result.steps
    time = {name: value * step_s / said.step_time_s for name, value in said.time_s.items()}
    joules = {name: value * step_J / said.energy_J for name, value in said.joules.items()}
    share = steps_a_job_step(point.configuration, job)
    error = {
        "step time": share * said.step_time_s / step_s - 1,
        "energy": share * said.energy_J / step_J - 1,
    }
    return time, joules, error, ""


def explain(result: Result, point: str | Configuration = "best") -> Explanation:
    """Explain a point of a result.

    Args:
        result: of a study.
        point: which (`tuner.results.result.Result.point`).

    Raises:
        UnknownName: there is no such point.
    """
    chosen = result.point(point)
    time, joules, error, why = _where(result, chosen)
    return Explanation(
        point=chosen,
        time_s=time,
        energy_J=joules,
        model_error=error,
        knobs=_effects(result, chosen),
        mark=chosen.meter.mark,
        notes=(why,) if why else (),
    )
