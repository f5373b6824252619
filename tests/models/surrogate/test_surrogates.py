"""The surrogates: few points, growth, corrections of the prior, ties, and against scikit-learn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import truncnorm
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import ConstantKernel, Matern

from tests.support.surrogate_data import (
    CANDIDATES,
    BadPrior,
    GoodPrior,
    figures,
    picked,
)
from tuner.models.analytic.constants import constants_of
from tuner.models.analytic.model import AnalyticModel
from tuner.models.job_prior import AnalyticPrior, prior_of
from tuner.models.prior import Prediction
from tuner.models.surrogate import gaussian_process
from tuner.models.surrogate.features import CORRECTING, FeatureMap
from tuner.models.surrogate.gaussian_process import (
    BY_COLUMN,
    LAUNCH,
    LIVE,
    OWN_LENGTH,
    TOLERANCE,
    GaussianProcess,
    Kernel,
    Pairs,
    first_best,
    laplace_draws,
    lower_root,
    quasi_normal,
    ranked,
)
from tuner.models.surrogate.surrogates import POWER_NOISE, Surrogates
from tuner.search_spaces.cluster import load_cluster
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.job import load_job
from tuner.search_spaces.space import Candidates


def error(surrogates: Surrogates) -> float:
    every = list(CANDIDATES.configurations)
    posterior = surrogates.predict(every)
    return float(np.median(np.abs(posterior.log_time - np.log(figures(every)[0]))))


@pytest.mark.parametrize("prior", [None, GoodPrior()])
@pytest.mark.parametrize("n", [0, 1, 2, 3])
def test_a_few_points_give_finite_and_wide_answers(n: int, prior: GoodPrior | None) -> None:
    surrogates = Surrogates(FeatureMap(CANDIDATES, prior=prior))
    some = picked(n)
    surrogates.fit(some, *figures(some))
    posterior = surrogates.predict(CANDIDATES.configurations)
    for figure in vars(posterior).values():
        assert np.isfinite(figure).all()
    at = surrogates.predict(some)
    assert at.log_time == pytest.approx(np.log(figures(some)[0]), abs=0.02)
    assert posterior.log_time_std.max() > 0.05
    assert (at.log_time_std < 0.02).all()


def test_one_point_sets_the_scale_of_the_prior() -> None:
    surrogates = Surrogates(FeatureMap(CANDIDATES, prior=GoodPrior()))
    surrogates.fit(*([picked(1)]), *figures(picked(1)))
    assert error(surrogates) < 0.02
    assert surrogates._time.uses_prior
    assert surrogates._power.uses_prior


def test_a_prior_that_harms_is_turned_off() -> None:
    some = picked(24)
    bad = Surrogates(FeatureMap(CANDIDATES, prior=BadPrior()))
    bad.fit(some, *figures(some))
    assert not bad._time.uses_prior
    assert error(bad) < 0.05


class RightLive:
    """Right about the clocks within a launch, upside down about the launches."""

    def predict(self, configurations: list[Configuration]) -> Prediction:
        highest = [Configuration.of(**c.launch, clock_MHz=1400) for c in configurations]
        t, p = np.array(figures(configurations)) / np.array(figures(highest)) ** 2.5
        return Prediction(t, p, t)


def test_a_prior_that_is_wrong_about_launches_harms_little() -> None:
    some = picked(16)
    wrong = Surrogates(FeatureMap(CANDIDATES, prior=RightLive()))
    without = Surrogates(FeatureMap(CANDIDATES))
    for surrogates in (wrong, without):
        surrogates.fit(some, *figures(some))
    assert error(wrong) < 1.5 * error(without)


class Flat:
    """A model that says the same of every configuration."""

    def predict(self, configurations: list[Configuration]) -> Prediction:
        return Prediction(*np.ones((3, len(configurations))))


def test_launches_with_a_value_in_common_share_what_the_model_misjudges_of_it() -> None:
    """Each of 24 launches is off by what its values do; a third of them tell of the others."""
    rng = np.random.default_rng(4)
    effects = {
        name: dict(zip(values, rng.normal(0, 0.1, (len(values), 2)), strict=True))
        for name, values in (
            ("zero_stage", (0, 1, 2)),
            ("tensor_parallel", (1, 2)),
            ("micro_batch", (1, 2, 4, 8)),
        )
    }
    every = [
        Configuration.of(zero_stage=z, tensor_parallel=t, micro_batch=b)
        for z in effects["zero_stage"]
        for t in effects["tensor_parallel"]
        for b in effects["micro_batch"]
    ]
    logs = np.array([sum(effects[n][c.launch[n]] for n in effects) for c in every])
    told = [every[i] for i in (0, 3, 6, 9, 12, 15, 18, 21)]
    surrogates = Surrogates(FeatureMap(Candidates.from_configurations(every), prior=Flat()))
    at = [every.index(c) for c in told]
    surrogates.fit(told, *np.exp(logs[at]).T)
    rest = [i for i in range(len(every)) if i not in at]
    shown = surrogates.with_intervals([every[i] for i in rest])
    off = shown.log_time - logs[rest, 0]
    assert np.sqrt(np.mean(off**2)) < 0.6 * np.std(logs[rest, 0])
    assert np.mean(np.abs(off) < 1.645 * shown.log_time_std) >= 0.8


def test_a_launch_far_off_its_values_is_not_explained_by_them() -> None:
    """One launch takes 40 % less than its values say: it, and not its neighbours, is believed."""
    every = [
        Configuration.of(zero_stage=z, micro_batch=b) for z in range(4) for b in (1, 2, 4, 8, 16)
    ]
    odd, near = every[7], every[6]
    told = [c for c in every if c != near]
    time = np.where([c == odd for c in told], 0.6, 1.0)
    surrogates = Surrogates(FeatureMap(Candidates.from_configurations(every), prior=Flat()))
    surrogates.fit(told, time, np.ones(len(told)))
    at = surrogates.with_intervals([odd, near])
    assert at.step_time_s[0] == pytest.approx(0.6, rel=0.05)
    assert at.step_time_s[1] > 0.6**0.5  # nearer to the others
    assert at.log_time[1] + 2 * at.log_time_std[1] > 0


def test_more_points_predict_better_and_intervals_hold() -> None:
    every = list(CANDIDATES.configurations)
    truth_log_power = np.log(figures(every)[1])
    errors: dict[int, list[float]] = {6: [], 30: []}
    inside = []
    for seed in range(5):
        rng = np.random.default_rng(seed)
        for n in errors:
            surrogates = Surrogates(FeatureMap(CANDIDATES))
            some = picked(n, seed)
            t, p = figures(some)
            surrogates.fit(
                some, t * np.exp(rng.normal(0, 0.002, n)), p * np.exp(rng.normal(0, 0.02, n))
            )
            errors[n].append(error(surrogates))
        posterior = surrogates.predict(every)
        off = np.abs(posterior.log_power - truth_log_power)
        inside.append(float(np.mean(off <= 1.645 * posterior.log_power_std)))
    assert np.mean(errors[30]) < np.mean(errors[6]) / 2
    assert np.mean(errors[30]) < 0.03
    assert np.mean(inside) > 0.75


def test_a_few_more_points_leave_the_hyperparameters_as_they_are() -> None:
    some = picked(30)
    t, p = figures(some)
    grown = Surrogates(FeatureMap(CANDIDATES))
    grown.fit(some[:26], t[:26], p[:26])
    before = grown.predict(CANDIDATES.configurations)
    assert not grown.fit(some, t, p)  # 30 < 1.2 x 26
    after = grown.predict(CANDIDATES.configurations)
    assert (after.log_time_std <= before.log_time_std + 1e-9).all()


def test_candidates_may_be_asked_for_by_their_numbers() -> None:
    some = picked(12)
    surrogates = Surrogates(FeatureMap(CANDIDATES, prior=GoodPrior()))
    surrogates.fit(some, *figures(some))
    numbers = np.array([CANDIDATES.index_of(configuration) for configuration in some])
    named, numbered = surrogates.predict(some), surrogates.predict(numbers)
    assert (named.log_time == numbered.log_time).all()
    assert (named.log_power_std == numbered.log_power_std).all()


def test_fewer_data_start_afresh() -> None:
    some, other = picked(20), picked(10, seed=5)
    surrogates = Surrogates(FeatureMap(CANDIDATES))
    surrogates.fit(some, *figures(some))
    assert surrogates.fit(other, *figures(other))
    fresh = Surrogates(FeatureMap(CANDIDATES))
    fresh.fit(other, *figures(other))
    assert surrogates.predict(some).log_time == pytest.approx(
        fresh.predict(some).log_time, abs=1e-3
    )


def test_the_same_measurements_give_the_same_intervals() -> None:
    some = picked(15)
    answers = []
    for _ in range(2):
        surrogates = Surrogates(FeatureMap(CANDIDATES))
        surrogates.fit(some, *figures(some))
        answers.append(surrogates.with_intervals(CANDIDATES.configurations).log_energy_std)
    assert (answers[0] == answers[1]).all()


@pytest.mark.parametrize("n", [5, 8, 15, 30])
def test_few_draws_of_the_hyperparameters_are_as_wide_as_many(
    n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    some = picked(n)
    widths = []
    for draws in (gaussian_process.DRAWS, 1024):
        monkeypatch.setattr(gaussian_process, "DRAWS", draws)
        surrogates = Surrogates(FeatureMap(CANDIDATES))
        surrogates.fit(some, *figures(some))
        shown = surrogates.with_intervals(CANDIDATES.configurations)
        widths.append(np.concatenate([shown.log_time_std, shown.log_power_std]))
    off = np.abs(np.log(widths[0] / widths[1]))
    assert np.median(off) < 0.08
    assert off.max() < 0.5


def test_hyperparameters_at_a_bound_are_drawn_next_to_it() -> None:
    """Against the exact density, a normal one of which only the tail is within the bounds."""

    def gradient(theta: np.ndarray) -> np.ndarray:
        return theta + 9.0

    draws = laplace_draws(np.array([-3.0]), np.array([[-3.0, 3.0]]), gradient)
    exact = truncnorm(6.0, 12.0, loc=-9.0)
    assert draws.min() == -3.0
    assert 0.5 * exact.std() < draws.std() < 1.5 * exact.std()


def test_leave_one_out_is_what_leaving_one_out_gives() -> None:
    """The processes' own errors are compared with scikit-learn's."""
    some = picked(14)
    surrogates = Surrogates(FeatureMap(CANDIDATES))
    t, p = figures(some)
    surrogates.fit(some, t, p)
    mean, _ = surrogates._time.regressor.leave_one_out()
    loo = surrogates.leave_one_out()
    assert loo.measurements == 14
    assert len(loo.pairs) == 14
    assert loo.pairs[3][0] == pytest.approx(t[3])
    assert loo.pairs[3][1] == pytest.approx(np.exp(mean[3]))
    assert 0 < loo.time_error < 0.5
    assert 0.5 <= loo.coverage <= 1


def test_a_noisy_window_counts_less() -> None:
    some = picked(12)
    t, p = figures(some)
    wrong = p.copy()
    wrong[0] *= 1.5
    quiet, warned = (Surrogates(FeatureMap(CANDIDATES)) for _ in range(2))
    quiet.fit(some, t, wrong)
    warned.fit(some, t, wrong, None, [0.5] + [float("nan")] * 11)
    off = [abs(s.predict(some[:1]).log_power[0] - np.log(p[0])) for s in (quiet, warned)]
    assert off[1] < off[0] / 2


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_figures_that_are_none_are_refused(value: float) -> None:
    with pytest.raises(ValueError, match="finite and positive"):
        Surrogates(FeatureMap(CANDIDATES)).fit(picked(1), [value], [100.0])


def test_the_same_configuration_may_be_measured_often() -> None:
    surrogates = Surrogates(FeatureMap(CANDIDATES))
    some = picked(1) * 6
    surrogates.fit(some, [1.0, 1.01, 0.99, 1.0, 1.0, 1.01], [100, 101, 99, 100, 102, 98])
    posterior = surrogates.predict(some[:1])
    assert posterior.step_time_s[0] == pytest.approx(1.0, abs=0.01)
    assert posterior.log_power_std[0] < 0.02


def test_shown_intervals_are_wider_while_little_is_known() -> None:
    """Of the doubt about the hyperparameters and of the factor for few measurements."""
    shares = []
    for n in (6, 12, 60):
        configurations = picked(n)
        here = Surrogates(FeatureMap(CANDIDATES))
        here.fit(configurations, *figures(configurations))
        rest = [c for c in CANDIDATES.configurations if c not in configurations]
        plain, shown = here.predict(rest), here.with_intervals(rest)
        shares.append(float(np.median(shown.log_time_std / plain.log_time_std)))
        off = np.abs(shown.log_time - plain.log_time)
        assert (off <= 1.5 * shown.log_time_std).all()  # the mixture's mean is another, not far
    assert shares[0] > 2.0
    assert shares[0] > shares[1] > shares[2] > 1.0


def test_draws_are_as_wide_as_the_shown_intervals_and_vary_together() -> None:
    configurations = picked(8)
    here = Surrogates(FeatureMap(CANDIDATES))
    here.fit(configurations, *figures(configurations))
    rest = [c for c in CANDIDATES.configurations if c not in configurations][:20]
    shown = here.with_intervals(rest)
    normals = np.random.default_rng(0).standard_normal((2000, 2, len(rest)))
    log_t, log_p = here.sample(rest, normals)
    assert (
        log_t.std(axis=0).mean() > 1.05 * here.widening[0] * here.predict(rest).log_time_std.mean()
    )
    assert log_t.std(axis=0) == pytest.approx(shown.log_time_std, rel=0.15)
    assert log_p.std(axis=0) == pytest.approx(shown.log_power_std, rel=0.15)
    assert np.corrcoef(log_p.T)[np.triu_indices(len(rest), 1)].max() > 0.5
    assert log_t.mean(axis=0) == pytest.approx(shown.log_time, abs=0.2 * shown.log_time_std.max())


def test_intervals_before_any_measurement_are_the_priors() -> None:
    here = Surrogates(FeatureMap(CANDIDATES))
    every = list(CANDIDATES.configurations)
    here.fit([], [], [])
    shown = here.with_intervals(every)
    assert (shown.log_time_std > here.predict(every).log_time_std).all()
    assert shown.correlation == 0.0


def test_the_energys_interval_knows_that_errors_go_together() -> None:
    """A machine under a power limit: what a step takes longer, it draws less."""
    rng = np.random.default_rng(3)
    configurations = picked(40)
    time, power = figures(configurations)
    own = np.exp(0.1 * rng.standard_normal(40))
    here = Surrogates(FeatureMap(CANDIDATES))
    here.fit(configurations, time * own, power / own)
    shown = here.with_intervals(list(CANDIDATES.configurations))
    assert shown.correlation < -0.5
    apart = np.hypot(shown.log_time_std, shown.log_power_std)
    assert (shown.log_energy_std < apart).all()
    assert np.median(shown.log_energy_std / apart) < 0.85
    assert shown[:3].correlation == shown.correlation


def test_power_that_varies_is_not_taken_for_noise_but_a_step_time_may_be() -> None:
    """Windows of power are known to 1.5 %; a knee that moves from launch to launch looks like noise
    of time, and is too costly to learn."""
    some = picked(24)
    odd = np.exp(np.random.default_rng(0).normal(0, 0.12, (2, len(some))))
    surrogates = Surrogates(FeatureMap(CANDIDATES))
    surrogates.fit(some, odd[0], 100 * odd[1])
    time_noise, power_noise = surrogates.noise()
    assert power_noise <= 2 * POWER_NOISE * (1 + 1e-6)
    assert time_noise > 2 * POWER_NOISE


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e9])
@pytest.mark.parametrize("seed", range(5))
def test_the_first_of_values_that_differ_by_rounding_is_best(scale: float, seed: int) -> None:
    values = np.array([0.1, 0.7, 0.3, 0.7, 0.1, 0.7]) * scale
    noise = 1 + 1e-12 * np.random.default_rng(seed).standard_normal(len(values))
    assert first_best(values * noise) == 1
    assert ranked(values * noise).tolist() == [1, 3, 5, 2, 0, 4]


def test_a_difference_beyond_the_tolerance_decides() -> None:
    assert first_best(np.array([1.0, 1 + 3 * TOLERANCE])) == 1
    assert first_best(-np.array([1.0, 1 - 3 * TOLERANCE])) == 1
    assert ranked(np.array([1.0, 1 + 3 * TOLERANCE])).tolist() == [1, 0]


def test_rounding_errors_of_zero_rank_as_zero() -> None:
    assert ranked(np.array([0.0, 1e-17, 0.5, -1e-18])).tolist() == [2, 0, 1, 3]
    assert first_best(np.zeros(3)) == 0
    assert ranked(np.empty(0)).tolist() == []


def test_infinite_values_are_worst_or_best() -> None:
    assert first_best(np.array([-np.inf, 2.0, 2.0])) == 1
    assert first_best(np.array([1.0, np.inf])) == 1
    assert ranked(np.array([-np.inf, 1.0, 2.0])).tolist() == [2, 1, 0]


def test_many_values_are_ranked_as_sorted() -> None:
    values = np.random.default_rng(0).random(100_000)
    assert (
        np.abs(np.diff(values[ranked(values)])[np.diff(values[ranked(values)]) > 0]).max(initial=0)
        <= TOLERANCE
    )


def test_a_root_of_equal_variances_does_not_change_with_rounding() -> None:
    noise = 1e-15 * np.random.default_rng(1).standard_normal((6, 6))
    once, again = lower_root(np.array([np.eye(6), np.eye(6) + noise + noise.T]), np.ones(2))
    assert np.abs(once - again).max() < 1e-12


def test_a_singular_covariance_has_a_root() -> None:
    (root,) = lower_root(np.ones((1, 4, 4)), np.ones(1))
    assert np.abs(root @ root.T - 1).max() < 1e-4


def test_a_covariance_that_rounding_made_negative_leaves_the_others_their_roots() -> None:
    both = np.array([np.diag([1.0, -1e-9]), np.eye(2)])
    roots = lower_root(both, np.ones(2))
    assert np.abs(roots @ roots.swapaxes(1, 2) - both).max() < 1e-6
    assert (roots[1] == lower_root(both[1:], np.ones(1))[0]).all()


JOB, CLUSTER = load_job("opt-350m"), load_cluster("a100-8")
BASE = constants_of(CLUSTER.device)
#: A program whose host dispatches four times as slowly.
TRUTH = AnalyticModel(JOB, CLUSTER, constants=replace(BASE, operator_s=4 * BASE.operator_s))
EVERY = [
    Configuration.of(data_parallel=8 // t, tensor_parallel=t, micro_batch=b, clock_MHz=clock)
    for t in (1, 2, 4)
    for b in (1, 2, 4, 8)
    for clock in (1410, 1050)
]


class Opaque:
    """The model's figures without its constants."""

    def predict(self, configurations: Sequence[Configuration]) -> Prediction:
        """Predict as the model."""
        return AnalyticModel(JOB, CLUSTER).predict(configurations)


def feature_map(prior: AnalyticPrior | Opaque | None = None) -> FeatureMap:
    prior = prior_of(JOB, CLUSTER) if prior is None else prior
    return FeatureMap(Candidates.from_configurations(EVERY), prior=prior, learns_program=True)


def logs(configurations: Sequence[Configuration]) -> np.ndarray:
    figures = TRUTH.predict(configurations)
    return np.log(np.column_stack([figures.step_time_s, figures.power_W]))


def test_after_one_launch_the_mean_is_that_of_the_program() -> None:
    features = feature_map()
    before = np.abs(features.prior_log(EVERY) - logs(EVERY))[:, 0].mean()
    assert features.correct(EVERY[:1], logs(EVERY[:1]))
    after = np.abs(features.prior_log(EVERY) - logs(EVERY))[:, 0].mean()
    assert after < before / 3


def test_later_launches_leave_it_and_no_rows_take_it_back() -> None:
    features, launches = feature_map(), EVERY[::2]
    plain = features.prior_log(EVERY)
    assert not features.correct([], np.empty((0, 2)))
    assert features.correct(launches[:CORRECTING], logs(launches[:CORRECTING]))
    assert not features.correct(launches[: CORRECTING + 2], logs(launches[: CORRECTING + 2]))
    assert features.correct([], np.empty((0, 2)))
    assert (features.prior_log(EVERY) == plain).all()


def test_a_prior_without_constants_stays() -> None:
    features = feature_map(Opaque())
    plain = features.prior_log(EVERY)
    assert not features.correct(EVERY[:1], logs(EVERY[:1]))
    assert (features.prior_log(EVERY) == plain).all()


def test_a_resumed_search_predicts_as_an_uninterrupted_one() -> None:
    step, resumed = (Surrogates(feature_map()) for _ in range(2))
    measured = np.exp(logs(EVERY))
    for n in (1, 3, 5):
        step.fit(EVERY[:n], measured[:n, 0], measured[:n, 1])
    resumed.fit(EVERY[:5], measured[:5, 0], measured[:5, 1])
    assert np.allclose(step.predict(EVERY).log_time, resumed.predict(EVERY).log_time)


@pytest.fixture
def data() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(7)
    x = rng.uniform(size=(24, 3))
    y = np.sin(4 * x[:, 0]) + 0.5 * x[:, 1] ** 2 + 0.02 * rng.normal(size=24)
    return x, y, np.full(24, 0.01**2)


def peer(
    process: GaussianProcess, x: np.ndarray, y: np.ndarray, own: np.ndarray
) -> GaussianProcessRegressor:
    """scikit-learn with the kernel that `process` has fitted: launch, own levels, constant, noise.

    All columns are of the launch, so the parts of the live ones are constants.
    """
    kernel = process._kernel
    d = x.shape[1]
    launch, live, mix, level = kernel.amplitudes[0] ** 2
    parts = ConstantKernel(launch + mix) * Matern(kernel.lengths[0], nu=2.5)
    parts += ConstantKernel((1 - BY_COLUMN) * level) * Matern(OWN_LENGTH * np.sqrt(d), nu=0.5)
    for column in np.eye(d):
        parts += ConstantKernel(BY_COLUMN * level / d) * Matern(
            np.where(column, OWN_LENGTH, 1e9), nu=0.5
        )
    parts += ConstantKernel(kernel.constant + live)
    noise = own + process.noise_**2
    model = GaussianProcessRegressor(parts, alpha=noise, optimizer=None)
    return model.fit(x, y - y.mean())


def test_the_posterior_is_scikit_learns(data) -> None:
    x, y, own = data
    process = GaussianProcess([LAUNCH] * 3, noise=0.02, amplitude=0.5, own=0.1)
    process.update(x[:20], y[:20], own[:20])
    process.update(x, y, own)
    asked = np.random.default_rng(8).uniform(size=(50, 3))
    mean, variance = process.posterior(asked)
    told = peer(process, x, y, own)
    expected, expected_std = told.predict(asked, return_std=True)
    np.testing.assert_allclose(mean, expected + y.mean(), atol=1e-6)
    np.testing.assert_allclose(np.sqrt(variance), expected_std, atol=1e-5)


def test_leave_one_out_in_closed_form_is_leaving_one_out(data) -> None:
    x, y, own = data
    process = GaussianProcess([LAUNCH] * 3, noise=0.02, amplitude=0.5, own=0.1)
    process.update(x, y, own)
    mean, variance = process.leave_one_out()
    for left in (0, 5, 23):
        rest = np.delete(np.arange(len(y)), left)
        told = peer(process, x[rest], y[rest], own[rest])
        expected, std = told.predict(x[[left]], return_std=True)
        # The centre is all rows' mean in ours; the constant's variance makes that immaterial.
        assert mean[left] == pytest.approx(float(expected[0]) + y[rest].mean(), abs=5e-3)
        assert variance[left] == pytest.approx(
            float(std[0]) ** 2 + own[left] + process.noise_**2, rel=0.02
        )


def test_pairs_found_once_are_the_pairs_themselves() -> None:
    """Launches times live settings, with and without columns of both kinds."""
    rng = np.random.default_rng(3)
    launches, lives = rng.uniform(size=(5, 2)), np.linspace(0, 1, 4)[:, None]
    grid = np.array([[*launch, *live] for launch in launches for live in lives])
    for x, kinds in (
        (grid, [LAUNCH, LAUNCH, LIVE]),
        (np.array(lives), [LIVE]),
        (launches, [LAUNCH] * 2),
    ):
        of = np.array(kinds)
        amplitudes = np.array([[0.4, 0.3, 0.2, 0.02], [0.2, 0.1, 0.4, 0.1]])
        lengths = np.linspace([0.3] * 2, [0.9, 2.0], len(kinds)).T
        kernel = Kernel(amplitudes, lengths, noise=np.full(2, 0.1), constant=2.0)
        both = kernel(Pairs(of, x[:3], x))
        for i in range(2):
            one = replace(kernel, amplitudes=amplitudes[[i]], lengths=lengths[[i]])
            every = [[one(Pairs(of, a[None], b[None]))[0, 0, 0] for b in x] for a in x[:3]]
            np.testing.assert_allclose(both[i], every, rtol=1e-13)


def test_the_likelihood_is_scikit_learns(data) -> None:
    x, y, own = data
    process = GaussianProcess([LAUNCH] * 3, noise=0.02, amplitude=0.5, own=0.1)
    process.update(x, y, own)
    told = peer(process, x, y, own)
    expected = -told.log_marginal_likelihood_value_ - len(y) / 2 * np.log(2 * np.pi)
    assert process._middle.loss == pytest.approx(expected, abs=1e-5)


def test_the_fitted_hyperparameters_are_more_likely_than_those_beside_them(data) -> None:
    x, y, own = data
    process = GaussianProcess([LAUNCH, LAUNCH, LIVE], noise=0.02, amplitude=0.5)
    process.update(x, y, own)
    mean, sd = process._prior_of_logs(float(np.std(y)))

    def loss(logs: np.ndarray) -> float:
        given = process._given(process._kernel_of(logs[None]))
        return float(given.loss[0]) + 0.5 * float(np.sum(((logs - mean) / sd) ** 2))

    best = loss(process._logs)
    beside = [loss(process._logs + step) for step in np.vstack([0.3 * np.eye(8), -0.3 * np.eye(8)])]
    assert best < min(beside)


def test_quasi_random_draws_are_standard_normal_and_fixed_by_the_seed() -> None:
    draws = quasi_normal(256, 6, 7)
    assert draws.mean(axis=0) == pytest.approx(np.zeros(6), abs=0.05)
    assert draws.std(axis=0) == pytest.approx(np.ones(6), abs=0.05)
    assert (draws == quasi_normal(256, 6, 7)).all()
    assert (draws != quasi_normal(256, 6, 8)).any()
