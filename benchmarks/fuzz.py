"""Bad input by the ten thousand: every file and word that a user may give, bent at random.

A sound file of each kind is parsed, parts of it are replaced by what a number, a name or a table
should never be, or its bytes are torn, and it is given back, mostly to the command itself, in this
process. All that may come of it is an answer, or one sentence and exit code 2: a traceback, an exit
code of another kind, more than five seconds of a core, or a file outside the folder is counted.
Aim: none. An input is told by its kind, the seed and its number, whichever process tries it.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import random
import re
import signal
import tempfile
import time
import traceback
import warnings
from collections import Counter, defaultdict
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path

from benchmarks.figures import Figure, arguments, publish
from benchmarks.fuzz_kinds import KINDS, Kind
from search_spaces.errors import InputError

__all__ = ["KINDS", "Kind", "Seen", "fuzz"]

#: An input may take so long, seconds of processor time.
LIMIT_S = 5
#: So many inputs of one kind are a worker's at a time.
CHUNK = 500
#: Memory as a folder: thousands of small files a minute are no business of a disk.
SHARED_MEMORY = Path("/dev/shm")


@dataclass
class Seen:
    """What some inputs of one kind gave.

    Attributes:
        tried: inputs.
        refused: those that a sentence refused.
        bad: a traceback's last lines, with how often it was seen.
        took_s: seconds.
    """

    tried: int = 0
    refused: int = 0
    bad: Counter[str] = field(default_factory=Counter)
    took_s: float = 0.0

    def add(self, other: Seen) -> None:
        """Count another's inputs as well."""
        self.tried += other.tried
        self.refused += other.refused
        self.bad += other.bad
        self.took_s += other.took_s


def _too_long(signum: int, frame: object) -> None:
    raise TimeoutError(f"it took more than {LIMIT_S} s")


def _place(error: BaseException) -> str:
    """Where an error came from: the last frame of ours, or else the very last."""
    frames = traceback.extract_tb(error.__traceback__)
    where = [f for f in frames if "/benchmarks/" not in f.filename] or list(frames)
    theirs = ("/site-packages/", "/lib/python", "<")
    ours = next((f for f in reversed(where) if not any(t in f.filename for t in theirs)), where[-1])
    return f"{Path(ours.filename).name}:{ours.lineno} {ours.name}"


def fuzz(kind: Kind, numbers: Sequence[int], seed: int = 0) -> Seen:
    """Try the inputs of one kind that bear these numbers."""
    seen, began_s = Seen(), time.monotonic()
    before = signal.signal(signal.SIGPROF, _too_long)
    memory = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else None
    with (
        tempfile.TemporaryDirectory(prefix="joulefront-fuzz-", dir=memory) as name,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", RuntimeWarning)  # an answer of infinite figures is one
        folder = Path(name) / "inside" / "here"
        folder.mkdir(parents=True)
        one = kind.prepare(folder)
        for number in numbers:
            draw = random.Random(f"{kind.name} {seed} {number}")
            seen.tried += 1
            # Of processor time: a busy machine is no fault of the input.
            signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
            try:
                with contextlib.redirect_stdout(io.StringIO()):
                    one(draw)
            except InputError as error:
                seen.refused += 1
                if "\n" in str(error):
                    seen.bad[f"not one line: {error}"] += 1
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                what = f"{type(error).__name__}: {str(error)[:160]}"
                seen.bad[f"{_place(error)}: {what} (input {number})"] += 1
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
        outside = [p for p in Path(name).iterdir() if p.name != "inside"]
        outside += [p for p in (Path(name) / "inside").iterdir() if p.name != "here"]
        outside += [*Path(name).rglob("pwned"), *Path.cwd().glob("pwned")]
        if outside:
            seen.bad[f"left the folder: {outside}"] += 1
    signal.signal(signal.SIGPROF, before)
    seen.took_s = time.monotonic() - began_s
    return seen


def _chunk(name: str, first: int, beyond: int, seed: int) -> tuple[str, Seen]:
    """A worker's part: a kind by its name, because functions of functions are not sent."""
    (kind,) = (kind for kind in KINDS if kind.name == name)
    return name, fuzz(kind, range(first, beyond), seed)


def _tell(name: str, seen: Seen) -> None:
    bad = sum(seen.bad.values())
    print(f"{name:18} {seen.tried:7} tried, {bad} bad, {seen.took_s:6.1f} s of a core", flush=True)
    merged: Counter[str] = Counter()
    first: dict[str, str] = {}
    for text, count in sorted(seen.bad.items()):
        short = re.sub(r" \(input \d+\)$", "", text)
        merged[short] += count
        first.setdefault(short, text)
    for short, count in merged.most_common(12):
        print(f"    {count:5} {first[short]}", flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments("bad input, and the tracebacks that it gave")
    parser.add_argument("--inputs", type=int, default=100_000, help="of all kinds together")
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
                parts.append(pool.submit(_chunk, kind.name, first, beyond, options.seed))
                left[kind.name] += 1
        for part in as_completed(parts):
            name, more = part.result()
            seen[name].add(more)
            left[name] -= 1
            if not left[name]:
                _tell(name, seen[name])
    publish(
        [
            Figure("inputs_fuzzed", sum(each.tried for each in seen.values()), "count"),
            Figure("tracebacks_seen", sum(sum(e.bad.values()) for e in seen.values()), "count"),
        ],
        options.json,
    )


if __name__ == "__main__":
    main()
