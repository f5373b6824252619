"""The surrogates' regressors: scikit-learn's contract for ours, and ours for scikit-learn's."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.datasets import make_regression
from sklearn.ensemble import (
    AdaBoostRegressor,
    BaggingRegressor,
    ExtraTreesRegressor,
    GradientBoostingRegressor,
    RandomForestRegressor,
)
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import ConstantKernel, Matern, WhiteKernel
from sklearn.linear_model import BayesianRidge, LinearRegression
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MinMaxScaler, PolynomialFeatures, StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from tuner.api import load_result
from tuner.models.surrogate.features import FeatureMap
from tuner.models.surrogate.gaussian_process import GaussianProcess
from tuner.models.surrogate.kernel import LAUNCH, LIVE
from tuner.models.surrogate.regressors import (
    ScikitRegressor,
    check_surrogate,
    mean_and_std,
)
from tuner.models.surrogate.surrogates import Surrogates
from tuner.search_spaces.errors import InputError
from tuner.testing.studies import TOML, run_replay, write_table
from tuner.testing.surrogate_data import CANDIDATES, GoodPrior, figures, picked

KERNEL = ConstantKernel() * Matern(nu=2.5) + WhiteKernel(0.01)

#: Every regressor that the contract holds for. Ours is there twice: with its own state, and as any
#: other scikit-learn regressor.
REGRESSORS: dict[str, Callable[[], Any]] = {
    "ours": lambda: None,
    "ours as scikit-learn's": lambda: GaussianProcess(noise=0.02),
    "GaussianProcessRegressor": lambda: GaussianProcessRegressor(KERNEL),
    "BayesianRidge": BayesianRidge,
    "RandomForestRegressor": lambda: RandomForestRegressor(30),
    "ExtraTreesRegressor": lambda: ExtraTreesRegressor(30),
    "BaggingRegressor of BayesianRidge": lambda: BaggingRegressor(BayesianRidge(), max_features=2),
    "Pipeline": lambda: make_pipeline(PolynomialFeatures(2), BayesianRidge()),
}


@parametrize_with_checks([GaussianProcess()])
def test_ours_is_a_scikit_learn_regressor(estimator, check) -> None:
    check(estimator)


def test_ours_works_in_scikit_learns_tools() -> None:
    x, y = make_regression(30, 3, noise=1.0, random_state=0)
    x, y = MinMaxScaler().fit_transform(x), StandardScaler().fit_transform(y[:, None])[:, 0]
    assert cross_val_score(GaussianProcess(), x, y, cv=3).min() > 0.95
    search = GridSearchCV(GaussianProcess(), {"kinds": [None, [0, 1, 1]]}, cv=3)
    assert search.fit(x, y).best_score_ > 0.95


def test_ours_fits_from_the_start_every_time_and_update_does_not() -> None:
    rng = np.random.default_rng(0)
    x = rng.random((30, 2))
    y = np.sin(3 * x[:, 0]) + x[:, 1]
    fresh = GaussianProcess(noise=0.01).fit(x, y)
    again = GaussianProcess(noise=0.01).fit(x[:20], -y[:20]).fit(x, y)
    assert (fresh.predict(x) == again.predict(x)).all()
    grown = GaussianProcess(noise=0.01)
    assert grown.update(x[:28], y[:28], np.zeros(28))
    assert not grown.update(x, y, np.zeros(30))  # two rows are appended: nothing is fitted anew
    np.testing.assert_allclose(grown.predict(x), fresh.predict(x), atol=0.01)


def test_ours_predicts_deviation_covariance_and_draws_that_agree() -> None:
    rng = np.random.default_rng(1)
    x, new = rng.random((15, 3)), rng.random((6, 3))
    model = GaussianProcess(noise=0.05, kinds=[LAUNCH, LAUNCH, LIVE]).fit(x, x.sum(axis=1))
    mean, std = model.predict(new, return_std=True)
    same, covariance = model.joint(new)
    np.testing.assert_allclose(mean, same, atol=1e-9)
    np.testing.assert_allclose(std, np.sqrt(np.diag(covariance)), atol=1e-6)
    draws = model.draw(new, rng.standard_normal((4000, 6))).T
    assert draws.shape == (6, 4000)
    np.testing.assert_allclose(draws.std(axis=1), std, rtol=0.1)
    np.testing.assert_allclose(np.cov(draws), covariance, atol=0.1 * covariance.max())
    with pytest.raises(ValueError, match="kinds has 3 entries; X has 2 columns"):
        model.fit(x[:, :2], x[:, 0])


def test_a_row_that_states_its_noise_counts_less_in_ours() -> None:
    x = np.linspace(0, 1, 12)[:, None]
    y = np.sin(4 * x[:, 0])
    y[5] += 1.0
    variance = np.zeros(12)
    plain = GaussianProcess(noise=0.01).fit(x, y, variance).predict(x[[5]])
    variance[5] = 1.0
    told = GaussianProcess(noise=0.01).fit(x, y, variance).predict(x[[5]])
    assert abs(told[0] - np.sin(4 * x[5, 0])) < 0.1 < abs(plain[0] - np.sin(4 * x[5, 0]))


# -- the contract of the surrogates' regressors ----------------------------------------------------


@pytest.fixture(params=REGRESSORS)
def make(request) -> Callable[[], Any]:
    def build() -> Any:
        regressor = REGRESSORS[request.param]()
        if regressor is None:
            return GaussianProcess(noise=0.02, amplitude=0.5, kinds=[LAUNCH, LAUNCH, LIVE])
        return ScikitRegressor(regressor, noise=0.02, amplitude=0.5, seed=0)

    return build


def rows(n: int = 24) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    x = np.random.default_rng(3).random((n, 3))
    return x, 5.0 + x[:, 0] - 0.5 * x[:, 1] + 0.2 * x[:, 2], np.zeros(n)


NEW = np.random.default_rng(4).random((9, 3))


def test_contract_the_prior_and_few_rows(make) -> None:
    regressor = make()
    for n in (0, 1, 2, 3):
        x, y, variance = rows(n)
        regressor.update(x, y, variance)
        mean, variance = regressor.posterior(NEW)
        assert mean.shape == variance.shape == (9,)
        assert np.isfinite(mean).all()
        assert (variance > 0).all()
        assert np.isfinite(variance).all()
    regressor.update(*rows(0))
    assert np.sqrt(regressor.posterior(NEW)[1]).min() >= 0.5


def test_contract_it_learns_and_the_mean_is_the_posteriors(make) -> None:
    regressor = make()
    x, y, variance = rows()
    assert regressor.update(x, y, variance)
    mean, _ = regressor.posterior(NEW)
    truth = 5.0 + NEW[:, 0] - 0.5 * NEW[:, 1] + 0.2 * NEW[:, 2]
    assert np.abs(mean - truth).mean() < 0.5 * np.abs(truth - truth.mean()).mean()
    np.testing.assert_allclose(regressor.mean(NEW), mean, atol=1e-6)
    if isinstance(regressor, GaussianProcess):
        wide = regressor.marginal(NEW)
        assert np.abs(wide[0] - truth).mean() < np.abs(truth - truth.mean()).mean()
        assert (wide[1] > 0).all()
    assert regressor.posterior(np.empty((0, 3)))[0].shape == (0,)
    assert regressor.noise_ > 0


def test_contract_the_same_rows_give_the_same_answer(make) -> None:
    answers = []
    for _ in range(2):
        regressor = make()
        regressor.update(*rows())
        answers.append(regressor.posterior(NEW))
    assert (answers[0][0] == answers[1][0]).all()
    assert (answers[0][1] == answers[1][1]).all()


def test_contract_growth_is_told_and_a_repeat_changes_nothing(make) -> None:
    regressor = make()
    x, y, variance = rows()
    assert regressor.update(x[:20], y[:20], variance[:20])
    before = regressor.posterior(NEW)
    assert not regressor.update(x[:20], y[:20], variance[:20])
    assert (regressor.posterior(NEW)[0] == before[0]).all()
    assert not regressor.update(x[:22], y[:22], variance[:22])
    assert regressor.update(x, y, variance)
    assert (regressor.posterior(NEW)[0] != before[0]).any()


def test_contract_draws_have_the_posteriors_moments(make) -> None:
    regressor = make()
    regressor.update(*rows())
    mean, variance = regressor.posterior(NEW)
    normals = np.random.default_rng(5).standard_normal((4000, 12))
    draws = regressor.draw(NEW, normals)
    assert draws.shape == (4000, 9)
    sd = np.sqrt(variance)
    assert (np.abs(draws.mean(axis=0) - mean) < 0.1 * sd + 1e-4).all()
    np.testing.assert_allclose(draws.std(axis=0), sd, rtol=0.1, atol=1e-4)


def test_contract_watched_rows_follow_the_data_and_what_is_believed(make) -> None:
    regressor = make()
    x, y, variance = rows()
    regressor.update(x[:10], y[:10], variance[:10])
    regressor.watch(NEW)
    for n in (10, 12, 24):
        regressor.update(x[:n], y[:n], variance[:n])
        for watched, at in zip(regressor.watched(), regressor.posterior(NEW), strict=True):
            np.testing.assert_allclose(watched, at, atol=1e-6)
    before = regressor.watched()
    for believed in (NEW[:2], NEW[:4]):  # the second replaces the first
        regressor.believe(believed)
        mean, spread = regressor.watched()
        np.testing.assert_allclose(mean, before[0], atol=0.15)
        assert spread[:2].sum() <= before[1][:2].sum() * 1.05
    regressor.believe(np.empty((0, 3)))
    for watched, at in zip(regressor.watched(), before, strict=True):
        np.testing.assert_allclose(watched, at, atol=1e-6)


def test_left_out_rows_are_predicted_from_others() -> None:
    regressor = GaussianProcess(noise=0.02, amplitude=0.5, kinds=[LAUNCH, LAUNCH, LIVE])
    x, y, variance = rows()
    y = y.copy()
    y[7] += 3.0  # unlike all others: no honest prediction of it can be near
    regressor.update(x, y, variance)
    mean, spread = regressor.leave_one_out()
    assert mean.shape == spread.shape == (24,)
    assert abs(mean[7] - y[7]) > 1.0
    assert (spread >= regressor.noise_**2 * 0.99).all()


def test_contract_it_travels_between_processes(make) -> None:
    regressor = make()
    regressor.update(*rows())
    copy = pickle.loads(pickle.dumps(regressor))
    assert (copy.posterior(NEW)[0] == regressor.posterior(NEW)[0]).all()


# -- what is particular to scikit-learn's ----------------------------------------------------------


def test_members_that_have_a_deviation_add_to_the_spread() -> None:
    """The law of total variance, against its parts."""
    x, y, _ = rows()
    model = BaggingRegressor(BayesianRidge(), 7, max_features=2, random_state=0).fit(x, y)
    mean, std = mean_and_std(model, NEW)
    each = [
        member.predict(NEW[:, columns], return_std=True)
        for member, columns in zip(model.estimators_, model.estimators_features_, strict=True)
    ]
    means, stds = (np.array(part) for part in zip(*each, strict=True))
    np.testing.assert_allclose(mean, model.predict(NEW))
    np.testing.assert_allclose(std**2, means.var(axis=0) + (stds**2).mean(axis=0))
    forest = RandomForestRegressor(20, random_state=0).fit(x, y)
    means = np.array([tree.predict(NEW) for tree in forest.estimators_])
    np.testing.assert_allclose(mean_and_std(forest, NEW)[1], means.std(axis=0))


def test_a_noisy_row_counts_less_where_fit_takes_weights() -> None:
    x, y, variance = rows()
    wrong = y.copy()
    wrong[:6] += 1.0
    said = variance.copy()
    said[:6] = 1.0
    off = []
    for stated in (variance, said):
        regressor = ScikitRegressor(BayesianRidge(), noise=0.02, amplitude=0.5, seed=0)
        regressor.update(x, wrong, stated)
        off.append(np.abs(regressor.mean(x) - y).mean())
    assert off[1] < off[0] / 5


def test_surrogates_of_any_regressor_answer_what_a_search_asks() -> None:
    some = picked(24)
    for prior in (GoodPrior(), None):
        here = Surrogates(FeatureMap(CANDIDATES, prior=prior), regressor=ExtraTreesRegressor(20))
        here.fit(some, *figures(some))
        assert here.mean_in_use == ((None, None) if prior is None else (0, 0))
        assert here.sample(some[:3], np.zeros((5, 2, 3)), wide=True)[0].shape == (5, 3)
        assert np.isfinite(here.predict(CANDIDATES.configurations).log_energy_std).all()


def test_a_regressor_that_cannot_be_fitted_says_so_in_a_sentence() -> None:
    regressor = ScikitRegressor(BayesianRidge(alpha_1=-1), noise=0.02, amplitude=0.5, seed=0)
    with pytest.raises(InputError, match="BayesianRidge cannot be fitted to 24 measurements: The"):
        regressor.update(*rows())


# -- a study with another one ----------------------------------------------------------------------


class Mine(BayesianRidge):
    """A regressor of the user's own, from outside of scikit-learn."""


@pytest.mark.parametrize("regressor", [Mine(), ExtraTreesRegressor(n_estimators=20)])
def test_a_study_searches_by_it_and_answers_by_ours(tmp_path: Path, regressor: Any) -> None:
    toml = TOML + "[noise]\ntime_cv = 0.002\npower_cv = 0.01\n"
    table, runs = write_table(tmp_path / "table", toml=toml), tmp_path / "runs"
    kept = {"runs_dir": runs, "name": "one"}
    result = run_replay(table, surrogate=regressor, max_probes=8, **kept)
    assert load_result("one", runs_dir=runs).to_json() == result.to_json()
    assert not hasattr(regressor, "estimators_")  # copies of it are fitted
    more = run_replay(table, max_probes=10, **kept)  # by ours from here on
    assert more.spent.probes >= result.spent.probes


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        (LinearRegression(), "its predict returns no standard deviation"),
        (RandomForestRegressor(n_estimators=-1), "'n_estimators' parameter of"),
        (LinearRegression(), "it must be a scikit-learn regressor whose predict takes return_std"),
        (GradientBoostingRegressor(), "cannot be a surrogate"),
        (AdaBoostRegressor(random_state=0), "not the mean of its members'"),
        (RandomForestRegressor, "an instance of scikit-learn estimator instead of a class"),
        (7, "int cannot be a surrogate: Cannot clone object '7'"),
        ("forest", "str cannot be a surrogate"),
    ],
)
def test_what_cannot_be_a_surrogate_is_refused_in_a_sentence(asked: Any, sentence: str) -> None:
    with pytest.raises(InputError) as error:
        check_surrogate(asked)
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


def test_it_is_refused_before_anything_is_touched(tmp_path: Path) -> None:
    table, runs = write_table(tmp_path / "table"), tmp_path / "runs"
    with pytest.raises(InputError, match="LinearRegression cannot be a surrogate"):
        run_replay(table, surrogate=LinearRegression(), runs_dir=runs)
    assert not runs.exists()
