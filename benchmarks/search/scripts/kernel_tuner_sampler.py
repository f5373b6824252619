"""Kernel Tuner's search strategies as samplers of the benchmark; the argument names the strategy.

A strategy calls what it optimises, so it runs in a thread of its own: what it asks for and what is
not measured yet is the next proposal, and it waits for the answer. Kernel Tuner answers from its
cache what it has measured before; here that is everything that was told. A strategy for several
objectives gets energy and time. Of a strategy for one, three runs take turns, for energy, for
energy times time, and for time: they share what is measured.
"""

from __future__ import annotations

import itertools
import queue
import random
import sys
import threading
import warnings
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from kernel_tuner import util
from kernel_tuner.interface import Options, strategy_map
from kernel_tuner.runners.runner import Runner
from kernel_tuner.searchspace import Searchspace
from line_protocol import Problem, serve

#: The strategy that takes several objectives.
SEVERAL = ("nsga2",)
#: Strategies that begin with a sample, of 20 configurations by default: most of a small space.
SAMPLED = ("nsga2", "bayes_opt")
#: Answers from what is measured after which a run has nothing new to ask for.
MOST_CACHED = 20_000


class Run(Runner):
    """A strategy in a thread, and what it waits for.

    Args:
        problem: the space; a combination of levels that is not in it is invalid.
        strategy: its name.
        objectives: of "energy", "time" and "product".
        measured: figures by number, shared with the caller.
    """

    def __init__(
        self,
        problem: Problem,
        strategy: str,
        objectives: list[str],
        measured: dict[int, dict[str, float]],
    ) -> None:
        super().__init__()
        self.dev = SimpleNamespace(max_threads=2**31)  # asked for by bayes_opt; no limit
        self._measured, self._cached = measured, 0
        self._asked: queue.Queue[int | None] = queue.Queue()
        self._answered: queue.Queue[bool] = queue.Queue()
        names = list(problem.knobs)
        rows = [tuple(row[name] for name in names) for row in problem.configurations]
        self._names, self._numbers = names, {row: i for i, row in enumerate(rows)}
        valid = {tuple(map(str, row)) for row in rows}
        # By position: names of knobs need not be valid Python.
        space = Searchspace(
            {f"k{i}": list(problem.knobs[name]) for i, name in enumerate(names)},
            [lambda **each: tuple(map(str, each.values())) in valid],
            max_threads=2**31,
            framework="bruteforce",
        )
        sample = {"popsize": max(4, min(20, len(rows) // 3))} if strategy in SAMPLED else {}
        options = Options(
            strategy=strategy,
            strategy_options=Options({"max_fevals": len(rows), **sample}),
            objective=objectives,
            objective_higher_is_better=[False] * len(objectives),
            tune_params=space.tune_params,
            restrictions=space.restrictions,
            budget=util.TuningBudget(None, 10**9),
            simulation_mode=False,
            verbose=False,
            seed=problem.seed,
            metrics=None,
            max_fevals=len(rows),
            cache={},
        )
        self._thread = threading.Thread(
            target=self._tune, args=(strategy_map[strategy], space, options), daemon=True
        )
        self._started = False

    def next(self) -> int | None:
        """Return the number of the configuration that is asked for next; None at the end."""
        if not self._started:
            self._started = True
            self._thread.start()
        else:
            self._answered.put(True)
        return self._asked.get()

    def _tune(self, strategy: Any, space: Searchspace, options: Options) -> None:
        try:
            strategy.tune(space, self, options)
        except Exception as error:
            print(f"{options.strategy} ended: {error!r}", file=sys.stderr)
        while True:
            self._asked.put(None)
            self._answered.get()

    def run(self, parameter_space: Any, tuning_options: Options) -> list[dict[str, Any]]:
        return [self._one(tuple(element)) for element in parameter_space]

    def _one(self, element: tuple[Any, ...]) -> dict[str, Any]:
        params: dict[str, Any] = {f"k{i}": value for i, value in enumerate(element)}
        number = self._numbers.get(element)
        if number is None:
            return {**params, "__error__": util.InvalidConfig()}
        if number in self._measured:
            self._cached += 1
            if self._cached > MOST_CACHED:
                raise util.StopCriterionReached("nothing new is asked for")
        else:
            self._cached = 0
            self._asked.put(number)
            self._answered.get()
            if number not in self._measured:  # its measurement failed
                return {**params, "__error__": util.InvalidConfig()}
        return {**params, **self._measured[number]}

    def get_device_info(self) -> None:
        return None

    def get_environment(self, tuning_options: Options) -> dict[str, Any]:
        return {}


class KernelTuner:
    """Runs of one strategy that take turns."""

    def __init__(self, problem: Problem, strategy: str) -> None:
        random.seed(problem.seed)
        np.random.seed(problem.seed)
        self._measured: dict[int, dict[str, float]] = {}
        several = (
            [["energy", "time"]] if strategy in SEVERAL else [["energy"], ["product"], ["time"]]
        )
        self._runs = [Run(problem, strategy, each, self._measured) for each in several]
        self._turns = itertools.cycle(self._runs)
        self._draw = random.Random(problem.seed)

    def tell(self, number: int, energy_J: float, time_s: float) -> None:
        product = energy_J * time_s
        self._measured[number] = {"energy": energy_J, "time": time_s, "product": product}

    def ask(self, still_open: Sequence[int]) -> int:
        for _ in self._runs:
            number = next(self._turns).next()
            if number is not None and number in still_open:
                return number
        return self._draw.choice(still_open)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    serve(lambda problem: KernelTuner(problem, sys.argv[1]))
