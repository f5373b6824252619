"""Posterior of a Gaussian process' hyperparameters: its density and draws from it."""

from __future__ import annotations

import numpy as np

from tuner.models.surrogate.kernel import AdditiveKernel, Likelihood


class PenalisedLikelihood:
    """Negative log posterior of the hyperparameters' logs, and its gradient."""

    def __init__(
        self, likelihood: Likelihood, prior_mean: np.ndarray, prior_sd: np.ndarray
    ) -> None:
        self._likelihood, self._prior_mean, self._prior_sd = likelihood, prior_mean, prior_sd

    def __call__(self, theta: np.ndarray) -> tuple[float, np.ndarray]:
        value, gradient = self._likelihood(theta)
        pull = (theta - self._prior_mean) / self._prior_sd
        return value + 0.5 * float(pull @ pull), gradient + pull / self._prior_sd


class HyperPosterior:
    """Posterior of the hyperparameters' logs about its mode, to draw from.

    Normal about the mode with the curvature there (Laplace), and each draw weighed by how likely it
    really is. In no direction is it taken to be wider than the prior.

    Args:
        bounds: of each, (d, 2).
        present: which of the kernel's amplitudes are among them.
    """

    def __init__(
        self,
        penalised: PenalisedLikelihood,
        mode: np.ndarray,
        prior_sd: np.ndarray,
        bounds: np.ndarray,
        present: np.ndarray,
        kernel: AdditiveKernel,
    ) -> None:
        self._penalised, self._mode, self._prior_sd = penalised, mode, prior_sd
        self._bounds, self._present, self._kernel = bounds, present, kernel

    def unpack(self, theta: np.ndarray) -> tuple[AdditiveKernel, float]:
        """Return the kernel and the noise variance of these logs."""
        count = len(self._present)
        amplitudes = np.zeros(4)
        amplitudes[self._present] = np.exp(0.5 * theta[:count])
        return self._kernel.with_(amplitudes, np.exp(theta[count:-1])), float(np.exp(theta[-1]))

    def draws(self, count: int, seed: int, step: float = 0.05) -> tuple[np.ndarray, np.ndarray]:
        """Draws (count, d) and their weights, which sum to one."""
        d = len(self._mode)
        base = self._penalised(self._mode)[1]
        curvature = np.array(
            [(self._penalised(self._mode + step * e)[1] - base) / step for e in np.eye(d)]
        )
        scaled = self._prior_sd * (curvature + curvature.T) / 2 * self._prior_sd[:, None]
        values, vectors = np.linalg.eigh(scaled)
        # The symmetric root: the signs of eigenvectors, and those of equal eigenvalues, are any.
        root = self._prior_sd[:, None] * ((vectors / np.sqrt(np.maximum(values, 1.0))) @ vectors.T)
        normals = np.random.default_rng(seed).standard_normal((count // 2, d))
        normals = np.vstack([normals, -normals])
        thetas = np.clip(self._mode + normals @ root.T, self._bounds[:, 0], self._bounds[:, 1])
        log = np.array([-self._penalised(theta)[0] for theta in thetas])
        log += 0.5 * (normals**2).sum(axis=1)
        weights = np.exp(log - log.max())
        # A single draw may not outweigh the others (truncated importance sampling: Ionides 2008).
        weights = np.minimum(weights, weights.mean() * np.sqrt(count))
        return thetas, weights / weights.sum()
