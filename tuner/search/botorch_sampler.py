"""BoTorch's qLogNEHVI over the candidates, as a peer for comparison.

The search that a user of BoTorch would write: one Gaussian process each for log energy and log time
on the candidates' features, and the open candidate with the most expected hypervolume improvement
under noise (Daulton, Balandat & Bakshy 2021; Ament et al. 2023), with the trials in flight as
pending points. It has no notion of launches and joules, so every point is a launch of its own.
BoTorch and PyTorch are imported only here.
"""

from __future__ import annotations

import importlib.util
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np

from tuner.models.surrogate.features import FeatureMap
from tuner.pareto import reference_point
from tuner.problem.probe_cost import ProbeCost
from tuner.search.planner import ProbePlan, ProbePlanner
from tuner.search_spaces.errors import InputError

if TYPE_CHECKING:
    from optuna.study import Study

    from tuner.search.observations import Observations
    from tuner.search_spaces.space import Candidates

__all__ = ["BotorchSampler"]

#: Number of candidates drawn at random before the models choose, as in Optuna's GPSampler.
START = 10
#: Number of open candidates that are scored, drawn at random: each costs memory.
SCORED = 2048
#: Number of draws of the acquisition.
DRAWS = 64


class BotorchSampler(ProbePlanner):
    """Planner that follows qLogNEHVI, one configuration a probe.

    Args:
        candidates: the valid configurations.
        cost: predicted joules of a probe, which it does not use.
        seed: of every draw.

    Raises:
        InputError: BoTorch is not installed.
    """

    def __init__(
        self, candidates: Candidates, *, cost: ProbeCost | None = None, seed: int = 0
    ) -> None:
        if importlib.util.find_spec("botorch") is None:
            raise InputError('the sampler "botorch" needs BoTorch; pip install botorch')
        super().__init__(candidates, cost=cost, seed=seed)
        self._matrix = FeatureMap(candidates).matrix

    def plan(self, study: Study) -> ProbePlan | None:
        """Plan the next open candidate; None if none is open."""
        with self._lock, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            observations = self._observe(study)
            still_open = np.flatnonzero(~self._closed(observations))
            if not len(still_open):
                return self._enqueue(None)
            measured = len(observations.measured)
            if measured + len(observations.pending) < START or measured < 2:
                candidate = int(self._rng.choice(still_open))
            else:
                candidate = self._improving(observations, still_open)
            return self._enqueue(self._plan_of([candidate], "proposed by BoTorch"))

    def _improving(self, observations: Observations, still_open: np.ndarray) -> int:
        import torch
        from botorch.acquisition.multi_objective.logei import (
            qLogNoisyExpectedHypervolumeImprovement,
        )
        from botorch.fit import fit_gpytorch_mll
        from botorch.models import ModelListGP, SingleTaskGP
        from botorch.models.transforms import Standardize
        from botorch.optim import optimize_acqf_discrete
        from botorch.sampling import SobolQMCNormalSampler
        from gpytorch.mlls import SumMarginalLogLikelihood

        def rows(candidates: Any) -> Any:
            return torch.as_tensor(self._matrix[np.asarray(candidates, dtype=int)])

        measured = observations.measured
        torch.manual_seed(self._seed + len(measured))
        x = rows([m.candidate for m in measured])
        # BoTorch maximises.
        logs = -np.log([[m.step_time_s * m.power_W, m.step_time_s] for m in measured])
        y = torch.as_tensor(logs)
        model = ModelListGP(
            *(
                SingleTaskGP(x, y[:, [i]], outcome_transform=Standardize(m=1))
                for i in range(y.shape[1])
            )
        )
        fit_gpytorch_mll(SumMarginalLogLikelihood(model.likelihood, model))
        acquisition = qLogNoisyExpectedHypervolumeImprovement(
            model=model,
            ref_point=(-reference_point(-logs)).tolist(),
            X_baseline=x,
            sampler=SobolQMCNormalSampler(torch.Size([DRAWS]), seed=self._seed),
            prune_baseline=True,
            X_pending=rows(observations.pending) if observations.pending else None,
        )
        if len(still_open) > SCORED:
            still_open = self._rng.choice(still_open, SCORED, replace=False)
        choices = rows(still_open)
        best, _ = optimize_acqf_discrete(acquisition, q=1, choices=choices, max_batch_size=256)
        return int(still_open[int(((choices - best) ** 2).sum(dim=1).argmin())])
