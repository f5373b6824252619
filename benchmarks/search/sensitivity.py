"""Sensitivity of the search to its constants: jackknifed joules at half, as is, and double.

Every number that a module of the search names in capitals, each number of a tuple by itself, and
every number of `SamplerDesign` is halved and doubled, one at a time (of integers at least 1). The
search then runs on the jackknifed tables. Printed is the geometric mean of the joules over those of
the search as it is, paired by table, with the standard error over the groups' means. A constant
that cannot be told from either neighbour (less than two standard errors) may as well be the
simplest value between them, as far as these tables can tell: with few tables the standard errors
are large.

With the default two tables of each group of zeus-nsdi23 about ten minutes on one core.
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
from benchmarks.search.names import OURS
from benchmarks.search.problems import SPLITS, Problem, load_problem, never_binds, split_of
from benchmarks.search.runner import run
from benchmarks.search.statistics import geometric_mean
from benchmarks.search.truth import truth_of
from tuner.problem.settings import SamplerDesign
from tuner.workload.table import load_table

#: What each constant is multiplied by, beside 1.
FACTORS = (0.5, 2.0)
#: Modules whose constants are those of the search.
MODULES = (
    "tuner.search.candidate_planner",
    "tuner.search.acquisition",
    "tuner.search.log_regret",
    "tuner.models.surrogate.kernel",
    "tuner.models.surrogate.gaussian_process",
    "tuner.models.surrogate.surrogates",
)
#: Names that number things and measure none.
CODES = {"LAUNCH", "LIVE", "MIXED"}
#: Standard errors from which a difference counts.
CLEAR_SE = 2.0


@dataclass(frozen=True)
class Constant:
    """One constant.

    Attributes:
        place: the module that defines it, or "SamplerDesign".
        name: as defined there.
        item: which number of a tuple or an array; None for a number.
    """

    place: str
    name: str
    item: int | None = None

    @property
    def whole(self) -> Any:
        """The number, tuple or array as it is now."""
        if self.place == SamplerDesign.__name__:
            return getattr(SamplerDesign(), self.name)
        return getattr(importlib.import_module(self.place), self.name)

    @property
    def value(self) -> Any:
        """The number as it is now."""
        return self.whole if self.item is None else self.whole[self.item]

    @property
    def title(self) -> str:
        """Its name, with the place and the item."""
        item = "" if self.item is None else f"[{self.item}]"
        return f"{self.place.removeprefix('tuner.')}.{self.name}{item}"

    def scaled(self, factor: float) -> Any:
        """Return the number, tuple or array with this number times a factor."""
        value = scaled(self.value, factor)
        if self.item is None:
            return value
        if isinstance(self.whole, np.ndarray):
            changed = self.whole.copy()
            changed[self.item] = value
            return changed
        return (*self.whole[: self.item], value, *self.whole[self.item + 1 :])


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
                items = range(len(value)) if isinstance(value, tuple | np.ndarray) else [None]
                found += [Constant(place, name, item) for item in items]
    design = SamplerDesign()
    found += [
        Constant("SamplerDesign", one.name)
        for one in fields(SamplerDesign)
        if _is_figure(getattr(design, one.name))
    ]
    return found


def scaled(value: Any, factor: float) -> Any:
    """Return a number times a factor; integers stay integers of at least 1."""
    if isinstance(value, int):
        return max(1, math.floor(value * factor))
    return value * factor


@contextlib.contextmanager
def changed(constant: Constant, value: Any) -> Iterator[None]:
    """Give a constant another value, wherever it is imported, while the context lasts."""
    before = constant.whole
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
            stack.enter_context(changed(constant, constant.scaled(factor)))
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
        print(f"  {'constant':48} {'value':>8} {'half':>15} {'double':>15}")
        for constant in dict.fromkeys(constant for constant, _ in others):
            text, clear, any_effect = "", False, False
            for factor in FACTORS:
                mean, error = compared(problems, others[constant, factor], base, split)
                clear |= abs(mean) > CLEAR_SE * error
                any_effect |= others[constant, factor] != list(base)
                text += f" {math.exp(mean):8.3f} ±{error:.3f}"
                side = "half" if factor < 1 else "double"
                item = "" if constant.item is None else f"_{constant.item}"
                name = f"sensitivity_{constant.name.lower()}{item}_{side}_{split}"
                figures.append(Figure(name, math.exp(mean), "ratio"))
            said = "" if clear else "  cannot be told from its neighbours"
            said = said if any_effect else "  has no effect on these tables"
            print(f"  {constant.title:48} {constant.value:>8.4g}{text}{said}")
    return figures


if __name__ == "__main__":
    main()
