"""First hour on a borrowed GPU: does the GPU path run, and are its figures right.

Runs without Ray, Optuna and a network, and sets neither clocks nor limits. Each part takes less
than ten minutes; it writes summary.txt, records.jsonl, recordings of NVML, and an archive of all
logs to DIR. docs/develop/gpu-hour.md says what to run, what to expect and what to commit.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from benchmarks.gpu_hour.hour import Hour
from tuner.search_spaces.errors import InputError

PARTS = ("runs", "figures", "knobs", "faults")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_hour", description=__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument(
        "--rehearse", action="store_true", help="train tiny jobs in short windows, without a GPU"
    )
    parser.add_argument(
        "--only", nargs="+", default=(), metavar="WORD", help="checks with one of these words"
    )
    options = parser.parse_args(argv)
    try:
        hour = Hour(options.folder, rehearse=options.rehearse, only=tuple(options.only))
        try:
            part = import_module(f"benchmarks.gpu_hour.{options.part}")
            getattr(part, options.part)(hour)
        finally:
            hour.close()
    except InputError as error:
        print(f"gpu_hour: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
