"""Malformed input: twenty thousand files, arguments and commands of a user, mutated at random.

See `tests.fuzz.fuzzer` for what counts as a failure.

With `--pieces FILE` each chunk of inputs is kept, so that the whole may be stopped and started
again, and run in parts (`--part 1/2`, `--only`); the figures are those of the part asked for.
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter, defaultdict
from collections.abc import Sequence

from benchmarks.figures import Figure, arguments, publish
from benchmarks.pieces import PACKAGE, Pieces, add_arguments
from tests.fuzz.commands import KINDS
from tests.fuzz.fuzzer import Seen, fuzz_chunk

#: Inputs of one kind that a worker gets at a time.
CHUNK = 100


def _print(name: str, seen: Seen) -> None:
    bad = sum(seen.wrong.values())
    counts = f"{seen.tried:6} tried, {seen.refused:6} refused, {bad} bad"
    print(f"{name:22} {counts}, {seen.took_s:6.1f} s of a core", flush=True)
    merged: Counter[str] = Counter()
    first: dict[str, str] = {}
    for text, count in sorted(seen.wrong.items()):
        short = re.sub(r" \(input \d+ from \d+\)$", "", text)
        merged[short] += count
        first.setdefault(short, text)
    for short, count in merged.most_common(12):
        print(f"    {count:5} {first[short]}", flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__, "fuzz")
    parser.add_argument("--inputs", type=int, default=20_000, help="of all kinds together")
    parser.add_argument("--seed", type=int, default=0)
    add_arguments(parser, "chunk")
    parser.add_argument(
        "--workers", type=int, default=os.cpu_count() or 1, help="processes; all cores by default"
    )
    options = parser.parse_args(argv)
    shares = sum(kind.share for kind in KINDS)
    chunks = []
    for kind in KINDS:
        inputs = math.ceil(options.inputs * kind.share / shares)
        for first in range(0, inputs, CHUNK) if options.only in kind.name else ():
            chunks.append((kind.name, first, min(first + CHUNK, inputs), options.seed))
    folders = (*PACKAGE, "tests/fuzz", "tests/support")
    pieces = Pieces(options.pieces, options.workers, folders=folders)
    seen: dict[str, Seen] = defaultdict(Seen)
    for name, more in pieces.results(fuzz_chunk, chunks[options.part]):
        seen[name].add(more)
    total = Seen()
    for name, each in seen.items():
        _print(name, each)
        total.add(each)
    publish(
        [
            Figure("inputs", total.tried, "count"),
            Figure("tracebacks", sum(total.bad.values()), "count"),
            Figure("hangs", sum(total.hangs.values()), "count"),
            Figure("files_outside", sum(total.outside.values()), "count"),
        ],
        options.json,
    )


if __name__ == "__main__":
    main()
