"""Any of scikit-learn's regressors in place of this project's Gaussian process.

`ScikitRegressor` adapts any scikit-learn regressor whose predict returns a standard deviation, or
that averages members. Their spread is then the standard deviation, as in SMAC's random forests
(Hutter, Xu, Hoos & Leyton-Brown 2014, "Algorithm runtime prediction", section 4.3.2).
"""

from __future__ import annotations

import inspect
import warnings
from typing import Any, NamedTuple

import numpy as np
from sklearn.base import clone
from sklearn.preprocessing import StandardScaler
from sklearn.utils.validation import has_fit_parameter

from tuner.models.surrogate.gaussian_process import REFIT_GROWTH
from tuner.search_spaces.errors import InputError

#: Least variance, where all members agree.
LEAST_VARIANCE = 1e-12


class ScikitRegressor:
    """Any scikit-learn regressor with a standard deviation, as the model of one figure.

    It is fitted anew to every change of the data, to standardised targets. Rows are weighted by
    their precision where its fit takes `sample_weight`. Draws at several rows are independent. Its
    methods are those of `GaussianProcess` that a search asks for.

    Args:
        noise: expected standard deviation of the noise, in units of y; a regressor's own estimate
            is part of its spread.
        amplitude: expected standard deviation of y, used with fewer than two rows.
        seed: of every random state in it that is None.
    """

    def __init__(self, estimator: Any, *, noise: float, amplitude: float, seed: int) -> None:
        self._estimator = clone(estimator)
        states = {k: v for k, v in estimator.get_params().items() if k.endswith("random_state")}
        self._estimator.set_params(**{name: seed for name in states if states[name] is None})
        self.noise_, self._amplitude = noise, amplitude
        self._weighted = has_fit_parameter(estimator, "sample_weight")
        self._judged_at = 0
        self._rows = (np.empty((0, 0)), np.empty(0), np.empty(0))
        self._fitted = self._believed = self._fit(*self._rows)
        self._watched = np.empty((0, 0))

    def update(self, x: np.ndarray, y: np.ndarray, variance: np.ndarray) -> bool:
        """Take these rows as the data; True once they have grown by `REFIT_GROWTH`."""
        if not all(map(np.array_equal, (x, y, variance), self._rows)):
            self._rows = (x.copy(), y.copy(), variance.copy())
            self._fitted = self._fit(x, y, variance)
        self._believed = self._fitted
        grown = len(y) >= REFIT_GROWTH * self._judged_at or len(y) < self._judged_at
        if grown and len(y) > 1:
            self._judged_at = len(y)
        return grown and len(y) > 1

    def _fit(self, x: np.ndarray, y: np.ndarray, variance: np.ndarray) -> _Fitted:
        if len(y) < 2:
            return _Fitted(None, float(np.mean(y)) if len(y) else 0.0, self._amplitude)
        scaler = StandardScaler().fit(y[:, None])
        weights = {}
        if self._weighted and variance.any():
            weight = 1 / (self.noise_**2 + variance)
            weights["sample_weight"] = weight / weight.mean()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of convergence: every few rows, and harmless
                target = scaler.transform(y[:, None])[:, 0]
                model = clone(self._estimator).fit(x, target, **weights)
        except Exception as error:
            raise InputError(
                f"the surrogate {type(self._estimator).__name__} cannot be fitted to {len(y)} "
                f"measurements: {' '.join(str(error).split())}"
            ) from error
        return _Fitted(model, float(scaler.mean_[0]), float(scaler.scale_[0]))

    def posterior(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return mean and variance at these rows."""
        return self._believed.posterior(x)

    def mean(self, x: np.ndarray) -> np.ndarray:
        """Return the mean alone."""
        return self.posterior(x)[0]

    def draw(self, x: np.ndarray, normals: np.ndarray) -> np.ndarray:
        """Return independent draws at these rows, (draws, n)."""
        mean, variance = self.posterior(x)
        return np.asarray(mean + normals[:, : len(mean)] * np.sqrt(variance))

    draw_marginal = draw

    def believe(self, x: np.ndarray) -> None:
        """Take these rows as measured at their mean, until the next call or `update`."""
        self._believed = self._fitted
        rows, figures, variance = self._rows
        if len(x) and len(figures) > 1:
            more = (np.vstack([rows, x]), np.append(figures, self.mean(x)))
            self._believed = self._fit(*more, np.append(variance, np.zeros(len(x))))

    def watch(self, x: np.ndarray) -> None:
        """Return the posterior at these rows by `watched` from now on."""
        self._watched = x

    def watched(self) -> tuple[np.ndarray, np.ndarray]:
        """Return mean and variance at the watched rows."""
        return self.posterior(self._watched)


class _Fitted(NamedTuple):
    model: Any  # fitted to (y - centre) / scale; None for the prior N(centre, scale^2)
    centre: float
    scale: float

    def posterior(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if self.model is None or not len(x):
            return np.full(len(x), self.centre), np.full(len(x), self.scale**2)
        mean, std = mean_and_std(self.model, x)
        variance = np.maximum((self.scale * std) ** 2, LEAST_VARIANCE)
        return self.centre + self.scale * mean, variance


def mean_and_std(model: Any, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return a fitted regressor's mean and standard deviation at these rows.

    Its own where its predict returns one. Else those of its members by the law of total variance:
    the variance of their means and, where the members have one, the mean of their variances.

    Raises:
        TypeError: it has neither.
    """
    if _has_std(model):
        mean, std = model.predict(x, return_std=True)
        return np.asarray(mean, dtype=float), np.asarray(std, dtype=float)
    members = getattr(model, "estimators_", None)
    if not isinstance(members, list) or not members:
        raise TypeError("its predict returns no standard deviation, and it averages no members")
    columns = getattr(model, "estimators_features_", [slice(None)] * len(members))
    parts = [
        member.predict(x[:, mine], return_std=True)
        if _has_std(member)
        else (member.predict(x[:, mine]), 0.0)
        for member, mine in zip(members, columns, strict=True)
    ]
    means, variances = [mean for mean, _ in parts], [np.square(std) for _, std in parts]
    return np.mean(means, axis=0), np.sqrt(np.var(means, axis=0) + np.mean(variances, axis=0))


def _has_std(model: Any) -> bool:
    last = model.steps[-1][1] if getattr(model, "steps", None) else model
    return "return_std" in inspect.signature(last.predict).parameters


def check_surrogate(surrogate: Any) -> None:
    """Refuse a regressor that cannot be a surrogate, by fitting it to a few made-up rows."""
    x = np.random.default_rng(0).random((12, 2))
    try:
        model = clone(surrogate).fit(x, x[:, 0] - x[:, 1] ** 2)
        mean, std = mean_and_std(model, x)
        if not (np.isfinite(std).all() and np.allclose(mean, model.predict(x), atol=1e-5)):
            raise ValueError("its prediction is not the mean of its members'")
    except Exception as error:  # whatever a regressor raises, it cannot be used
        raise InputError(
            f"{type(surrogate).__name__} cannot be a surrogate: {' '.join(str(error).split())}; "
            "it must be a scikit-learn regressor whose predict takes return_std=True, or that "
            "averages its estimators_, as a random forest does"
        ) from error
