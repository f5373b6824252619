"""Searches of made-up programs that crash at a value: how many probes go into one cause.

    python -m benchmarks.crashes [--searches N]

The times of the launches are made up, each search with its own. The causes: a value of one knob,
two values together, and an accident, after which the search must still find the best launch. The
first space was seen while the rule was made, the second was not.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from tuner.search.candidate_planner import CandidatePlanner
from tuner.search.planner import PlanningState
from tuner.search_spaces.candidates import Candidates
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.search_spaces.knobs import Value
from tuner.testing.studies import METER, measured
from tuner.workload.probe import Failure, ProbeRecord, ProbeRequest

SEEN = {
    "data_parallel": (1, 2),
    "micro_batch": (1, 2, 4),
    "zero_stage": (0, 1),
    "activation_checkpointing": ("none", "full"),
}
HELD_OUT = {
    "data_parallel": (1, 2, 4),
    "micro_batch": (1, 2, 4, 8),
    "optimizer_offload": ("none", "cpu"),
    "activation_checkpointing": ("none", "selective", "full"),
}
#: Probes after today's configuration.
PROBES = (3, 4)


@dataclass(frozen=True)
class Program:
    """Made-up program: the time of a step, and where it crashes."""

    knobs: dict[str, tuple[Value, ...]]
    seed: int
    crashes: Callable[[Settings], bool]
    accident: int | None = None  # probe that crashes for no reason

    def step_time_s(self, launch: Settings) -> float:
        """Return the time of a step, with effects of each value and of each pair of them."""
        rng = np.random.default_rng(self.seed)
        log = 0.0
        for name, values in self.knobs.items():
            effects = np.append(0.0, rng.normal(0, 0.25, len(values) - 1))
            log += effects[values.index(launch[name])]
        for one, other in itertools.combinations(self.knobs, 2):
            both = rng.normal(0, 0.03, (len(self.knobs[one]), len(self.knobs[other])))
            log += both[self.knobs[one].index(launch[one]), self.knobs[other].index(launch[other])]
        return float(np.exp(log))

    def search(self, probes: int, *, cautious: bool) -> tuple[int, float]:
        """Return how many probes crashed, and how far the best launch found is from the best."""
        every = [
            Configuration.of(**dict(zip(self.knobs, values, strict=True)))
            for values in itertools.product(*self.knobs.values())
        ]
        planner = CandidatePlanner(
            Candidates.from_configurations(every), seed=self.seed, one_new_value=cautious
        )
        records: list[ProbeRecord] = []
        for number in range(probes + 1):
            plan = planner.plan(PlanningState(tuple(records))) if number else None
            if number and plan is None:
                break
            records.append(self._probed(every[0].launch if plan is None else plan.launch, number))
        found = min(self.step_time_s(each.request.launch) for each in records if each.measurements)
        best = min(self.step_time_s(each.launch) for each in every if not self.crashes(each.launch))
        return sum(each.failure is not None for each in records), found / best - 1

    def _probed(self, launch: Settings, number: int) -> ProbeRecord:
        request = ProbeRequest(f"p{number:04d}", launch, purpose="search" if number else "baseline")
        if number == self.accident or self.crashes(launch):
            failure = Failure("crash", "RuntimeError: no", frames=("train.py:main",))
            return ProbeRecord(request, (), METER, failure)
        return ProbeRecord(
            request, (replace(measured(), step_time_s=self.step_time_s(launch)),), METER
        )


def causes(knobs: dict[str, tuple[Value, ...]]) -> dict[str, Callable[[Settings], bool]]:
    """Return what may crash, by name: the last value of each knob, two of them, nothing."""
    made: dict[str, Callable[[Settings], bool]] = {}
    for name, values in knobs.items():
        made[name] = lambda launch, name=name, values=values: launch[name] == values[-1]  # type: ignore[misc]
    one, other = made["data_parallel"], made["activation_checkpointing"]
    made["two values"] = lambda launch: one(launch) and other(launch)
    return {**made, "accident": lambda launch: False, "nothing": lambda launch: False}


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--searches", type=int, default=6)
    count = parser.parse_args().searches
    for title, knobs in (("seen", SEEN), ("held out", HELD_OUT)):
        for probes in PROBES:
            worst = 0
            for name, crashes in causes(knobs).items():
                accident = 1 if name == "accident" else None
                ends = [
                    [
                        Program(knobs, seed, crashes, accident).search(probes, cautious=cautious)
                        for seed in range(count)
                    ]
                    for cautious in (False, True)
                ]
                (free, cautious_ends) = ends
                worst = max(worst, *(lost for lost, _ in cautious_ends))
                lost, missed = (np.mean(column) for column in zip(*cautious_ends, strict=True))
                print(
                    f"{title}, {probes} probes, {name}: {lost:.2f} lost (most "
                    f"{max(lost for lost, _ in cautious_ends)}), {missed:.1%} behind the best; "
                    f"without one_new_value {np.mean([lost for lost, _ in free]):.2f} lost, "
                    f"{np.mean([missed for _, missed in free]):.1%} behind",
                    flush=True,
                )
            print(f"probes_lost_to_one_cause ({title}, {probes} probes): {worst}", flush=True)


if __name__ == "__main__":
    main()
