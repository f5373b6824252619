"""Planner that makes the probes of a recording again, in the order in which they were recorded."""

from __future__ import annotations

from collections.abc import Sequence

from tuner.search.planner import PlanningState, ProbePlan, ProbePlanner
from tuner.search_spaces.candidates import Candidates
from tuner.search_spaces.configuration import Configuration


class RecordedOrder(ProbePlanner):
    """Planner of the recorded probes, oldest first; a configuration is visited once.

    It estimates nothing: a search ends with the recording, or at a limit.
    """

    def __init__(self, candidates: Candidates, probes: Sequence[Sequence[Configuration]]) -> None:
        super().__init__(candidates)
        self._probes = [[candidates.index_of(c) for c in probe] for probe in probes]

    def plan(self, state: PlanningState) -> ProbePlan | None:
        """Plan what is open of the next recorded probe; None at the end of the recording."""
        closed = self._closed(self._observe(state))
        for probe in self._probes:
            if still_open := [index for index in dict.fromkeys(probe) if not closed[index]]:
                return self._plan_of(still_open, "next in the recording")
        return None
