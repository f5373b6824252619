"""Protocol of the planners, which choose the next probe from the state of a study.

A planner reads records of probes, the configurations in flight and the question; it keeps nothing
of a study but what is faster to update than to compute anew.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from tuner.problem.problem import ProbeCost
from tuner.search.evidence import Observations
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.workload.records.probe import ProbeRecord

if TYPE_CHECKING:
    from tuner.search.joint_draws import RegretEstimate
    from tuner.search.question import PeakLimit, Question
    from tuner.search_spaces.space import Candidates


#: Live settings that a probe visits at most by default, and that a new launch is planned for.
MAX_LIVE = 8


@dataclass(frozen=True)
class PlanningState:
    """State of a study as far as planning needs it.

    Attributes:
        records: finished probes, oldest first, in job steps.
        in_flight: configurations that running probes visit.
        question: limits and objective that decide which probe is worth its joules; None for the
            whole front.
        peak_limit: cap on peak power that no probe should exceed; None if there is none.
        cost: cost of probing, learned from the records.
        idle_share: power of a node without a probe, as a share of one with a probe; 0 if unknown.
        probes_left: number of further probes that the limits of the search allow, about.
    """

    records: Sequence[ProbeRecord] = ()
    in_flight: Sequence[Configuration] = ()
    question: Question | None = None
    peak_limit: PeakLimit | None = None
    cost: ProbeCost = field(default_factory=ProbeCost)
    idle_share: float = 0.0
    probes_left: float = math.inf


@dataclass(frozen=True)
class ProbePlan:
    """One probe that a planner proposes, and why."""

    configurations: tuple[Configuration, ...]
    reason: str
    # expected fall of the log regret per predicted joule; NaN if not estimated.
    score: float = math.nan
    # expected fall of the regret, a logarithm; infinite if not estimated.
    expected_gain: float = math.inf
    # predicted joules of the probe, its probable continuation included; NaN if not estimated.
    cost_J: float = math.nan
    #: Predicted joules of the probe without a continuation.
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


class ProbePlanner(ABC):
    """Candidates by number, and the interface by which a search asks for its next probe."""

    #: Further live settings that a running probe visits at most, after the first.
    max_live: int = MAX_LIVE
    #: Whether it estimates what its probes bring (`ProbePlan.expected_gain`).
    estimates_gain: bool = False

    def __init__(self, candidates: Candidates, *, seed: int | None = None) -> None:
        self.candidates = candidates
        self._rng = np.random.default_rng(seed)
        self._configurations = candidates.configurations
        self._launch_of = np.empty(len(self._configurations), dtype=int)
        self._members: list[np.ndarray] = []  # the candidates of each launch, by number
        for i, launch in enumerate(candidates.launches):
            rows = np.asarray(candidates.indices_of_launch(launch), dtype=int)
            self._members.append(rows)
            self._launch_of[rows] = i

    @abstractmethod
    def plan(self, state: PlanningState) -> ProbePlan | None:
        """Plan the next probe; None if no candidate is left to propose."""

    def plan_continuation(self, state: PlanningState, so_far: ProbeRecord) -> ProbePlan | None:
        """Plan further settings of a running launch; None to end the launch.

        Args:
            state: without the running probe.
            so_far: what the running probe visited and measured.
        """
        return None

    def lessons(self, records: Sequence[ProbeRecord]) -> tuple[str, ...]:
        """Return what failed probes mean for the next ones, a sentence each."""
        return ()

    def better_to_wait(self, state: PlanningState) -> bool:
        """Return True if a further probe should wait for results of those in flight."""
        return False

    def _observe(self, state: PlanningState, so_far: ProbeRecord | None = None) -> Observations:
        records = state.records if so_far is None else (*state.records, so_far)
        return Observations.of(records, state.in_flight, self.candidates, self._launch_of)

    def _closed(self, observations: Observations) -> np.ndarray:
        # They were tried, are in flight, or belong to a launch that failed.
        closed = np.zeros(len(self._configurations), dtype=bool)
        closed[list(observations.closed) + observations.pending] = True
        for launch in observations.failed_launches:
            closed[self._members[launch]] = True
        return closed

    def _plan_of(self, members: Sequence[int], reason: str, **figures: Any) -> ProbePlan:
        return ProbePlan(tuple(self._configurations[i] for i in members), reason, **figures)
