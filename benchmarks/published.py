"""The analytic models compared with published measurements.

Four comparisons: Sailor's measured plans on GH200, the study of multimodal training on JUPITER,
models of both that the constants were not fitted to, and MPT models on A100 and H100. Each prints
its shortcomings and their causes, and the end summarises the worth of each result. Data that is not
on this machine (`../shared`) is skipped and named; the tables of JUPITER and of MPT come with the
repository.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from benchmarks.figures import arguments, publish
from benchmarks.validation.comparison import Comparison
from benchmarks.validation.jupiter import compare as compare_jupiter
from benchmarks.validation.mpt import compare as compare_mpt
from benchmarks.validation.sailor import compare as compare_sailor
from benchmarks.validation.unseen import compare as compare_unseen

REPOSITORY = Path(__file__).resolve().parent.parent
GH200_TABLE = REPOSITORY / "benchmarks" / "data" / "gh200_multimodal.csv"


def comparisons(
    shared: Path, *, fit: bool
) -> list[tuple[str, Path | None, Callable[[], Comparison]]]:
    """(name, the file it needs beside the repository, what makes it)."""
    published = shared / "published"
    return [
        (
            "sailor",
            published / "sailor" / "plans.csv",
            lambda: compare_sailor(shared, refit=fit),
        ),
        ("jupiter", None, lambda: compare_jupiter(GH200_TABLE, refit=fit)),
        ("unseen", None, lambda: compare_unseen(GH200_TABLE)),
        ("mpt", None, lambda: compare_mpt(refit=fit)),
    ]


def main() -> None:
    parser = arguments(__doc__, "published")
    parser.add_argument("--shared", type=Path, default=REPOSITORY.parent / "shared")
    parser.add_argument("--only", metavar="NAME", help="one comparison")
    parser.add_argument("--fit", action="store_true", help="print the fitted constants")
    options = parser.parse_args()
    known = comparisons(options.shared, fit=options.fit)
    if options.only and options.only not in [name for name, _, _ in known]:
        parser.error(f"--only takes one of {', '.join(name for name, _, _ in known)}")
    figures, summaries = [], []
    for name, needed, compare in known:
        if options.only not in (None, name):
            continue
        if needed is not None and not needed.exists():
            print(f"\n== {name}: skipped, {needed} is not here", flush=True)
            continue
        comparison = compare()
        print(f"\n== {comparison.title}\n", flush=True)
        print("\n".join(comparison.lines), flush=True)
        figures += comparison.figures
        summaries.append(f"{name}: {comparison.summary}")
    if summaries:
        print("\n== summary\n\n" + "\n".join(summaries), flush=True)
    publish(figures, options.json)


if __name__ == "__main__":
    main()
