"""Regressors that surrogates are made of: this project's Gaussian process or scikit-learn's.

`Regressor` is what the surrogates need of the model of one figure.
`tuner.models.surrogate.gaussian_process.GaussianProcess` meets it with joint draws at little cost.
`ScikitRegressor` meets it with any scikit-learn regressor
whose predict returns a standard deviation, or that averages members: then the standard deviation is
the spread of the members' predictions, as in SMAC's random forests (Hutter, Xu, Hoos &
Leyton-Brown 2014, "Algorithm runtime prediction: methods & evaluation", section 4.3.2).
"""

from __future__ import annotations

import inspect
import warnings
from typing import Any, Protocol

import numpy as np
from sklearn.base import clone
from sklearn.model_selection import KFold
from sklearn.preprocessing import StandardScaler
from sklearn.utils.validation import has_fit_parameter

from tuner.models.surrogate.conditioned import draw_normal
from tuner.models.surrogate.gaussian_process import REFIT_GROWTH
from tuner.search_spaces.errors import InputError

__all__ = ["FOLDS", "Regressor", "ScikitRegressor", "mean_and_std"]

#: Folds of the cross-validation of a regressor that has to be refitted for each. With at most this
#: many measurements it leaves out one at a time.
FOLDS = 10
#: Least variance, where all members agree.
LEAST_VARIANCE = 1e-12


class Regressor(Protocol):
    """Model of one figure over rows of features, as the surrogates use it.

    Rows are (n, columns), figures (n,); standard normal draws are (draws, at least n).
    """

    @property
    def noise_(self) -> float:
        """Standard deviation of the noise beside what the rows state."""

    def update(self, x: np.ndarray, y: np.ndarray, variance: np.ndarray) -> bool:
        """Take these rows as the data, zero or more.

        Args:
            variance: each row's own noise variance, beside the fitted one; 0 where unknown.

        Returns:
            True if the model has changed by more than the appended rows.
        """

    def posterior(
        self, x: np.ndarray, *, first: int | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return mean and variance at these rows; `first` allows to use the first rows only."""

    def marginal(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return `posterior`, with the uncertainty of the hyperparameters if the model has it."""

    def mean(self, x: np.ndarray) -> np.ndarray:
        """Return the mean alone."""

    def draw(self, x: np.ndarray, normals: np.ndarray) -> np.ndarray:
        """Return draws at these rows, (draws, n): joint where the model has a covariance."""

    def draw_marginal(self, x: np.ndarray, normals: np.ndarray) -> np.ndarray:
        """Return `draw`, with the uncertainty of the hyperparameters if the model has it."""

    def believe(self, x: np.ndarray) -> None:
        """Take these rows as measured at their mean, until the next call or `update`."""

    def watch(self, x: np.ndarray) -> None:
        """Keep the posterior at these rows at hand from now on."""

    def watched(self) -> tuple[np.ndarray, np.ndarray]:
        """Return mean and variance at the watched rows."""

    def leave_one_out(self) -> tuple[np.ndarray, np.ndarray]:
        """Return mean and variance (noise included) of each datum, predicted from others."""


def mean_and_std(model: Any, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return a fitted regressor's mean and standard deviation at these rows.

    Its own where its predict returns one. Else those of its members by the law of total variance:
    the variance of their means and, where the members have one, the mean of their variances.

    Raises:
        TypeError: it has neither.
    """
    if _takes(model.predict, "return_std"):
        mean, std = model.predict(x, return_std=True)
        return np.asarray(mean, dtype=float), np.asarray(std, dtype=float)
    members = getattr(model, "estimators_", None)
    if not isinstance(members, list) or not members:
        raise TypeError("its predict returns no standard deviation, and it averages no members")
    columns = getattr(model, "estimators_features_", [slice(None)] * len(members))
    means, variances = [], []
    for member, mine in zip(members, columns, strict=True):
        if _takes(member.predict, "return_std"):
            mean, std = member.predict(x[:, mine], return_std=True)
            variances.append(np.asarray(std) ** 2)
        else:
            # As forests do themselves: checking the rows for each tree takes longer than the tree.
            unchecked = _takes(member.predict, "check_input")
            mean = (
                member.predict(x[:, mine].astype(np.float32), check_input=False)
                if unchecked
                else member.predict(x[:, mine])
            )
            variances.append(np.zeros(len(x)))
        means.append(mean)
    variance = np.var(means, axis=0) + np.mean(variances, axis=0)
    return np.mean(means, axis=0), np.sqrt(variance)


def _takes(method: Any, name: str) -> bool:
    """Return True if the method, or the last step of its pipeline, has this parameter."""
    model = getattr(method, "__self__", None)
    steps = getattr(model, "steps", None)
    if steps:
        return _takes(steps[-1][1].predict, name)
    return name in inspect.signature(method).parameters


def _seeded(estimator: Any, seed: int) -> Any:
    """Return an unfitted copy; every random state in it that is None is set to the seed."""
    copy = clone(estimator)
    parameters = copy.get_params()
    states = [name for name in parameters if name.split("__")[-1] == "random_state"]
    return copy.set_params(**{name: seed for name in states if parameters[name] is None})


class ScikitRegressor:
    """Any scikit-learn regressor with a standard deviation, as the model of one figure.

    The targets are standardised for it. Rows are weighted by their precision where its fit takes
    `sample_weight`. It is fitted anew to every change of the data.

    Args:
        estimator: the regressor; copies of it are fitted.
        noise: expected standard deviation of the noise, in units of y.
        amplitude: expected standard deviation of y, used with fewer than two rows.
        seed: of every random state in it that is None, and of the folds.
    """

    def __init__(self, estimator: Any, *, noise: float, amplitude: float, seed: int) -> None:
        self._estimator = _seeded(estimator, seed)
        self._noise, self._amplitude, self._seed = noise, amplitude, seed
        self._weighted = has_fit_parameter(estimator, "sample_weight")
        self._judged_at = 0
        self._x = np.empty((0, 0))
        self._y = self._variance = np.empty(0)
        self._data_model: _Fitted | None = None
        self._model: _Fitted | None = None  # with what is believed
        self._watched = np.empty((0, 0))
        self._watched_posterior: tuple[np.ndarray, np.ndarray] | None = None

    @property
    def fitted(self) -> Any:
        """Regressor fitted to the data; None with fewer than two rows."""
        return None if self._data_model is None else self._data_model.model

    @property
    def noise_(self) -> float:
        """Expected noise: a regressor's own estimate, if any, is part of its spread."""
        return self._noise

    def update(self, x: np.ndarray, y: np.ndarray, variance: np.ndarray) -> bool:
        """See `Regressor.update`; True again once the rows have grown by `REFIT_GROWTH`."""
        old = (self._x, self._y, self._variance)
        if not all(map(np.array_equal, (x, y, variance), old)):
            self._x, self._y, self._variance = x.copy(), y.copy(), variance.copy()
            self._data_model = self._trained(x, y, variance)
        self._use(self._data_model)
        grown = len(y) >= REFIT_GROWTH * self._judged_at or len(y) < self._judged_at
        if grown and len(y) > 1:
            self._judged_at = len(y)
            return True
        return False

    def _use(self, model: _Fitted | None) -> None:
        if model is not self._model:
            self._model, self._watched_posterior = model, None

    def _trained(self, x: np.ndarray, y: np.ndarray, variance: np.ndarray) -> _Fitted | None:
        """Fit a copy to these rows; None with fewer than two.

        Raises:
            InputError: it cannot be fitted to them.
        """
        if len(y) < 2:
            return None
        scaler = StandardScaler().fit(y[:, None])
        more = {}
        if self._weighted and variance.any():
            weight = 1 / (self._noise**2 + variance)
            more["sample_weight"] = weight / weight.mean()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of convergence: every few rows, and harmless
                model = clone(self._estimator).fit(x, scaler.transform(y[:, None])[:, 0], **more)
        except Exception as error:
            raise InputError(
                f"the surrogate {type(self._estimator).__name__} cannot be fitted to {len(y)} "
                f"measurements: {' '.join(str(error).split())}"
            ) from error
        return _Fitted(model, float(scaler.mean_[0]), float(scaler.scale_[0]))

    def posterior(
        self, x: np.ndarray, *, first: int | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """See `Regressor.posterior`; all rows are used."""
        if self._model is not None:
            return self._model.posterior(x)
        mean = float(np.mean(self._y)) if len(self._y) else 0.0
        return np.full(len(x), mean), np.full(len(x), self._amplitude**2)

    def marginal(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """See `Regressor.marginal`; the hyperparameters are certain."""
        return self.posterior(x)

    def mean(self, x: np.ndarray) -> np.ndarray:
        """See `Regressor.mean`."""
        return self.posterior(x)[0]

    def draw(self, x: np.ndarray, normals: np.ndarray) -> np.ndarray:
        """See `Regressor.draw`; independent for each row unless predict returns a covariance."""
        if self._model is not None and self._model.has_covariance:
            return draw_normal(*self._model.joint(x), normals)
        return _draw_apart(*self.posterior(x), normals)

    def draw_marginal(self, x: np.ndarray, normals: np.ndarray) -> np.ndarray:
        """See `Regressor.draw_marginal`; the hyperparameters are certain."""
        return self.draw(x, normals)

    def believe(self, x: np.ndarray) -> None:
        """See `Regressor.believe`: the regressor is fitted anew with these rows."""
        self._use(self._data_model)
        if len(x) and self._data_model is not None:
            rows, figures = np.vstack([self._x, x]), np.append(self._y, self.mean(x))
            stated = np.append(self._variance, np.zeros(len(x)))
            self._use(self._trained(rows, figures, stated))

    def watch(self, x: np.ndarray) -> None:
        """See `Regressor.watch`."""
        self._watched, self._watched_posterior = x, None

    def watched(self) -> tuple[np.ndarray, np.ndarray]:
        """See `Regressor.watched`."""
        if self._watched_posterior is None:
            self._watched_posterior = self.posterior(self._watched)
        return self._watched_posterior

    def leave_one_out(self) -> tuple[np.ndarray, np.ndarray]:
        """See `Regressor.leave_one_out`: by refits on `FOLDS` folds, at most one a datum."""
        n = len(self._y)
        mean, variance = np.empty(n), np.empty(n)
        folds = KFold(min(n, FOLDS), shuffle=True, random_state=self._seed)
        for rest, left in folds.split(self._x):
            model = self._trained(self._x[rest], self._y[rest], self._variance[rest])
            if model is None:
                mean[left], variance[left] = self._y[rest].mean(), self._amplitude**2
            else:
                mean[left], variance[left] = model.posterior(self._x[left])
        return mean, variance + self._noise**2 + self._variance


def _draw_apart(mean: np.ndarray, variance: np.ndarray, normals: np.ndarray) -> np.ndarray:
    """Return independent normal draws, (draws, n)."""
    return np.asarray(mean + normals[:, : len(mean)] * np.sqrt(variance))


class _Fitted:
    """A fitted regressor and the scale of its targets.

    Args:
        model: fitted to (y - centre) / scale.
        centre, scale: in units of y.
    """

    def __init__(self, model: Any, centre: float, scale: float) -> None:
        self.model, self._centre, self._scale = model, centre, scale

    def posterior(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if not len(x):
            return np.empty(0), np.empty(0)
        mean, std = mean_and_std(self.model, x)
        variance = np.maximum((self._scale * std) ** 2, LEAST_VARIANCE)
        return self._centre + self._scale * mean, variance

    @property
    def has_covariance(self) -> bool:
        return _takes(self.model.predict, "return_cov")

    def joint(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        mean, covariance = self.model.predict(x, return_cov=True)
        return self._centre + self._scale * mean, self._scale**2 * covariance
