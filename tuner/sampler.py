"""The sampler: what to probe next, as an Optuna `BaseSampler` over the enumerated candidates.

`plan` reads the study's trials, fits the surrogates and chooses a probe: one launch and the live
settings to visit in it. The driver then asks the study once a live setting, and the trials carry
the planned parameters. Without a plan each ask plans for itself, so that the sampler also serves
`study.optimize`. What is asked beyond the candidates' own knobs is drawn at random, as Optuna's
contract for samplers wants.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    IntDistribution,
)
from optuna.samplers import BaseSampler, RandomSampler
from optuna.trial import FrozenTrial, TrialState
from scipy.stats import norm

from models.features import FeatureMap, varying_knobs
from models.process import REFIT_GROWTH
from models.surrogate import LeaveOneOut, Posterior, Surrogates
from search_spaces.configuration import Configuration, Settings
from search_spaces.errors import InvalidConfiguration, UnknownName
from search_spaces.knobs import KNOBS
from tuner.acquisition import (
    JOINT_DRAWS,
    LIVE_TRIED,
    SINGLE_DRAWS,
    ProbeCost,
    choose_probe,
    farthest,
    normal_draws,
    search_reference,
)
from tuner.pareto import improvement, nondominated
from tuner.settings import SamplerDesign

if TYPE_CHECKING:
    from optuna.study import Study

    from models.analytic import Prior
    from search_spaces.space import Candidates

__all__ = ["CandidateSampler", "ProbePlan"]

#: A failure of one of these kinds is the launch's: its other live settings would fail as well.
LAUNCH_FAILURES = frozenset({"refused", "out_of_memory", "crash", "hang", "time_limit"})
#: Distinct launches that are measured before the surrogates choose, at most.
START_LAUNCHES = 6
#: A measurement that is dominated by more than this (in log, on its better axis) is told as less
#: exact: its standard error grows by this share of what lies beyond.
FAR_FROM, FAR_NOISE = 0.1, 0.1
#: Relative error that a prediction of memory is taken to have (its standard deviation in log).
MEMORY_ERROR = 0.1
#: measurements x candidates that are kept up to date at once (32 MB an output); beyond that only
#: the launches that look best are.
WATCHED_ENTRIES = 4_000_000
#: At least so many candidates are watched, however many measurements there are.
LEAST_WATCHED = 1000
#: Measurements that this coarse look is conditioned on.
COARSE_ROWS = 128


@dataclass(frozen=True)
class ProbePlan:
    """One probe that the sampler wants, and why.

    Attributes:
        launch: the launch knobs.
        live: the live settings to visit.
        configurations: launch with each live setting, in that order.
        score: expected hypervolume improvement per predicted joule; NaN for the start.
        expected_gain: expected hypervolume improvement over the hypervolume of the front so far;
            infinite for the start. The search may end when it falls under some epsilon.
        cost_J: predicted joules of the probe; NaN for the start.
        reason: "space-filling start" or "expected improvement".
    """

    launch: Settings
    live: tuple[Settings, ...]
    configurations: tuple[Configuration, ...]
    score: float
    expected_gain: float
    cost_J: float
    reason: str


@dataclass(frozen=True)
class _Told:
    """One finished measurement: candidate, what really ran, and figures."""

    candidate: int
    ran: Configuration
    step_time_s: float
    power_W: float
    step_time_rse: float
    power_rse: float


class _Seen:
    """The study's trials as far as they are about the candidates, each finished one parsed once."""

    def __init__(self) -> None:
        self.parsed: set[int] = set()
        self.told: list[_Told] = []
        self.closed: set[int] = set()  # candidates never to be proposed again
        self.failed_launches: set[int] = set()
        self.pending: list[int] = []


class CandidateSampler(BaseSampler):
    """Expected hypervolume improvement per joule over a finite list of valid configurations.

    Observations are the study's COMPLETE trials with user attributes `configuration` (its key),
    `step_time_s`, `power_W` and, where known, `step_time_rse` and `power_rse`. RUNNING trials are
    pending. A FAIL trial's configuration is never proposed again, nor, where its attribute
    `failure` blames the launch, any other live setting of it; "cancelled" blames nobody. Trials of
    unknown configurations are passed over.

    Args:
        candidates: the valid configurations; None makes this a random sampler.
        prior: predicts before there are measurements (the analytic model).
        steps: optimizer steps to the solution; time and energy of the solution are this many times
            those of a step, so it changes no choice.
        cost: what a probe costs; the defaults of `ProbeCost` where None.
        seed: every draw follows from it and from the order in which trials finish.
        memory_bytes: what a device holds; with a prior, a launch that is unlikely to fit is worth
            less. None where nothing is known.
        design: the design choices, for leaving one out.
    """

    def __init__(
        self,
        candidates: Candidates | None = None,
        *,
        prior: Prior | None = None,
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
        self._seen, self._study_seen = _Seen(), ""
        if candidates is None:
            return
        configurations = candidates.configurations
        self._configurations = configurations
        self._of_key = {configuration.key: i for i, configuration in enumerate(configurations)}
        self._launch_of = np.empty(len(configurations), dtype=int)
        self._members = []
        for i, launch in enumerate(candidates.launches):
            rows = np.asarray(candidates.indices_of_launch(launch), dtype=int)
            self._members.append(rows)
            self._launch_of[rows] = i
        self._knobs = varying_knobs(configurations)
        self._levels = {
            name: list(dict.fromkeys(_as_param(c.get(name)) for c in configurations))
            for name in self._knobs
        }
        self._distributions = {
            name: _distribution(name, levels) for name, levels in self._levels.items()
        }
        self._of_params: dict[tuple[Any, ...], int] = {}
        for i, configuration in enumerate(configurations):
            params = self.params_of(configuration)
            self._of_params.setdefault(tuple(params[name] for name in self._knobs), i)
        self.features = FeatureMap(candidates, prior=prior)
        self.surrogates = Surrogates(
            self.features,
            seed=self._seed,
            split=self.design.split_kernel,
            own_level=self.design.own_level,
        )
        self._fits = _probability_of_fitting(configurations, prior, memory_bytes)
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
        self._watching: np.ndarray | None = None
        self._far_told, self._far_base = np.empty(0), np.empty((0, 2))

    @property
    def max_live(self) -> int:
        """Live settings that one probe visits at most."""
        return self.design.max_live

    # -- names and numbers ---------------------------------------------------------------------

    def distributions(self) -> dict[str, BaseDistribution]:
        """One distribution a knob that varies: what `study.ask` is to be called with.

        Integers at even steps are integer ranges, which stock samplers and the dashboard order;
        everything else is a categorical over its levels in rising order. A live knob that may be
        left to the device has the level None.
        """
        return dict(self._distributions) if self.candidates is not None else {}

    def params_of(self, configuration: Configuration) -> dict[str, Any]:
        """A configuration as trial parameters, one a knob of `distributions`."""
        return {name: _as_param(configuration.get(name)) for name in self._knobs}

    def configuration_of(self, params: dict[str, Any]) -> Configuration:
        """The candidate with these parameters.

        Raises:
            UnknownName: a parameter is missing.
            InvalidConfiguration: no candidate has them: the combination is not valid.
        """
        for name in self._knobs:
            if name not in params:
                raise UnknownName("parameter", name, params)
        key = tuple(params[name] for name in self._knobs)
        if key not in self._of_params:
            text = " ".join(f"{name}={value}" for name, value in params.items())
            raise InvalidConfiguration(text, ["it is not among the candidates"])
        return self._configurations[self._of_params[key]]

    # -- what the study says -------------------------------------------------------------------

    def _candidate_of(self, trial: FrozenTrial) -> int | None:
        key = trial.user_attrs.get("configuration")
        if key is not None:
            return self._of_key.get(key)
        if not self._knobs or any(name not in trial.params for name in self._knobs):
            return None
        return self._of_params.get(tuple(trial.params[name] for name in self._knobs))

    def _read(self, study: Study) -> _Seen:
        """Bring `_seen` up to date: finished trials are parsed once, in the order they finish."""
        if self._study_seen != study.study_name:
            self._seen, self._study_seen = _Seen(), study.study_name
        seen = self._seen
        seen.pending = []
        for trial in study.get_trials(
            deepcopy=False, states=(TrialState.COMPLETE, TrialState.FAIL, TrialState.RUNNING)
        ):
            if trial.number in seen.parsed:
                continue
            candidate = self._candidate_of(trial)
            if trial.state == TrialState.RUNNING:
                if candidate is not None:
                    seen.pending.append(candidate)
                continue
            seen.parsed.add(trial.number)
            if candidate is None:
                continue
            attrs = trial.user_attrs
            if trial.state == TrialState.FAIL:
                if attrs.get("failure") != "cancelled":
                    seen.closed.add(candidate)
                if attrs.get("failure") in LAUNCH_FAILURES:
                    seen.failed_launches.add(int(self._launch_of[candidate]))
                continue
            seen.closed.add(candidate)
            time, power = _figure(attrs.get("step_time_s")), _figure(attrs.get("power_W"))
            if time > 0 and power > 0:
                rse = (_figure(attrs.get(f"{name}_rse")) for name in ("step_time", "power"))
                # The models learn from what was delivered, which a request may not be.
                asked = self._configurations[candidate]
                live = attrs.get("delivered")
                ran = asked if live is None else Configuration(asked.launch, Settings(live))
                seen.told.append(_Told(candidate, ran, time, power, *rse))
        return seen

    def fit(self, study: Study) -> Surrogates:
        """The surrogates, fitted to what the study holds now (nothing pending believed)."""
        with self._lock:
            told = self._read(study).told
            far = self._far(told)
            if self.surrogates.fit(
                [t.ran for t in told],
                [t.step_time_s for t in told],
                [t.power_W for t in told],
                np.hypot(np.nan_to_num([t.step_time_rse for t in told]), far),
                np.hypot(np.nan_to_num([t.power_rse for t in told]), far),
            ):
                self._watching = None
            return self.surrogates

    def _far(self, told: Sequence[_Told]) -> np.ndarray:
        """Extra relative standard error of measurements that lie far behind the front, (n,).

        What a wall is like far behind the front is of no use there, and a process that follows it
        exactly takes the front's finer shape for noise. Told anew whenever the data have grown by
        a fifth, with the hyperparameters.
        """
        n = len(told)
        known = self._far_told
        if n >= REFIT_GROWTH * len(self._far_base) or n < len(known):
            known = np.empty(0)
            logs = np.log([[t.step_time_s * t.power_W, t.step_time_s] for t in told]).reshape(n, 2)
            self._far_base = logs
        base = self._far_base
        if n > len(known):
            new = np.log([[t.step_time_s * t.power_W, t.step_time_s] for t in told[len(known) :]])
            front = base[nondominated(base[:, 0], base[:, 1])]
            behind = (new[:, None, :] - front[None, :, :]).min(axis=2).max(axis=1)
            share = FAR_NOISE * self.design.discount_far
            known = np.append(known, share * np.maximum(behind - FAR_FROM, 0.0))
        self._far_told = known
        return known

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
            closed = self._closed(seen)
            plan = None
            if not closed.all():
                launched = {int(self._launch_of[i]) for i in seen.closed.union(seen.pending)}
                launched |= seen.failed_launches
                useful = {int(self._launch_of[t.candidate]) for t in seen.told}
                useful |= {int(self._launch_of[i]) for i in seen.pending}
                fresh = [
                    launch
                    for launch in range(len(self._members))
                    if launch not in launched and not closed[self._members[launch]].all()
                ]
                if (len(useful) < self._start and fresh) or not seen.told:
                    plan = self._start_plan(closed, launched, fresh)
                else:
                    plan = self._improvement_plan(study, closed)
            self._queue = deque(plan.configurations if plan else ())
            return plan

    def _closed(self, seen: _Seen) -> np.ndarray:
        """Which candidates may not be proposed: tried, in flight, or of a launch that failed."""
        closed = np.zeros(len(self._configurations), dtype=bool)
        closed[list(seen.closed) + seen.pending] = True
        for launch in seen.failed_launches:
            closed[self._members[launch]] = True
        return closed

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

    def _start_plan(self, closed: np.ndarray, launched: set[int], fresh: list[int]) -> ProbePlan:
        """A launch far from those tried, at live settings spread over their range."""
        allowed = np.array(fresh or np.unique(self._launch_of[~closed]), dtype=int)
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
        return self._plan_of([int(rows[i]) for i in chosen], "space-filling start")

    def _improvement_plan(self, study: Study, closed: np.ndarray) -> ProbePlan:
        surrogates = self.fit(study)
        seen = self._seen
        posterior, watching = self._posterior(seen, closed)
        still_open = ~closed[watching]
        if not still_open.any():  # all that looked promising is measured: look anew
            self._watching = None
            posterior, watching = self._posterior(seen, closed)
            still_open = ~closed[watching]
        told = list(dict.fromkeys([t.candidate for t in seen.told] + seen.pending))
        best = choose_probe(
            surrogates,
            told=[self._configurations[i] for i in told],
            open_members=watching[still_open],
            open_rows=np.flatnonzero(still_open),
            launch_of=self._launch_of,
            posterior=posterior[still_open],
            cost=self.cost,
            max_live=self.max_live,
            draws=self._draws,
            cost_weight=self.design.cost_weight,
            finish=self.design.finish_sweeps,
            fits=self._fits[watching[still_open]],
        )
        return self._plan_of(
            best.members,
            "expected improvement",
            score=best.score,
            expected_gain=best.relative_gain,
            cost_J=best.cost_J,
        )

    def _posterior(self, seen: _Seen, closed: np.ndarray) -> tuple[Posterior, np.ndarray]:
        """The posterior of what is watched (pending believed), and which candidates those are."""
        n = max(len(seen.told), 1)
        room = max(WATCHED_ENTRIES // n, LEAST_WATCHED)
        if self._watching is None:
            every = np.arange(len(self._configurations))
            self._watching = every if len(every) <= room else self._promising(room // 2, closed)
            self.surrogates.watch([self._configurations[i] for i in self._watching])
        self.surrogates.believe([self._configurations[i] for i in seen.pending])
        return self.surrogates.watched(), self._watching

    def _promising(self, room: int, closed: np.ndarray) -> np.ndarray:
        """The launches with the most hopeful open settings, about `room` candidates in all.

        Hope is the improvement at optimistic figures (two standard deviations) of a posterior that
        is conditioned on the first `COARSE_ROWS` measurements only; its standard deviations are too
        large, never too small, so nothing good is lost for being unknown.
        """
        coarse = self.surrogates.predict(self._configurations, first=COARSE_ROWS)
        told = np.unique([t.candidate for t in self._seen.told])
        front = np.column_stack([coarse.log_energy[told], coarse.log_time[told]])
        hope = improvement(
            front,
            coarse.log_energy - 2 * coarse.log_energy_std,
            coarse.log_time - 2 * coarse.log_time_std,
            search_reference(front, coarse),
        )
        hope[closed] = -1.0
        best = np.array([hope[rows].max() for rows in self._members])
        chosen: list[np.ndarray] = []
        count = 0
        for launch in np.argsort(-best, kind="stable"):
            if count and count + len(self._members[launch]) > room:
                break
            chosen.append(self._members[launch])
            count += len(self._members[launch])
        return np.concatenate(chosen)

    def _plan_of(
        self,
        members: Sequence[int],
        reason: str,
        *,
        score: float = math.nan,
        expected_gain: float = math.inf,
        cost_J: float = math.nan,
    ) -> ProbePlan:
        configurations = tuple(self._configurations[i] for i in members)
        return ProbePlan(
            launch=configurations[0].launch,
            live=tuple(configuration.live for configuration in configurations),
            configurations=configurations,
            score=score,
            expected_gain=expected_gain,
            cost_J=cost_J,
            reason=reason,
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


def _probability_of_fitting(
    configurations: Sequence[Configuration], prior: Prior | None, memory_bytes: float | None
) -> np.ndarray:
    """Probability that each configuration fits in a device's memory, (n,); 1 where none is told.

    The prediction is taken as log-normal with relative error `MEMORY_ERROR`.
    """
    if prior is None or memory_bytes is None:
        return np.ones(len(configurations))
    predicted = np.asarray(prior.predict(configurations).memory_bytes, dtype=float)
    return np.asarray(norm.cdf(np.log(memory_bytes / predicted) / MEMORY_ERROR))


def _figure(value: object) -> float:
    """A number from a trial's attribute; NaN for none."""
    return float(value) if isinstance(value, int | float) else math.nan


def _as_param(value: object) -> Any:
    """A knob's value as Optuna stores it: a tuple (one value a stage) as text."""
    return ",".join(map(str, value)) if isinstance(value, tuple) else value


def _distribution(name: str, levels: list[Any]) -> BaseDistribution:
    integers = all(isinstance(v, int) and not isinstance(v, bool) for v in levels)
    if integers and not (name in KNOBS and KNOBS[name].scale == "category"):
        steps = {b - a for a, b in zip(sorted(levels)[:-1], sorted(levels)[1:], strict=True)}
        if len(steps) == 1:
            return IntDistribution(min(levels), max(levels), step=steps.pop())
    numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in levels)
    return CategoricalDistribution(sorted(levels) if numbers else sorted(levels, key=_level_order))


def _level_order(level: Any) -> tuple[int, float, str]:
    """None first, then numbers, then text."""
    if level is None:
        return (0, 0.0, "")
    if isinstance(level, int | float):
        return (1, float(level), "")
    return (2, 0.0, str(level))


def _launch_rows(
    candidates: Candidates, features: FeatureMap, members: list[np.ndarray]
) -> np.ndarray:
    """Features of the launches alone: the live knobs averaged out, shape (launches, dimension)."""
    return np.vstack([features.matrix[rows].mean(axis=0) for rows in members])
