"""Programs of other projects, tried unmodified as a new user would.

Each program of `scripts.toml` is started alone, then by `tuner optimize -- COMMAND`; a verdict
compares the answer with values read by hand from the program's source. Outcomes are kept in the
cache folder, one JSON each, so an interrupted run continues. `--sources DIR` holds the repositories
as `OWNER/NAME` or `OWNER+NAME/repo`; without it they are downloaded from GitHub at their commits.
"""

from __future__ import annotations

import json
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.figures import ROOT, Figure, arguments, publish
from benchmarks.scripts.attempt import Attempt, Options, attempt
from benchmarks.scripts.environment import Unavailable, cache_folder, make_environment
from benchmarks.scripts.programs import Program, listed

#: Of `--quick`: one of each kind.
QUICK = ("nanoGPT", "minGPT adder", "pytorch regression", "pytorch ddp multigpu", "TRL sft")


def stored(program: Program, file: Path, options: Options) -> Attempt | None:
    """Return the kept outcome of the same attempt; None if there is none."""
    if not file.is_file():
        return None
    kept = json.loads(file.read_text())
    if kept.pop("of") != _identity(program, options):
        return None
    return Attempt(**kept)


def store(found: Attempt, program: Program, file: Path, options: Options) -> None:
    """Write an outcome for `stored`."""
    file.parent.mkdir(parents=True, exist_ok=True)
    kept = {**found.to_json(), "of": _identity(program, options)}
    file.write_text(json.dumps(kept, indent=1) + "\n")


def _identity(program: Program, options: Options) -> list[str]:
    return [program.origin, program.command, *map(str, program.today), str(options.probes)]


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
    wanted = [program for program in programs if not names or program.name in names]
    attempts = []
    for number, program in enumerate(wanted, 1):
        file = options.cache / "outcomes" / f"{program.slug}.json"
        found = None if chosen.again else stored(program, file, options)
        if found is None:
            found = _attempted(program, options, f"{number}/{len(wanted)}")
            store(found, program, file, options)
        attempts.append(found)
        print(found.line(), flush=True)
    publish(figures(attempts), chosen.json)


def _attempted(program: Program, options: Options, place: str) -> Attempt:
    def announce(what: str) -> None:
        print(f"{place} {program.name}: {what}", file=sys.stderr, flush=True)

    try:
        return attempt(program, options, announce)
    except Unavailable as error:
        return Attempt(program.name, program.origin, "unavailable", str(error))


if __name__ == "__main__":
    main()
