"""Base of the samplers that plan probes over a finite list of valid configurations.

A planner is an Optuna `BaseSampler` with a queue of planned configurations that the next asks take.
Without a plan each ask plans for itself, so that a planner also serves `study.optimize`.
"""

from __future__ import annotations

import math
import threading
from abc import abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, RandomSampler
from optuna.trial import FrozenTrial

from tuner.problem.probe_cost import ProbeCost
from tuner.problem.settings import SamplerDesign
from tuner.search.observations import Observations, ParameterEncoding
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.workload.probe import ProbeRecord

if TYPE_CHECKING:
    from optuna.study import Study

    from tuner.search.put_off import PeakLimit
    from tuner.search.question import Question
    from tuner.search.regret import RegretEstimate
    from tuner.search_spaces.space import Candidates


@dataclass(frozen=True)
class ProbePlan:
    """One probe that a planner proposes, and why."""

    configurations: tuple[Configuration, ...]
    reason: str
    # expected fall of the log regret per predicted joule; NaN if not estimated.
    score: float = math.nan
    # share of the front's hypervolume that the probe is expected to add; infinite if not estimated.
    expected_gain: float = math.inf
    # predicted joules of the probe, its probable continuation included; NaN if not estimated.
    cost_J: float = math.nan
    first_J: float = math.nan
    extendable: bool = False
    regret: RegretEstimate | None = None

    @property
    def launch(self) -> Settings:
        """The launch knobs."""
        return self.configurations[0].launch

    @property
    def live(self) -> tuple[Settings, ...]:
        """The live settings to visit now."""
        return tuple(configuration.live for configuration in self.configurations)


class ProbePlanner(BaseSampler):
    """Candidates by number, observations of them, and the queue of planned configurations."""

    #: Live settings that one probe visits at most.
    max_live: int = SamplerDesign.max_live
    #: Whether it estimates what its probes bring (`ProbePlan.expected_gain`).
    estimates_gain: bool = False
    #: Limits and objective that decide which probe is worth its joules; None for the whole front.
    question: Question | None = None
    #: Cap on peak power that no probe should exceed; None if there is none.
    peak_limit: PeakLimit | None = None

    def __init__(
        self, candidates: Candidates, *, cost: ProbeCost | None = None, seed: int | None = None
    ) -> None:
        self.candidates = candidates
        self.cost = cost or ProbeCost()
        self._random = RandomSampler(seed=seed)
        self._seed = 0 if seed is None else seed
        self._rng = np.random.default_rng(seed)
        self._lock = threading.RLock()
        self._queue: deque[Configuration] = deque()
        self._configurations = candidates.configurations
        self._launch_of = np.empty(len(self._configurations), dtype=int)
        self._members: list[np.ndarray] = []  # the candidates of each launch, by number
        for i, launch in enumerate(candidates.launches):
            rows = np.asarray(candidates.indices_of_launch(launch), dtype=int)
            self._members.append(rows)
            self._launch_of[rows] = i
        self._encoding = ParameterEncoding(candidates)
        self._observations = Observations(self._encoding, self._launch_of)
        self._study_name = ""  # of the study that was observed

    # -- planning --------------------------------------------------------------------------------

    @abstractmethod
    def plan(self, study: Study) -> ProbePlan | None:
        """Plan the next probe; None if no candidate is left to propose.

        The next `len(plan.live)` asks of this study take the plan's configurations, in order; a new
        plan replaces the rest of an earlier one.
        """

    def plan_continuation(self, study: Study, so_far: ProbeRecord) -> ProbePlan | None:
        """Plan further settings of a running launch; None to end the launch."""
        return None

    def better_to_wait(self, study: Study) -> bool:
        """Return True if a further probe should wait for results of those in flight."""
        return False

    def _observe(self, study: Study) -> Observations:
        if self._study_name != study.study_name:
            self._observations = Observations(self._encoding, self._launch_of)
            self._study_name = study.study_name
        self._observations.update(study)
        return self._observations

    def _closed(self, observations: Observations) -> np.ndarray:
        # They were tried, are in flight, or belong to a launch that failed.
        closed = np.zeros(len(self._configurations), dtype=bool)
        closed[list(observations.closed) + observations.pending] = True
        for launch in observations.failed_launches:
            closed[self._members[launch]] = True
        return closed

    def _plan_of(self, members: Sequence[int], reason: str, **figures: Any) -> ProbePlan:
        return ProbePlan(tuple(self._configurations[i] for i in members), reason, **figures)

    def _enqueue(self, plan: ProbePlan | None) -> ProbePlan | None:
        self._queue = deque(plan.configurations if plan else ())
        return plan

    def propose(self, configuration: Configuration) -> None:
        """Let the next ask take this configuration."""
        with self._lock:
            self._queue = deque([configuration])

    # -- parameters ------------------------------------------------------------------------------

    def distributions(self) -> dict[str, BaseDistribution]:
        """Return one distribution per knob that varies, to call `study.ask` with."""
        return dict(self._encoding.distributions)

    def params_of(self, configuration: Configuration) -> dict[str, Any]:
        """Return a configuration as trial parameters, one per knob of `distributions`."""
        return self._encoding.params_of(configuration)

    def configuration_of(self, params: dict[str, Any]) -> Configuration:
        """Return the candidate with these parameters; see `ParameterEncoding.configuration_of`."""
        return self._encoding.configuration_of(params)

    # -- BaseSampler -----------------------------------------------------------------------------

    def infer_relative_search_space(
        self, study: Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        """Return the distributions of the candidates' knobs."""
        return self.distributions()

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Return the parameters of the next planned configuration, others drawn at random."""
        params: dict[str, Any] = {}
        knobs = self.distributions()
        if knobs and all(search_space.get(name) == knobs[name] for name in knobs):
            with self._lock:
                if not self._queue:
                    self.plan(study)
                if self._queue:
                    params = self.params_of(self._queue.popleft())
        for name, distribution in search_space.items():
            if name not in params:
                params[name] = self.sample_independent(study, trial, name, distribution)
        return params

    def sample_independent(self, *given: Any, **named: Any) -> Any:
        # It is no knob of the candidates, or none is left.
        return self._random.sample_independent(*given, **named)

    def reseed_rng(self) -> None:
        """Draw a new random state, for a copy that works beside this one."""
        self._random.reseed_rng()
        self._rng = np.random.default_rng()
