"""Names of the benchmark's samplers: ours, and Optuna's own."""

from __future__ import annotations

from collections.abc import Callable

import optuna
from optuna.samplers import BaseSampler

#: This project's planner, `tuner.search.candidate_planner.CandidatePlanner`.
OURS = "joulefront"
#: Optuna's samplers by name, made from a seed.
STOCK: dict[str, Callable[[int], BaseSampler]] = {
    # Optuna 5 keeps TPE independent with several objectives unless multivariate is set.
    "tpe": lambda seed: optuna.samplers.TPESampler(seed=seed, multivariate=True),
    "nsgaii": lambda seed: optuna.samplers.NSGAIISampler(seed=seed, population_size=10),
    "random": lambda seed: optuna.samplers.RandomSampler(seed=seed),
}
