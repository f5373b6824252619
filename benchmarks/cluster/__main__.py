"""Figures of a search on several nodes: `python -m benchmarks.cluster [schedule]`.

`python -m benchmarks.cluster.ray_driver`, which needs minutes and a Ray of its own, is apart.
"""

from __future__ import annotations

from benchmarks.cluster.schedule import figures
from benchmarks.figures import arguments, publish


def main() -> None:
    """Print the figures."""
    parser = arguments("speed of a search on several nodes, and how busy they are")
    parser.add_argument("part", nargs="?", choices=("schedule",), help="all that there is")
    publish(figures(), parser.parse_args().json)


if __name__ == "__main__":
    main()
