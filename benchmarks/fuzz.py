"""Malformed input: twenty thousand files, arguments and commands of a user, mutated at random.

See `tests.fuzz.fuzzer` for what counts as a failure. Target: none.
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context

from benchmarks.figures import Figure, arguments, publish
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
    """Try all inputs on all workers, print the failures, and publish the figures."""
    parser = arguments("bad input, and the tracebacks that it gave")
    parser.add_argument("--inputs", type=int, default=20_000, help="of all kinds together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", metavar="WORDS", help="kinds whose name has these")
    parser.add_argument(
        "--workers", type=int, default=os.cpu_count() or 1, help="processes; all cores by default"
    )
    options = parser.parse_args(argv)
    kinds = [kind for kind in KINDS if options.only in kind.name]
    shares = sum(kind.share for kind in kinds)
    left: Counter[str] = Counter()
    seen: dict[str, Seen] = defaultdict(Seen)
    # Spawned: a fork would hand on the threads' locks of whatever was imported here.
    with ProcessPoolExecutor(options.workers, mp_context=get_context("spawn")) as pool:
        parts = []
        for kind in kinds:
            inputs = math.ceil(options.inputs * kind.share / shares)
            for first in range(0, inputs, CHUNK):
                beyond = min(first + CHUNK, inputs)
                parts.append(pool.submit(fuzz_chunk, kind.name, first, beyond, options.seed))
                left[kind.name] += 1
        for part in as_completed(parts):
            name, more = part.result()
            seen[name].add(more)
            left[name] -= 1
            if not left[name]:
                _print(name, seen[name])
    total = Seen()
    for each in seen.values():
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
