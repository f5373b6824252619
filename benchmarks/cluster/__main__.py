"""Figures of searches on a cluster: `python -m benchmarks.cluster [PART ...]`, by default all.

A part is a module of this package with a function `figures`. `ray_driver`, which needs minutes and
a Ray of its own, is a command by itself: `python -m benchmarks.cluster.ray_driver`.
"""

from __future__ import annotations

from importlib import import_module

from benchmarks.figures import Figure, arguments, publish

#: Modules of this package, in the order in which they run.
PARTS = ("lead", "schedule", "states")


def main() -> None:
    parser = arguments(__doc__, "cluster")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    options = parser.parse_args()
    if unknown := sorted(set(options.parts) - set(PARTS)):
        parser.error(f"{', '.join(unknown)}: not a part; the parts are {', '.join(PARTS)}")
    found: list[Figure] = []
    for name in options.parts or PARTS:
        found += import_module(f"benchmarks.cluster.{name}").figures()
    publish(found, options.json)


if __name__ == "__main__":
    main()
