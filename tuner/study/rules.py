"""Rules of a search: baseline launches that are due, worth of a probe, question, and stopping."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from itertools import takewhile

from tuner.answer.judge import FurtherLaunches
from tuner.answer.parts import Point
from tuner.answer.state import StudyState
from tuner.problem.constraints import Constraints
from tuner.problem.from_job import is_default
from tuner.problem.problem import Problem
from tuner.problem.settings import LIMITS, StopReason, energy_not_repaid, little_left
from tuner.search.planner import ProbePlan
from tuner.search.question import PeakLimit, Question, most_power_W
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.search_spaces.knobs import KNOBS, Value
from tuner.workload.records.probe import ProbeRecord

#: Failures of one node that end the search if no probe succeeds in between, on any node: the next
#: one would fail, too.
NODE_TRIES = 3
#: Mean power over a power limit that still counts as kept to it: neither regulation nor meter is
#: exact. Not fitted.
LIMIT_SLACK = 1.05
#: Numbers of launch settings after which the baseline is launched once more.
REPEAT_AFTER = (4, 7)
#: Number of times that a cancelled baseline is tried.
BASELINE_TRIES = 2
#: Knobs with which a user makes a configuration fit, in the order in which they are tried.
_LIGHTER = ("micro_batch", "zero_stage", "activation_checkpointing", "optimizer_offload")


def node_failures(records: Sequence[ProbeRecord], earlier: int) -> StopReason | None:
    """Return the failures of a node after which nothing can be measured, or None.

    Of those of this session, after `earlier` ones, at least `NODE_TRIES` are made. Probes that ran
    on a node at the same time fail together and count once.
    """
    run = list(takewhile(lambda r: r.failure and r.failure.of_node, reversed(records)))
    of_each: dict[str, list[ProbeRecord]] = {}
    for record in run:
        of_each.setdefault(record.host, []).append(record)
    most = max(map(_one_after_another, of_each.values()), default=0)
    if len(records) - earlier < NODE_TRIES or most < NODE_TRIES:
        return None
    last = run[0].failure
    return StopReason("node_failures", {"failures": NODE_TRIES}, last.message if last else "")


def _one_after_another(records: Sequence[ProbeRecord]) -> int:
    """Return the largest number of probes of which none began before another had ended."""
    dated = [record for record in records if record.started_at]
    began = [datetime.fromisoformat(record.started_at) for record in dated]
    times = [(at + timedelta(seconds=r.wall_s), at) for at, r in zip(began, dated, strict=True)]
    count, free = len(records) - len(dated), None
    for end, at in sorted(times):
        if free is None or at >= free:
            count, free = count + 1, end
    return count


def measured_launches(problem: Problem, records: Sequence[ProbeRecord], count: int) -> bool:
    """Return True if this number of launches was measured, or as many as there are."""
    measured = {r.request.launch for r in records if r.measurements}
    return len(measured) >= min(count, len(problem.candidates.launches))


def repeat_due(problem: Problem, records: Sequence[ProbeRecord], *, early: bool = False) -> bool:
    """Return True if the baseline is to be launched once more by now.

    Args:
        early: count the repeats that are due later in the search, too.
    """
    if len(problem.candidates.launches) < 2:  # of one launch, one effect
        return False
    due = sum(early or measured_launches(problem, records, count) for count in REPEAT_AFTER)
    repeats = [r for r in records if r.request.purpose == "verify"]
    lost = any(r.failure and not r.failure.blames_configuration for r in repeats)
    # One that a node or an interrupt lost is made again, and not more: today's may end every node.
    return len(repeats) - lost < due


def idle_share(problem: Problem, records: Sequence[ProbeRecord]) -> float:
    """Return the power of a node without a probe as a share of one with a probe; 0 if unknown.

    It is that of the probes of one node: as measured before their ranks started, else as the
    cluster's file states it. A recording has no node that could idle.
    """
    cluster = problem.cluster
    if cluster is None or problem.recording is not None:
        return 0.0
    each = cluster.devices_per_node
    made = [
        record
        for record in records
        if record.wall_s > 0
        and record.energy_J > 0
        and Configuration(record.request.launch).world_size <= each
    ]
    if not made:
        return 0.0
    stated_W = cluster.host_W + each * cluster.device.idle_W
    idle_W = [stated_W if record.idle_W is None else record.idle_W for record in made]
    drawn_W = [record.energy_J / record.wall_s for record in made]
    return min(1.0, statistics.median(idle_W) / statistics.median(drawn_W))


def reason_to_stop(state: StudyState, plan: ProbePlan, cost_kJ: float) -> StopReason | None:
    """Return why the search, or a launch, may end instead of making this plan, or None.

    It may when little is left to find (`little_left`), or when that would not repay the probe over
    a job of known length (`not_repaid`). With limits or an objective it is the answer that can be
    improved, else the front.
    """
    if plan.regret is None:
        return None
    little = little_left(state.spec.settings, plan.regret, cost_kJ)
    return little or not_repaid(state, plan, cost_kJ)


def not_repaid(state: StudyState, plan: ProbePlan, cost_kJ: float) -> StopReason | None:
    """Return why a probe, or a continuation of one, cannot repay its energy, or None.

    All that is left to find, applied to the whole training as it would be recommended now, has to
    be worth more. Nothing has to be repaid by a recording, or by a training of unknown length.
    """
    if not state.spec.problem.repays or plan.regret is None or not state.front:
        return None
    best, _ = state.judge.choose()
    whole_kJ = (best or state.front[-1]).inferred.energy_to_solution_kJ
    return energy_not_repaid(plan.regret.saving * whole_kJ, cost_kJ)


def with_next_probe(
    limit: StopReason,
    plan: ProbePlan | None,
    expected_kJ: Callable[[Sequence[Configuration], float], float],
    question: Question | None,
) -> StopReason:
    """Return a limit that ends the search, with the cost and gain of the next probe."""
    if limit.kind not in LIMITS or plan is None or not math.isfinite(plan.score):
        return limit  # without a score the gain is not estimated
    figures = {
        "next_kJ": expected_kJ(plan.configurations, plan.cost_J / 1000),
        "expected_gain": plan.expected_gain,
        "of_answer": float(question is not None),
    }
    return replace(limit, figures={**limit.figures, **figures})


def launches_to_verify(
    state: StudyState, expected_kJ: Callable[[Sequence[Configuration]], float]
) -> tuple[Point | None, FurtherLaunches | None]:
    """Return the choice and its further launches, or today's, that are worth it; None if none."""
    choice, _ = state.judge.choose()
    if choice is None:
        return None, None
    if not _can_be_set(choice.configuration, state):
        return choice, None
    launch_kJ = expected_kJ([choice.configuration])
    share = state.judge.launch_share(launch_kJ, state.spec.problem.length)
    return choice, state.judge.more(choice, share)


def _can_be_set(configuration: Configuration, state: StudyState) -> bool:
    # Not any more, for example, if the permission to set clocks was withdrawn in the meantime.
    known = state.spec.problem.candidates.find(configuration) is not None
    return known or configuration == state.today


def measured_job_kJ(problem: Problem, records: Sequence[ProbeRecord]) -> float | None:
    """Return the energy of the training at the measured baseline; None if unknown."""
    for record in records if problem.length else ():
        if record.request.purpose == "baseline" and record.measurements:
            return record.measurements[0].energy_per_step_J * problem.steps / 1000
    return None


def peak_limit_of(state: StudyState) -> PeakLimit | None:
    """Return the cap on peak power with the peaks of the windows so far; None without one."""
    cap_W = state.spec.constraints.peak_power_W
    if cap_W is None:
        return None
    points = state.points
    pairs = [(p.peak_power_W, p.power_W) for p in points if p.peak_power_W is not None]
    limit = PeakLimit.of(cap_W, [peak for peak, _ in pairs], [mean for _, mean in pairs])
    # More than a limit permits is drawn where devices are metered that the configuration lacks.
    holds = all(record.meter.scope == "gpu" for record in state.records) and all(
        p.power_W <= LIMIT_SLACK * most_power_W(p.configuration) for p in points
    )
    return replace(limit, limits_hold=holds)


def question_of(state: StudyState, peak: PeakLimit | None) -> Question | None:
    """Return the question of the search; None to search the whole front.

    A limit relative to the baseline counts once the baseline was measured. A cap on peak power
    counts as the cap on mean power at which it is expected.
    """
    constraints = state.constraints
    if peak is not None:
        cap_W = min(constraints.power_cap_W or math.inf, peak.mean_power_W)
        constraints = replace(constraints, power_cap_W=cap_W)
    return Question.of(constraints, state.spec.problem.steps)


def front_to_beat(
    constraints: Constraints, front: Sequence[Point], steps: float
) -> tuple[tuple[float, float], ...]:
    """Return the figures of the front, for windows to end early (`ProbeRequest.front`).

    Empty where a configuration that is slower and takes more energy may still be the choice: under
    a limit on neither time nor energy, or where each GPU has a price. `steps` of the configuration
    to measure make the solution.
    """
    if not all(point.meter.has_energy for point in front):
        return ()
    limits = [row for row, _ in constraints.limits.given if row.figure != "gpus"]
    if constraints.price_per_gpu_hour or not all(row.of_training for row in limits):
        return ()
    reached = [
        (each.time_interval_s.high / steps, 1000 * each.energy_interval_kJ.high / steps)
        for each in (point.inferred for point in front)
    ]
    return tuple(pair for pair in reached if all(map(math.isfinite, pair)))


def baseline_due(problem: Problem, records: Sequence[ProbeRecord]) -> Configuration | None:
    """Return the baseline that has to be measured, or None.

    A baseline of the user's is measured or fails. Where the default one runs out of memory, the
    next lighter candidate takes its place (`lighter`).
    """
    baseline = problem.baseline
    tries = [record for record in records if record.request.purpose == "baseline"]
    if any(record.measurements for record in tries):
        return None
    by_default = is_default(problem.identity)
    while True:
        own = [r for r in tries if r.request.configurations()[0] == baseline]
        failed = [r.failure for r in own if r.failure and r.failure.blames_configuration]
        if not failed:
            return baseline if len(own) < BASELINE_TRIES else None
        if not by_default or not failed[-1].type.lacks_memory:
            return None
        following = next(lighter(baseline, problem), None)
        if following is None:
            return None
        baseline = following


def lighter(configuration: Configuration, problem: Problem) -> Iterator[Configuration]:
    """Yield candidates that need less memory in one knob: a smaller micro-batch, a higher ZeRO
    stage, checkpointed activations, the optimizer on the host.

    For a default that ran out of memory; `lighter_defaults` are those that are predicted to fit."""
    candidates = problem.candidates
    for knob in _LIGHTER:
        values = {c.get(knob) for c in map(Configuration, candidates.launches)}
        today = configuration.get(knob)
        following: list[Value]
        if knob == "micro_batch":
            ordered = sorted((v for v in values if isinstance(v, int)), reverse=True)
            following = [v for v in ordered if isinstance(today, int) and v < today]
        else:
            order = KNOBS[knob].choices
            following = [v for v in order if v in values and order.index(v) > order.index(today)]
        for value in following:
            launch = Settings({**configuration.launch, knob: value})
            other = Configuration(launch, configuration.live)
            if other in candidates:
                yield candidates[candidates.index_of(other)]
