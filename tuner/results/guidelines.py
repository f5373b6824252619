"""Published guidelines compared with this run: confirmed, refuted or untested, and by which points.

Two studies of the energy of distributed training give guidelines: Zhang, Strati and Klimovic,
"Characterizing Energy and Performance for Distributed Training of Large Language Models"
(EuroMLSys 2026), and Ahmed et al., "Cross-Layer Energy Analysis of Multimodal Training on Grace
Hopper Superchips" (arXiv 2605.01938). Each was found on other jobs and machines, so here it is only
a claim: it is checked on measured points that differ in the one knob it is about, each difference
with its error, and without such points it is reported as untested.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

import numpy as np

from tuner.formatting import percent
from tuner.results.parts import Point
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.knobs import Value
from tuner.workload.measure.statistics import Z90, log_error

__all__ = ["Guideline", "check_guidelines"]

_PARALLEL = "Zhang, Strati and Klimovic, EuroMLSys 2026"
_GH200 = "Ahmed et al., arXiv 2605.01938"

Verdict = Literal["holds", "fails", "mixed", "not shown", "not tested"]


@dataclass(frozen=True)
class Guideline:
    """One published finding, compared with this run.

    Attributes:
        text: the finding.
        source: the publication.
        verdict: "holds", "fails", "mixed" (some points say so and some the opposite), "not shown"
            (the differences are within their errors), or "not tested" (no points to tell).
        evidence: what the points of this run say.
        comparisons: the number of pairs, launches or curves behind the verdict.
    """

    text: str
    source: str
    verdict: Verdict
    evidence: str
    comparisons: int = 0


@dataclass(frozen=True)
class _Figures:
    """A measured point in logarithms, with standard errors."""

    configuration: Configuration
    log_time: float
    log_energy: float
    log_power: float
    time_se: float
    energy_se: float

    @classmethod
    def of(cls, point: Point) -> _Figures:
        return cls(
            point.configuration,
            math.log(point.time_to_solution_s),
            math.log(point.energy_to_solution_kJ),
            math.log(point.power_W),
            log_error(point.time_interval_s),
            log_error(point.energy_interval_kJ),
        )

    def log(self, what: str) -> tuple[float, float]:
        """(logarithm, standard error) of "time", "energy" or "power"."""
        if what == "time":
            return self.log_time, self.time_se
        if what == "energy":
            return self.log_energy, self.energy_se
        return self.log_power, math.sqrt(max(self.energy_se**2 - self.time_se**2, 0.0))


_Pairs = list[tuple[_Figures, _Figures]]


def _without(configuration: Configuration, knob: str) -> tuple[tuple[str, Value], ...]:
    both = {**configuration.launch, **configuration.live}
    return tuple(sorted((name, value) for name, value in both.items() if name != knob))


def _pairs(
    figures: Sequence[_Figures], knob: str, wanted: Callable[[object, object], bool]
) -> _Pairs:
    """Points that differ in this knob alone, from `a` to `b` where `wanted(a, b)`."""
    groups: dict[tuple[tuple[str, Value], ...], list[_Figures]] = {}
    for each in figures:
        groups.setdefault(_without(each.configuration, knob), []).append(each)
    found = []
    for group in groups.values():
        for a, b in combinations(group, 2):
            for first, second in ((a, b), (b, a)):
                if wanted(first.configuration.get(knob), second.configuration.get(knob)):
                    found.append((first, second))
    return found


def _counts(pairs: _Pairs, what: str) -> tuple[int, int, float]:
    """Return the number of falls and rises beyond their errors and the median relative change."""
    fell = rose = 0
    changes = []
    for a, b in pairs:
        (before, before_se), (after, after_se) = a.log(what), b.log(what)
        changes.append(after - before)
        reach = Z90 * math.hypot(before_se, after_se)
        fell += after - before < -reach
        rose += after - before > reach
    return fell, rose, math.expm1(float(np.median(changes)))


def _verdict(favour: int, against: int) -> Verdict:
    if not favour and not against:
        return "not shown"
    if favour >= 3 * against and favour:
        return "holds"
    return "fails" if against >= 3 * favour else "mixed"


def _change(median: float, what: str) -> str:
    return f"{percent(abs(median))} {'less' if median < 0 else 'more'} {what} in the middle"


def _by_pairs(
    text: str, source: str, pairs: _Pairs, *, falls: str = "", rises: str = ""
) -> Guideline:
    """Check a finding about a quantity that falls, or rises, from one value to another."""
    if not pairs:
        said = "no two measured points differ in this alone"
        return Guideline(text, source, "not tested", said)
    fell, rose, median = _counts(pairs, falls or rises)
    favour, against = (fell, rose) if falls else (rose, fell)
    what = falls or rises
    evidence = (
        f"{len(pairs)} pair{'s' * (len(pairs) != 1)} of points: {what} fell in {fell}, rose in "
        f"{rose}, the rest within their errors; {_change(median, what)}"
    )
    return Guideline(text, source, _verdict(favour, against), evidence, len(pairs))


def _more(a: object, b: object) -> bool:
    return isinstance(a, int) and isinstance(b, int) and a < b


def _to(first: tuple[object, ...], second: tuple[object, ...]) -> Callable[[object, object], bool]:
    return lambda a, b: a in first and b in second


def _faster_is_frugal(figures: Sequence[_Figures]) -> Guideline:
    """Insight 1: at one live setting, energy follows time over the launches."""
    text = (
        "At fixed clocks the configurations that train faster also use less energy: energy follows "
        "step time"
    )
    by_live: dict[object, list[_Figures]] = {}
    for each in figures:
        by_live.setdefault(each.configuration.live, []).append(each)
    group = max(by_live.values(), key=len, default=[])
    if len(group) < 4:
        return Guideline(text, _PARALLEL, "not tested", "fewer than four launches at one setting")
    times, energies = ([each.log(what)[0] for each in group] for what in ("time", "energy"))
    if not (np.ptp(times) and np.ptp(energies)):
        said = f"all {len(group)} launches at one setting take the same time or the same energy"
        return Guideline(text, _PARALLEL, "not shown", said, len(group))
    from scipy.stats import spearmanr

    rank = spearmanr(times, energies)
    rho, p = float(rank.statistic), float(rank.pvalue)
    verdict: Verdict = "not shown" if not p < 0.1 else "holds" if rho > 0 else "fails"
    live = group[0].configuration.live
    at = f" at {live.short}" if live else ""
    return Guideline(
        text,
        _PARALLEL,
        verdict,
        f"rank correlation of time and energy over {len(group)} launches{at}: {rho:+.2f} "
        f"({f'p = {p:.2g}' if p >= 1e-4 else 'p < 0.0001'})",
        len(group),
    )


def _curves(figures: Sequence[_Figures]) -> list[list[_Figures]]:
    """Points of one launch by rising clock, where at least three clocks were measured."""
    by_launch: dict[object, list[_Figures]] = {}
    for each in figures:
        if isinstance(each.configuration.get("clock_MHz"), int | float):
            by_launch.setdefault(_without(each.configuration, "clock_MHz"), []).append(each)
    curves = [
        sorted(group, key=lambda each: float(str(each.configuration.get("clock_MHz"))))
        for group in by_launch.values()
    ]
    return [curve for curve in curves if len(curve) >= 3]


def _valley(figures: Sequence[_Figures]) -> Guideline:
    text = "Energy over the clock is a valley: least between the lowest clock and the highest"
    curves = _curves(figures)
    if not curves:
        said = "no launch was measured at three clocks"
        return Guideline(text, _PARALLEL, "not tested", said)
    inner = beyond = 0
    for curve in curves:
        least = min(range(len(curve)), key=lambda i: curve[i].log_energy)
        inner += 0 < least < len(curve) - 1
        beyond += least in (0, len(curve) - 1)
    return Guideline(
        text,
        _PARALLEL,
        _verdict(inner, beyond),
        f"of {len(curves)} launches with three clocks or more, {inner} use least energy at a clock "
        f"in between and {beyond} at an end",
        len(curves),
    )


def _slack(figures: Sequence[_Figures]) -> Guideline:
    """Insight 2: pipelines lose less time to a lower clock."""
    text = "Pipeline parallelism tolerates a lower clock better than data parallelism"
    slopes: dict[bool, list[float]] = {True: [], False: []}
    for curve in _curves(figures):
        low, high = curve[0], curve[-1]
        clocks = [float(str(each.configuration.get("clock_MHz"))) for each in (low, high)]
        slope = (low.log_time - high.log_time) / math.log(clocks[1] / clocks[0])
        slopes[low.configuration.pipeline_parallel > 1].append(slope)
    if not all(slopes.values()):
        said = "not both kinds of launch were measured at three clocks"
        return Guideline(text, _PARALLEL, "not tested", said)
    piped, plain = (float(np.median(slopes[kind])) for kind in (True, False))
    return Guideline(
        text,
        _PARALLEL,
        "holds" if piped < plain else "fails",
        f"a clock 10 % lower costs {percent(1.1**piped - 1)} of time with a pipeline and "
        f"{percent(1.1**plain - 1)} without, in the middle of "
        f"{len(slopes[True])} and {len(slopes[False])} launches",
        min(map(len, slopes.values())),
    )


def _jointly(figures: Sequence[_Figures]) -> Guideline:
    """Insight 3, and the GH200 study: the fastest is not the most frugal."""
    text = "The configuration that is tuned for time is not the one that uses least energy"
    fastest = min(figures, key=lambda each: each.log_time)
    frugal = min(figures, key=lambda each: each.log_energy)
    if fastest is frugal:
        said = f"one point is both: {fastest.configuration.short}"
        return Guideline(text, f"{_PARALLEL}; {_GH200}", "fails", said, len(figures))
    saved = fastest.log_energy - frugal.log_energy
    shown = saved > Z90 * math.hypot(fastest.energy_se, frugal.energy_se)
    return Guideline(
        text,
        f"{_PARALLEL}; {_GH200}",
        "holds" if shown else "not shown",
        f"the most frugal point uses {percent(-math.expm1(-saved))} less energy than the fastest "
        f"and takes {percent(math.expm1(frugal.log_time - fastest.log_time))} longer",
        len(figures),
    )


def check_guidelines(points: Sequence[Point]) -> tuple[Guideline, ...]:
    """Compare every published finding with these measured points."""
    figures = [_Figures.of(point) for point in points if point.source == "measured"]
    if not figures:
        return ()

    def pairs(knob: str, wanted: Callable[[object, object], bool]) -> _Pairs:
        return _pairs(figures, knob, wanted)

    offloaded = pairs("optimizer_offload", _to(("none",), ("cpu", "async")))
    return (
        _faster_is_frugal(figures),
        _valley(figures),
        _slack(figures),
        _jointly(figures),
        _by_pairs(
            "A larger micro-batch uses less energy",
            _PARALLEL,
            pairs("micro_batch", _more),
            falls="energy",
        ),
        _by_pairs(
            "More tensor parallelism costs energy where it is not needed for memory",
            _PARALLEL,
            pairs("tensor_parallel", _more),
            rises="energy",
        ),
        _by_pairs(
            "More GPUs take less time",
            _GH200,
            pairs("data_parallel", _more),
            falls="time",
        ),
        _by_pairs(
            "More GPUs do not save energy by themselves",
            _GH200,
            pairs("data_parallel", _more),
            rises="energy",
        ),
        _by_pairs(
            "Offloading the optimizer saves energy on tightly coupled processors",
            _GH200,
            offloaded,
            falls="energy",
        ),
        _by_pairs(
            "Offloading does not lower power: it raises it by shortening stalls",
            _GH200,
            offloaded,
            rises="power",
        ),
        _by_pairs(
            "Asynchronous optimizer offloading uses less energy than synchronous",
            _GH200,
            pairs("optimizer_offload", _to(("cpu",), ("async",))),
            falls="energy",
        ),
        _by_pairs(
            "Asynchronous activation offloading uses less energy than synchronous",
            _GH200,
            pairs("activation_offload", _to(("sync",), ("async",))),
            falls="energy",
        ),
        _by_pairs(
            "Activation checkpointing saves energy",
            _GH200,
            pairs("activation_checkpointing", lambda a, b: a == "none" and b != "none"),
            falls="energy",
        ),
        _by_pairs(
            "A higher degree of sequence parallelism costs energy",
            _GH200,
            pairs("sequence_parallel", _more),
            rises="energy",
        ),
    )
