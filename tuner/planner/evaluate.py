"""Prediction of every configuration of a space, in bounded memory.

Launches are enumerated and predicted in blocks. What may matter later is kept: the exact fronts of
energy and time and of each with power (a power cap chooses on those), what is close enough behind
the front to be on it if the models err, and a random sample of the rest, which a figure shows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from tuner.answer.posterior import Windows
from tuner.models.analytic.constants import Constants, constants_of
from tuner.models.analytic.model import AnalyticModel
from tuner.models.prior import Prediction
from tuner.models.scale_out import ScaleOut, predictor
from tuner.pareto import nondominated
from tuner.search_spaces.cluster import Cluster
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.search_spaces.errors import InputError, InvalidConfiguration
from tuner.search_spaces.job import TrainingJob
from tuner.search_spaces.rules import why_it_cannot_run
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
    host_bytes = prediction.host_memory_bytes
    if cluster.device.has_own_memory and cluster.host_memory_bytes and len(host_bytes):
        fits &= host_bytes <= cluster.host_memory_bytes
    return fits


# Failures of nodes during a long training: lost work, checkpoints and restarts.
#
# J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps",
# Future Generation Computer Systems 22 (2006): failures come at random with a mean time M between
# them, the state is saved every tau seconds of work, which takes delta, and a restart takes R. The
# expected wall time of work that takes T is
#
#     M exp(R / M) (exp((tau + delta) / M) - 1) T / tau
#
# and the interval that makes it least is, for delta below 2 M,
#
#     sqrt(2 delta M) (1 + sqrt(delta / 2 M) / 3 + (delta / 2 M) / 9) - delta
#
# which begins with Young's sqrt(2 delta M), and M beyond.

DAY_S = 86400.0
#: Exponents above this are a training that does not end, and so is one that takes this much longer.
_MOST, _LONGEST = 700.0, 100.0


@dataclass(frozen=True)
class Interruptions:
    """Cost of failures in a training on some nodes.

    Attributes:
        a_day: failures a day.
        interval_s: work between two checkpoints.
        time_ratio: expected wall time over that without failures and checkpoints.
        idle_ratio: the part of it in which no device computes: checkpoints and restarts.
    """

    a_day: float
    interval_s: float
    time_ratio: float
    idle_ratio: float

    def energy_ratio(self, idle_share: float) -> float:
        """Return energy over that without failures; `idle_share` is idle over training power."""
        return self.time_ratio - (1 - idle_share) * self.idle_ratio


def best_interval_s(mean_s: float, checkpoint_s: float) -> float:
    """Return Daly's interval between checkpoints for a mean time between failures."""
    if checkpoint_s >= 2 * mean_s:
        return mean_s
    small = checkpoint_s / (2 * mean_s)
    first = math.sqrt(2 * checkpoint_s * mean_s)
    return first * (1 + math.sqrt(small) / 3 + small / 9) - checkpoint_s


def require_end(cluster: Cluster) -> None:
    """Raise InputError if a training on all of the nodes would never end."""
    found = interruptions(cluster, cluster.nodes)
    if found is not None and found.time_ratio > _LONGEST:
        raise InputError(
            f"cluster {cluster.name!r} states {found.a_day:.3g} failures a day on {cluster.nodes} "
            f"nodes, with which a training takes over {_LONGEST:.0f} times as long: lower "
            "failures_per_node_day, restart_s, checkpoint_s or checkpoint_interval_s"
        )


def interruptions(cluster: Cluster, nodes: int) -> Interruptions | None:
    """Return the cost of failures on some nodes of a cluster; None if it states no failures."""
    a_day = cluster.failures_per_node_day * nodes
    if not a_day:
        return None
    mean_s, checkpoint_s, restart_s = DAY_S / a_day, cluster.checkpoint_s, cluster.restart_s
    interval_s = cluster.checkpoint_interval_s or best_interval_s(mean_s, checkpoint_s)
    exponent = (restart_s + interval_s + checkpoint_s) / mean_s
    if exponent > _MOST:
        return Interruptions(a_day, interval_s, math.inf, 0.0)
    grown = math.exp(restart_s / mean_s) * math.expm1((interval_s + checkpoint_s) / mean_s)
    time_ratio = mean_s * grown / interval_s
    idle_ratio = checkpoint_s / interval_s + restart_s * time_ratio / mean_s
    return Interruptions(a_day, interval_s, time_ratio, min(idle_ratio, time_ratio - 1))


def with_failures(
    prediction: Prediction, ranks: Callable[[], np.ndarray], cluster: Cluster
) -> Prediction:
    """Return the mean time and power of a step, failures included, for numbers of ranks.

    Where nothing computes, in checkpoints and restarts, nodes draw their idle power.
    """
    if not cluster.failures_per_node_day:
        return prediction
    each, counts = cluster.devices_per_node, ranks()
    nodes = -(-counts // each)
    found = {int(n): interruptions(cluster, int(n)) for n in np.unique(nodes)}
    node_idle_W = cluster.host_W + cluster.device.idle_W * np.minimum(counts, each)
    idle_share = np.minimum(nodes * node_idle_W / prediction.power_W, 1.0)
    pairs = [(found[int(n)], share) for n, share in zip(nodes, idle_share, strict=True)]
    time = np.array([added.time_ratio for added, _ in pairs if added])
    energy = np.array([added.energy_ratio(share) for added, share in pairs if added])
    return replace(
        prediction,
        step_time_s=prediction.step_time_s * time,
        power_W=prediction.power_W * energy / time,
    )


@dataclass(frozen=True)
class Correction:
    """Models corrected by measured launches.

    Attributes:
        log_time, log_power: mean distance of the launches from the corrected models, as logs.
    """

    constants: Constants
    log_time: float
    log_power: float
    launches: int

    @property
    def sentence(self) -> str:
        """Description of the correction for the user."""
        plural = "" if self.launches == 1 else "es"
        return (
            f"the models are corrected by the step time and power of {self.launches} measured "
            f"launch{plural}; the intervals are still those of models that nothing corrects"
        )


def correction(
    job: TrainingJob,
    cluster: Cluster,
    configurations: Sequence[Configuration],
    logs: np.ndarray,
    launches: Sequence[object],
) -> Correction:
    """Correct the models by windows: their log step times and powers (n, 2), and their launches."""
    predict = predictor(job, cluster, configurations)
    gpus = [each.world_size for each in configurations]
    model = ScaleOut(
        constants_of(cluster.device), predict, gpus=gpus, launches=launches, measured=logs
    )
    above = (model.medians(predict, gpus) - predict(model.constants)).mean(axis=0)
    return Correction(model.constants, float(above[0]), float(above[1]), len(set(launches)))


if TYPE_CHECKING:
    from tuner.models.analytic.model import Breakdown
    from tuner.workload.records.probe import MeterInfo, ProbeRecord


@dataclass(frozen=True)
class Forecast:
    """Prediction with its breakdown and its known error."""

    job: TrainingJob
    cluster: Cluster
    breakdown: Breakdown
    known_error: tuple[str, ...]
    # step time (s), power (W) and energy of a step (J) as probes correct them: median and 90 %
    # interval; empty where no run was named.
    corrected: Mapping[str, tuple[float, float, float]]
    probes: int = 0
    # of the number of GPUs beyond the largest that was probed; 0 up to it
    doublings: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the figures that `tuner.planner.fit.Fit` lacks, as JSON values."""
        steps = self.job.steps
        return {
            **asdict(self.breakdown),
            "power_W": self.breakdown.power_W,
            "time_to_solution_s": steps * self.breakdown.step_time_s if steps else None,
            "energy_to_solution_J": steps * self.breakdown.energy_J if steps else None,
            "corrected": {name: list(values) for name, values in self.corrected.items()},
            "probes": self.probes,
            "doublings": self.doublings,
        }


def charged(cluster: Cluster, meter: MeterInfo) -> Cluster:
    """Return the cluster as a meter charges it: a meter of GPUs alone has no host or supply."""
    return replace(cluster, host_W=0.0, supply_loss=0.0) if meter.scope == "gpu" else cluster


def measured_windows(records: Sequence[ProbeRecord]) -> Windows:
    """Return the windows of these probes, at least one; InputError if there is none."""
    windows = Windows.of(records)
    if not windows.records:
        raise InputError("the run that is to correct the prediction has measured nothing")
    return windows


def forecast(
    job: TrainingJob,
    cluster: Cluster,
    configuration: Configuration,
    *,
    records: Sequence[ProbeRecord] = (),
    probed_on: Cluster | None = None,
) -> Forecast:
    """Predict one configuration, corrected by the probes of `records`; InvalidConfiguration if it
    cannot train this job on this cluster, InputError if they hold no measurement."""
    from tuner.models.analytic.model import AnalyticModel, known_error_lines
    from tuner.models.scale_out import ScaleOut, predictor

    if phrases := why_it_cannot_run(configuration, job, cluster):
        raise InvalidConfiguration(configuration.short, phrases)
    breakdown = AnalyticModel(job, cluster).breakdown(configuration)
    corrected: dict[str, tuple[float, float, float]] = {}
    doublings = 0.0
    if records:
        # By every window of these probes.
        windows, before = measured_windows(records), probed_on or cluster
        meter = windows.records[0].meter
        model = AnalyticModel(job, charged(before, meter))
        line = ScaleOut.of_prior(model, windows.as_delivered, windows.logs)
        one = predictor(job, charged(cluster, meter), [configuration])
        predicted = line.correct(one, [configuration.world_size])
        largest = max(each.world_size for each in windows.as_delivered)
        doublings = max(0.0, math.log2(configuration.world_size / largest))
        for name in ("step_time_s", "power_W", "energy_J"):
            figure = getattr(predicted, name)
            ends = figure.median, figure.low, figure.high
            corrected[name] = float(ends[0][0]), float(ends[1][0]), float(ends[2][0])
    return Forecast(
        job=job,
        cluster=cluster,
        breakdown=breakdown,
        known_error=tuple(known_error_lines(cluster.device)),
        corrected=corrected,
        probes=sum(len(record.measurements) for record in records),
        doublings=doublings,
    )
