"""Requests of probes: their time limits, windows, and the front that ends a window early."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tuner.answer.state import StudyState
from tuner.problem.problem import probe_limits
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.job import steps_a_job_step
from tuner.study.rules import front_to_beat
from tuner.workload.records.limits import ProbeLimits
from tuner.workload.records.probe import ProbeRequest

#: Number of successful probes from which their time limits a further probe, the factor by which it
#: may take longer than the longest of them, and the least limit in seconds.
LEAST_PROBES, LONGEST_FACTOR, LEAST_LIMIT_S = 2, 5.0, 60.0


def probe_request(
    state: StudyState,
    name: str,
    configurations: Sequence[Configuration],
    purpose: str,
    *,
    visits: int,
    extendable: bool = False,
) -> ProbeRequest:
    """Return the request of a probe of one launch.

    Args:
        state: of the study by now.
        visits: largest number of settings that the probe may visit, further ones included.
    """
    spec = state.spec
    limits = _time_limits(state, configurations, visits, extendable)
    front: tuple[tuple[float, float], ...] = ()
    if purpose == "search":  # whatever else is measured is compared, or is the choice
        steps = spec.problem.steps * steps_a_job_step(configurations[0], spec.problem.job)
        front = front_to_beat(spec.constraints, state.front, steps)
    return ProbeRequest(
        probe_id=name,
        launch=configurations[0].launch,
        live=tuple(configuration.live for configuration in configurations),
        window=spec.settings.window_of(purpose),
        time_limit_s=limits.probe_s,
        first_step_limit_s=limits.first_step_s,
        step_limit_s=limits.step_s,
        purpose=purpose,
        extendable=extendable,
        front=front,
    )


def _time_limits(
    state: StudyState, configurations: Sequence[Configuration], visits: int, extendable: bool
) -> ProbeLimits:
    settings, problem = state.spec.settings, state.spec.problem
    limits = probe_limits(
        problem.job,
        problem.prior,
        configurations,
        settings.window,
        visits=visits,
        first_step_s=settings.first_step_limit_s,
        step_s=settings.step_limit_s,
        probe_s=settings.time_limit_s,
    )
    walls_s = [record.wall_s for record in state.records if record.ok]
    if len(walls_s) < LEAST_PROBES:
        return limits
    further_s = extendable * visits * (settings.window.settle_s + settings.window.max_s)
    least_s = limits.first_step_s if problem.job and problem.job.first_step_s else LEAST_LIMIT_S
    usual_s = max(least_s, LONGEST_FACTOR * max(walls_s)) + further_s
    return replace(limits, probe_s=min(limits.probe_s, usual_s))
