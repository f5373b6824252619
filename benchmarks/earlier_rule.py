"""The rule of commit 82b5105 on the made-up searches (`benchmarks.verdicts --against 82b5105`).

This runs with the package of that commit: its verification, launch by launch, and its verdict. Of
the search only what stands in `benchmarks.made_up_searches` is ours.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

from tuner.results.verification import choose_verified

from benchmarks.made_up_searches import CONFIGURATIONS, STEPS, Machine, Outcome, Row
from tuner.problem.constraints import OBJECTIVES, Constraints
from tuner.problem.settings import SearchSettings
from tuner.results.build import measured_points
from tuner.search_spaces.configuration import Configuration
from tuner.study.verification_run import verify

#: Its name in that commit.
LEAST_ENERGY = next(each for each in OBJECTIVES if each.endswith("energy"))


class Search:
    """What the rule's verification needs of a search.

    Args:
        machine: launches.
        limit: number of probes.
    """

    def __init__(self, machine: Machine, limit: int) -> None:
        self._machine, self._limit = machine, limit
        self.records = machine.records
        self.settled: tuple[str, tuple[int, ...]] = ("", ())

    def note(self, sentence: str) -> None:
        """Take a sentence for the user."""

    def room_for(self, configurations: Sequence[Configuration], most: int = 20) -> int:
        """Return how many further launches the limit allows."""
        return min(most, self._limit - len(self.records))

    def probe_now(self, configuration: Configuration, purpose: str, why: str) -> Any:
        """Launch a configuration; return its record, None if the limit forbids it."""
        if len(self.records) >= self._limit:
            return None
        self._machine.launch(CONFIGURATIONS.index(configuration), purpose)
        return self.records[-1]

    def settle_on(self, key: str, planned: tuple[int, ...]) -> None:
        """Keep what is tried, and the pairs that are planned."""
        self.settled = key, planned


def search(row: Row, seed: int) -> Outcome:
    """Return the answer of one made-up search."""
    machine, constraints = Machine(row, seed), Constraints(objective=LEAST_ENERGY)
    settings: Any = SearchSettings(max_probes=row.limit)
    kept = settings.reserved_probes("verify") + settings.reserved_probes("remeasure")
    for number in machine.candidates(row.limit - kept):
        machine.launch(number, "search")
    searched, found = len(machine.records), Search(machine, row.limit)
    if row.ended != "interrupted":
        spec = SimpleNamespace(
            problem=SimpleNamespace(steps=STEPS),
            run_dir=None,
            ended=SimpleNamespace(chosen="", planned_pairs=()),
            settings=settings,
            constraints=constraints,
            name="made-up",
        )
        verify(found, spec, settle_on=found.settle_on)
    points = measured_points(machine.records, STEPS)
    prefer, planned = found.settled
    answer = choose_verified(
        points, machine.records, constraints, prefer=prefer, planned=planned, steps=STEPS
    )
    launches = len(machine.records) - searched
    if answer.verification is None or answer.verification.status != "confirmed":
        return Outcome(None, launches)
    saved = -float(machine.logs[CONFIGURATIONS.index(answer.best.configuration)])
    energy = next(a.energy for a in answer.verification.attempts if a.survived)
    if energy is None:
        return Outcome(saved, launches)
    stated = [-math.log1p(value) for value in (energy.relative, energy.high, energy.low)]
    return Outcome(saved, launches, *stated)


def main() -> None:
    asked = json.loads(sys.argv[1])
    for row in asked["rows"]:
        seeds = range(asked["first"], asked["first"] + asked["trials"])
        print(json.dumps([asdict(search(Row(**row), seed)) for seed in seeds]), flush=True)


if __name__ == "__main__":
    main()
