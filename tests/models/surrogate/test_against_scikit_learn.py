"""Our Gaussian process against scikit-learn's, on the same data with the same hyperparameters.

Ours evaluates few of the halves of launches times live settings, and works its errors out in closed
form; a well-kept library that does none of that must agree with it to rounding.
"""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import ConstantKernel, Matern

from tuner.models.surrogate.gaussian_process import (
    LAUNCH,
    LIVE,
    OF_ERRORS,
    OWN_LENGTH,
    GaussianProcess,
    Kernel,
    Likelihood,
    Pairs,
    prior_of_logs,
    quasi_normal,
)


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
    launch, live, mix, level = kernel.amplitudes**2
    parts = ConstantKernel(launch + mix) * Matern(kernel.lengths, nu=2.5)
    parts += ConstantKernel((1 - OF_ERRORS.by_column) * level) * Matern(
        OWN_LENGTH * np.sqrt(d), nu=0.5
    )
    for column in np.eye(d):
        parts += ConstantKernel(OF_ERRORS.by_column * level / d) * Matern(
            np.where(column, OWN_LENGTH, 1e9), nu=0.5
        )
    parts += ConstantKernel(kernel.constant + live)
    noise = own + process.noise_**2
    model = GaussianProcessRegressor(parts, alpha=noise, optimizer=None)
    return model.fit(x, y - y.mean())


def test_the_posterior_is_scikit_learns(data) -> None:
    x, y, own = data
    process = GaussianProcess([LAUNCH] * 3, noise=0.02, amplitude=0.5, level=OF_ERRORS)
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
    process = GaussianProcess([LAUNCH] * 3, noise=0.02, amplitude=0.5, level=OF_ERRORS)
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
        lengths = np.linspace(0.3, 0.9, len(kinds))
        kernel = Kernel(np.array([0.4, 0.3, 0.2, 0.02]), lengths, noise=0.1, constant=2.0)
        every = [[kernel(Pairs(of, a[None], b[None]))[0, 0] for b in x] for a in x[:3]]
        np.testing.assert_allclose(kernel(Pairs(of, x[:3], x)), every, rtol=1e-13)


def test_the_gradient_of_the_likelihood_is_its_slope(data) -> None:
    x, y, own = data
    for kinds in ([LAUNCH, LAUNCH, LIVE], [LAUNCH] * 3, [LIVE] * 3):
        of = np.array(kinds)
        likelihood = Likelihood(of, x, y, own, constant=4.0, level=OF_ERRORS)
        logs = prior_of_logs(of, 0.5, 0.02, OF_ERRORS)[0] - 0.3
        slopes = [
            (likelihood(logs + step)[0] - likelihood(logs - step)[0]) / 2e-5
            for step in 1e-5 * np.eye(len(logs))
        ]
        np.testing.assert_allclose(likelihood(logs)[1], slopes, rtol=1e-4, atol=1e-2)


def test_quasi_random_draws_are_standard_normal_and_fixed_by_the_seed() -> None:
    draws = quasi_normal(256, 6, 7)
    assert draws.mean(axis=0) == pytest.approx(np.zeros(6), abs=0.05)
    assert draws.std(axis=0) == pytest.approx(np.ones(6), abs=0.05)
    assert (draws == quasi_normal(256, 6, 7)).all()
    assert (draws != quasi_normal(256, 6, 8)).any()
