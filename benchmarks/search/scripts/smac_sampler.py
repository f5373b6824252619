"""SMAC3 as a sampler of the benchmark: ParEGO over a random forest, all knobs ordered.

Runs in an environment with SMAC3 (`benchmarks.search.external` says how it is talked to). SMAC is
told every measurement, also of configurations that it did not propose. A proposal that is not open
is answered by the open configuration with the fewest knobs and levels changed.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import warnings

from ConfigSpace import (
    CategoricalHyperparameter,
    Configuration,
    ConfigurationSpace,
    OrdinalHyperparameter,
)
from smac import HyperparameterOptimizationFacade as Facade
from smac import Scenario
from smac.main.exceptions import ConfigurationSpaceExhaustedException
from smac.multi_objective.parego import ParEGO
from smac.runhistory.dataclasses import TrialInfo, TrialValue

#: Launches that are swept before the forest chooses.
START = 3


def main() -> None:
    """Answer until the input ends."""
    warnings.simplefilter("ignore")
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what SMAC prints is no answer
    problem = json.loads(sys.stdin.readline())
    rows, knobs = problem["configurations"], problem["knobs"]
    space = ConfigurationSpace(seed=problem["seed"])
    for name, levels in knobs.items():
        numbers = all(isinstance(level, (int, float)) for level in levels)
        kind = OrdinalHyperparameter if numbers else CategoricalHyperparameter
        space.add(kind(name, levels))
    with tempfile.TemporaryDirectory() as folder:
        scenario = Scenario(
            space,
            objectives=["energy", "time"],
            n_trials=100_000,
            deterministic=True,
            seed=problem["seed"],
            output_directory=folder,
        )
        smac = Facade(
            scenario,
            lambda config, seed=0: None,
            multi_objective_algorithm=ParEGO(scenario),
            initial_design=Facade.get_initial_design(scenario, n_configs=START),
            logging_level=False,
            overwrite=True,
        )
        for line in sys.stdin:
            message = json.loads(line)
            for i, energy_J, time_s in message["tell"]:
                told = TrialInfo(Configuration(space, values=rows[i]), seed=0)
                smac.tell(told, TrialValue(cost=[energy_J, time_s]))
            try:
                proposed = dict(smac.ask().config)
            except (ConfigurationSpaceExhaustedException, StopIteration):  # most of it is told
                proposed = rows[message["open"][0]]

            def distance(i: int, proposed: dict[str, object] = proposed) -> tuple[int, int]:
                steps = [
                    abs(levels.index(rows[i][name]) - levels.index(proposed[name]))
                    for name, levels in knobs.items()
                ]
                return sum(step > 0 for step in steps), sum(steps)

            answers.write(json.dumps({"ask": min(message["open"], key=distance)}) + "\n")
            answers.flush()


if __name__ == "__main__":
    main()
