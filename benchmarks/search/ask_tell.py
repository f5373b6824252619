"""The interface of a sampler of this benchmark, and its adapter to a study.

A sampler is told each measurement and asked for the configuration to measure next. If that belongs
to the launch that is running, it costs a window; else the launch ends and another is paid for. So a
sampler sweeps a launch by asking for its settings one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

import numpy as np

from tuner.problem.problem import ProbeCost
from tuner.search.planner import PlanningState, ProbePlan, ProbePlanner
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.search_spaces.space import Candidates
from tuner.workload.records.probe import ProbeRecord

if TYPE_CHECKING:
    from tuner.search.evidence import Observations


def level_order(settings: Settings) -> list[tuple[int, float, str]]:
    """Return a sort key that orders numbers by size, and other values by name after them."""
    return [
        (0, float(value), "") if isinstance(value, int | float) else (1, 0.0, str(value))
        for _, value in sorted(settings.items())
    ]


class AskTell(Protocol):
    """A sampler of the benchmark."""

    def tell(self, configuration: Configuration, time_s: float, power_W: float) -> None:
        """Receive a measurement."""

    def ask(self, still_open: Sequence[Configuration]) -> Configuration:
        """Return the configuration to measure next, one of those not measured yet.

        Args:
            still_open: at least one, in the order of the candidates.
        """


class Ends(AskTell, Protocol):
    """A sampler that has a rule of its own that ends the search."""

    def ended(self, still_open: Sequence[Configuration]) -> bool:
        """Return True if what is told is enough; asked when a launch has ended.

        Args:
            still_open: at least one.
        """


@dataclass(frozen=True)
class Peer:
    """An entry of the benchmark.

    Attributes:
        make: called with the candidates, the cost of probing them and the seed.
        sweeps: True if it makes use of launches; the headline's ratio is to the best of these.
        missing: returns what has to be installed or set first; "" if nothing.
        ends: True if it is an `Ends`; its own stop is then compared with ours.
    """

    make: Callable[[Candidates, ProbeCost, int], AskTell]
    sweeps: bool
    missing: Callable[[], str]
    ends: bool = False


#: Entries by name; a module that holds some is imported by `benchmarks.search.samplers`.
PEERS: dict[str, Peer] = {}


def peer(
    name: str,
    *,
    sweeps: bool = True,
    missing: Callable[[], str] = lambda: "",
    ends: bool = False,
) -> Callable[[Callable[..., AskTell]], Callable[..., AskTell]]:
    """Return a decorator that enters a class or a function in `PEERS`."""

    def enter(make: Callable[..., AskTell]) -> Callable[..., AskTell]:
        PEERS[name] = Peer(make, sweeps, missing, ends)
        return make

    return enter


class AskTellPlanner(ProbePlanner):
    """Planner that follows an `AskTell` sampler, a window at a time.

    Args:
        candidates: the valid configurations.
        sampler: is asked and told.

    Attributes:
        ends_itself: whether the sampler's own rule ends the search (`Ends`); else it goes on until
            nothing is left.
    """

    def __init__(self, candidates: Candidates, sampler: AskTell) -> None:
        super().__init__(candidates)
        self._sampler = sampler
        self.ends_itself = False
        self._told: set[int] = set()
        self._next: int | None = None  # asked for when it ended a launch

    def plan(self, state: PlanningState) -> ProbePlan | None:
        """Plan a launch with the sampler's next configuration; None if none is open."""
        observations = self._observe(state)
        closed = self._closed(observations)
        if closed.all():
            return None
        if self.ends_itself:
            self._tell(observations)
            if cast(Ends, self._sampler).ended(self._open(closed)):
                return None
        candidate, self._next = self._next, None
        if candidate is None or closed[candidate]:
            candidate = self._ask(observations, closed)
        return self._window(candidate, closed)

    def plan_continuation(self, state: PlanningState, so_far: ProbeRecord) -> ProbePlan | None:
        """Plan the sampler's next configuration if it belongs to the running launch."""
        observations = self._observe(state, so_far)
        closed = self._closed(observations)
        if closed.all():
            return None
        candidate = self._ask(observations, closed)
        if self._configurations[candidate].launch == so_far.request.launch:
            return self._window(candidate, closed)
        self._next = candidate
        return None

    def _open(self, closed: np.ndarray) -> list[Configuration]:
        return [self._configurations[i] for i in np.flatnonzero(~closed)]

    def _tell(self, observations: Observations) -> None:
        for measured in observations.measured:
            if measured.candidate not in self._told:
                self._told.add(measured.candidate)
                configuration = self._configurations[measured.candidate]
                window = measured.window
                self._sampler.tell(configuration, window.step_time_s, window.power_W)

    def _ask(self, observations: Observations, closed: np.ndarray) -> int:
        self._tell(observations)
        chosen = self._sampler.ask(self._open(closed))
        candidate = self.candidates.find(chosen)
        if candidate is None or closed[candidate]:
            name = type(self._sampler).__name__
            raise ValueError(f"{name} asks for {chosen.key!r}, which is not open")
        return candidate

    def _window(self, candidate: int, closed: np.ndarray) -> ProbePlan:
        rows = self._members[self._launch_of[candidate]]
        others = rows[~closed[rows] & (rows != candidate)]
        reason = f"proposed by {type(self._sampler).__name__}"
        return self._plan_of([candidate], reason, extendable=bool(len(others)))
