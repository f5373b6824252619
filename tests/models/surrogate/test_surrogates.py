"""The surrogates: few points, growth, pending points, leave-one-out, a prior that harms."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import truncnorm

from tests.support.surrogate_data import (
    CANDIDATES,
    BadPrior,
    GoodPrior,
    figures,
    picked,
)
from tuner.models.prior import Prediction
from tuner.models.surrogate import gaussian_process
from tuner.models.surrogate.features import FeatureMap
from tuner.models.surrogate.gaussian_process import laplace_draws
from tuner.models.surrogate.surrogates import POWER_NOISE, Surrogates
from tuner.search_spaces.configuration import Configuration
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
