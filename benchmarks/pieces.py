"""Results of a long benchmark, kept one by one, so that it can be run in parts and added up."""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import multiprocessing
import os
import pickle
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from benchmarks.figures import ROOT

Result = TypeVar("Result")
#: All code of the package, by the folders in which it stands.
PACKAGE = ("tuner", "search_spaces", "workload", "models")


@cache
def _digest(folders: Sequence[str]) -> str:
    files = [file for folder in folders for file in (ROOT / folder).rglob("*.py")]
    return hashlib.sha256(b"".join(file.read_bytes() for file in sorted(files))).hexdigest()


def _end_with_parent() -> None:
    """Let the kernel end this process with the one that started it, however that ends."""
    set_death_signal = 1  # PR_SET_PDEATHSIG of prctl(2)
    ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL)


def part(text: str) -> slice:
    """Parse "2/3": every third, from the second on.

    Raises:
        ArgumentTypeError: the text is no such part.
    """
    try:
        first, of = map(int, text.split("/"))
    except ValueError:
        first = of = 0
    if not 1 <= first <= of:
        raise argparse.ArgumentTypeError(f"{text!r} is not K/N with 1 <= K <= N")
    return slice(first - 1, None, of)


def add_arguments(parser: argparse.ArgumentParser, of: str) -> None:
    """Add the options of a benchmark that runs in parts, with the name of what it keeps."""
    parser.add_argument("--only", default="", metavar="WORDS", help="those whose name has these")
    parser.add_argument(
        "--part", type=part, default="1/1", metavar="K/N", help=f"every Nth {of}, from the Kth on"
    )
    parser.add_argument(
        "--pieces", type=Path, metavar="FILE", help=f"keep each {of} here, and add it up later"
    )


class Pieces:
    """Results of calls, in a file if one is given.

    Args:
        file: results of earlier runs, to which new ones are added; several processes may. It is
            read as a pickle, so it has to be one's own.
        jobs: number of processes.
        folders: code that the results depend on: those of other code are computed again.
    """

    def __init__(
        self, file: Path | None = None, jobs: int = 1, *, folders: Sequence[str] = PACKAGE
    ) -> None:
        self._file, self._jobs, self._folders = file, jobs, tuple(folders)
        self._kept: dict[str, Any] = {}
        if file is not None and file.exists():
            with file.open("r+b") as stream:
                self._read(stream)

    def _read(self, stream: BinaryIO) -> None:
        end = 0
        try:
            while True:
                self._kept.update([pickle.load(stream)])
                end = stream.tell()
        except (EOFError, pickle.UnpicklingError):  # the last may have been cut off
            stream.truncate(end)

    def _key(self, call: Callable[..., Any], arguments: Sequence[Any]) -> str:
        # Tables that are made stand in another folder each time, so a problem has a key.
        words = [getattr(one, "key", one) for one in arguments]
        return f"{_digest(self._folders)} {call.__name__} {words}"

    def results(self, call: Callable[..., Result], work: Sequence[tuple[Any, ...]]) -> list[Result]:
        """Return the result of each call, in order; those that are kept are not made again."""
        keys = [self._key(call, each) for each in work]
        missing = [i for i, key in enumerate(keys) if key not in self._kept]
        calls = [work[i] for i in missing]
        if self._jobs > 1 and calls:
            # Spawned: a fork would hand on the locks of this process's threads.
            spawned = multiprocessing.get_context("spawn")
            with ProcessPoolExecutor(self._jobs, spawned, _end_with_parent) as pool:
                self._keep([keys[i] for i in missing], pool.map(call, *zip(*calls, strict=True)))
        else:
            self._keep([keys[i] for i in missing], (call(*each) for each in calls))
        return [self._kept[key] for key in keys]

    def forget(
        self,
        call: Callable[..., Result],
        work: Sequence[tuple[Any, ...]],
        where: Callable[[Result], bool],
    ) -> int:
        """Forget the kept results for which `where` is true; return their number."""
        keys = [self._key(call, each) for each in work]
        found = [key for key in keys if key in self._kept and where(self._kept[key])]
        for key in found:
            del self._kept[key]
        return len(found)

    def _keep(self, keys: Sequence[str], results: Iterable[Any]) -> None:
        for done, piece in enumerate(zip(keys, results, strict=True), 1):
            self._kept.update([piece])
            if self._file is not None:
                # One write, so that pieces of several processes do not mix.
                file = os.open(self._file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
                try:
                    os.write(file, pickle.dumps(piece))
                finally:
                    os.close(file)
            print(f"\r{done} of {len(keys)}", end="", file=sys.stderr, flush=True)
        print(end="\n" * bool(keys), file=sys.stderr)
