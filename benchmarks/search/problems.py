"""Search problems: groups of recorded tables, whole or jackknifed, and how they are split.

A jackknifed table leaves out a random quarter of a group's launches, drawn by a fixed seed, so that
a search cannot have been fitted to the exact table. Power limits that show no effect are repeats of
one setting: their spread is the recording's own noise, which the jackknifed tables draw from, and
their mean is the truth of all of them. Which limits these are is read from the group's own rows,
not by the rule of the search that is judged (`repeat_sets`). A group in which no power limit binds
has no live knob to search and is a problem like any other: its best launch has to be found.
"""

from __future__ import annotations

import math
import statistics
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from tuner.recordings.table import (
    RecordedTable,
    TableGroup,
    TableNoise,
    TablePoint,
    load_table,
)
from tuner.search_spaces.configuration import Settings

#: Share of a group's launches that a jackknifed table leaves out.
DROPPED = 0.25
#: Limits show an effect if power or speed rises with them over all launches by this many standard
#: errors of the slope, or is lower at the lowest of a launch than at its others by this many of
#: their standard deviations (one-sided, 1 % and 0.1 %).
SLOPE_SE, ROW_SD = 2.33, 3.0
POWER_LIMIT = "power_limit_W"
#: Degrees of freedom from which a group's own repeats tell its noise; below, the table's do.
LEAST_FREEDOM = 5
#: Groups that the search's constants were chosen on, and those that it was only looked at with, by
#: split: name of the table -> part of the group's name. All other groups are held out.
SPLITS: Mapping[str, Mapping[str, str]] = {
    "tuned": {"zeus-nsdi23": "V100", "kareus-attention-a100": ""},
    "seen": {"zeus-nsdi23": "RTX6000"},
    "held_out": {},
}


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

    @property
    def key(self) -> tuple[str, str, int | None]:
        """Name of the problem, wherever its table stands."""
        return self.folder.name, self.group, self.jackknife


def split_of(table: str, group: str) -> str:
    """Return the key of `SPLITS` that a group belongs to."""
    splits = (s for s, parts in SPLITS.items() if table in parts and parts[table] in group)
    return next(splits, "held_out")


def repeat_sets(group: TableGroup) -> list[list[TablePoint]]:
    """Return the sets of points that differ only in a power limit that shows no effect.

    A limit below what a launch draws at its highest limit does bind. Of the others those that are
    the least above it are left out, one by one, until the rest shows no effect. With fewer than
    `LEAST_FREEDOM` degrees of freedom nothing can be shown, and nothing is a repeat.
    """
    curves: dict[tuple[Settings, Settings], list[TablePoint]] = {}
    for point in group.points:
        live = point.configuration.live
        if isinstance(live.get(POWER_LIMIT), int | float):
            others = Settings({name: live[name] for name in live if name != POWER_LIMIT})
            curves.setdefault((point.configuration.launch, others), []).append(point)
    ordered = [sorted(curve, key=_limit_W) for curve in curves.values()]
    ratios = {_limit_W(point) / curve[-1].power_W for curve in ordered for point in curve}
    for least in [1.0, *sorted(ratio for ratio in ratios if ratio > 1)]:
        sets = [[p for p in curve if _limit_W(p) > least * curve[-1].power_W] for curve in ordered]
        sets = [points for points in sets if points]
        if sum(map(len, sets)) - len(sets) < LEAST_FREEDOM:
            break
        if not _shows_effect([points for points in sets if len(points) > 1]):
            return sets
    return []


def _shows_effect(sets: Sequence[Sequence[TablePoint]]) -> bool:
    """Return True if power or speed depends on the limit in these sets, lowest limit first."""
    logs = [np.log([(_limit_W(p), p.power_W, 1 / p.time_s) for p in points]) for points in sets]
    centred = np.vstack([each - each.mean(axis=0) for each in logs])
    limit, figures = centred[:, 0], centred[:, 1:]
    slope = limit @ figures / (limit @ limit)
    residuals = ((figures - np.outer(limit, slope)) ** 2).sum(axis=0)
    error = np.sqrt(residuals / max(len(limit) - len(sets) - 1, 1) / (limit @ limit))
    others = [each[1:, 1:] - each[1:, 1:].mean(axis=0) for each in logs]
    freedom = max(sum(map(len, others)) - len(others), 1)
    sd = np.sqrt(sum((each**2).sum(axis=0) for each in others) / freedom)
    lower = np.array([each[1:, 1:].mean(axis=0) - each[0, 1:] for each in logs])
    return bool((slope > SLOPE_SE * error).any() or (lower > ROW_SD * np.maximum(sd, 1e-9)).any())


def _limit_W(point: TablePoint) -> float:
    return float(point.configuration.live[POWER_LIMIT])


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
