"""Chance that a candidate that was never measured meets limits that no measured one meets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from scipy.special import ndtr

from tuner.formatting import percent
from tuner.problem.constraints import Constraints, given_limits, limit_on
from tuner.results.parts import Choice
from tuner.search_spaces.configuration import Configuration
from tuner.workload.probe import ProbeRecord

if TYPE_CHECKING:  # which needs scikit-learn, and a probe shows its figures without
    from tuner.models.surrogate.surrogates import Surrogates

#: Joint draws behind a probability, whose standard error is at most 0.01, and limit on the
#: candidates that are drawn: those with the greatest bounds.
DRAWS, MOST_DRAWN = 2500, 50
#: Limit on the candidates with a full posterior: those with the best means.
MOST_PREDICTED = 4_000
#: A smaller probability is only bounded.
LEAST = 0.01


def never_measured(
    candidates: Sequence[Configuration], records: Sequence[ProbeRecord]
) -> tuple[Configuration, ...]:
    """Return the candidates that were not measured and whose launch did not fail."""
    measured = {
        Configuration(record.request.launch, window.live)
        for record in records
        for window in record.measurements
    }
    failed = {record.request.launch for record in records if not record.ok}
    failed -= {configuration.launch for configuration in measured}
    return tuple(c for c in candidates if c not in measured and c.launch not in failed)


#: Exponents of time and power by row of the figures that the surrogates predict.
_ROWS = {(1.0, 0.0): 0, (0.0, 1.0): 1, (1.0, 1.0): 2}


def likeliest(
    surrogates: Surrogates,
    candidates: Sequence[Configuration],
    constraints: Constraints,
    steps: int,
) -> tuple[Configuration, float] | None:
    """Return the candidate that most probably meets all limits, with that probability.

    None if there is no candidate, or if peak power is limited, which the surrogates do not predict.
    """
    limits = constraints.limits
    if limit_on("peak_power_W", limits) is not None:
        return None
    most_gpus = limit_on("gpus", limits) or math.inf
    left = [c for c in candidates if c.world_size <= most_gpus]
    if not left:
        return None
    bounds = np.full(3, math.inf)  # of log time, log power and log energy of a step
    for limit, value in given_limits(limits):
        if limit.exponents is not None:
            bounds[_ROWS[limit.exponents]] = math.log(limit.of_step(value, steps))
    if len(left) > MOST_PREDICTED:
        time, power = surrogates.mean(left)
        beyond = np.max([time, power, time + power] - bounds[:, None], axis=0)
        left = [left[i] for i in np.argsort(beyond)[:MOST_PREDICTED]]
    posterior = surrogates.with_intervals(left)
    means = np.array([posterior.log_time, posterior.log_power, posterior.log_energy])
    errors = np.array([posterior.log_time_std, posterior.log_power_std, posterior.log_energy_std])
    # The joint probability is at most the least of the three.
    most = ndtr((bounds[:, None] - means) / errors).min(axis=0)
    rows = np.argsort(-most)[:MOST_DRAWN]
    first, second = np.random.default_rng(0).standard_normal((2, DRAWS, 1))
    together = posterior.correlation
    second = together * first + math.sqrt(max(1 - together**2, 0.0)) * second
    time = means[0, rows] + errors[0, rows] * first
    power = means[1, rows] + errors[1, rows] * second
    met = (time <= bounds[0]) & (power <= bounds[1]) & (time + power <= bounds[2])
    chances = met.mean(axis=0)
    best = int(np.argmax(chances))
    return left[rows[best]], float(chances[best])


def with_unmeasured(
    choice: Choice,
    constraints: Constraints,
    surrogates: Surrogates | None,
    candidates: Sequence[Configuration],
    steps: int,
) -> Choice:
    """Return a choice that misses limits with the chance that some candidate meets them."""
    if choice.met or surrogates is None or not constraints.limits:
        return choice
    found = likeliest(surrogates, candidates, constraints, steps)
    if found is None:
        return choice
    configuration, chance = found
    what = "this" if len(constraints.limits) == 1 else "all of it"
    if chance < LEAST:
        text = f"No unmeasured candidate meets {what} with a probability of 1 % or more."
    else:
        text = (
            f"Of the unmeasured candidates {configuration.short} most probably meets {what}, with "
            f"a probability of {percent(chance)}."
        )
    return replace(choice, sentence=f"{choice.sentence} {text}")
