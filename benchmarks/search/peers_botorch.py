"""BoTorch's qLogNEHVI with the launch as its batch and its predicted joules as its cost.

One Gaussian process each for log energy and log time on the candidates' features. A launch is worth
the joint noisy expected hypervolume improvement of settings spread over its live range, over the
joules that the model predicts for sweeping it (log acquisition minus log cost: Snoek, Larochelle &
Adams 2012, "expected improvement per second"). BoTorch and PyTorch are imported only here.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.search.ask_tell import level_order, peer
from benchmarks.search.peers import Sweep
from tuner.models.surrogate.features import FeatureMap
from tuner.pareto import reference_point
from tuner.problem.problem import ProbeCost
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.search_spaces.space import Candidates

#: Launches drawn at random before the models choose.
START = 2
#: Settings of a launch that are scored jointly: the cost of the acquisition grows as 2**SCORED.
SCORED = 4
#: Draws of the acquisition, and launches that are scored, drawn at random where there are more.
DRAWS, LAUNCHES = 64, 256


def _missing() -> str:
    found = importlib.util.find_spec("botorch") is not None
    return "" if found else "it needs BoTorch; pip install botorch"


@peer("botorch-sweep", missing=_missing)
class BotorchSweep(Sweep):
    """Sweeps the launch of the most expected hypervolume improvement per predicted joule."""

    def __init__(self, candidates: Candidates, cost: ProbeCost, seed: int) -> None:
        super().__init__(candidates, cost, seed)
        self._features = FeatureMap(candidates)

    def choose(self, still_open: Sequence[Configuration]) -> Settings:
        launches: dict[Settings, list[Configuration]] = {}
        for configuration in still_open:
            launches.setdefault(configuration.launch, []).append(configuration)
        names = list(launches)
        if len({c.launch for c in self.measured}) < START or len(names) == 1:
            return names[int(self.draw.integers(len(names)))]
        if len(names) > LAUNCHES:
            names = [names[i] for i in self.draw.choice(len(names), LAUNCHES, replace=False)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return names[self._best([launches[name] for name in names])]

    def _best(self, launches: Sequence[Sequence[Configuration]]) -> int:
        """Return the number of the launch with the most log improvement less log joules."""
        import torch
        from botorch.acquisition.multi_objective.logei import (
            qLogNoisyExpectedHypervolumeImprovement,
        )
        from botorch.fit import fit_gpytorch_mll
        from botorch.models import ModelListGP, SingleTaskGP
        from botorch.models.transforms import Standardize
        from botorch.sampling import SobolQMCNormalSampler
        from gpytorch.mlls import SumMarginalLogLikelihood

        torch.manual_seed(self.seed + len(self.measured))
        x = self._rows(list(self.measured))
        logs = -np.log(list(self.measured.values()))  # BoTorch maximises
        y = torch.as_tensor(logs)
        outputs = (SingleTaskGP(x, y[:, [i]], outcome_transform=Standardize(m=1)) for i in (0, 1))
        model = ModelListGP(*outputs)
        fit_gpytorch_mll(SumMarginalLogLikelihood(model.likelihood, model))
        acquisition = qLogNoisyExpectedHypervolumeImprovement(
            model=model,
            ref_point=(-reference_point(-logs)).tolist(),
            X_baseline=x,
            sampler=SobolQMCNormalSampler(torch.Size([DRAWS]), seed=self.seed),
            prune_baseline=True,
        )
        values = []
        with torch.no_grad():
            for launch in launches:
                ordered = sorted(launch, key=lambda c: level_order(c.live))
                places = np.linspace(0, len(ordered) - 1, min(SCORED, len(ordered))).round()
                spread = [ordered[int(i)] for i in dict.fromkeys(places)]
                mean = model.posterior(self._rows(ordered)).mean.numpy()
                power_W, time_s = np.exp(mean[:, 1] - mean[:, 0]), np.exp(-mean[:, 1])
                joules = self.cost.launch_J(power_W)[0] + self.cost.visit_J(power_W, time_s).sum()
                values.append(float(acquisition(self._rows(spread)[None])) - np.log(joules))
        return int(np.argmax(values))

    def _rows(self, configurations: Sequence[Configuration]) -> Any:
        import torch

        return torch.as_tensor(self._features.transform(configurations))
