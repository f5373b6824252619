"""Injected faults: measurements lost, clocks that stay wrong, processes left, fronts that differ.

Each fault runs in an empty folder: the driver is killed at each point of its cycle and at random
moments, disks fill, storages become unavailable, ranks die, hang or misbehave, GPU drivers fail.
Outcomes are observed from outside (`tests.faults.harness`, `tests.faults.moments`).

With `--pieces FILE` each outcome is kept, so that the whole may be stopped and started again, and
run in parts (`--part 1/2`, `--only`); the figures are those of the part that was asked for.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

from benchmarks.figures import Figure, arguments, publish
from benchmarks.pieces import PACKAGE, Pieces, add_arguments
from tests.faults.harness import Outcome
from tests.faults.table import all_faults, try_fault


def _try(name: str) -> Outcome:
    """Cause the fault of a name, and print its outcome."""
    (fault,) = (fault for fault in all_faults() if fault.name == name)
    began = time.monotonic()
    outcome = try_fault(fault)
    took = time.monotonic() - began
    if outcome.skipped:
        print(f"skipped   {name:40} {outcome.skipped}", flush=True)
    else:
        word = "survived" if outcome.survived else "FAILED"
        print(f"{word:9} {name:40} {took:5.1f} s  {outcome.said[:300]}", flush=True)
    if outcome.failed:
        print(f"          {_wrong(outcome)}", flush=True)
    return outcome


def _wrong(outcome: Outcome) -> str:
    counts = f"lost {outcome.lost}, told twice {outcome.told_twice}, clocks wrong "
    counts += f"{outcome.clocks_wrong}, left {outcome.processes_left}, "
    counts += f"front differs {outcome.front_differs}"
    return "; ".join([counts, *outcome.wrong])


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__, "faults")
    add_arguments(parser, "fault")
    parser.add_argument(
        "--again", action="store_true", help="cause those once more that FILE has as failed"
    )
    options = parser.parse_args(argv)
    names = [(f.name,) for f in all_faults() if options.only in f.name][options.part]
    pieces = Pieces(options.pieces, folders=(*PACKAGE, "tests/faults", "tests/twin"))
    repeated = pieces.forget(_try, names, lambda outcome: outcome.failed) if options.again else 0
    outcomes = pieces.results(_try, names)
    tried = [outcome for outcome in outcomes if not outcome.skipped]
    for (name,), outcome in zip(names, outcomes, strict=True):
        if outcome.failed:
            print(f"FAILED    {name}: {_wrong(outcome)}")
    recoveries = [o.recovery_s for o in tried if o.recovery_s is not None]
    figures = [
        Figure("faults", len(tried), "count"),
        Figure("survived", sum(o.survived for o in tried), "count"),
        Figure("skipped", len(outcomes) - len(tried), "count"),
        Figure("caused_again", repeated, "count"),
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
