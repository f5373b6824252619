"""The sampler: what to probe next, as an Optuna `BaseSampler` over the enumerated candidates.

`plan` reads the study's trials, fits the surrogates and chooses a probe: one launch and the live
setting to visit first. While the launch is up `plan_on` is asked, with what it measured, which
others are worth visiting there: they cost their windows only, so what is known decides, and no
setting has to be visited on suspicion. Without a plan each ask plans for itself, so that the
sampler also serves `study.optimize`. What is asked beyond the candidates' own knobs is drawn at
random, as Optuna's contract for samplers wants.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, RandomSampler
from optuna.trial import FrozenTrial

from models.features import FeatureMap
from models.memory_margin import learned_margin
from models.surrogate import LeaveOneOut, Surrogates
from search_spaces.configuration import Configuration, Settings
from tuner.acquisition import (
    JOINT_DRAWS,
    LIVE_TRIED,
    SINGLE_DRAWS,
    ProbeCost,
    choose_probe,
    farthest,
    normal_draws,
)
from tuner.considered import Watch
from tuner.named import NamedCandidates
from tuner.settings import SamplerDesign
from tuner.told import Seen
from workload.probe import ProbeRecord

if TYPE_CHECKING:
    from optuna.study import Study

    from models.analytic import Prior
    from search_spaces.space import Candidates

__all__ = ["CandidateSampler", "ProbePlan"]

#: Distinct launches that are measured before the surrogates choose, at most.
START_LAUNCHES = 6
#: A launch that is less likely than this to fit in memory is not proposed, and the start takes only
#: those that are as likely as not, where there are any.
REFUSED_BELOW, START_FROM = 0.05, 0.5


@dataclass(frozen=True)
class ProbePlan:
    """One probe that the sampler wants, and why.

    Attributes:
        launch: the launch knobs.
        live: the live settings to visit now.
        configurations: launch with each live setting, in that order.
        score: expected hypervolume improvement per predicted joule; NaN for the start.
        expected_gain: expected hypervolume improvement over the hypervolume of the front so far;
            infinite for the start. The search may end when it falls under some epsilon.
        expected_saving: by how much log energy is expected to come down, averaged over the front's
            range of times (`tuner.acquisition.Scored.saving`); infinite for the start.
        cost_J: predicted joules of the probe, with what it will probably go on with; NaN for the
            start.
        reason: "space-filling start" or "expected improvement".
        first_J: of these, the joules until `live` is visited.
        open: whether the launch has further settings, to be asked about once these are visited.
    """

    launch: Settings
    live: tuple[Settings, ...]
    configurations: tuple[Configuration, ...]
    score: float
    expected_gain: float
    cost_J: float
    reason: str
    expected_saving: float = math.inf
    first_J: float = math.nan
    open: bool = False


class CandidateSampler(BaseSampler):
    """Expected hypervolume improvement per joule over a finite list of valid configurations.

    Observations are the study's COMPLETE trials with user attributes `configuration` (its key),
    `step_time_s`, `power_W` and, where known, `step_time_rse` and `power_rse`. RUNNING trials are
    pending. A FAIL trial's configuration is never proposed again, nor, where its attribute
    `failure` blames the launch, any other live setting of it; "cancelled" and "node" blame no
    configuration. Trials of unknown configurations are passed over.

    Args:
        candidates: the valid configurations; None makes this a random sampler.
        prior: predicts before there are measurements (the analytic model).
        earlier: what measurements made elsewhere say (`tuner.transfer`).
        steps: optimizer steps to the solution; time and energy of the solution are this many times
            those of a step, so it changes no choice.
        cost: what a probe costs; the defaults of `ProbeCost` where None.
        seed: every draw follows from it and from the order in which trials finish.
        memory_bytes: what a device holds; with a prior, a launch that is unlikely to fit is worth
            less, and one that hardly can is not proposed. None where nothing is known.
        design: the design choices, for leaving one out.
    """

    def __init__(
        self,
        candidates: Candidates | None = None,
        *,
        prior: Prior | None = None,
        earlier: Sequence[Prior] = (),
        steps: int = 1,
        cost: ProbeCost | None = None,
        seed: int | None = None,
        memory_bytes: float | None = None,
        design: SamplerDesign | None = None,
    ) -> None:
        self.candidates = candidates
        self.cost = cost or ProbeCost()
        self.steps = steps
        self.design = design or SamplerDesign()
        self._random = RandomSampler(seed=seed)
        self._seed = 0 if seed is None else seed
        self._rng = np.random.default_rng(seed)
        self._lock = threading.RLock()
        self._queue: deque[Configuration] = deque()
        self._study_seen = ""
        if candidates is None:
            return
        configurations = candidates.configurations
        self._configurations = configurations
        self._launch_of = np.empty(len(configurations), dtype=int)
        self._members = []
        for i, launch in enumerate(candidates.launches):
            rows = np.asarray(candidates.indices_of_launch(launch), dtype=int)
            self._members.append(rows)
            self._launch_of[rows] = i
        self._names = NamedCandidates(candidates)
        self._seen = Seen(self._names, self._launch_of)
        self.features = FeatureMap(candidates, prior=prior, earlier=earlier)
        self.surrogates = Surrogates(
            self.features,
            seed=self._seed,
            split=self.design.split_kernel,
            own_level=self.design.own_level,
        )
        self._memory_bytes = memory_bytes
        self._predicted_bytes: np.ndarray | None = None
        if prior is not None and memory_bytes is not None:
            firsts = [configurations[rows[0]] for rows in self._members]
            self._predicted_bytes = np.asarray(prior.predict(firsts).memory_bytes, dtype=float)
        self._launch_rows = _launch_rows(candidates, self.features, self._members)
        self._start_pool = self._affordable_launches()
        n = len(self._members)
        self._start = min(START_LAUNCHES, math.floor(n**0.25 + 1e-9))
        if self.design.start_launches is not None:
            self._start = min(n, self.design.start_launches)
        self._draws = (
            normal_draws(SINGLE_DRAWS, 1, self._seed),
            normal_draws(JOINT_DRAWS, LIVE_TRIED, self._seed + 1),
        )
        self._watch = Watch(self.surrogates, candidates, self._members, self._launch_of, self._rng)

    @property
    def max_live(self) -> int:
        """Live settings that one probe visits at most."""
        return self.design.max_live

    # -- names and numbers ---------------------------------------------------------------------

    def distributions(self) -> dict[str, BaseDistribution]:
        """One distribution a knob that varies (`tuner.named`): what `study.ask` is called with."""
        return dict(self._names.distributions) if self.candidates is not None else {}

    def params_of(self, configuration: Configuration) -> dict[str, Any]:
        """A configuration as trial parameters, one a knob of `distributions`."""
        return self._names.params_of(configuration)

    def configuration_of(self, params: dict[str, Any]) -> Configuration:
        """The candidate with these parameters.

        Raises:
            UnknownName: a parameter is missing.
            InvalidConfiguration: no candidate has them: the combination is not valid.
        """
        return self._names.configuration_of(params)

    # -- what the study says -------------------------------------------------------------------

    def _read(self, study: Study) -> Seen:
        """What the study says now."""
        if self._study_seen != study.study_name:
            self._seen, self._study_seen = Seen(self._names, self._launch_of), study.study_name
        self._seen.update(study)
        return self._seen

    def fit(self, study: Study) -> Surrogates:
        """The surrogates, fitted to what the study holds now (nothing pending believed)."""
        with self._lock:
            return self._fit(self._read(study))

    def _fit(self, seen: Seen) -> Surrogates:
        told = seen.told
        if self.surrogates.fit(
            [t.ran for t in told],
            [t.step_time_s for t in told],
            [t.power_W for t in told],
            [t.step_time_rse for t in told],
            [t.power_rse for t in told],
        ):
            self._watch.renew()
        return self.surrogates

    def leave_one_out(self, study: Study) -> LeaveOneOut | None:
        """The surrogates' error on left-out measurements; None with fewer than three."""
        with self._lock:
            surrogates = self.fit(study)
            return surrogates.leave_one_out() if len(self._seen.told) >= 3 else None

    # -- planning ------------------------------------------------------------------------------

    def plan(self, study: Study) -> ProbePlan | None:
        """The next probe; None when no candidate is left to propose.

        The next `len(plan.live)` asks of this study take the plan's configurations, in order; a new
        plan replaces one that was not asked for.
        """
        if self.candidates is None:
            return None
        with self._lock:
            seen = self._read(study)
            closed, fits = self._closed_and_fits(seen)
            plan = None
            if not closed.all():
                launched, fresh = self._launches(seen, closed)
                if self._starting(seen, fresh) or not seen.told:
                    plan = self._start_plan(closed, launched, fresh, fits)
                else:
                    plan = self._improvement_plan(seen, closed, fits)
            self._queue = deque(plan.configurations if plan else ())
            return plan

    def plan_on(self, study: Study, so_far: ProbeRecord) -> ProbePlan | None:
        """What else to visit in a launch that is up; None where that is not worth its windows, or
        another launch is worth more.

        Args:
            study: the probe's own trials still run.
            so_far: the probe, with what it measured.
        """
        if self.candidates is None or not self.design.go_on:
            return None
        with self._lock:
            seen = self._read(study).with_measured(so_far)
            closed, fits = self._closed_and_fits(seen)
            here = self._names.candidate_named(so_far.request.configurations()[0].key)
            if here is None or not seen.told:
                return None
            up = int(self._launch_of[here])
            if closed[self._members[up]].all() or self._starting(
                seen, self._launches(seen, closed)[1]
            ):
                return None
            plan = self._improvement_plan(seen, closed, fits, up=up)
            return plan if plan.launch == so_far.request.launch else None

    def _launches(self, seen: Seen, closed: np.ndarray) -> tuple[set[int], list[int]]:
        """Launches that were tried or are in flight, and those that may still be."""
        launched = {int(self._launch_of[i]) for i in seen.closed.union(seen.pending)}
        launched |= seen.failed_launches
        fresh = [
            launch
            for launch in range(len(self._members))
            if launch not in launched and not closed[self._members[launch]].all()
        ]
        return launched, fresh

    def _starting(self, seen: Seen, fresh: list[int]) -> bool:
        """Whether the first launches, spread over the space, are not all on their way yet."""
        useful = {int(self._launch_of[t.candidate]) for t in seen.told}
        useful |= {int(self._launch_of[i]) for i in seen.pending}
        return len(useful) < self._start and bool(fresh)

    def better_to_wait(self, study: Study) -> bool:
        """Whether a further probe beside those in flight would be chosen on too little.

        The launches in flight may grow what is known by `SamplerDesign.in_flight_share`; the first
        ones, spread over the space, are chosen without knowledge and need not wait.
        """
        if self.candidates is None:
            return False
        with self._lock:
            seen = self._read(study)
            known = {int(self._launch_of[t.candidate]) for t in seen.told}
            flying = {int(self._launch_of[i]) for i in seen.pending}
            starting = len(known | flying) < self._start
            most = max(1.0, self.design.in_flight_share * max(len(known), 1))
            return bool(flying) and not starting and len(flying) + 1 > most

    def _closed(self, seen: Seen) -> np.ndarray:
        """Which candidates may not be proposed: tried, in flight, or of a launch that failed."""
        closed = np.zeros(len(self._configurations), dtype=bool)
        closed[list(seen.closed) + seen.pending] = True
        for launch in seen.failed_launches:
            closed[self._members[launch]] = True
        return closed

    def _closed_and_fits(self, seen: Seen) -> tuple[np.ndarray, np.ndarray]:
        """Which candidates may not be proposed, those that hardly can fit in memory among them, and
        the probability that each fits."""
        closed, fits = self._closed(seen), self._fits(seen)
        unlikely = fits < REFUSED_BELOW
        if (closed | unlikely).all():  # what is left is unlikely to fit, but it is all there is
            return closed, np.ones_like(fits)
        return closed | unlikely, fits

    def _fits(self, seen: Seen) -> np.ndarray:
        """Probability that each candidate fits in a device's memory, by its prediction and by what
        probes said of such predictions (`models.memory_margin`), (n,); 1 where nothing tells."""
        if self._predicted_bytes is None or self._memory_bytes is None:
            return np.ones(len(self._configurations))
        learned = seen.peaks if self.design.learn_memory else {}
        margin = learned_margin(self._memory_bytes, self._predicted_bytes, learned)
        return margin.probability_of_fitting(self._predicted_bytes)[self._launch_of]

    def _affordable_launches(self) -> np.ndarray:
        """Launches that the start may take: with a prior, the better half by predicted energy x
        time of their best setting; without, all."""
        every = np.arange(len(self._members))
        if not self.features.has_prior:
            return every
        log = self.features.prior_log(self._configurations)
        worth = 2 * log[:, 0] + log[:, 1]  # log (E t) = log (t P t)
        best = np.array([worth[rows].min() for rows in self._members])
        return every[best <= np.median(best)]

    def _start_plan(
        self, closed: np.ndarray, launched: set[int], fresh: list[int], fits: np.ndarray
    ) -> ProbePlan:
        """A launch far from those tried, at live settings spread over their range."""
        allowed = np.array(fresh or np.unique(self._launch_of[~closed]), dtype=int)
        likely = allowed[[fits[self._members[i][0]] >= START_FROM for i in allowed]]
        allowed = likely if len(likely) else allowed
        pool = np.intersect1d(allowed, self._start_pool)
        launch = farthest(
            self._launch_rows,
            self._launch_rows[sorted(launched)],
            allowed=pool if len(pool) else allowed,
            rng=self._rng,
        )
        rows = self._members[launch]
        rows = rows[~closed[rows]]
        matrix = self.features.matrix[rows]
        # The device's own or highest setting first (the last of a clock's rows has the largest
        # feature), then the farthest from what is chosen.
        chosen = [int(np.argmax(matrix.sum(axis=1)))]
        while len(chosen) < min(self.design.start_live, self.max_live, len(rows)):
            left = np.setdiff1d(np.arange(len(rows)), chosen)
            chosen.append(farthest(matrix, matrix[chosen], allowed=left, rng=self._rng))
        return self._plan_of([int(rows[i]) for i in chosen], "space-filling start", closed=closed)

    def _improvement_plan(
        self, seen: Seen, closed: np.ndarray, fits: np.ndarray, up: int | None = None
    ) -> ProbePlan:
        """The probe that is worth the most; `up` is a launch that can be gone on with."""
        surrogates = self._fit(seen)
        posterior, watching = self._watch.posterior(seen, closed)
        still_open = ~closed[watching]
        told = list(dict.fromkeys(t.candidate for t in seen.told))
        best = choose_probe(
            surrogates,
            told=[self._configurations[i] for i in told],
            pending=[self._configurations[i] for i in seen.pending],
            open_members=watching[still_open],
            open_rows=np.flatnonzero(still_open),
            launch_of=self._launch_of,
            posterior=posterior[still_open],
            cost=self.cost,
            max_live=self.max_live,
            draws=self._draws,
            cost_weight=self.design.cost_weight,
            first_decides=self.design.go_on,
            up=up,
            fits=fits[watching[still_open]],
        )
        decides = self.design.go_on and self._launch_of[best.members[0]] != up
        return self._plan_of(
            best.members[:1] if decides else best.members,
            "expected improvement",
            closed=closed,
            score=best.score,
            expected_gain=best.relative_gain,
            expected_saving=best.saving,
            cost_J=best.cost_J,
            first_J=best.first_J,
        )

    def _plan_of(
        self,
        members: Sequence[int],
        reason: str,
        *,
        closed: np.ndarray | None = None,
        score: float = math.nan,
        expected_gain: float = math.inf,
        expected_saving: float = math.inf,
        cost_J: float = math.nan,
        first_J: float = math.nan,
    ) -> ProbePlan:
        """These candidates, of one launch; gone on with where it has others that are not closed."""
        further = np.setdiff1d(self._members[self._launch_of[members[0]]], members)
        configurations = tuple(self._configurations[i] for i in members)
        return ProbePlan(
            launch=configurations[0].launch,
            live=tuple(configuration.live for configuration in configurations),
            configurations=configurations,
            score=score,
            expected_gain=expected_gain,
            expected_saving=expected_saving,
            cost_J=cost_J,
            reason=reason,
            first_J=first_J,
            open=self.design.go_on and closed is not None and not closed[further].all(),
        )

    # -- BaseSampler -----------------------------------------------------------------------------

    def infer_relative_search_space(
        self, study: Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        """The candidates' knobs."""
        return self.distributions()

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """The next planned configuration's parameters; what is no knob here is drawn at random."""
        params: dict[str, Any] = {}
        known = self.distributions()
        if known and all(search_space.get(name) == known[name] for name in known):
            with self._lock:
                if not self._queue:
                    self.plan(study)
                if self._queue:
                    params = self.params_of(self._queue.popleft())
        for name, distribution in search_space.items():
            if name not in params:
                params[name] = self.sample_independent(study, trial, name, distribution)
        return params

    def sample_independent(
        self,
        study: Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        """Drawn at random: the parameter is none of the candidates' knobs, or none is left."""
        return self._random.sample_independent(study, trial, param_name, param_distribution)

    def reseed_rng(self) -> None:
        """New random state, for a copy that works beside this one."""
        self._random.reseed_rng()
        self._rng = np.random.default_rng()


def _launch_rows(
    candidates: Candidates, features: FeatureMap, members: list[np.ndarray]
) -> np.ndarray:
    """Features of the launches alone: the live knobs averaged out, shape (launches, dimension)."""
    return np.vstack([features.matrix[rows].mean(axis=0) for rows in members])
