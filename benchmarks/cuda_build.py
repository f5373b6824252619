"""Fork server, preload, hook and ranks with torch's CUDA build, until each rank's own cuInit.

No GPU is needed: NVML and the CUDA driver are the twin's, and a rank ends where a device would have
to compute. Packages come from pip's index into cached folders: torch's CUDA build at the pinned
version beside this environment's DeepSpeed and transformers, and the newest of all of them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmarks.figures import Figure, arguments, publish
from tests.workload.node.cuda_build_cases import CASES, Launched, launch
from tests.workload.node.cuda_build_install import NotInstalled, newest, pinned

SETS = {"pinned": pinned, "newest": newest}


def said(case: str, found: Launched) -> str:
    """Return one line on a case."""
    bad = f", CUDA refused after {', '.join(found.bad_forks)}" if found.bad_forks else ""
    why = f", ranks start in new interpreters: {found.why}" if found.why else ""
    return (
        f"  {case}: {found.reached} of {len(found.ranks)} ranks at cuInit, {found.touches} touches "
        f"elsewhere{bad}{why}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments(__doc__, "cuda_build")
    parser.add_argument("--packages", choices=SETS, nargs="+", default=list(SETS))
    parser.add_argument("--cases", choices=CASES, nargs="+", default=CASES, metavar="CASE")
    options = parser.parse_args(argv)
    every: list[Launched] = []
    for name in options.packages:
        try:
            folder = SETS[name]()
        except NotInstalled as error:
            print(f"{name}: left out, {error}")
            continue
        for case in options.cases:
            found = launch(case, folder)
            if case == options.cases[0]:
                print(f"{name}: {', '.join(f'{k} {v}' for k, v in found.versions.items())}")
            print(said(case, found), flush=True)
            every.append(found)
    ranks = sum(len(found.ranks) for found in every)
    figures = [
        Figure("bad_forks", sum(len(found.bad_forks) for found in every), "count"),
        Figure("cuda_touches", sum(found.touches for found in every), "count"),
        Figure("ranks_at_cuinit", sum(found.reached for found in every), f"of {ranks}"),
    ]
    publish(figures if every else [], options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
