"""Clocks of pipeline stages against the best ones, on made-up pipelines whose truth is known.

Pipelines of three stages and 8 or 32 micro-batches under 1F1B, with stages that differ by up to
half. A part of a stage's time falls with the clock and the rest does not; power while it computes
follows the clock, and while it waits it is a fifth. `tuner.online.settings` knows the work of the
stages alone. The oracle tries all clocks of all stages, and takes the least energy within the time
of ours.
"""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Sequence

from benchmarks.figures import Figure
from tuner.online.settings import stage_settings, stage_shares
from tuner.search_spaces.configuration import Settings

CLOCKS = tuple(range(810, 1411, 60))
STAGES, TOP, WAITING, EXPONENT = 3, CLOCKS[-1], 0.2, 2.4


def one_f_one_b(chunk_s: Sequence[float], micro_batches: int) -> float:
    """Return the time of a step of 1F1B; a backward pass takes twice its forward's `chunk_s`."""
    count = len(chunk_s)
    orders = []
    for stage in range(count):
        ahead = min(micro_batches, count - stage)
        order = [("f", i) for i in range(ahead)]
        for i in range(micro_batches):
            order.append(("b", i))
            if i + ahead < micro_batches:
                order.append(("f", i + ahead))
        orders.append(order)
    ends: dict[tuple[int, str, int], float] = {}
    free_s, at = [0.0] * count, [0] * count
    while any(at[stage] < len(orders[stage]) for stage in range(count)):
        for stage in range(count):
            if at[stage] == len(orders[stage]):
                continue
            kind, i = orders[stage][at[stage]]
            before = (stage - 1, "f", i) if kind == "f" else (stage + 1, "b", i)
            first = stage == 0 if kind == "f" else stage == count - 1
            if not first and before not in ends:
                continue
            start_s = max(free_s[stage], 0.0 if first else ends[before])
            free_s[stage] = start_s + chunk_s[stage] * (1 if kind == "f" else 2)
            ends[stage, kind, i] = free_s[stage]
            at[stage] += 1
    return max(free_s)


def step(
    work_s: Sequence[float], clocks_MHz: Sequence[float], bound: float, micro_batches: int
) -> tuple[float, float]:
    """Return time and energy of a step."""
    ratios = [TOP / clock for clock in clocks_MHz]
    chunk_s = [s * (1 - bound + bound * r) for s, r in zip(work_s, ratios, strict=True)]
    time_s = one_f_one_b(chunk_s, micro_batches)
    busy_s = [3 * micro_batches * seconds for seconds in chunk_s]
    powers = [WAITING + (1 - WAITING) / r**EXPONENT for r in ratios]
    busy_J = sum(p * s for p, s in zip(powers, busy_s, strict=True))
    return time_s, busy_J + WAITING * sum(time_s - s for s in busy_s)


def stage_figures(pipelines: int) -> list[Figure]:
    """Draw pipelines, and compare clocks in proportion to the work with the best ones."""
    draw, ours, saved, slow = random.Random(0), list[float](), list[float](), list[float]()
    common = [Settings(), Settings(clock_MHz=CLOCKS[-2])]
    while len(ours) < pipelines:
        work_s = [0.01 * draw.uniform(0.5, 1.0) for _ in range(STAGES)]
        bound, micro_batches = draw.choice([0.5, 0.75, 1.0]), draw.choice([8, 32])
        shares = stage_shares({rank: [seconds] for rank, seconds in enumerate(work_s)})
        if not shares:
            continue
        clocks = stage_settings(common, shares, CLOCKS)[1]["clock_MHz"]
        assert isinstance(clocks, tuple)
        top_s, top_J = step(work_s, [TOP] * STAGES, bound, micro_batches)
        time_s, energy_J = step(work_s, [float(c) for c in clocks], bound, micro_batches)
        every = [
            step(work_s, chosen, bound, micro_batches)
            for chosen in itertools.product(CLOCKS, repeat=STAGES)
        ]
        ours.append((top_J - energy_J) / (top_J - min(j for s, j in every if s <= time_s + 1e-12)))
        saved.append(1 - energy_J / top_J)
        slow.append(time_s / top_s - 1)
    return [
        Figure("stages_saving_over_oracle", statistics.fmean(ours), "ratio"),
        Figure("stages_saved", statistics.fmean(saved), "share"),
        Figure("stages_slowdown", statistics.fmean(slow), "share"),
    ]
