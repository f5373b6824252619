"""Explanation of a point: its time and energy by part and its knobs' effects.

Parts are the analytic model's breakdown, scaled to what was measured. A knob's effect is the
difference between the point and its neighbour, drawn from the surrogates' joint posterior, so that
what the two share does not widen the interval.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tuner.answer.answer import Answer
from tuner.answer.parts import Explanation, KnobEffect, Point, RelativeChange
from tuner.answer.views import AnswerExtra
from tuner.formatting import ordered_knobs, varying_knobs
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.search_spaces.job import steps_a_job_step
from tuner.search_spaces.knobs import KNOBS, Value
from tuner.search_spaces.plugins import shipped_module
from tuner.search_spaces.rules import broken_rules

#: Joint draws behind an interval.
DRAWS = 1000
#: Limit on the neighbours that are drawn together.
MOST_NEIGHBOURS = 150


def _neighbours(result: Answer, point: Point) -> list[tuple[str, Value | None, Configuration]]:
    job, cluster = result.job, result.cluster
    mine, measured = point.configuration, {p.configuration for p in result.points}
    found = []
    for knob in ordered_knobs(p.configuration for p in result.points):
        seen = {p.configuration.get(knob) for p in result.points} - {mine.get(knob)}
        for value in sorted(seen, key=lambda each: (str(type(each)), str(each))):
            live = KNOBS[knob].kind == "live" if knob in KNOBS else knob in mine.live
            half = {**(mine.live if live else mine.launch), knob: value}
            changed = Settings({name: each for name, each in half.items() if each is not None})
            other = replace(mine, **{"live" if live else "launch": changed})
            able = job is None or cluster is None or not broken_rules(other, job, cluster)
            if other in measured or able:
                found.append((knob, value, other))
    return found[:MOST_NEIGHBOURS]


def _effects(result: Answer, point: Point) -> tuple[KnobEffect, ...]:
    if sum(map(len, result.windows.values())) < 3 or (surrogates := result.surrogates) is None:
        return ()
    neighbours = _neighbours(result, point)
    if not neighbours:
        return ()
    drawn = [point.configuration, *(other for _, _, other in neighbours)]
    normals = np.random.default_rng(0).standard_normal((DRAWS, 2, len(drawn)))
    time, power = surrogates.sample(drawn, normals)
    measured = {p.configuration for p in result.points}
    baseline = result.today_configuration
    metered = point.meter.has_energy

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
            energy=change(time + power, column) if metered else None,
            power=change(power, column) if metered else None,
            measured=other in measured,
            of_baseline=baseline is not None and baseline.get(knob) == value,
        )
        for column, (knob, value, other) in enumerate(neighbours, start=1)
    ]
    return tuple(
        sorted(effects, key=lambda e: (not e.of_baseline, -abs((e.energy or e.time).median)))
    )


def _where(models: Any, result: Answer, point: Point) -> dict[str, Mapping[str, float]]:
    job, cluster = result.job, result.cluster
    assert job is not None and cluster is not None  # noqa: PT018
    breakdown = models.AnalyticModel(job, cluster).breakdown(point.configuration)
    step_s = point.time_to_solution_s / result.steps
    step_J = 1000 * point.energy_to_solution_kJ / result.steps
    share = steps_a_job_step(point.configuration, job)
    return {
        "time_s": {
            name: value * step_s / breakdown.step_time_s for name, value in breakdown.time_s.items()
        },
        "energy_J": {
            name: value * step_J / breakdown.energy_J for name, value in breakdown.joules.items()
        },
        "model_error": {
            "step time": share * breakdown.step_time_s / step_s - 1,
            "energy": share * breakdown.energy_J / step_J - 1,
        },
    }


def explain(result: Answer, point: str | Configuration = "best") -> Explanation:
    """Explain a point of a result."""
    chosen, where, why = result.point(point), dict[str, Any](), ""
    if result.job is None or result.cluster is None:
        why = "no job or cluster is known"
    elif not result.job.is_modelled:
        why = "the model's sizes are not known"
    elif (models := shipped_module("tuner.models.analytic.model")) is None:
        why = "the analytic models are not installed"
    else:
        where = _where(models, result, chosen)
    metered = chosen.meter.has_energy
    if where and not metered:
        error = {name: value for name, value in where["model_error"].items() if name != "energy"}
        where = {"time_s": where["time_s"], "model_error": error}
    subject = "time and energy go is" if metered else "time goes is"
    return Explanation(
        point=chosen,
        **where,
        parts_W=result.parts_W(chosen.configuration),
        knobs=_effects(result, chosen),
        mark=chosen.meter.mark,
        notes=(f"Where {subject} not told: {why}.",) if why else (),
    )


#: Share of the memory that is to be left: a probe sees the first steps alone, and fragments and
#: longer samples come later.
LEFT = 0.1
_GIB = 2**30


class MicroBatchView(AnswerExtra):
    """AnswerExtra of the largest micro-batch that was measured and may be called safe."""

    PROTOCOL = 1

    def answer_lines(self, answer: Answer) -> list[str]:
        """Return a line on the largest safe micro-batch, and on what is known of a larger one."""
        points = [point for point in answer.points if point.source == "measured"]
        lacking, failed = _failures(answer)
        sizes = [point.configuration for point in points]
        limit = _limit_bytes(answer, sizes[0]) if sizes else None
        if varying_knobs([*sizes, *lacking, *failed]) != ("micro_batch",) or limit is None:
            return []
        least_lacking = min((each.micro_batch for each in lacking), default=None)
        safe = [
            point
            for point in points
            if point.peak_memory_bytes is not None
            and point.peak_memory_bytes <= (1 - LEFT) * limit
            and (least_lacking is None or point.configuration.micro_batch < least_lacking)
        ]
        subject = f"micro-batch that leaves {100 * LEFT:.0f} % of the memory"
        if not safe:
            return [f"No {subject} was measured."]
        largest = max(safe, key=lambda point: point.configuration.micro_batch)
        assert largest.peak_memory_bytes is not None
        used = f"peak {largest.peak_memory_bytes / _GIB:.1f} of {limit / _GIB:.1f} GiB"
        beyond = _beyond(answer, largest, points, lacking, failed)
        size = largest.configuration.micro_batch
        return [f"Largest {subject}, of those measured: {size}, {used}; {beyond}."]


def _failures(answer: Answer) -> tuple[list[Configuration], list[Configuration]]:
    # Configurations that ran out of memory, and those that failed otherwise; of a training that was
    # over too soon nothing is known.
    lacking: list[Configuration] = []
    others: list[Configuration] = []
    for record in answer.failures:
        failure = record.failure
        if failure is not None and record.failed and not failure.was_cancelled:
            found = lacking if failure.type.lacks_memory else others
            found += record.request.configurations()
    return lacking, others


def _limit_bytes(answer: Answer, configuration: Configuration) -> int | None:
    # Of a rank: its GPU's memory, or its share of the host's.
    cluster = answer.cluster
    if cluster is None:
        return None
    if (own := cluster.device.memory_limit_bytes) and not cluster.device.shares_host_memory:
        return int(own)
    ranks = min(configuration.world_size, cluster.devices_per_node)
    return cluster.host_memory_bytes // ranks or None


def _beyond(
    answer: Answer,
    largest: Point,
    points: Sequence[Point],
    lacking: Sequence[Configuration],
    failed: Sequence[Configuration],
) -> str:
    # Of the smallest larger one that was tried.
    known = {p.configuration.micro_batch: "leaves less" for p in points}
    known |= {each.micro_batch: "failed" for each in failed}
    known |= {each.micro_batch: "ran out of memory" for each in lacking}
    for size in sorted(known):
        if size > largest.configuration.micro_batch:
            return f"{size} {known[size]}"
    batch = answer.job.global_batch if answer.job is not None else 0
    if batch and largest.configuration.accumulation(batch) == 1:
        return "it is a rank's whole batch"
    return "no larger one was tried"


VIEW = MicroBatchView()
