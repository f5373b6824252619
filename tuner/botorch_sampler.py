"""BoTorch's qLogNEHVI over the candidates, as a peer to be compared with.

What a user of BoTorch would write: one Gaussian process each for log energy and log time on the
candidates' features, and the open candidate with the most expected hypervolume improvement under
noise (Daulton, Balandat & Bakshy 2021; Ament et al. 2023), with what is in flight as pending. It
knows nothing of launches and joules, so every point is a launch of its own. BoTorch and PyTorch are
imported only here.
"""

from __future__ import annotations

import importlib.util
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np

from search_spaces.errors import InputError
from tuner.acquisition import ProbeCost
from tuner.pareto import reference_point
from tuner.sampler import CandidateSampler, ProbePlan

if TYPE_CHECKING:
    from optuna.study import Study

    from search_spaces.space import Candidates
    from tuner.told import Seen

__all__ = ["BotorchSampler"]

#: Candidates drawn at random before the processes choose, as Optuna's GPSampler draws them.
START = 10
#: Open candidates that are scored at most, drawn at random: the acquisition costs memory for each.
SCORED = 2048
#: Draws of the acquisition.
DRAWS = 64


class BotorchSampler(CandidateSampler):
    """Plans what qLogNEHVI asks for, one configuration a probe.

    Args:
        candidates: the valid configurations.
        steps: optimizer steps to the solution.
        cost: what a probe costs; it does not look at it.
        seed: of every draw.

    Raises:
        InputError: BoTorch is not installed.
    """

    def __init__(
        self,
        candidates: Candidates,
        *,
        steps: int = 1,
        cost: ProbeCost | None = None,
        seed: int = 0,
    ) -> None:
        if importlib.util.find_spec("botorch") is None:
            raise InputError('the sampler "botorch" needs BoTorch; pip install botorch')
        super().__init__(candidates, steps=steps, cost=cost, seed=seed)

    def better_to_wait(self, study: Study) -> bool:
        """Never: what is in flight is conditioned on."""
        return False

    def plan(self, study: Study) -> ProbePlan | None:
        """The next open candidate; None when none is open."""
        with self._lock, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            seen = self._read(study)
            still_open = np.flatnonzero(~self._closed(seen))
            if not len(still_open):
                return None
            if len(seen.told) + len(seen.pending) < START or len(seen.told) < 2:
                candidate = int(self._rng.choice(still_open))
            else:
                candidate = self._improving(seen, still_open)
            plan = self._plan_of([candidate], "asked by BoTorch")
            self._queue.clear()
            self._queue.extend(plan.configurations)
            return plan

    def _improving(self, seen: Seen, still_open: np.ndarray) -> int:
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
            return torch.as_tensor(self.features.matrix[np.asarray(candidates, dtype=int)])

        torch.manual_seed(self._seed + len(seen.told))
        x = rows([told.candidate for told in seen.told])
        # Larger is better to BoTorch.
        logs = -np.log([[t.step_time_s * t.power_W, t.step_time_s] for t in seen.told])
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
            X_pending=rows(seen.pending) if seen.pending else None,
        )
        if len(still_open) > SCORED:
            still_open = self._rng.choice(still_open, SCORED, replace=False)
        choices = rows(still_open)
        best, _ = optimize_acqf_discrete(acquisition, q=1, choices=choices, max_batch_size=256)
        return int(still_open[int(((choices - best) ** 2).sum(dim=1).argmin())])
