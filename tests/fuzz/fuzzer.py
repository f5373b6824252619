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
import os
import random
import signal
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.fuzz.kinds import KINDS, Kind
from tuner.search_spaces.errors import InputError

#: An input may take so long, seconds of processor time.
LIMIT_S = 5
#: Memory as a folder: thousands of small files a minute are no business of a disk.
SHARED_MEMORY = Path("/dev/shm")


@dataclass
class Seen:
    """Counts of what some inputs of one kind gave.

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
    """Locate an error: the last frame of ours, or else the very last."""
    frames = traceback.extract_tb(error.__traceback__)
    where = [f for f in frames if "/tests/" not in f.filename] or list(frames)
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


def fuzz_chunk(name: str, first: int, beyond: int, seed: int) -> tuple[str, Seen]:
    """Try a range of one kind's inputs in a worker: by name, since a closure cannot be pickled."""
    (kind,) = (kind for kind in KINDS if kind.name == name)
    return name, fuzz(kind, range(first, beyond), seed)
