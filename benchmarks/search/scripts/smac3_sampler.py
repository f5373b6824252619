"""SMAC3 as a sampler of the benchmark: ParEGO over a random forest, all knobs ordered.

SMAC is told every measurement, also of configurations that it did not propose. A proposal that is
not open is answered by the nearest one that is.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Sequence

from ConfigSpace import (
    CategoricalHyperparameter,
    Configuration,
    ConfigurationSpace,
    OrdinalHyperparameter,
)
from line_protocol import START, Problem, serve
from smac import HyperparameterOptimizationFacade as Facade
from smac import Scenario
from smac.main.exceptions import ConfigurationSpaceExhaustedException
from smac.multi_objective.parego import ParEGO
from smac.runhistory.dataclasses import TrialInfo, TrialValue


class Smac:
    """SMAC's hyperparameter facade with two objectives."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._space = ConfigurationSpace(seed=problem.seed)
        for name, levels in problem.knobs.items():
            kind = OrdinalHyperparameter if problem.ordered(name) else CategoricalHyperparameter
            self._space.add(kind(name, levels))
        self._folder = tempfile.TemporaryDirectory()
        scenario = Scenario(
            self._space,
            objectives=["energy", "time"],
            n_trials=100_000,
            deterministic=True,
            seed=problem.seed,
            output_directory=self._folder.name,
        )
        self._smac = Facade(
            scenario,
            lambda config, seed=0: None,
            multi_objective_algorithm=ParEGO(scenario),
            initial_design=Facade.get_initial_design(scenario, n_configs=START),
            logging_level=False,
            overwrite=True,
        )

    def tell(self, number: int, energy_J: float, time_s: float) -> None:
        values = self._problem.configurations[number]
        told = TrialInfo(Configuration(self._space, values=values), seed=0)
        self._smac.tell(told, TrialValue(cost=[energy_J, time_s]))

    def ask(self, still_open: Sequence[int]) -> int:
        try:
            proposed = dict(self._smac.ask().config)
        except (ConfigurationSpaceExhaustedException, StopIteration):  # most of it is told
            return still_open[0]
        return self._problem.nearest(proposed, still_open)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    serve(Smac)
