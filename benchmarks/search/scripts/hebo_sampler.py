"""HEBO as a sampler of the benchmark: its optimiser for several objectives, `GeneralBO`.

A Gaussian process each for log energy and log time over the levels of the knobs; NSGA-II finds the
front of their lower confidence bounds, and the point of it that is least certain is proposed. A
proposal that is not open is answered by the nearest one that is.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

import numpy as np
import pandas as pd
import torch
from hebo.design_space.design_space import DesignSpace
from hebo.optimizers.general import GeneralBO
from line_protocol import START, Problem, serve

#: Individuals and generations of the search for the acquisition's front. The spaces of the
#: benchmark have a hundred points; HEBO's defaults (100, 200) take 10 times as long.
POPULATION, GENERATIONS = 50, 20


class Hebo:
    """HEBO over the levels of ordered knobs and the values of the others."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        torch.set_num_threads(1)
        torch.manual_seed(problem.seed)
        np.random.seed(problem.seed)
        space = [
            {"name": name, "type": "int", "lb": 0, "ub": len(levels) - 1}
            if problem.ordered(name)
            else {"name": name, "type": "cat", "categories": levels}
            for name, levels in problem.knobs.items()
            if len(levels) > 1
        ]
        self._hebo = GeneralBO(
            DesignSpace().parse(space),
            num_obj=2,
            evo_pop=POPULATION,
            evo_iters=GENERATIONS,
        )
        self._launches = 0
        self._draw = np.random.default_rng(problem.seed)

    def tell(self, number: int, energy_J: float, time_s: float) -> None:
        row = self._problem.configurations[number]
        told = {
            name: levels.index(row[name]) if self._problem.ordered(name) else row[name]
            for name, levels in self._problem.knobs.items()
            if len(levels) > 1
        }
        logs = np.array([[math.log(energy_J), math.log(time_s)]])
        self._hebo.observe_new_data(pd.DataFrame([told]), logs)

    def ask(self, still_open: Sequence[int]) -> int:
        self._launches += 1
        if self._launches <= START:
            return int(self._draw.choice(still_open))
        proposed = self._hebo.suggest(1).iloc[0]
        levels = {
            name: values[0]
            if len(values) == 1
            else values[round(proposed[name])]
            if self._problem.ordered(name)
            else proposed[name]
            for name, values in self._problem.knobs.items()
        }
        return self._problem.nearest(levels, still_open)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    serve(Hebo)
