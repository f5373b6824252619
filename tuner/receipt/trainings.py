"""Trainings below a command, from the counts that their processes keep (`workload.hook.tally`)."""

from __future__ import annotations

import contextlib
import json
import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tuner.workload.hook.tally import HEAD

#: The most that is read of a file of counts, which takes some kilobytes.
_MAX_BYTES = 2**20


@dataclass(frozen=True)
class RankCount:
    """Steps of one process, the end of its first and last one (CLOCK_MONOTONIC), and samples.

    `samples` were drawn up to the last step, `first_samples` up to the first; NaN if unknown.
    """

    rank: int
    world: int
    pid: int
    parent: int
    words: tuple[str, ...]
    steps: int
    first_s: float
    last_s: float
    samples: float
    first_samples: float


def _read(path: Path) -> RankCount:
    with path.open("rb") as file:
        data = file.read(_MAX_BYTES)
    steps, first_s, last_s, samples, first_samples = HEAD.unpack_from(data)
    facts = json.loads(data[HEAD.size :])
    if not (steps >= 1 and math.isfinite(first_s) and first_s <= last_s < math.inf):
        raise ValueError(f"{path} holds no step")
    rank, world, pid, parent = (int(facts[key]) for key in ("rank", "world", "pid", "parent"))
    words = tuple(map(str, facts["words"]))
    return RankCount(
        *(rank, world, pid, parent, words, int(steps), first_s, last_s, samples, first_samples)
    )


def read_counts(folder: Path) -> list[RankCount]:
    """Return the counts of the processes that have stepped, by their first step."""
    counts = []
    for path in folder.iterdir():
        # A file that is being written, or that the program wrote, holds no counts.
        with contextlib.suppress(
            OSError, ValueError, LookupError, TypeError, OverflowError, RecursionError, struct.error
        ):
            counts.append(_read(path))
    return sorted(counts, key=lambda count: (count.first_s, count.rank))


@dataclass(frozen=True)
class Training:
    """Training of one process, or of the ranks of one process group on this node."""

    ranks: tuple[RankCount, ...]

    @property
    def lead(self) -> RankCount:
        """The lowest rank, whose steps count."""
        return min(self.ranks, key=lambda each: each.rank)

    @property
    def world(self) -> int:
        """Number of ranks, those on other nodes included."""
        return self.lead.world

    @property
    def samples(self) -> float:
        """Samples that the ranks of this node drew for the steps after the first; NaN if unknown,
        or if none were drawn."""
        samples = sum(each.samples - each.first_samples for each in self.ranks)
        return samples if samples > 0 else math.nan


def trainings_of(counts: Iterable[RankCount]) -> list[Training]:
    """Group ranks into trainings: one group has one parent, one world and each rank once."""
    groups: list[list[RankCount]] = []
    for count in counts:
        group = next((each for each in reversed(groups) if _belongs(count, each)), None)
        if group is None:
            groups.append([count])
        else:
            group.append(count)
    return [Training(tuple(group)) for group in groups]


def _belongs(count: RankCount, group: list[RankCount]) -> bool:
    first = group[0]
    return (
        count.world > 1
        and (count.parent, count.world) == (first.parent, first.world)
        and all(count.rank != each.rank for each in group)
    )
