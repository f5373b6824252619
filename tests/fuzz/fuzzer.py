"""Bad input by the ten thousand: every file and word that a user may give, bent at random.

A sound file of each kind is parsed, parts of it are replaced by what a number, a name or a table
should never be, or its bytes are torn, and it is given to its reader or to the command itself, in
this process. All that may come of it is an answer, or one sentence and exit code 2: a traceback or
another exit code, more than some seconds, and a file written outside the folder are counted. Aim:
none. An input is told by its kind, the seed and the chunk, whichever process tries it.
"""

from __future__ import annotations

import contextlib
import io
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hypothesis
from hypothesis import strategies as st
from hypothesis.configuration import set_hypothesis_home_dir
from hypothesis.errors import Flaky, UnsatisfiedAssumption
from hypothesis.internal.conjecture.data import StopTest

from tests.fuzz.commands import KINDS
from tests.fuzz.kinds import Kind, parser
from tests.fuzz.mutate import Draw
from tests.fuzz.watch import Place, watched_place
from tuner.search_spaces.errors import InputError

#: Processor time that an input may take, and time, which includes waiting for nothing, seconds. The
#: vendors' parsers, in an interpreter that imports torch, are given 180 s on a busy machine.
LIMIT_S, WAIT_LIMIT_S = 5, 240


@dataclass
class Seen:
    """Counts of what some inputs of one kind gave.

    Attributes:
        tried: inputs.
        refused: those that a sentence refused.
        bad: a traceback's last lines, with how often it was seen.
        hangs: inputs over a limit of time, by where they were.
        outside: files outside the folder that were written or left.
        took_s: seconds.
    """

    tried: int = 0
    refused: int = 0
    bad: Counter[str] = field(default_factory=Counter)
    hangs: Counter[str] = field(default_factory=Counter)
    outside: Counter[str] = field(default_factory=Counter)
    took_s: float = 0.0

    def add(self, other: Seen) -> None:
        """Count another's inputs as well."""
        self.tried += other.tried
        self.refused += other.refused
        self.bad += other.bad
        self.hangs += other.hangs
        self.outside += other.outside
        self.took_s += other.took_s

    @property
    def wrong(self) -> Counter[str]:
        """All that should not have come of an input."""
        return self.bad + self.hangs + self.outside


class Hang(BaseException):
    """An input took too long; nothing that catches errors catches this."""


def _too_long(signum: int, frame: object) -> None:
    limit = f"{LIMIT_S} s of a core" if signum == signal.SIGPROF else f"{WAIT_LIMIT_S} s"
    raise Hang(f"it took more than {limit}")


def _place(error: BaseException) -> str:
    """Locate an error: the last frame of ours, or else the very last."""
    frames = traceback.extract_tb(error.__traceback__)
    where = [f for f in frames if "/tests/" not in f.filename] or list(frames)
    theirs = ("/site-packages/", "/lib/python", "<")
    ours = next((f for f in reversed(where) if not any(t in f.filename for t in theirs)), where[-1])
    return f"{Path(ours.filename).name}:{ours.lineno} {ours.name}"


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    """Raise `Hang` in what takes too long."""
    # Of processor time, for a busy machine is no fault of the input; and of waiting for a pipe.
    signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
    signal.setitimer(signal.ITIMER_REAL, WAIT_LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)


def _try_one(one: Callable[[Draw], Any], draw: Draw, seen: Seen) -> str:
    """Try one input; return what was wrong, or ""."""
    seen.tried += 1
    try:
        with contextlib.redirect_stdout(io.StringIO()), _limited():
            one(draw)
    except InputError as error:
        seen.refused += 1
        return f"not one line: {error}" if "\n" in str(error) else ""
    except (KeyboardInterrupt, StopTest, UnsatisfiedAssumption):
        raise
    except BaseException as error:
        if isinstance(error, OSError) and error.filename is not None:
            seen.refused += 1  # which the command says in a sentence (`tuner.cli.main`)
            return ""
        return f"{_place(error)}: {type(error).__name__}: {str(error)[:160]}"
    return ""


def fuzz(kind: Kind, numbers: Sequence[int], seed: int = 0) -> Seen:
    """Try the inputs of one kind that bear these numbers."""
    seen, began_s = Seen(), time.monotonic()
    signals = (signal.SIGPROF, signal.SIGALRM)
    before = [signal.signal(each, _too_long) for each in signals]
    try:
        with watched_place() as place:
            set_hypothesis_home_dir(place.folder / "hypothesis")
            _fuzz_in(place, kind, numbers, seed, seen)
    finally:
        set_hypothesis_home_dir(None)
        for each, handler in zip(signals, before, strict=True):
            signal.signal(each, handler)
    seen.took_s = time.monotonic() - began_s
    return seen


def _fuzz_in(place: Place, kind: Kind, numbers: Sequence[int], seed: int, seen: Seen) -> None:
    parser.cache_clear()  # which knows the runs folder of another place
    one = kind.prepare(place.folder)
    written: set[str] = set(place.outside)  # by imports, which are no input's doing

    @hypothesis.seed(f"{kind.name} {seed} {numbers[0]}")
    @hypothesis.settings(
        max_examples=len(numbers),
        database=None,
        deadline=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=[*hypothesis.HealthCheck],
    )
    @hypothesis.given(st.data())
    def try_inputs(data: st.DataObject) -> None:
        here = f"(input {seen.tried} from {numbers[0]})"
        wrong = _try_one(one, Draw(data), seen)
        if wrong:
            counts = seen.hangs if ": Hang: " in wrong else seen.bad
            counts[f"{wrong} {here}"] += 1
        for path in set(place.outside) - written:
            seen.outside[f"wrote {path} {here}"] += 1
            written.add(path)

    try:
        try_inputs()
    except Flaky:
        if not seen.hangs:  # what is ended at its limit draws less than at another time
            raise
    for path in place.left_outside():
        if path not in written:
            seen.outside[f"left {path}"] += 1


def fuzz_chunk(name: str, first: int, beyond: int, seed: int) -> tuple[str, Seen]:
    """Try a range of one kind's inputs in a worker: by name, since a closure cannot be pickled."""
    (kind,) = (kind for kind in KINDS if kind.name == name)
    return name, fuzz(kind, range(first, beyond), seed)
