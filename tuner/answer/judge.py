"""Judgement of measured configurations against the baseline, by one posterior.

The best of several measured configurations looks better than it is. So a configuration counts as
better with the least of two probabilities: that of the posterior, which shrinks the configurations
towards each other, and that of its own launches, which is either by launches made after it was
chosen, or by all of them less what the choice among the configurations may have added (the union
bound, Bonferroni 1936).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import NormalDist
from typing import Any

import numpy as np

from tuner.answer.choice import (
    BOTH,
    LIKELY,
    SAME,
    as_shown,
    cost_of,
    decide,
    energy_cost_of,
    figures_of,
    ratios_to,
)
from tuner.answer.parts import (
    Choice,
    ComparesWithToday,
    Difference,
    Evidence,
    FurtherLaunches,
    Point,
    Recommendation,
    SearchCost,
    Shrunk,
)
from tuner.answer.posterior import DRAWS, Gain, LaunchPosterior
from tuner.problem.constraints import OBJECTIVES, Constraints
from tuner.search_spaces.configuration import Configuration
from tuner.workload.node.measure.statistics import log_error
from tuner.workload.records.probe import ProbeRecord

#: Probability from which on a configuration is recommended, and from which on no further launch is
#: bought; the larger one allows for looking after each launch (`python -m benchmarks.verdicts`).
SURE, ENOUGH = 0.95, 0.99
#: Log saving that a configuration must exceed to be better: its probability is of that.
MARGIN = 0.005
#: Least saving of energy or time that is named: a smaller one is no difference worth a change.
WORTH = 0.01
#: Difference of two savings of the same, that of the verdict and that of a table, which a reader
#: would take for a mistake.
VISIBLE = 0.02
NORMAL = NormalDist()
#: Launches that are bought at most in one study.
MOST_LAUNCHES = 16
#: Smallest probability of becoming sure for which launches are bought.
FUTILE = 0.05
#: Share of launches that measure something else than what was asked, for reasons that no spread of
#: launches tells: even a choice that seems sure is launched once more if that is worth it.
OUTLIERS = 0.01
#: Energy of the training over that of a launch where the training is unknown.
LONG_TRAINING = 2000.0


def failed_again(records: Sequence[ProbeRecord]) -> frozenset[Configuration]:
    """Return the configurations whose last verifying launch failed for their own fault."""
    last: dict[Configuration, bool] = {}
    for record in records:
        if record.request.purpose != "verify":
            continue
        failure = record.failure
        if failure is None or (failure.blames_configuration and not failure.type.too_short):
            last[record.request.configurations()[0]] = not record.measurements
    return frozenset(each for each, failed in last.items() if failed)


def _differences(
    gains: tuple[Gain, Gain], method: str, *, predicted: bool
) -> tuple[Difference, Difference]:
    found = []
    for quantity, gain in zip(("energy_per_step", "step_time"), gains, strict=True):
        low, high = gain.interval(0.95)
        p_less = gain.above(0.0)
        middle, low, high = (math.expm1(-log) for log in (gain.median, high, low))
        p_value = 2 * min(p_less, 1 - p_less)
        found.append(Difference(quantity, middle, low, high, p_value, method, predicted))
    return found[0], found[1]


def differences_by_intervals(
    today: Point, point: Point, ratio_sd: tuple[float, float] | None = None
) -> tuple[Difference, Difference]:
    """Return how a point differs from another in energy and time.

    Args:
        ratio_sd: standard deviations of log time and log energy over the other's; None if the
            errors of the two are independent.
    """
    energy, time = map(math.log, ratios_to(today, point))
    if ratio_sd is None:
        energies = today.energy_interval_kJ, point.energy_interval_kJ
        times = today.time_interval_s, point.time_interval_s
        ratio_sd = math.hypot(*map(log_error, times)), math.hypot(*map(log_error, energies))
    gains = Gain.normal(-energy, ratio_sd[1]), Gain.normal(-time, ratio_sd[0])
    return _differences(gains, "intervals of the points", predicted=point.source == "predicted")


def _outside(point: Point, *, of_energy: bool) -> bool:
    # Whether the verdict's figure is outside the interval of what was measured.
    counts = point.inferred
    if of_energy:
        low, high = point.energy_interval_kJ
        return not low <= counts.energy_to_solution_kJ <= high
    low, high = point.time_interval_s
    return not low <= counts.time_to_solution_s <= high


def _visibly_apart(ratio: float, other: float) -> bool:
    # Whether two savings of the same differ visibly, whichever of the two points is compared with
    # the other: a ratio and its inverse are one saving.
    return min(abs(ratio - other), abs(1 / ratio - 1 / other)) > VISIBLE


@dataclass(frozen=True)
class Judge(ComparesWithToday):
    """Judge of the points of a study under one set of constraints."""

    points: Sequence[Point]
    baseline: Point | None
    constraints: Constraints
    steps: int
    # of the points; None for predictions, which have intervals only.
    posterior: LaunchPosterior | None = None
    # numbers of the launches that were made after the search, to verify.
    verifying: frozenset[int] = frozenset()
    # configurations that failed when they were launched again.
    failed: frozenset[Configuration] = frozenset()
    # standard deviations of log time and log energy over the baseline's, of a plan.
    ratio_sd: dict[Configuration, tuple[float, float]] | None = None

    @property
    def today_point(self) -> Point:
        """The baseline's point, of a study that measured it."""
        assert self.baseline is not None
        return self.baseline

    # -- limits ----------------------------------------------------------------------------------

    def _drawn(self, point: Point) -> tuple[np.ndarray, np.ndarray]:
        draws = self.posterior.draws if self.posterior is not None else {}
        if point.configuration in draws:
            time, power = draws[point.configuration]
            return time + math.log(self.steps), power
        normal = np.random.default_rng(0).standard_normal((2, DRAWS))
        time_se, energy_se = log_error(point.time_interval_s), log_error(point.energy_interval_kJ)
        power_se = math.sqrt(max(energy_se**2 - time_se**2, 0.0))
        time = math.log(point.time_to_solution_s) + time_se * normal[0]
        return time, math.log(point.power_W) + power_se * normal[1]

    def _drawn_slowdown(self, point: Point) -> np.ndarray:
        today = self.today_point
        if self.ratio_sd is None or point.configuration not in self.ratio_sd:
            return self._drawn(point)[0] - self._drawn(today)[0]
        log = math.log(point.time_to_solution_s / today.time_to_solution_s)
        time_sd, _ = self.ratio_sd[point.configuration]
        return log + time_sd * np.random.default_rng(0).standard_normal(DRAWS)

    def chance(self, point: Point, constraints: Constraints) -> tuple[dict[str, float], float]:
        """Return the probability that a point meets each limit, and that it meets all.

        A peak and a number of GPUs are met or not. The limit on slowdown is relative to the
        baseline, draw by draw, so the baseline meets it for certain.
        """
        limits = constraints.limits
        if not limits:
            return {}, 1.0
        log_time, log_power = self._drawn(point)
        time_s, energy_kJ = np.exp(log_time), np.exp(log_time + log_power) / 1000
        # Without a baseline the limits state its time, and the deadline that follows.
        if limits.slowdown is not None and self.baseline is not None:
            slowdown = np.exp(self._drawn_slowdown(point))
            time_s = slowdown * self.baseline.inferred.time_to_solution_s
        job = figures_of([point])._replace(
            energy_kJ=energy_kJ, time_s=time_s, power_W=np.exp(log_power)
        )
        # A figure without any error may equal its limit.
        met = {name: ratio <= 1 + 1e-12 for name, ratio in limits.ratios(job).items()}
        every = np.logical_and.reduce(np.broadcast_arrays(*met.values()))
        return {name: float(holds.mean()) for name, holds in met.items()}, float(every.mean())

    # -- the choice ------------------------------------------------------------------------------

    def choose(self, among: Sequence[Point] | None = None) -> tuple[Point | None, Choice]:
        """Return the point that is best by the posterior's medians, and how it was chosen."""
        if among is None:
            among = self.candidates
        constraints, beside = self.constraints, (*self.points, *self.compared)
        best, choice = decide(among, constraints, self.baseline, chance=self.chance, beside=beside)
        for today in self.compared:
            _, kept = decide([today], constraints, today, chance=self.chance)
            value, p_met = kept.objective_value, kept.p_all_met
            choice = replace(
                choice, baseline_met=kept.met, baseline_value=value, baseline_p_met=p_met
            )
        return best, choice

    @cached_property
    def candidates(self) -> Sequence[Point]:
        """The points but those that failed when they were launched again, unless all did."""
        return [p for p in self.points if p.configuration not in self.failed] or self.points

    @cached_property
    def p_baseline_meets(self) -> float:
        """Probability that the baseline meets the limits; 1 without either."""
        return min((self.chance(each, self.constraints)[1] for each in self.compared), default=1.0)

    # -- against the baseline --------------------------------------------------------------------

    def differences(self, point: Point) -> tuple[Difference, Difference] | None:
        """Return how a point differs from the baseline in energy and time; None without one.

        Errors and probabilities are the posterior's. The difference itself is that of what was
        measured, as every table shows it; `shrunk` is what the verdict counts instead.
        """
        found, rival = self._differences(point), self.rival(point)
        if found is None or rival is None:
            return None
        ratios = ratios_to(as_shown(rival), as_shown(point))
        energy, time = (
            replace(
                each,
                relative=ratio - 1,
                low=min(each.low, ratio - 1),
                high=max(each.high, ratio - 1),
            )
            for each, ratio in zip(found, ratios, strict=True)
        )
        return energy, time

    def _differences(self, point: Point) -> tuple[Difference, Difference] | None:
        if (rival := self.rival(point)) is None:
            return None
        if not self._compared(point):
            return differences_by_intervals(
                rival, point, (self.ratio_sd or {}).get(point.configuration)
            )
        gains = self._saving(point, 1.0, 0.0), self._saving(point, 0.0, 1.0)
        return _differences(gains, "posterior of all launches", predicted=False)

    def against(self, other: Point) -> Judge:
        """Return the judge that compares with another point than the baseline.

        The models' error of a ratio is known to the baseline. That of two others is at most the
        sum of their two: the triangle inequality of the errors' features.
        """
        if self.ratio_sd is None:
            return replace(self, baseline=other)
        ratio_sd = {**self.ratio_sd, self.today_point.configuration: (0.0, 0.0)}
        if other.configuration not in ratio_sd:
            return replace(self, baseline=other, ratio_sd=None)
        own_time, own_energy = ratio_sd[other.configuration]
        sums = {
            each: (time + own_time, energy + own_energy)
            for each, (time, energy) in ratio_sd.items()
        }
        return replace(self, baseline=other, ratio_sd=sums)

    def launches_of(self, point: Point) -> frozenset[int]:
        """Return the numbers of the launches that measured a point, if its posterior is known."""
        posterior = self.posterior
        return frozenset() if posterior is None else posterior.launches_of(point.configuration)

    def rival(self, point: Point) -> Point | None:
        """Return the baseline, to compare a point with; None for itself and without one."""
        others = (each for each in self.compared if each.configuration != point.configuration)
        return next(others, None)

    def _compared(self, point: Point) -> bool:
        # Whether the posterior compares a point with its rival.
        return bool(self.launches_of(point) and self.launches_of(self.today_point))

    def _saving(self, point: Point, energy: float, time: float) -> Gain:
        assert self.posterior is not None
        return self.posterior.saving(
            point.configuration, self.today_point.configuration, energy, time
        )

    def _weights(self, point: Point) -> tuple[float, float, float]:
        # The price is a sum of a term in energy and one in time; its logarithm is linear in theirs
        # near the point.
        goal = self.constraints.goal
        if goal != "cost":
            return *(OBJECTIVES[goal] or (1.0, 1.0)), 0.0
        constraints, today = self.constraints, self.today_point
        mine, before = cost_of(point, constraints), cost_of(today, constraints)
        energy = energy_cost_of(point, constraints) / mine
        log_energy, log_time = map(math.log, ratios_to(point, today))
        logs = energy * log_energy + (1 - energy) * log_time
        return energy, 1 - energy, math.log(before / mine) - logs

    def gain(self, point: Point) -> Gain | None:
        """Return the log gain of the objective against the baseline; None without one."""
        if self.rival(point) is None:
            return None
        energy, time, more = self._weights(point)
        if self._compared(point):
            return self._saving(point, energy, time).shifted(more)
        pair = self._differences(point)
        assert pair is not None
        means = [-math.log1p(each.relative) for each in pair]
        errors = [
            (math.log1p(each.high) - math.log1p(each.low)) / (2 * NORMAL.inv_cdf(0.975))
            for each in pair
        ]
        mean = energy * means[0] + time * means[1] + more
        error = math.hypot(energy * errors[0], time * errors[1])
        return Gain.normal(mean, error)

    @cached_property
    def all_may_equal_today(self) -> bool:
        """True if every other point may need far less than the baseline, and far more."""
        for point in self.points:
            found = self.differences(point) or ()
            # Without energy its figures are those of time.
            shown = found if point.meter.has_energy else found[1:]
            if any(each.low > -UNCERTAIN or each.high < UNCERTAIN for each in shown):
                return False
        return True

    def saves_enough(self, point: Point) -> bool:
        """Return True if a point saves at least `WORTH` of the energy or time that the objective
        weighs.
        """
        pair = self._differences(point)
        if pair is None:
            return False
        energy, time, _ = self._weights(point)
        weighed = zip((energy, time), pair, strict=True)
        return any(weight and -each.relative >= WORTH for weight, each in weighed)

    def p_for_limits(self, point: Point) -> float:
        """Return the probability that a point meets the limits and the baseline misses them."""
        missed = 1 - self.p_baseline_meets
        return missed and missed * self.chance(point, self.constraints)[1]

    def p_better(self, point: Point) -> float:
        """Return the probability that a point is better than the baseline by the objective."""
        if self.rival(point) is None:
            return 0.0
        for_limits = self.p_for_limits(point)
        if for_limits >= LIKELY:
            return for_limits
        gain = self.gain(point)
        assert gain is not None
        joint = gain.above(MARGIN)
        return min(joint, self._by_launches(point)) if self._compared(point) else joint

    def _by_launches(self, point: Point) -> float:
        assert self.posterior is not None
        energy, time, more = self._weights(point)
        pair = point.configuration, self.today_point.configuration
        every = self.posterior.by_launches(*pair, energy, time)
        assert every is not None
        chosen_among = max(1, len(self.posterior.configurations) - 1)  # of one launch, too
        by_all = 1 - chosen_among * (1 - every.above(MARGIN - more))
        verified = self.posterior.by_launches(*pair, energy, time, only=self.verifying)
        return max(by_all, verified.above(MARGIN - more) if verified is not None else 0.0, 0.0)

    def shrunk(self, point: Point) -> Shrunk | None:
        """Return the figure that the verdict on a point counts otherwise than it was measured.

        It makes another saving than the two measured figures. Without a baseline it is outside the
        interval of what was measured. None if all count as they were measured.
        """
        if point.estimate is None:
            return None
        quantities = (False, True) if point.meter.has_energy else (False,)
        rival = self.rival(point)
        for of_energy in quantities:
            if rival is None:
                told = _outside(point, of_energy=of_energy)
            else:
                told = rival.estimate is not None and _visibly_apart(
                    ratios_to(as_shown(rival), as_shown(point))[0 if of_energy else 1],
                    ratios_to(rival, point)[0 if of_energy else 1],
                )
            if told:
                counted = ratios_to(rival, point) if rival is not None else None
                return Shrunk(point, of_energy, counted)
        return None

    # -- further launches ------------------------------------------------------------------------

    def launch_share(self, launch_kJ: float | None, length: int | None) -> float | None:
        """Return the energy of a launch as a share of the training's as it runs today; None if
        either is unknown."""
        if self.baseline is None or not launch_kJ or not length:
            return None
        return launch_kJ / self.baseline.inferred.energy_to_solution_kJ

    def more(self, point: Point, launch_share: float | None) -> FurtherLaunches | None:
        """Return the launches that are worth it to become sure of a point; None if none are.

        Each of k launches, of whichever of the two is less known, narrows the saving as another
        launch of both would; their worth is the saving that they let the training have, less what
        they take.
        """
        gain = self.gain(point)
        if gain is None or not self._compared(point):
            return None
        assert self.posterior is not None
        training = 1 / launch_share if launch_share else LONG_TRAINING
        verified = self.launches_of(point) & self.verifying
        if self.p_better(point) >= ENOUGH:
            worth_one = not verified and OUTLIERS * gain.mean * training > 1
            return FurtherLaunches(1, of_baseline=False) if worth_one else None
        energy, time, _ = self._weights(point)
        spread = self.posterior.launch_sd(energy, time) ** 2
        mean, sd = gain.mean, gain.sd
        best, worth = 0, 0.0
        for k in range(1, MOST_LAUNCHES - len(self.verifying) + 1):
            left = 1 / (1 / sd**2 + k / (4 * spread))  # variance that remains: half of each
            moves = math.sqrt(max(sd**2 - left, 1e-14))
            z = (mean - MARGIN - float(NORMAL.inv_cdf(SURE)) * math.sqrt(left)) / moves
            reach = float(NORMAL.cdf(z))
            value = (mean * reach + moves * float(NORMAL.pdf(z))) * training - k
            if reach > FUTILE and value > worth:
                best, worth = k, value
        if not best:
            return None
        few = len(self.launches_of(self.today_point)) <= len(verified)
        return FurtherLaunches(
            best, of_baseline=few and self.today_point.configuration not in self.failed
        )


# Recommendation of a study: train with its choice, or keep the baseline, and how sure that is.
#
# The choice (`Answer.best`) is the configuration that is best by the posterior under the
# constraints. It is recommended once it is better than the baseline with a probability of
# `judge.SURE`. If it is not, but another measured configuration is, that one is recommended and the
# choice is named as promising. If the choice probably meets the limits and the baseline misses
# them, the choice is recommended in any case.


#: Probability to be better below which a candidate is not called promising: "very unlikely" in the
#: words of Intelligence Community Directive 203 (2015).
UNLIKELY = 0.2
#: Objectives that can choose a point which trades energy for time.
TRADING = ("energy", "time", "edp")
#: Probability to be better up to which the odds are about even ("about as likely as not" ends at
#: 60 % in the scale of the IPCC's fifth report): such a candidate is named only if further launches
#: are worth it.
EVEN = 0.6
#: Probability from which on a candidate is said to be probably better: "likely" on the scale of
#: Mastrandrea et al. (2010, guidance note for lead authors of the IPCC's fifth report), below which
#: something is about as likely as not.
PROBABLY = 2 / 3
#: A configuration may equal today's if both a saving and a loss of this share of energy and time
#: are within the intervals (95 %) of its measurements.
UNCERTAIN = 0.2


def evidence_of(judge: Judge, point: Point) -> Evidence:
    """Return the facts of a point."""
    if point.source == "predicted":
        return Evidence.PREDICTED
    if judge.baseline is None:
        return Evidence.NO_BASELINE
    return Evidence.VERIFIED if judge.launches_of(point) & judge.verifying else Evidence.MEASURED


def is_promising(judge: Judge, point: Point, launch_share: float | None = None) -> bool:
    """Return True if a point that is not sure to be better is worth naming beside the advice."""
    p = judge.p_better(point)
    if p < UNLIKELY or not judge.saves_enough(point):
        return False
    return p >= EVEN or judge.more(point, launch_share) is not None


def advise(
    judge: Judge, best: Point, *, met: bool = True, launch_share: float | None = None
) -> Recommendation:
    """Return the recommendation under the judge's constraints.

    Args:
        launch_share: energy of a launch, as a share of the training's.
    """
    today = judge.baseline
    if today is None:
        return Recommendation("train", best, evidence_of(judge, best))
    if best.configuration == today.configuration:
        return Recommendation("keep", today, evidence_of(judge, today))

    def train(point: Point, **more: Any) -> Recommendation:
        energy, time = judge.differences(point) or (None, None)
        p = judge.p_better(point)
        evidence = evidence_of(judge, point)
        return Recommendation("train", point, evidence, p, energy=energy, time=time, **more)

    p_best = judge.p_better(best)
    missed = judge.p_baseline_meets < LIKELY
    for_limits = missed and met and judge.p_for_limits(best) >= LIKELY
    # A plan's today that does not fit in memory is no point.
    cannot_stay = today.configuration not in {point.configuration for point in judge.points}
    if cannot_stay or for_limits or (p_best >= SURE and judge.saves_enough(best)):
        return train(best, for_limits=for_limits)
    promising = best if is_promising(judge, best, launch_share) else None
    sure = [p for p in judge.points if p.configuration not in judge.failed]
    sure = [p for p in sure if not missed and judge.p_better(p) >= SURE and judge.saves_enough(p)]
    second, choice = judge.choose([today, *sure])
    if second is not None and second is not today and choice.met:
        return train(second, promising=promising)
    return Recommendation("keep", today, evidence_of(judge, best), p_best, promising=promising)


def recommend(
    judge: Judge,
    best: Point,
    choice: Choice,
    spent: SearchCost,
    length: int | None,
    front: Sequence[Point],
) -> Recommendation:
    """Return the recommendation of a study with this choice.

    Args:
        length: steps of the whole training; None if unknown.
    """
    more: dict[str, Any] = {}
    launch_kJ = spent.energy_kJ / spent.probes if spent.probes else None
    share = judge.launch_share(launch_kJ, length)
    found = advise(judge, best, met=choice.met, launch_share=share)
    if choice.rule == BOTH:
        trade = more["trade"] = _trade(front, judge, found.point)
        more["trade_objective"] = trade and _objective_of(trade, judge)
    if found.promising is not None and found.evidence is not Evidence.PREDICTED:
        more["launch_s"] = spent.time_s / spent.probes if spent.probes else None
        more["launch_kJ"] = launch_kJ
        more["more"] = judge.more(found.promising, share)
    return replace(found, **more)


def _trade(front: Sequence[Point], judge: Judge, point: Point) -> Point | None:
    # Of the points that trade energy for time, the one with the least product of both; None if that
    # is no less.

    def is_trade(other: Point) -> bool:
        if other.configuration in judge.failed:
            return False
        pair = ratios_to(point, other)
        return min(pair) < 1 - SAME and max(pair) > 1 + SAME and pair[0] * pair[1] < 1

    return min(
        filter(is_trade, front),
        key=lambda other: math.prod(ratios_to(point, other)),
        default=None,
    )


def _objective_of(trade: Point, judge: Judge) -> str | None:
    for objective in TRADING:
        constraints = replace(judge.constraints, objective=objective)
        if replace(judge, constraints=constraints).choose()[0] is trade:
            return objective
    return None
