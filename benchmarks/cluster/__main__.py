"""Figures of searches on a cluster: `python -m benchmarks.cluster [PART ...]`, by default all.

`ray_driver`, which needs minutes and a Ray of its own, is a command by itself: `python -m
benchmarks.cluster.ray_driver`.
"""

from __future__ import annotations

from benchmarks.cluster import lead, schedule
from benchmarks.figures import Figure, arguments, publish
from tests.cluster.joining_states import false_sentences


def states() -> list[Figure]:
    """Return the number of states of a cluster of which joining says what is not so."""
    found = false_sentences()
    print("\n".join(found) or "each state is told as it is")
    return [Figure("false_sentences", len(found), "count")]


#: In the order in which they run.
PARTS = {"lead": lead.figures, "schedule": schedule.figures, "states": states}


def main() -> None:
    parser = arguments(__doc__, "cluster")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    options = parser.parse_args()
    if unknown := sorted({*options.parts} - {*PARTS}):
        parser.error(f"{', '.join(unknown)}: not a part; the parts are {', '.join(PARTS)}")
    found: list[Figure] = []
    for name in options.parts or PARTS:
        found += PARTS[name]()
    publish(found, options.json)


if __name__ == "__main__":
    main()
