"""Prediction of every configuration of a space, in bounded memory.

Launches are enumerated and predicted in blocks. What may matter later is kept: the exact fronts of
energy and time and of each with power (a power cap chooses on those), what is close enough behind
the front to be on it if the models err, and a random sample of the rest, which a figure shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from tuner.models.analytic.constants import Constants
from tuner.models.analytic.model import AnalyticModel
from tuner.models.prior import Prediction
from tuner.pareto import nondominated
from tuner.planner.failures import with_failures
from tuner.search_spaces.cluster import Cluster
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.search_spaces.job import TrainingJob
from tuner.search_spaces.space import SearchSpace

#: A launch with its live settings.
Group = tuple[Settings, tuple[Settings, ...]]

#: Configurations that are predicted together: their arrays take some 100 MB.
BLOCK = 50_000
#: Limit on the kept configurations behind the front, and on the sample.
MOST_NEAR, SAMPLE = 2_000, 400


@dataclass(frozen=True)
class Evaluation:
    """Predictions of one space on one cluster.

    Attributes:
        log_time, log_power: of a step, in s and W, (n,).
        memory_bytes: peak of the fullest rank, (n,).
        listed: True for those on a front or in the sample, which a result lists, (n,); the others
            are close behind the front.
    """

    configurations: tuple[Configuration, ...]
    log_time: np.ndarray
    log_power: np.ndarray
    memory_bytes: np.ndarray
    listed: np.ndarray
    count: int
    fitting: int
    least_bytes: float

    @property
    def log_energy(self) -> np.ndarray:
        """Logarithm of a step's energy (J), (n,)."""
        return self.log_time + self.log_power


class _Selection:
    def __init__(self, slack: float, seed: int) -> None:
        self._slack, self._rng = slack, np.random.default_rng(seed)
        self.configurations: list[Configuration] = []
        self.figures = np.empty((0, 4))  # log time, log power, memory, key of the sample

    def add(self, figures: np.ndarray, configuration: Callable[[int], Configuration]) -> None:
        keys = self._rng.random((len(figures), 1))
        both = np.vstack([self.figures, np.hstack([figures, keys])])
        front, near, sample = self._parts(both)
        rows = np.flatnonzero(front | near | sample)
        before = len(self.configurations)
        self.configurations = [
            self.configurations[row] if row < before else configuration(int(row) - before)
            for row in rows
        ]
        self.figures = both[rows]

    @property
    def listed(self) -> np.ndarray:
        front, _, sample = self._parts(self.figures)
        return np.asarray(front | sample)

    def _parts(self, figures: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        time, power = figures[:, 0], figures[:, 1]
        energy = time + power
        # A clock that is the device's own predicts what leaving it alone does: the first one stays.
        _, firsts = np.unique(np.round(figures[:, :2], 9), axis=0, return_index=True)
        first = np.isin(np.arange(len(figures)), firsts)
        on = first & nondominated(energy, time)
        front = on | (first & (nondominated(energy, power) | nondominated(time, power)))
        behind = _behind(energy, time, on)
        near = first & (behind <= self._slack)
        if near.sum() > MOST_NEAR:
            near &= behind <= np.partition(behind, MOST_NEAR)[MOST_NEAR]
        sample = np.zeros(len(figures), dtype=bool)
        sample[np.argsort(np.where(first, figures[:, 3], np.inf))[:SAMPLE]] = True
        sample &= first
        return front, near, sample


def _behind(energy: np.ndarray, time: np.ndarray, front: np.ndarray) -> np.ndarray:
    # The least shift of a point along both axes, at least 0, that leaves no point of the front
    # better on both.
    order = np.argsort(time[front])
    t, e = time[front][order], energy[front][order]
    if not len(t):
        return np.zeros(len(time))
    gap = np.zeros(len(time))
    for low in range(0, len(time), 20_000):  # blocks, so that the matrix stays small
        rows = slice(low, low + 20_000)
        worst = np.minimum(energy[rows, None] - e[None, :], time[rows, None] - t[None, :])
        gap[rows] = np.maximum(worst.max(axis=1), 0.0)
    return gap


def evaluate(
    job: TrainingJob,
    cluster: Cluster,
    space: SearchSpace,
    *,
    gpus: int | None = None,
    slack: float,
    seed: int = 0,
    constants: Constants | None = None,
) -> Evaluation:
    """Predict every configuration of a space.

    Args:
        gpus: only configurations of this number of GPUs; of any number if None.
        slack: distance behind the front (log, on the better axis) within which one is kept.

    Raises:
        InputError: the space has no configuration for this job and cluster.
    """
    model = AnalyticModel(job, cluster, constants=constants)
    kept = _Selection(slack, seed)
    count = fitting = 0
    least = np.inf
    for block in _blocks(space.groups(job, cluster, gpus=gpus)):
        prediction = with_failures(model.predict_groups(block), partial(_ranks, block), cluster)
        fits = np.flatnonzero(_fits(prediction, cluster))
        count, fitting = count + len(prediction.step_time_s), fitting + len(fits)
        least = min(least, float(prediction.memory_bytes.min()))
        figures = np.column_stack(
            [
                np.log(prediction.step_time_s[fits]),
                np.log(prediction.power_W[fits]),
                prediction.memory_bytes[fits],
            ]
        )
        starts = np.cumsum([0, *(len(lives) for _, lives in block)])
        kept.add(figures, lambda row, b=block, s=starts, f=fits: _numbered(b, s, int(f[row])))  # type: ignore[misc]
    return Evaluation(
        configurations=tuple(kept.configurations),
        log_time=kept.figures[:, 0],
        log_power=kept.figures[:, 1],
        memory_bytes=kept.figures[:, 2],
        listed=kept.listed,
        count=count,
        fitting=fitting,
        least_bytes=float(least),
    )


def _ranks(block: Sequence[Group]) -> np.ndarray:
    ranks = [Configuration(launch).world_size for launch, _ in block]
    return np.repeat(ranks, [len(lives) for _, lives in block])


def _numbered(block: Sequence[Group], starts: np.ndarray, number: int) -> Configuration:
    group = int(np.searchsorted(starts, number, side="right")) - 1
    launch, lives = block[group]
    return Configuration(launch, lives[number - int(starts[group])])


def _blocks(groups: Iterator[Group]) -> Iterator[list[Group]]:
    block: list[Group] = []
    size = 0
    for launch, lives in groups:
        block.append((launch, lives))
        size += len(lives)
        if size >= BLOCK:
            yield block
            block, size = [], 0
    if block:
        yield block


def _fits(prediction: Prediction, cluster: Cluster) -> np.ndarray:
    fits = np.ones(len(prediction.memory_bytes), dtype=bool)
    if limit := cluster.device.memory_limit_bytes:
        fits &= prediction.memory_bytes <= limit
    if cluster.device.is_gpu and cluster.host_memory_bytes and len(prediction.host_memory_bytes):
        fits &= prediction.host_memory_bytes <= cluster.host_memory_bytes
    return fits
