"""Rules of a search: what is due, what is worth it, what to measure again, and when to give up."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from tuner.problem.constraints import Constraints
from tuner.problem.stop_reason import LIMITS, StopReason
from tuner.problem.study_spec import StudySpec
from tuner.results.build import measured_points
from tuner.results.choice import decide, front_of
from tuner.results.parts import Point
from tuner.results.verification import baseline_of
from tuner.search.planner import ProbePlan
from tuner.search.question import Question
from tuner.search.safety import PeakLimit, most_power_W
from tuner.search_spaces.configuration import Configuration
from tuner.workload.probe import ProbeRecord

__all__ = [
    "constraints_of",
    "front_to_beat",
    "node_failures",
    "not_repaid",
    "not_worth_it",
    "peak_limit_of",
    "question_of",
    "settings_to_remeasure",
    "with_next_probe",
]

#: Windows after which a configuration of the front has been measured often enough.
ENOUGH_WINDOWS = 3
#: Consecutive failures of the node that end the search: the next probe would fail, too.
NODE_TRIES = 3
#: Mean power over a power limit that still counts as kept to it: neither regulation nor meter is
#: exact. Not fitted.
LIMIT_SLACK = 1.05
#: A search ends when more than the allowed regret is left with a smaller probability than this.
STOP_PROBABILITY = 0.1


def node_failures(records: Sequence[ProbeRecord], earlier: int) -> StopReason | None:
    """Return the failures of the node after which nothing can be measured here, or None.

    Args:
        records: probes of all sessions.
        earlier: number of those of earlier sessions; this one makes at least `NODE_TRIES`.
    """
    failures = [record.failure for record in records[-NODE_TRIES:]]
    last = failures[-1] if failures else None
    if last is None or len(records) - earlier < NODE_TRIES:
        return None
    if any(failure is None or failure.kind != "node" for failure in failures):
        return None
    return StopReason("node_failures", {"failures": NODE_TRIES}, last.message)


def not_worth_it(
    spec: StudySpec, records: Sequence[ProbeRecord], plan: ProbePlan, cost_kJ: float
) -> StopReason | None:
    """Return why the search may end instead of making this probe, or None.

    With a job, what is left to find has to repay the probe (`not_repaid`). A recording has no
    training to come, so there it has to be more than `max_regret` and than the noise. With limits
    or an objective it is the answer that can be improved, else the front.

    Args:
        spec: the study.
        records: probes so far.
        plan: the probe.
        cost_kJ: its expected energy.
    """
    if spec.problem.job is not None or plan.regret is None:
        return not_repaid(spec, records, plan, cost_kJ)
    least = spec.settings.max_regret
    probability = plan.regret.probability_above(least)
    if probability >= STOP_PROBABILITY:
        return None
    figures = {
        "regret": plan.regret.least_told(least),
        "probability": probability,
        "expected_gain": plan.expected_gain,
        "needed_kJ": cost_kJ,
        "of_answer": float(plan.regret.of_answer),
    }
    return StopReason("not_worth_it", figures)


def not_repaid(
    spec: StudySpec, records: Sequence[ProbeRecord], plan: ProbePlan, cost_kJ: float
) -> StopReason | None:
    """Return why a probe, or a continuation of one, cannot repay its energy, or None.

    All that is left to find, applied to the whole training as it would be recommended now, has to
    be worth more. A recording has no training to come, so there nothing has to be repaid.

    Args:
        spec: the study.
        records: probes so far.
        plan: the probe.
        cost_kJ: its expected energy.
    """
    if spec.problem.job is None or plan.regret is None:
        return None
    points = measured_points(records, spec.problem.steps)
    front = front_of(points)
    if not front:
        return None
    best, _ = decide(points, front, constraints_of(spec, records, points))
    whole_kJ = (best or front[-1]).energy_to_solution_kJ
    # A fall of log energy by s leaves exp(-s) of it.
    left_kJ = float(np.mean(-np.expm1(-plan.regret.saving))) * whole_kJ
    if left_kJ >= cost_kJ:
        return None
    return StopReason("not_worth_it", {"needed_kJ": cost_kJ, "left_kJ": left_kJ})


def with_next_probe(
    limit: StopReason,
    plan: ProbePlan | None,
    expected_kJ: Callable[[Sequence[Configuration], float], float],
    question: Question | None,
) -> StopReason:
    """Return a limit that ends the search with what the next probe would take and bring.

    Args:
        limit: forbids the probe.
        plan: the probe; None if nothing is left to propose.
        expected_kJ: returns what a probe is expected to use, given its configurations and the
            planned kilojoules.
        question: what the search is to answer; None for the whole front.
    """
    if limit.kind not in LIMITS or plan is None or not math.isfinite(plan.score):
        return limit  # without a score the gain is not estimated
    figures = {
        "next_kJ": expected_kJ(plan.configurations, plan.cost_J / 1000),
        "expected_gain": plan.expected_gain,
        "of_answer": float(question is not None),
    }
    return replace(limit, figures={**limit.figures, **figures})


def constraints_of(
    spec: StudySpec, records: Sequence[ProbeRecord], points: Sequence[Point]
) -> Constraints:
    """Return the study's constraints, those relative to the baseline as absolute limits.

    Args:
        spec: the study.
        records: probes so far.
        points: what they measured.
    """
    baseline = baseline_of(records)
    times_s = [point.time_to_solution_s for point in points if point.configuration == baseline]
    return spec.constraints.relative_to(times_s[0] if times_s else None)


def peak_limit_of(spec: StudySpec, records: Sequence[ProbeRecord]) -> PeakLimit | None:
    """Return the cap on peak power with what the windows so far tell of peaks; None without one.

    Args:
        spec: the study.
        records: probes so far.
    """
    cap_W = spec.constraints.peak_power_W
    if cap_W is None:
        return None
    points = measured_points(records, spec.problem.steps, run_dir=spec.run_dir)
    pairs = [(p.peak_power_W, p.power_W) for p in points if p.peak_power_W is not None]
    limit = PeakLimit.of(cap_W, [peak for peak, _ in pairs], [mean for _, mean in pairs])
    # More than a limit permits is drawn where devices are metered that the configuration lacks.
    holds = all(record.meter.scope == "gpu" for record in records) and all(
        p.power_W <= LIMIT_SLACK * most_power_W(p.configuration) for p in points
    )
    return replace(limit, limits_hold=holds)


def question_of(
    spec: StudySpec, records: Sequence[ProbeRecord], peak: PeakLimit | None
) -> Question | None:
    """Return what the search is to answer; None to search the whole front.

    A limit relative to the baseline counts once the baseline was measured. A cap on peak power
    counts as the cap on mean power at which it is expected.

    Args:
        spec: the study.
        records: probes so far.
        peak: cap on peak power.
    """
    steps = spec.problem.steps
    constraints = constraints_of(spec, records, measured_points(records, steps))
    if peak is not None:
        cap_W = min(constraints.power_cap_W or math.inf, peak.mean_power_W)
        constraints = replace(constraints, power_cap_W=cap_W)
    return Question.of(constraints, steps)


def front_to_beat(
    constraints: Constraints, front: Sequence[Point], steps: float
) -> tuple[tuple[float, float], ...]:
    """Return what the front reaches, for windows to end early (`ProbeRequest.front`).

    Empty where a configuration that is slower and takes more energy may still be the choice: under
    a limit of power, or where each GPU has a price.

    Args:
        constraints: limits and objective of the training job.
        front: measured so far.
        steps: steps of the configuration to measure that make the solution.
    """
    limits = (constraints.power_cap_W, constraints.peak_power_W, constraints.price_per_gpu_hour)
    if any(limit is not None for limit in limits):
        return ()
    reached = [
        (point.time_interval_s.high / steps, 1000 * point.energy_interval_kJ.high / steps)
        for point in front
    ]
    return tuple(pair for pair in reached if all(map(math.isfinite, pair)))


def settings_to_remeasure(
    spec: StudySpec, records: Sequence[ProbeRecord], max_live: int
) -> list[Configuration]:
    """Return settings of one launch to measure again: the choice first, then the least measured.

    Args:
        spec: the study.
        records: probes so far.
        max_live: the largest number of live settings of one probe.
    """
    made = [record for record in records if record.request.purpose == "remeasure"]
    allowed = spec.settings.reserved_probes("remeasure")
    # Not of what verification adds: a finished search that is started again would find more due.
    searched = sum(record.request.purpose != "verify" for record in records)
    allowed = allowed or max(1, round(spec.settings.remeasure_share * searched))
    if len(made) >= allowed:
        return []
    points = measured_points(records, spec.problem.steps)
    front = front_of(points)
    best, _ = decide(points, front, constraints_of(spec, records, points))
    failed = {record.request.launch for record in made if not record.ok}
    wanted = [p for p in front if p.windows < ENOUGH_WINDOWS]
    if best is not None and best.windows < ENOUGH_WINDOWS and best not in wanted:
        wanted.append(best)
    wanted = [p for p in wanted if p.configuration.launch not in failed]
    if not wanted:
        return []
    first = min(wanted, key=lambda p: (p.windows, p is not best))
    launch = first.configuration.launch
    together = [p.configuration for p in wanted if p.configuration.launch == launch]
    together = together[:max_live]
    if first.configuration not in together:
        together[-1] = first.configuration
    return together
