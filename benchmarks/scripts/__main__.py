"""Programs of other projects, tried unmodified as a new user would.

Each program of `scripts.toml` is started alone, then by `tuner optimize -- COMMAND`; a verdict
compares the answer with values read by hand from the program's source. Outcomes are kept in the
cache folder, so that an interrupted run of the same code continues. `--sources DIR` holds the
repositories as `OWNER/NAME` or `OWNER+NAME/repo`; without it they are downloaded from GitHub at
their commits.
"""

from __future__ import annotations

import signal
import statistics
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.figures import ROOT, Figure, arguments, publish
from benchmarks.pieces import PACKAGE, Pieces
from benchmarks.scripts.attempt import Attempt, Options, attempt
from benchmarks.scripts.environment import Unavailable, cache_folder, make_environment
from benchmarks.scripts.programs import Program, listed

#: Of `--quick`: one of each kind.
QUICK = ("nanoGPT", "minGPT adder", "pytorch regression", "pytorch ddp multigpu", "TRL sft")


def figures(attempts: Sequence[Attempt]) -> list[Figure]:
    """Return the figures of the programs that could be started."""
    tried = [found for found in attempts if found.verdict != "unavailable"]
    wrong = sum(bool(found.wrong) for found in tried)
    ratios = {
        "today_s_over_own": _ratios((found.today_s, found.own_first_step_s) for found in tried),
        "first_point_s_over_own": _ratios(
            (found.first_point_s, found.own_first_step_s) for found in tried
        ),
        "first_point_without_window_over_own": _ratios(
            (
                found.first_point_s and found.first_point_s - found.first_window_s,
                found.own_first_step_s,
            )
            for found in tried
        ),
        "error_told_s_over_own": _ratios((found.ended_s, found.own_death_s) for found in tried),
    }
    held = [found.holds for found in tried if found.holds is not None]
    promises = [kept for found in tried if (kept := found.keeps_promise) is not None]
    trained = [found for found in tried if found.verdict not in ("error told", "error not told")]
    turned = sum(bool({*found.knobs} - {"threads"}) for found in trained)
    right = sum(found.right for found in tried)
    every = [
        Figure("programs_tried", len(tried), "count"),
        Figure("answered_at_first_attempt", right / max(1, len(tried)), "ratio"),
        Figure("today_wrong", wrong, "count"),
        Figure("misread_silently", sum(f.verdict == "misread" for f in tried), "count"),
        Figure("something_to_turn", turned / max(1, len(trained)), "ratio"),
        Figure("table_outside_windows", sum(f.outside for f in tried), "count"),
    ]
    for name, found_ratios in ratios.items():
        if found_ratios:
            every.append(Figure(name, statistics.median(found_ratios), "ratio"))
    if held:
        every.append(Figure("recommendation_holds", sum(held) / len(held), "ratio"))
    if promises:
        every.append(Figure("promise_kept", sum(promises) / len(promises), "ratio"))
    return every


def _ratios(pairs: Iterable[tuple[float | None, float | None]]) -> list[float]:
    return [time_s / own_s for time_s, own_s in pairs if time_s is not None and own_s]


def main() -> None:
    parser = arguments(__doc__, "scripts")
    parser.add_argument("--sources", type=Path, metavar="DIR", help="repositories, OWNER/NAME")
    parser.add_argument("--cache", type=Path, default=cache_folder(), metavar="DIR")
    parser.add_argument("--only", action="append", default=[], metavar="NAME")
    parser.add_argument("--quick", action="store_true", help="a few programs, no timing by hand")
    parser.add_argument("--probes", type=int, default=4)
    parser.add_argument("--limit-s", type=float, default=240.0, help="wall time of an attempt")
    parser.add_argument("--hand-s", type=float, default=20.0, help="each start timed by hand")
    parser.add_argument("--again", action="store_true", help="also those with a kept outcome")
    chosen = parser.parse_args()
    # One that is killed ends what it has started, as one that is interrupted does.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    options = Options(
        cache=chosen.cache.resolve(),
        sources=chosen.sources and chosen.sources.resolve(),
        probes=chosen.probes,
        search_s=chosen.limit_s / 2,
        limit_s=chosen.limit_s,
        hand_s=0.0 if chosen.quick else chosen.hand_s,
    )
    names = chosen.only or (QUICK if chosen.quick else ())
    packages, without_dependencies, programs = listed()
    if unknown := {*chosen.only} - {program.name for program in programs}:
        parser.error(f"--only {sorted(unknown)[0]!r} is not in benchmarks/scripts/scripts.toml")
    python = make_environment(options.cache / "environment", packages, without_dependencies)
    inputs = ["-m", "benchmarks.scripts.inputs", str(options.cache / "inputs")]
    subprocess.run([str(python), *inputs], check=True, cwd=ROOT)
    wanted = [(program, options) for program in programs if not names or program.name in names]
    pieces = Pieces(options.cache / "outcomes.pieces", folders=(*PACKAGE, "benchmarks/scripts"))
    if chosen.again:
        pieces.forget(attempted, wanted, lambda outcome: True)
    attempts = pieces.results(attempted, wanted)
    print(*(found.line() for found in attempts), sep="\n", flush=True)
    publish(figures(attempts), chosen.json)


def attempted(program: Program, options: Options) -> Attempt:
    """Return the outcome of a program, one that cannot be had here included."""

    def announce(what: str) -> None:
        print(f"{program.name}: {what}", file=sys.stderr, flush=True)

    try:
        found = attempt(program, options, announce)
    except Unavailable as error:
        found = Attempt(program.name, program.origin, "unavailable", str(error))
    announce(f"{found.verdict}; {found.says}")
    return found


if __name__ == "__main__":
    main()
