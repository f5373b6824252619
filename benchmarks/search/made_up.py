"""Made-up tables for kinds of spaces of which no recording is at hand, written as recorded ones.

`clock-limit`: clock by power limit, so that most pairs equal another one. `adversarial`: tables on
which a rule of the search is wrong: work in bursts, so that limits far above the mean power bind;
no limit that binds, so that the front is one lucky row; a lowest limit far below the knee, by
another amount in each launch; many launches whose best ones stand apart, behind a ridge, so that
what is near today's tells nothing of them. `several-knobs`: simulated clusters
(`benchmarks.search.simulated_tables`). `misjudged`: one of these on which the models are wrong by
far, of one value of a knob, of one launch, or of two regions. `held-out`: batch size by power
limit, and clock by limit of a single launch, by seeds with which no constant of the search was
chosen.
"""

from __future__ import annotations

import csv
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.search.problems import Problem
from benchmarks.search.simulated_tables import PROBLEMS, record
from tuner.recordings.table import load_table
from tuner.search_spaces.configuration import Settings

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
CLOCKS_MHZ = (600, 800, 1000, 1200, 1400)
LIMITS_W = (100, 125, 150, 175, 200, 225, 250)
TOML = """name = "{name}"
what = "made up"
launch_knobs = ["micro_batch"]
live_knobs = [{live}]
unit_of_work = "step"
time_s = "t"
power_W = "p"
energy_scope = "gpu"

[noise]
time_cv = 0.002
power_cv = 0.015

[cost]
launch_s = 30.0
launch_power = 0.5
settle_s = 2.0
window_s = 5.0
"""
#: Of a configuration (micro-batch, limit in W, clock in MHz): seconds and watts.
Answer = Callable[[float, float, float], tuple[float, float]]


def clock_by_limit(seed: int) -> Answer:
    """Return devices that run at the clock that is set, or at a lower one at which they keep the
    limit; the best micro-batch, and how much memory bounds the step, are drawn."""
    draw = np.random.default_rng([seed, 29])
    best, bound = float(draw.uniform(0, 7)), float(draw.uniform(0.2, 0.6))
    offsets = draw.normal(0, 0.03, (len(BATCHES), 2))

    def answer(batch: float, limit_W: float, clock_MHz: float) -> tuple[float, float]:
        octave = math.log2(batch)
        slower, more = np.exp(offsets[round(octave)])
        most_W = 60 + more * (120 + 90 * octave / 7)
        free = min(max((limit_W - 60) / (most_W - 60), 0.05) ** (1 / 2.6), 1.0)
        clock = min(clock_MHz / CLOCKS_MHZ[-1], free)
        time_s = slower * (1 + 0.04 * (octave - best) ** 2) * (bound + (1 - bound) / clock)
        return 10 * time_s, 60 + (most_W - 60) * clock**2.6

    return answer


def bursts(batch: float, limit_W: float, clock_MHz: float) -> tuple[float, float]:
    """A share of the work draws 250 W, the rest 70 W."""
    octaves = math.log2(batch / 8) / 3
    work_s = 100 * (1 + 12 / batch + 0.1 * (batch / 64) ** 2)
    share, burst_W = 0.30 + 0.02 * octaves, 250 + 4 * octaves
    power_W = min(burst_W, limit_W)
    burst_s = work_s * share * math.sqrt(burst_W / power_W)
    time_s = burst_s + work_s * (1 - share)
    return time_s, (burst_s * power_W + work_s * (1 - share) * 70) / time_s


def chance(batch: float, limit_W: float, clock_MHz: float) -> tuple[float, float]:
    """No limit binds, and rows differ by chance: the front is one lucky row or two."""
    normal = np.random.default_rng([int(batch), int(limit_W)]).standard_normal(2)
    time_s = 10 * (1 + 2000 / batch) * math.exp(0.02 * normal[0])
    return time_s, (68 - 0.45 * math.log2(batch / 8)) * math.exp(0.01 * normal[1])


def below_the_knee(batch: float, limit_W: float, clock_MHz: float) -> tuple[float, float]:
    """The lowest limit takes two to three times as long, by another amount in each launch."""
    work_s = 100 * (1 + 0.03 * abs(batch - 5.5))
    if limit_W == LIMITS_W[0]:
        return work_s * (2 + (7 * batch % 11) / 11), 88 + 0.5 * batch
    return work_s * (250 / limit_W) ** 0.35, min(0.97 * limit_W, 140 + 5 * batch + 0.45 * limit_W)


def two_basins(batch: float, limit_W: float, clock_MHz: float) -> tuple[float, float]:
    """A wide shallow optimum at small batches, and a deep one three batches wide at large ones."""
    place = (batch - 1) / 39
    shallow, deep = (
        math.exp(-(((place - at) / wide) ** 2)) for at, wide in ((0.1, 0.1), (0.8, 0.07))
    )
    most_W = 150 + 60 * place
    speed = min((limit_W - 50) / (most_W - 50), 1.0) ** (1 / 2.4)
    time_s = 100 * (1.35 - 0.25 * shallow - 0.4 * deep) * (0.3 + 0.7 / speed)
    return time_s, 50 + (most_W - 50) * speed**2.4


def write(
    folder: Path,
    answer: Answer,
    batches: Sequence[int],
    limits_W: Sequence[int],
    clocks_MHz: Sequence[int] = (0,),
) -> Path:
    """Write one table, without the clock if there is only one; return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    live = ["power_limit_W", "clock_MHz"][: 1 + (len(clocks_MHz) > 1)]
    with (folder / "table.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["micro_batch", *live, "t", "p"])
        for setting in itertools.product(batches, limits_W, clocks_MHz):
            writer.writerow([*setting[: 1 + len(live)], *map("{:.9g}".format, answer(*setting))])
    names = ", ".join(f'"{name}"' for name in live)
    (folder / "table.toml").write_text(TOML.format(name=folder.name, live=names))
    return folder


def clock_limit_tables(folder: Path) -> list[Path]:
    """Write two tables of eight launches and one of a single launch."""
    several = [(seed, BATCHES) for seed in (0, 1)]
    return [
        write(folder / f"clock-limit-{seed}", clock_by_limit(seed), batches, LIMITS_W, CLOCKS_MHZ)
        for seed, batches in (*several, (2, BATCHES[-1:]))
    ]


def held_out_tables(folder: Path) -> list[Path]:
    """Write three tables of batch by limit at the highest clock, and three of one launch."""
    made = []
    for seed in (30, 31, 32):
        at_highest = partial(_at_highest, clock_by_limit(seed))
        made.append(write(folder / f"batch-limit-{seed}", at_highest, BATCHES, LIMITS_W))
    for seed in (33, 34, 35):
        batches = (BATCHES[seed % len(BATCHES)],)
        answer = clock_by_limit(seed)
        made.append(write(folder / f"one-launch-{seed}", answer, batches, LIMITS_W, CLOCKS_MHZ))
    return made


def _at_highest(
    answer: Answer, batch: float, limit_W: float, clock_MHz: float
) -> tuple[float, float]:
    del clock_MHz
    return answer(batch, limit_W, CLOCKS_MHZ[-1])


def adversarial_tables(folder: Path) -> list[Path]:
    """Write the tables on which rules are wrong."""
    doubled = [2**octave for octave in range(3, 15)]
    return [
        write(folder / "bursts", bursts, (8, 12, 16, 24, 32, 48, 64, 72, 96), LIMITS_W[1:]),
        write(folder / "chance", chance, doubled, (100, 125, 150, 175, 200, 225, 250, 275, 300)),
        write(folder / "below-the-knee", below_the_knee, range(1, 12), LIMITS_W),
        write(folder / "two-basins", two_basins, range(1, 41), LIMITS_W),
    ]


def several_knob_tables(folder: Path, launches: Iterable[int] = (40, 200)) -> list[Path]:
    """Record simulated clusters, with this number of launches each."""
    made = []
    for (job, cluster, space), most in zip(PROBLEMS, launches, strict=True):
        made.append(folder / f"{job}-{cluster}")
        record(
            made[-1], job, cluster, space, most=most, spread=0.2, of_values=0.05, error=0.03, seed=0
        )
    return made


def _one_value(products: Mapping[Settings, float]) -> dict[Settings, float]:
    """The micro-batch of the launch that the models rank first takes three times as long."""
    best = min(products, key=lambda each: products[each])
    return {each: 3.0 for each in products if each["micro_batch"] == best["micro_batch"]}


def _one_launch(products: Mapping[Settings, float]) -> dict[Settings, float]:
    """One launch of the better quarter takes 40 % less time than its values say."""
    ranked = sorted(products, key=lambda each: products[each])
    return {ranked[len(ranked) // 4]: 0.6}


def _two_regions(products: Mapping[Settings, float]) -> dict[Settings, float]:
    """Launches with tensor parallelism are fast with small micro-batches alone."""
    split = {each for each in products if each["tensor_parallel"] != 1}
    return {each: 0.6 if int(str(each["micro_batch"])) <= 2 else 1.5 for each in split}


def misjudged_tables(folder: Path, launches: int = 90) -> list[Path]:
    """Record a simulated cluster on which the models are wrong by far, in three ways."""
    job, cluster, space = PROBLEMS[1]
    ways = {"one-value": _one_value, "one-launch": _one_launch, "two-regions": _two_regions}
    for name, way in ways.items():
        record(
            folder / name,
            *(job, cluster, space),
            most=launches,
            spread=0.2,
            of_values=0.05,
            error=0.03,
            seed=7,
            misjudged=way,
        )
    return [folder / name for name in ways]


#: Kinds of tables that are made, with what writes them, and whether they are jackknifed.
KINDS: dict[str, tuple[Callable[[Path], list[Path]], bool]] = {
    "clock-limit": (clock_limit_tables, False),
    "adversarial": (adversarial_tables, False),
    "held-out": (held_out_tables, False),
    "several-knobs": (several_knob_tables, True),
    "misjudged": (misjudged_tables, False),
}


def problems_of(kind: str, folder: Path) -> list[Problem]:
    """Write the tables of a kind into a folder and return their problems."""
    make, jackknifed = KINDS[kind]
    return [
        Problem(table, group.name, 0 if jackknifed else None)
        for table in make(folder)
        for group in load_table(table).groups
    ]
