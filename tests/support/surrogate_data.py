"""Made-up candidates, figures and priors for tests of the surrogates."""

from __future__ import annotations

import numpy as np

from tuner.models.prior import Prediction
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.space import Candidates

CLOCKS = range(600, 1401, 100)


CANDIDATES = Candidates.from_configurations(
    Configuration.of(data_parallel=d, micro_batch=b, clock_MHz=c)
    for d in (1, 2, 4, 8)
    for b in (1, 2, 4)
    for c in CLOCKS
)


def truth(configuration: Configuration) -> tuple[float, float]:
    """(seconds, watts) of a made-up machine."""
    d, b = configuration.data_parallel, configuration.micro_batch
    f = float(configuration.get("clock_MHz") or 0) / 1400  # type: ignore[arg-type]
    return 8 / d**0.8 * (0.3 + 0.7 / f) * (1 + 0.5 / b), d * (80 + 250 * f**2.5)


def figures(configurations: list[Configuration]) -> tuple[np.ndarray, np.ndarray]:
    """Return made-up step times in s and powers in W of the configurations."""
    t, p = np.array([truth(c) for c in configurations]).reshape(-1, 2).T
    return t, p


class GoodPrior:
    """Right up to a factor of three in time and a half in power."""

    def predict(self, configurations: list[Configuration]) -> Prediction:
        t, p = figures(configurations)
        return Prediction(3 * t, 0.5 * p, t)


class BadPrior:
    """Upside down."""

    def predict(self, configurations: list[Configuration]) -> Prediction:
        t, p = figures(configurations)
        return Prediction(1 / t**2, 1e4 / p**2, t)


def picked(n: int, seed: int = 0) -> list[Configuration]:
    """Draw configurations without replacement."""
    rows = np.random.default_rng(seed).choice(len(CANDIDATES), n, replace=False)
    return [CANDIDATES.configurations[i] for i in rows]
