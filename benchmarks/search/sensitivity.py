"""Sensitivity of the search to its constants: jackknifed joules at half, as is, and double.

Every number that a module of the search names in capitals, and every number of `SamplerDesign`, is
halved and doubled, one at a time (of integers at least 1). The search then runs on the jackknifed
tables. Printed is the geometric mean of the joules over those of the search as it is, paired by
table, with the standard error over the groups' means. A constant that cannot be told from both its
neighbours (less than two standard errors) may as well be the simplest value between them.

About 9 s a constant and jackknifed table of all thirteen groups of zeus-nsdi23 on one core: with
the default two tables about ten minutes.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import statistics
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.figures import Figure, arguments, publish
from benchmarks.search.jackknife import SPLITS
from benchmarks.search.problems import Problem, load_problem, never_binds, split_of
from benchmarks.search.runner import run
from benchmarks.search.statistics import geometric_mean
from benchmarks.search.truth import truth_of
from tuner.problem.settings import SamplerDesign
from tuner.search.optuna_samplers import OURS
from tuner.workload.table import load_table

__all__ = ["FACTORS", "Constant", "constants", "main", "scaled"]

#: What each constant is multiplied by, beside 1.
FACTORS = (0.5, 2.0)
#: Modules whose constants are those of the search.
MODULES = (
    "tuner.search.sampler",
    "tuner.search.acquisition",
    "tuner.search.live_sweep",
    "tuner.models.surrogate.kernel",
    "tuner.models.surrogate.gaussian_process",
    "tuner.models.surrogate.surrogates",
)
#: Names that number things and measure none.
CODES = {"LAUNCH", "LIVE", "MIXED"}
#: Standard errors from which a difference counts.
CLEAR_SE = 2.0


@dataclass(frozen=True, order=True)
class Constant:
    """One constant.

    Attributes:
        place: the module that defines it, or "SamplerDesign".
        name: as defined there.
    """

    place: str
    name: str

    @property
    def value(self) -> Any:
        """Its value as it is now."""
        if self.place == SamplerDesign.__name__:
            return getattr(SamplerDesign(), self.name)
        return getattr(importlib.import_module(self.place), self.name)


def _is_figure(value: object) -> bool:
    if isinstance(value, tuple):
        return bool(value) and all(_is_figure(one) for one in value)
    if isinstance(value, np.ndarray):
        return bool(np.issubdtype(value.dtype, np.number))
    return isinstance(value, int | float) and not isinstance(value, bool)


def constants() -> list[Constant]:
    """Return the constants of the search, each where it is defined."""
    found = []
    for place in MODULES:
        module = importlib.import_module(place)
        source = Path(str(module.__file__)).read_text(encoding="utf-8")
        for name, value in vars(module).items():
            defined = any(
                not line[:1].isspace() and name in line.split("=")[0].replace(",", " ").split()
                for line in source.splitlines()
                if " = " in line
            )
            if name.isupper() and name not in CODES and defined and _is_figure(value):
                found.append(Constant(place, name))
    design = SamplerDesign()
    found += [
        Constant("SamplerDesign", one.name)
        for one in fields(SamplerDesign)
        if _is_figure(getattr(design, one.name))
    ]
    return found


def scaled(value: Any, factor: float) -> Any:
    """Return a value times a factor; integers stay integers of at least 1."""
    if isinstance(value, tuple):
        return tuple(scaled(one, factor) for one in value)
    if isinstance(value, int):
        return max(1, math.floor(value * factor))
    return value * factor


@contextlib.contextmanager
def changed(constant: Constant, value: Any) -> Iterator[None]:
    """Give a constant another value, wherever it is imported, while the context lasts."""
    before = constant.value
    if constant.place == SamplerDesign.__name__:
        init: Any = SamplerDesign.__init__
        names = [one.name for one in fields(SamplerDesign)]
        defaults = init.__defaults__
        init.__defaults__ = tuple(
            value if name == constant.name else default
            for name, default in zip(names, defaults, strict=True)
        )
        try:
            yield
        finally:
            init.__defaults__ = defaults
        return
    places = [
        module
        for name, module in list(sys.modules.items())
        if name.startswith("tuner.") and vars(module).get(constant.name) is before
    ]
    for module in places:
        setattr(module, constant.name, value)
    try:
        yield
    finally:
        for module in places:
            setattr(module, constant.name, before)


def logs_of(
    change: tuple[Constant, float] | None, problems: Sequence[Problem], most: int
) -> list[float]:
    """Return the log joules of ours on each problem, with one constant changed."""
    with contextlib.ExitStack() as stack:
        if change is not None:
            constant, factor = change
            stack.enter_context(changed(constant, scaled(constant.value, factor)))
        return [
            math.log(run(problem, OURS, problem.jackknife or 0, most=most).kJ)
            for problem in problems
        ]


def compared(
    problems: Sequence[Problem], logs: Sequence[float], base: Sequence[float], split: str
) -> tuple[float, float]:
    """Return the mean log ratio of the joules over a split's groups, and its standard error."""
    by_group: dict[str, list[float]] = {}
    for problem, log, before in zip(problems, logs, base, strict=True):
        if split_of(load_problem(problem).name, problem.group) == split:
            by_group.setdefault(problem.group, []).append(log - before)
    means = [statistics.fmean(each) for each in by_group.values()]
    spread = statistics.stdev(means) / math.sqrt(len(means)) if len(means) > 1 else math.nan
    return statistics.fmean(means), spread


def main(argv: Sequence[str] | None = None) -> None:
    """Print a line for each constant, and publish the figures."""
    parser = arguments("sensitivity of the search to its constants, on jackknifed tables")
    parser.prog = "python -m benchmarks.search.sensitivity"
    add = parser.add_argument
    add("tables", nargs="+", type=Path, metavar="TABLE_DIR", help="folders with table.toml")
    add("--jackknife", type=int, default=2, metavar="N", help="tables of each group (default 2)")
    add("--group", default="", metavar="TEXT", help="only groups whose name holds this")
    add("--only", default="", metavar="TEXT", help="only constants whose name holds this")
    add("--most", type=int, default=400, metavar="N", help="measurements of a run (default 400)")
    add("--jobs", type=int, default=1, metavar="N", help="processes (default 1)")
    options = parser.parse_args(argv)
    problems = [
        Problem(folder, group.name, seed)
        for folder in options.tables
        for group in load_table(folder).groups
        if options.group in group.name and not never_binds(group)
        for seed in range(options.jackknife)
    ]
    chosen = [constant for constant in constants() if options.only in constant.name]
    if not problems or not chosen:
        raise SystemExit("no group or no constant has such a name")
    changes = [(constant, factor) for constant in chosen for factor in FACTORS]
    work = partial(logs_of, problems=problems, most=options.most)
    if options.jobs > 1:
        with ProcessPoolExecutor(options.jobs) as pool:
            base, *others = pool.map(work, [None, *changes])
    else:
        base, *others = map(work, [None, *changes])
    publish(_report(problems, base, dict(zip(changes, others, strict=True))), options.json)


def _report(
    problems: Sequence[Problem],
    base: Sequence[float],
    others: dict[tuple[Constant, float], list[float]],
) -> list[Figure]:
    """Print a line for each constant and split; return the figures."""
    figures = []
    for split in SPLITS:
        rows = [
            log - math.log(truth_of(problem).oracle_kJ)
            for problem, log in zip(problems, base, strict=True)
            if split_of(load_problem(problem).name, problem.group) == split
        ]
        if not rows:
            continue
        as_is = geometric_mean([math.exp(row) for row in rows])
        print(f"\n{split} groups: {as_is:.2f} x the oracle's joules as is; ratios to that at")
        print(f"  {'constant':44} {'value':>16} {'half':>15} {'double':>15}")
        for constant in dict.fromkeys(constant for constant, _ in others):
            text, clear = "", False
            for factor in FACTORS:
                mean, error = compared(problems, others[constant, factor], base, split)
                clear |= abs(mean) > CLEAR_SE * error
                text += f" {math.exp(mean):8.3f} ±{error:.3f}"
                side = "half" if factor < 1 else "double"
                name = f"sensitivity_{constant.name.lower()}_{side}_{split}"
                figures.append(Figure(name, math.exp(mean), "ratio"))
            name = f"{constant.place.removeprefix('tuner.')}.{constant.name}"
            said = "" if clear else "  cannot be told from its neighbours"
            print(f"  {name:44} {constant.value!s:>16}{text}{said}")
    return figures


if __name__ == "__main__":
    main()
