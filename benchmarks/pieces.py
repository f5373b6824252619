"""Results of searches, kept one by one, so that a run of hours goes on where it was stopped."""

from __future__ import annotations

import hashlib
import pickle
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from benchmarks.figures import ROOT
from benchmarks.search.problems import Problem

Result = TypeVar("Result")


@cache
def _search_digest() -> str:
    # Results of another search, or of one that ends elsewhere, are computed again.
    folders = "tuner/search", "tuner/problem", "tuner/study", "models"
    files = [file for folder in folders for file in (ROOT / folder).rglob("*.py")]
    return hashlib.sha256(b"".join(file.read_bytes() for file in sorted(files))).hexdigest()


def _key(search: Callable[..., Any], arguments: Sequence[Any]) -> str:
    # Tables that are made stand in another folder each time.
    words = [
        (one.folder.name, one.group, one.jackknife) if isinstance(one, Problem) else one
        for one in arguments
    ]
    return f"{_search_digest()} {search.__name__} {words}"


class Pieces:
    """Results of searches, in a file if one is given.

    Args:
        file: results of earlier runs, to which new ones are added; it is read as a pickle, so it
            has to be one's own.
        jobs: number of processes.
    """

    def __init__(self, file: Path | None = None, jobs: int = 1) -> None:
        self._file, self._jobs = file, jobs
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

    def results(
        self, search: Callable[..., Result], work: Sequence[tuple[Any, ...]]
    ) -> list[Result]:
        """Return the result of each call, in order; those that are kept are not made again."""
        keys = [_key(search, each) for each in work]
        missing = [i for i, key in enumerate(keys) if key not in self._kept]
        calls = [work[i] for i in missing]
        if self._jobs > 1:
            with ProcessPoolExecutor(self._jobs) as pool:
                self._keep([keys[i] for i in missing], pool.map(search, *zip(*calls, strict=True)))
        else:
            self._keep([keys[i] for i in missing], (search(*each) for each in calls))
        return [self._kept[key] for key in keys]

    def _keep(self, keys: Sequence[str], results: Iterable[Any]) -> None:
        for done, piece in enumerate(zip(keys, results, strict=True), 1):
            self._kept.update([piece])
            if self._file is not None:
                with self._file.open("ab") as stream:
                    pickle.dump(piece, stream)
            print(f"\r{done} of {len(keys)} searches", end="", file=sys.stderr, flush=True)
        print(end="\n" * bool(keys), file=sys.stderr)
