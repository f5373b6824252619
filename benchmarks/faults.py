"""Every fault of the table, caused for real: what was kept, what was left, what the user was told.

Each one runs in an empty folder: the driver killed at each point of its cycle and resumed, disks
that fill, storages that go away, ranks that die, hang or misbehave, GPUs whose driver fails. What
counts is seen from outside (`benchmarks.fault_tools`): measurements lost or told twice, clocks left
wrong, processes left, and how long after a rank's death the next probe starts. Aims: 0, 0, 0, 0 and
3 s.
"""

from __future__ import annotations

import statistics
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from benchmarks import (
    faults_asked,
    faults_device,
    faults_driver,
    faults_probe,
    faults_ray,
    faults_storage,
)
from benchmarks.fault_tools import Fault, Outcome
from benchmarks.figures import Figure, arguments, publish

__all__ = ["all_faults", "try_fault"]


def all_faults() -> Sequence[Fault]:
    """Every fault, in the table's order."""
    return (
        *faults_driver.FAULTS,
        *faults_asked.FAULTS,
        *faults_storage.FAULTS,
        *faults_probe.FAULTS,
        *faults_device.FAULTS,
        *faults_ray.FAULTS,
    )


def try_fault(fault: Fault) -> Outcome:
    """Cause one fault in a folder of its own. An error of the harness is an outcome, too."""
    with tempfile.TemporaryDirectory(prefix="joulefront-fault-") as folder:
        try:
            return fault.cause(Path(folder))
        except Exception:
            return Outcome(wrong=(traceback.format_exc(),))


def main(argv: Sequence[str] | None = None) -> None:
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
            counts += f"{outcome.clocks_wrong}, processes left {outcome.processes_left}"
            print("          " + "; ".join([counts, *outcome.wrong]), flush=True)
    recoveries = [o.recovery_s for o in tried if o.recovery_s is not None]
    figures = [
        Figure("faults_tried", len(tried), "count"),
        Figure("faults_survived", sum(o.survived for o in tried), "count"),
        Figure("faults_skipped", skipped, "count"),
        Figure("measurements_lost", sum(o.lost for o in tried), "count"),
        Figure("measurements_told_twice", sum(o.told_twice for o in tried), "count"),
        Figure("clocks_left_wrong", sum(o.clocks_wrong for o in tried), "count"),
        Figure("processes_left", sum(o.processes_left for o in tried), "count"),
    ]
    if recoveries:
        figures += [
            Figure("death_to_next_probe_median_s", statistics.median(recoveries), "s"),
            Figure("death_to_next_probe_worst_s", max(recoveries), "s"),
        ]
    publish(figures, options.json)


if __name__ == "__main__":
    main()
