"""Injected faults: measurements lost, clocks that stay wrong, processes left, fronts that differ.

Each fault runs in an empty folder: the driver is killed at each point of its cycle and at random
moments, disks fill, storages become unavailable, ranks die, hang or misbehave, GPU drivers fail.
Outcomes are observed from outside (`tests.faults.harness`): measurements lost or recorded twice,
clocks that stay wrong, processes and temporary folders left, the time from a rank's death to the
start of the next probe, and if a search that continues ends with the front of one that nothing
disturbed (`tests.faults.moments`). Targets: none of these, and 3 s.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

from benchmarks.figures import Figure, arguments, publish
from tests.faults.harness import Outcome
from tests.faults.table import all_faults, try_fault


def main(argv: Sequence[str] | None = None) -> None:
    """Cause every fault, print its outcome, and publish the figures."""
    parser = arguments("faults tried, survived, and what they left")
    parser.add_argument("--only", default="", metavar="WORDS", help="faults whose name has these")
    options = parser.parse_args(argv)
    tried: list[Outcome] = []
    skipped = 0
    for fault in all_faults():
        if options.only not in fault.name:
            continue
        began = time.monotonic()
        outcome = try_fault(fault)
        took = time.monotonic() - began
        if outcome.skipped:
            skipped += 1
            print(f"skipped   {fault.name:40} {outcome.skipped}", flush=True)
            continue
        tried.append(outcome)
        word = "survived" if outcome.survived else "FAILED"
        print(f"{word:9} {fault.name:40} {took:5.1f} s  {outcome.said[:300]}", flush=True)
        if not outcome.survived:
            counts = f"lost {outcome.lost}, told twice {outcome.told_twice}, clocks wrong "
            counts += f"{outcome.clocks_wrong}, left {outcome.processes_left}, "
            counts += f"front differs {outcome.front_differs}"
            print("          " + "; ".join([counts, *outcome.wrong]), flush=True)
    recoveries = [o.recovery_s for o in tried if o.recovery_s is not None]
    figures = [
        Figure("faults", len(tried), "count"),
        Figure("survived", sum(o.survived for o in tried), "count"),
        Figure("skipped", skipped, "count"),
        Figure("lost", sum(o.lost for o in tried), "count"),
        Figure("doubled", sum(o.told_twice for o in tried), "count"),
        Figure("left", sum(o.processes_left for o in tried), "count"),
        Figure("clocks_wrong", sum(o.clocks_wrong for o in tried), "count"),
        Figure("front_differs", sum(o.front_differs for o in tried), "count"),
    ]
    if recoveries:
        figures += [
            Figure("death_to_next_probe_median_s", statistics.median(recoveries), "s"),
            Figure("death_to_next_probe_worst_s", max(recoveries), "s"),
        ]
    publish(figures, options.json)


if __name__ == "__main__":
    main()
