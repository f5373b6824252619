"""Planner of this project: expected fall of the log regret per joule, probe by probe.

`plan` chooses one launch and the live setting to visit first; `plan_continuation` chooses, from
what the running launch measured, the further settings that are worth their windows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from tuner.models.memory_margin import LIKELY_FROM, learned_margin
from tuner.models.surrogate.features import FeatureMap
from tuner.models.surrogate.gaussian_process import LEAST_ROWS, TOLERANCE, first_best
from tuner.models.surrogate.surrogates import AMPLITUDE_PRIOR, Surrogates
from tuner.search.evidence import (
    LAST,
    CrashCauses,
    LargerBatches,
    Observations,
    SlackLimits,
    UnreachedClocks,
)
from tuner.search.joint_draws import (
    LIVE_DRAWN,
    CandidatePool,
    JointDraws,
    RegretEstimate,
    best_probe,
)
from tuner.search.planner import MAX_LIVE, PlanningState, ProbePlan, ProbePlanner
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.workload.records.probe import ProbeRecord

if TYPE_CHECKING:
    from tuner.models.prior import Prior
    from tuner.search_spaces.space import Candidates

#: Distinct launches that are measured before the surrogates choose, at most.
START_LAUNCHES = 6
#: With a prior a search starts at launches whose predicted log of energy x time is at most this
#: above the best: its expected error.
PROMISING = math.hypot(2 * AMPLITUDE_PRIOR[0], AMPLITUDE_PRIOR[1])
#: The first launches are at most this share of the probes, and a search of at most so many has none
#: to spare for learning the space.
START_SHARE, FEW_PROBES = 0.25, 5
#: Launches in flight, as a share of the measured ones, beyond which a probe waits for results.
IN_FLIGHT_SHARE = 0.4


def farthest(
    points: np.ndarray, chosen: np.ndarray, *, allowed: np.ndarray, rng: np.random.Generator
) -> int:
    """Return the allowed row of (n, d) points that is farthest from all chosen rows (maximin)."""
    if len(chosen):
        apart = points[allowed][:, None, :] - chosen[None, :, :]
        distance = np.linalg.norm(apart, axis=2).min(axis=1)
    else:
        distance = -np.linalg.norm(points[allowed] - points.mean(axis=0), axis=1)
    ties = np.flatnonzero(distance >= distance.max() - 1e-9)
    return int(allowed[rng.choice(ties)])


def waiting_pays(in_flight: int, most: float, measured: int, idle_share: float) -> bool:
    """Return True if a node should wait for the first of the probes in flight.

    Up to `most` probes in flight, a further one loses nothing. Each beyond is chosen without a part
    of the results that it should rest on, and that part of its joules is lost. Waiting costs what
    the node draws meanwhile, `idle_share` of a probe's power: of n probes under way, the first ends
    after 1 / (n + 1) of a probe's length on average.
    """
    count = in_flight + 1
    return (count - most) / (measured + count) > idle_share / count


class CandidatePlanner(ProbePlanner):
    """Planner by expected fall of the log regret per joule.

    Args:
        seed: every draw follows from it and from the order in which probes finish.
        memory_bytes: of one device; with a prior, a launch that is unlikely to fit is worth less,
            and one that hardly can is not proposed. None if unknown.
        first: configurations to probe before any other, in this order.
    """

    estimates_gain = True

    def __init__(
        self,
        candidates: Candidates,
        *,
        prior: Prior | None = None,
        seed: int | None = None,
        memory_bytes: float | None = None,
        first: Sequence[Configuration] = (),
    ) -> None:
        super().__init__(candidates, seed=seed)
        self._seed = 0 if seed is None else seed
        self._first = first
        if len(self._members) == 1:  # the only launch is not ended to begin it anew
            self.max_live = max(MAX_LIVE, min(len(self._configurations), LIVE_DRAWN))
        self.features = FeatureMap(candidates, prior=prior, learns_program=True)
        self.surrogates = Surrogates(self.features)
        self._memory_bytes = memory_bytes
        self._predicted_bytes: np.ndarray | None = None  # of each launch
        if prior is not None and memory_bytes is not None:
            firsts = [self._configurations[rows[0]] for rows in self._members]
            self._predicted_bytes = np.asarray(prior.predict(firsts).memory_bytes, dtype=float)
        # Features of each launch, (launches, dimension): the live knobs averaged out.
        self._launch_features = np.vstack(
            [self.features.matrix[rows].mean(axis=0) for rows in self._members]
        )
        # Predicted log of energy x time of each launch at its best setting; 0 without a prior.
        log_time, log_power = self.features.prior_log(np.arange(len(self._configurations))).T
        product = 2 * log_time + log_power  # log (E t) = log (t P t)
        self._predicted = np.array([product[rows].min() for rows in self._members])
        self._spread = min(START_LAUNCHES, math.floor(len(self._members) ** 0.25 + 1e-9))
        self.slack_limits = SlackLimits(self._configurations, self._launch_of)
        self.unreached_clocks = UnreachedClocks(self._configurations)
        self.crash_causes = CrashCauses(candidates.launches)
        self.larger_batches = LargerBatches(candidates.launches)
        self._pool = CandidatePool(
            self.surrogates, candidates, self._members, self._launch_of, self._rng
        )

    def _fit(self, observations: Observations) -> None:
        measured = observations.measured
        names = "step_time_s", "power_W", "step_time_rse", "power_rse"
        figures = ([getattr(one.window, name) for one in measured] for name in names)
        if self.surrogates.fit([one.delivered for one in measured], *figures):
            self._pool.tracked = None

    # -- planning ------------------------------------------------------------------------------

    def plan(self, state: PlanningState) -> ProbePlan | None:
        """Plan the next probe; None if no candidate is left to propose."""
        observations = self._observe(state)
        trains = self._trains(state, observations)
        closed, chances = self._closed_and_chances(observations, trains)
        if closed.all():
            return None
        if wanted := self._to_try(state, closed, trains):
            more = self._extendable(wanted, closed)
            return self._plan_of(wanted, "to be tried first", extendable=more)
        hardly = (trains < LAST)[self._launch_of]
        if not hardly[~closed].all():
            closed = closed | hardly
        launched, fresh = self._launches(observations, closed)
        if self._starting(state, observations, fresh) or not observations.measured:
            return self._start_plan(closed, launched, fresh, chances)
        return self._improvement_plan(state, observations, closed, chances)

    def plan_continuation(self, state: PlanningState, so_far: ProbeRecord) -> ProbePlan | None:
        """Plan further settings of a running launch; None to end the launch."""
        if len(so_far.request.live) > self.max_live:
            return None  # the probe's time limit holds the first window and `max_live` further ones
        observations = self._observe(state, so_far)
        trains = self._trains(state, observations)
        closed, chances = self._closed_and_chances(observations, trains)
        first = self.candidates.find(so_far.request.configurations()[0])
        if first is None or not observations.measured:
            return None
        running, (_, fresh) = int(self._launch_of[first]), self._launches(observations, closed)
        if closed[self._members[running]].all() or self._starting(state, observations, fresh):
            return None
        if self._to_try(state, closed, trains):
            return None  # which comes first
        plan = self._improvement_plan(state, observations, closed, chances, running_launch=running)
        return plan if plan and plan.launch == so_far.request.launch else None

    def lessons(self, records: Sequence[ProbeRecord]) -> tuple[str, ...]:
        """Return which launches come first after crashes."""
        return self.crash_causes.sentences(records)

    def better_to_wait(self, state: PlanningState) -> bool:
        """Return True if a further probe would be chosen on too few results."""
        observations = self._observe(state)
        measured = {int(self._launch_of[m.candidate]) for m in observations.measured}
        in_flight = {int(self._launch_of[i]) for i in observations.pending}
        if not in_flight or len(measured | in_flight) < self._start_count(state):
            return False
        most = max(1.0, IN_FLIGHT_SHARE * max(len(measured), 1))
        return waiting_pays(len(in_flight), most, len(measured), state.idle_share)

    def _start_count(self, state: PlanningState) -> int:
        share = START_SHARE * (len(state.records) + state.probes_left)
        return max(1, math.floor(min(self._spread, share)))

    def _to_try(self, state: PlanningState, closed: np.ndarray, trains: np.ndarray) -> list[int]:
        closed = closed | (trains < LAST)[self._launch_of]
        numbers = (self.candidates.find(each) for each in (*self._first, *self._usual(state)))
        wanted = [i for i in numbers if i is not None and not closed[i]]
        launch = [i for i in wanted if self._launch_of[i] == self._launch_of[wanted[0]]]
        return launch[: self.max_live]

    def _usual(self, state: PlanningState) -> list[Configuration]:
        # In a search of few probes without a prior: the launch of the first record with twice its
        # micro-batch or, where that is the largest, the middle one of its live settings.
        few = len(state.records) + state.probes_left <= FEW_PROBES
        if not few or self.features.has_prior or not state.records:
            return []
        today = state.records[0].request.configurations()[0]
        larger = [
            c
            for c in self._configurations
            if c.live == today.live
            and c.micro_batch >= 2 * today.micro_batch
            and c.launch == Settings({**today.launch, "micro_batch": c.micro_batch})
        ]
        if larger:
            return [min(larger, key=lambda c: c.micro_batch)]
        others = [c for c in self._configurations if c.launch == today.launch and c != today]
        return others[len(others) // 2 :][:1]

    def _launches(
        self, observations: Observations, closed: np.ndarray
    ) -> tuple[set[int], list[int]]:
        tried = {int(self._launch_of[i]) for i in observations.closed.union(observations.pending)}
        tried |= observations.failed_launches
        some_open = [launch for launch, rows in enumerate(self._members) if not closed[rows].all()]
        return tried, [launch for launch in some_open if launch not in tried]

    def _starting(self, state: PlanningState, observations: Observations, fresh: list[int]) -> bool:
        useful = [*(m.candidate for m in observations.measured), *observations.pending]
        return len(set(self._launch_of[useful])) < self._start_count(state) and bool(fresh)

    def _trains(self, state: PlanningState, observations: Observations) -> np.ndarray:
        """Return the probability of each launch neither to crash nor to run out of memory, by what
        failed; a search of few probes makes none of what crashes more likely than not."""
        crashes = self.crash_causes.chances(state.records)
        return crashes * self.larger_batches.chances(observations)

    def _closed_and_chances(
        self, observations: Observations, trains: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        chances = self._fits(observations) * self.unreached_clocks.chances(observations)
        chances *= self.slack_limits.chances(observations.measured)
        chances *= trains[self._launch_of]
        return self._closed(observations), chances

    def _fits(self, observations: Observations) -> np.ndarray:
        if self._predicted_bytes is None or self._memory_bytes is None:
            return np.ones(len(self._configurations))
        margin = learned_margin(self._memory_bytes, self._predicted_bytes, observations.peak_bytes)
        return margin.probability_of_fitting(self._predicted_bytes)[self._launch_of]

    def _start_plan(
        self, closed: np.ndarray, tried: set[int], fresh: list[int], chances: np.ndarray
    ) -> ProbePlan:
        allowed = np.array(fresh or np.unique(self._launch_of[~closed]), dtype=int)
        best = np.array([chances[self._members[i]].max() for i in allowed])
        allowed = allowed[best >= min(LIKELY_FROM, best.max())]
        predicted = self._predicted[allowed]
        launch = farthest(
            self._launch_features,
            self._launch_features[sorted(tried)],
            allowed=allowed[predicted <= predicted.min() + PROMISING + TOLERANCE],
            rng=self._rng,
        )
        rows = self._members[launch]
        rows = rows[~closed[rows] & (chances[rows] >= chances[rows].max())]
        matrix = self.features.matrix[rows]
        # The lowest setting first: power is least there, and so are the joules of the launch and of
        # the window. The first windows of the launches that follow are at low settings for the
        # same reason, so launches are compared at like settings.
        members = [int(rows[first_best(-matrix.sum(axis=1))])]
        extendable = self._extendable(members, closed)
        return self._plan_of(members, "space-filling start", extendable=extendable)

    def _improvement_plan(
        self,
        state: PlanningState,
        observations: Observations,
        closed: np.ndarray,
        chances: np.ndarray,
        running_launch: int | None = None,
    ) -> ProbePlan | None:
        # None if every candidate would probably exceed the cap on peak power.
        self._fit(observations)
        front, candidates = self._pool.views(observations, closed, chances)
        if state.peak_limit is not None:
            levels = self.features.matrix[candidates.members].sum(axis=1)
            safe = state.peak_limit.safe(
                candidates.posterior,
                self.surrogates.widening[1],
                [self._configurations[i] for i in candidates.members],
                levels if len(observations.measured) < LEAST_ROWS else None,
            )
            if safe is None:
                return None
            candidates = candidates[safe]
        drawn = JointDraws(
            self.surrogates,
            front,
            candidates,
            state.question,
            running_launch=running_launch,
            seed=self._seed,
        )
        best = best_probe(drawn, state.cost, MAX_LIVE, running_launch, state.probes_left)
        return self._plan_of(
            [best.member],
            "expected improvement",
            score=best.score,
            expected_gain=best.expected_gain,
            cost_J=best.cost_J,
            first_J=best.first_J,
            extendable=self._extendable([best.member], closed),
            regret=self._regret_of(observations, drawn),
        )

    def _regret_of(self, observations: Observations, drawn: JointDraws) -> RegretEstimate | None:
        # None with too few measurements to fit the hyperparameters, and until two live settings of
        # a launch are measured: launches begin at like settings, which tell nothing of the others.
        launches = [int(self._launch_of[i]) for i in {m.candidate for m in observations.measured}]
        varied = len(set(launches)) < len(launches) or all(len(r) == 1 for r in self._members)
        if len(observations.measured) < LEAST_ROWS or not varied:
            return None
        return RegretEstimate(drawn.regret, drawn.question is not None)

    def _extendable(self, members: Sequence[int], closed: np.ndarray) -> bool:
        others = np.setdiff1d(self._members[self._launch_of[members[0]]], members)
        return not closed[others].all()
