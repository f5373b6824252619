"""Search problems: groups of recorded tables, whole or jackknifed, and how they are split.

A jackknifed table leaves out a random quarter of a group's launches, drawn by a fixed seed, so that
a search cannot have been fitted to the exact table. Power limits that cannot bind are repeats of
one setting: their spread is the recording's own noise, which the jackknifed tables draw from, and
their mean is the truth of all of them. A group in which no power limit binds has no live knob to
search and a front made of noise; it is left out of the headline.
"""

from __future__ import annotations

import math
import statistics
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from tuner.search_spaces.configuration import Settings
from tuner.workload.table import RecordedTable, TableGroup, TableNoise, TablePoint, load_table

__all__ = ["Problem", "load_problem", "never_binds", "repeat_noise", "repeat_sets", "split_of"]

#: Share of a group's launches that a jackknifed table leaves out.
DROPPED = 0.25
#: A power limit cannot bind if it exceeds the launch's mean power at its highest limit by this
#: factor. The mean hides phases of higher power: on zeus-nsdi23, limits of 1.05 to 1.3 times the
#: mean still lower it, and beyond 1.3 power no longer rises with the limit.
SLACK = 1.3
POWER_LIMIT = "power_limit_W"
#: Degrees of freedom from which a group's own repeats tell its noise; below, the table's do.
LEAST_FREEDOM = 5
#: Groups that the search was tuned on or inspected with: name of the table -> part of the group's
#: name. All other groups are held out: no constant was set by them.
TUNED_ON = {"zeus-nsdi23": "V100", "kareus-attention-a100": ""}


@dataclass(frozen=True)
class Problem:
    """One search problem.

    Attributes:
        folder: the table's folder.
        group: name of its group.
        jackknife: seed of the launches that are left out; None for the table as recorded.
    """

    folder: Path
    group: str
    jackknife: int | None = None


def split_of(table: str, group: str) -> str:
    """Return "tuned" or "held_out"."""
    part = TUNED_ON.get(table)
    return "tuned" if part is not None and part in group else "held_out"


def repeat_sets(group: TableGroup) -> list[list[TablePoint]]:
    """Return the sets of points that differ only in a power limit that cannot bind."""
    curves: dict[tuple[Settings, Settings], list[TablePoint]] = {}
    for point in group.points:
        live = point.configuration.live
        if isinstance(live.get(POWER_LIMIT), int | float):
            others = Settings({name: live[name] for name in live if name != POWER_LIMIT})
            curves.setdefault((point.configuration.launch, others), []).append(point)
    sets = []
    for curve in curves.values():
        highest = max(curve, key=_limit_W)
        sets.append([point for point in curve if _limit_W(point) > SLACK * highest.power_W])
    return [points for points in sets if points]


def _limit_W(point: TablePoint) -> float:
    return float(point.configuration.live[POWER_LIMIT])


def never_binds(group: TableGroup) -> bool:
    """Return True if the group's live knob is a power limit that binds in no launch."""
    return sum(map(len, repeat_sets(group))) == len(group.points)


def _spread(groups: Sequence[TableGroup]) -> tuple[float, float, int]:
    """Return the pooled standard deviations of log time and log power, and their freedom."""
    squares, freedom = np.zeros(2), 0
    for group in groups:
        for points in repeat_sets(group):
            logs = np.log([(point.time_s, point.power_W) for point in points])
            squares += ((logs - logs.mean(axis=0)) ** 2).sum(axis=0)
            freedom += len(points) - 1
    time_cv, power_cv = np.sqrt(squares / max(freedom, 1))
    return float(time_cv), float(power_cv), freedom


def repeat_noise(table: RecordedTable, group: TableGroup) -> TableNoise:
    """Return the noise of a window as the recording's own repeats show it.

    It is the spread of the group's power limits that cannot bind. A group with fewer than
    `LEAST_FREEDOM` degrees of freedom takes the median of the groups that have as many; a table
    without any keeps its [noise].
    """
    time_cv, power_cv, freedom = _spread([group])
    if freedom >= LEAST_FREEDOM:
        return TableNoise(time_cv, power_cv)
    others = [s for s in (_spread([one]) for one in table.groups) if s[2] >= LEAST_FREEDOM]
    if not others:
        return table.noise
    return TableNoise(*(statistics.median(spread[i] for spread in others) for i in (0, 1)))


def _pooled(group: TableGroup) -> TableGroup:
    """Return the group with the geometric mean of repeats as the truth of each of them."""
    means = {}
    for points in repeat_sets(group):
        time_s, power_W = np.exp(np.log([(p.time_s, p.power_W) for p in points]).mean(axis=0))
        means.update({p.configuration: (float(time_s), float(power_W)) for p in points})
    pooled = []
    for point in group.points:
        time_s, power_W = means.get(point.configuration, (point.time_s, point.power_W))
        pooled.append(replace(point, time_s=time_s, power_W=power_W))
    return replace(group, points=tuple(pooled))


def _kept_launches(group: TableGroup, seed: int) -> set[Settings]:
    """Return the launches that a jackknifed table keeps, at least two where there are two."""
    launches = list(dict.fromkeys(point.configuration.launch for point in group.points))
    draw = np.random.default_rng([seed, zlib.crc32(group.name.encode())])
    dropped = min(max(1, math.floor(DROPPED * len(launches) + 0.5)), max(len(launches) - 2, 0))
    order = draw.permutation(len(launches))
    return {launches[i] for i in order[dropped:]}


@lru_cache(maxsize=512)
def load_problem(problem: Problem) -> RecordedTable:
    """Return the table with the problem's group alone, as recorded or jackknifed."""
    table = load_table(problem.folder)
    group = table.group(problem.group)
    if problem.jackknife is None:
        return replace(table, groups=(group,))
    kept = _kept_launches(group, problem.jackknife)
    pooled = _pooled(group)
    left = tuple(p for p in pooled.points if p.configuration.launch in kept)
    noise = repeat_noise(table, group)
    return replace(table, groups=(replace(group, points=left),), noise=noise)
