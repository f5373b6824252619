"""The GPU path on a twin GPU node: its errors against the exact truth.

Nothing here is a measurement of a GPU.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import product
from pathlib import Path

import numpy as np

from benchmarks.figures import Figure, arguments, publish
from benchmarks.twin.clocks import delivered_clock_error
from benchmarks.twin.energy import window_error
from benchmarks.twin.front import run_study
from benchmarks.twin.smoothing import smoothing_error_worst
from tests.workload.node.clocks.governor_faults import (
    FAULTS,
    try_cpu_fault,
    try_fault,
    try_root_fault,
)
from tests.workload.node.platforms.fleet_conditions import CONDITIONS, wrong


def energy(windows: int) -> list[Figure]:
    every = [window_error(seed) for seed in range(windows)]
    counted = [100 * abs(window.error) for window in every if window.plain is not None]
    sampled = [100 * abs(window.error) for window in every if window.plain is None]
    bare = [100 * abs(window.plain) for window in every if window.plain is not None]
    waited_s = statistics.mean(window.waited_s for window in every)
    print(
        f"{len(counted)} windows by twin counters, {len(sampled)} by sampled twin power; the bare "
        f"counter's worst error is {max(bare):.1f} %; two boundaries take {waited_s:.2f} s"
    )
    return [
        Figure("energy_error_median", statistics.median(counted), "%"),
        Figure("energy_error_worst", max(counted), "%"),
        Figure("energy_error_by_sampled_power_median", statistics.median(sampled), "%"),
        Figure("energy_error_by_sampled_power_worst", max(sampled), "%"),
    ]


def clocks(windows: int, rounds: int) -> list[Figure]:
    errors = [100 * abs(delivered_clock_error(seed)) for seed in range(windows)]
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        for fault in FAULTS:
            for seed in range(rounds):
                if left := try_fault(fault, seed, Path(folder)):
                    wrong += 1
                    print(f"{fault} {seed}: {left}")
    return [
        Figure("delivered_clock_error_worst", max(errors), "%"),
        Figure("clocks_wrong", wrong, "count"),
    ]


def limits_of_others() -> list[Figure]:
    kept = tried = 0
    with tempfile.TemporaryDirectory() as folder:
        for attempt, watts in ((try_fault, 137), (try_root_fault, 137), (try_cpu_fault, 13)):
            for fault, seed in product(FAULTS, range(2)):  # 0: nothing is set after the others
                left = attempt(fault, seed, Path(folder), others_W=watts)
                tried, kept = tried + 1, kept + (not left)
                if left:
                    print(f"{attempt.__name__} {fault} {seed}: {left}")
    return [Figure("limits_of_others_kept", kept, f"of {tried}")]


def smoothing() -> list[Figure]:
    print("windows of GPUs that smooth their power:")
    return [Figure("smoothing_error_worst", 100 * smoothing_error_worst(), "%")]


def conditions() -> list[Figure]:
    print(f"{len(CONDITIONS)} conditions of fleets:")
    right = contradictions = 0
    for condition in CONDITIONS:
        found, contradicts = wrong(condition)
        right += not found
        contradictions += contradicts
        print(f"  {condition.number:2} {condition.title}: {found or 'right'}")
    return [
        Figure("conditions_right", right / len(CONDITIONS), "ratio"),
        Figure("doctor_contradicts_study", contradictions, "count"),
    ]


def front(max_probes: int) -> list[Figure]:
    found = run_study(max_probes=max_probes)
    windows, points = 100 * abs(found.window_errors), 100 * abs(found.errors)
    print(f"{found.told['answer']} GPUs waited {found.told['late_s']:.1f} s for ranks.")
    return [
        Figure("front_hypervolume", found.hypervolume, "ratio"),
        Figure("window_error_median", float(np.median(windows)), "%"),
        Figure("window_error_worst", float(max(windows)), "%"),
        Figure("points_off_the_law", float(np.median(points)), "%"),
        Figure("points_off_the_law_worst", float(np.max(points)), "%"),
        Figure("shown_off_the_law_worst", 100 * float(np.max(abs(found.shown_errors))), "%"),
    ]


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__, "twin")
    parser.add_argument("--windows", type=int, default=500, help="random windows (default: 500)")
    parser.add_argument("--rounds", type=int, default=5, help="of each fault (default: 5)")
    parser.add_argument(
        "--probes", type=int, default=14, help="probes of the study; 0 makes none (default: 14)"
    )
    options = parser.parse_args(argv)
    figures = energy(options.windows) + smoothing() + conditions()
    figures += clocks(max(1, options.windows // 5), options.rounds) + limits_of_others()
    if find_spec("deepspeed") is None:
        print("front_hypervolume: deepspeed is not installed")
    elif options.probes:
        figures += front(options.probes)
    publish(figures, options.json)


if __name__ == "__main__":
    main()
