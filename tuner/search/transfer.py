"""Priors from earlier measurements over the same knobs: of the job elsewhere, a trace, a table.

The surrogates are fitted to the earlier measurements, and their mean is a prior mean of this study.
The search starts with it; from six measurements on, leave-one-out decides whether it, the analytic
model or none predicts best, and the scale is always fitted (`tuner.models.surrogate.surrogates`).
If the analytic model is known on both sides, its errors are transferred instead of the figures
themselves. A study's result rests on its own measurements alone: only the search uses these priors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tuner.models.analytic.model import Prediction, Prior
from tuner.models.surrogate.features import FeatureMap, knob_names, varying_knobs
from tuner.models.surrogate.gaussian_process import LEAST_ROWS
from tuner.models.surrogate.surrogates import Surrogates
from tuner.problem.batch_scaling import in_job_steps
from tuner.problem.from_recording import recorded_problem
from tuner.problem.problem import Problem
from tuner.problem.run_folder import find_run
from tuner.search_spaces.candidates import Candidates
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.knobs import KNOBS, Value
from tuner.workload.replay import TableRunner, TraceRunner
from tuner.workload.table import RecordedTable

#: Number of configurations predicted at once: a block of the covariance, not all of it.
BLOCK = 4096


@dataclass(frozen=True)
class Earlier:
    """Earlier measurements, of another study or a recording.

    Attributes:
        configurations: the delivered ones, one per measurement.
        prior: analytic model of that job on that cluster; None if there is none.
    """

    name: str
    configurations: tuple[Configuration, ...]
    step_time_s: np.ndarray
    power_W: np.ndarray
    prior: Prior | None = None
    device: str = ""


def read_earlier(source: str | Path, *, runs_dir: str | Path = "runs") -> Earlier:
    """Read the measurements of a run, a trace, or a recorded table.

    Args:
        source: a run's name, or a path; FOLDER:GROUP for a table with several groups.

    Raises:
        InputError: there is no such source, it cannot be read, or it has too few measurements.
    """
    path, group = Path(source), None
    if not path.exists() and ":" in str(source):
        before, _, after = str(source).partition(":")
        if (Path(before) / "table.toml").is_file():
            path, group = Path(before), after
    if not path.exists():
        path = find_run(str(source), runs_dir).path
    problem, runner = recorded_problem(path, group=group)
    if isinstance(runner, TableRunner):
        return earlier_of_group(runner.table, runner.group.name)
    rows: list[tuple[Configuration, float, float]] = []
    if isinstance(runner, TraceRunner):
        rows = [
            (Configuration(record.request.launch, m.as_delivered), m.step_time_s, m.power_W)
            for record in (in_job_steps(record, problem.job) for record in runner.records)
            for m in record.measurements
        ]
    if len(rows) < LEAST_ROWS:
        raise _too_few(str(source), len(rows))
    return Earlier(
        name=path.name if path.is_dir() else str(path),
        configurations=tuple(row[0] for row in rows),
        step_time_s=np.array([row[1] for row in rows]),
        power_W=np.array([row[2] for row in rows]),
        prior=problem.prior,
        device=problem.cluster.device.name if problem.cluster else "",
    )


def earlier_of_group(table: RecordedTable, group: str | None = None) -> Earlier:
    """Return one group of a recorded table as earlier measurements.

    Raises:
        InputError: there is no such group, or it has too few points.
    """
    recorded = table.group(group)
    if len(recorded.points) < LEAST_ROWS:
        raise _too_few(recorded.name, len(recorded.points))
    return Earlier(
        name=table.name if recorded.name == table.name else f"{table.name}, {recorded.name}",
        configurations=tuple(point.configuration for point in recorded.points),
        step_time_s=np.array([point.time_s for point in recorded.points]),
        power_W=np.array([point.power_W for point in recorded.points]),
    )


def _too_few(name: str, count: int) -> InputError:
    return InputError(
        f"{name} holds {count} measurements, too few to start a search from; at least "
        f"{LEAST_ROWS} are needed"
    )


class EarlierPrior:
    """Prior of this study's configurations made of earlier measurements.

    A numeric live knob is read as a share of its highest value if the devices differ or are
    unknown: another device has another range of clocks and power limits.

    Args:
        prior: this study's analytic model; if the earlier study has one too, the models' errors are
            transferred, else the figures themselves.

    Raises:
        InputError: a knob is only on one side, or none varies on both.
    """

    def __init__(
        self,
        earlier: Earlier,
        candidates: Candidates,
        *,
        prior: Prior | None = None,
        device: str = "",
        seed: int = 0,
    ) -> None:
        self._prior = prior if earlier.prior is not None else None
        here, there = candidates.configurations, earlier.configurations
        names = [knob_names(side) for side in (here, there)]
        named = [{*launch, *live} for launch, live in names]
        varying = dict.fromkeys([*varying_knobs(here), *varying_knobs(there)])
        # A standard knob that a side does not name has its default there.
        alone = [n for n in varying if n not in KNOBS and not all(n in side for side in named)]
        self.knobs = tuple(n for n in varying_knobs(here) if n in varying_knobs(there))
        if alone or not self.knobs:
            why = f"only one of them has {', '.join(alone)}" if alone else "none varies in both"
            raise InputError(
                f"{earlier.name} cannot start this search, whose knobs must be the same: {why}"
            )
        lives = {*names[0][1], *(n for n in names[1][1] if n not in named[0])}
        self._launch = [name for name in varying if name not in lives]
        self._live = [name for name in varying if name in lives]
        same_device = bool(device) and device == earlier.device
        shares = {} if same_device else _shares(self._live, here, there)
        rows = [self._restricted(c, shares) for c in there]
        every = dict.fromkeys([*map(self._restricted, here), *rows])
        self._surrogates = Surrogates(FeatureMap(Candidates.from_configurations(every)), seed=seed)
        time_s, power_W = earlier.step_time_s, earlier.power_W
        if self._prior is not None and earlier.prior is not None:
            predicted = earlier.prior.predict(there)
            time_s, power_W = time_s / predicted.step_time_s, power_W / predicted.power_W
        self._surrogates.fit(rows, time_s, power_W)

    def _restricted(
        self, configuration: Configuration, shares: dict[str, float] | None = None
    ) -> Configuration:
        """Return the knobs that vary on either side, the live ones scaled by their share."""
        launch = {name: configuration.get(name) for name in self._launch}
        live = {
            name: _times(configuration.get(name), (shares or {}).get(name, 1.0))
            for name in self._live
        }
        halves = ({n: v for n, v in half.items() if v is not None} for half in (launch, live))
        return Configuration(*map(Settings, halves))

    def predict(self, configurations: Sequence[Configuration]) -> Prediction:
        """Predict step time and power, each on the earlier study's scale; no memory."""
        rows = [self._restricted(c) for c in configurations]
        return self._of_log(self._mean(rows), configurations)

    def _mean(self, rows: Sequence[Configuration]) -> np.ndarray:
        """Return posterior means of log time and log power, (2, n), block by block."""
        starts = range(0, max(len(rows), 1), BLOCK)
        return np.hstack([np.stack(self._surrogates.mean(rows[i : i + BLOCK])) for i in starts])

    def _of_log(self, log: np.ndarray, configurations: Sequence[Configuration]) -> Prediction:
        time_s, power_W = np.exp(log)
        if self._prior is not None:
            predicted = self._prior.predict(configurations)
            time_s, power_W = time_s * predicted.step_time_s, power_W * predicted.power_W
        return Prediction(time_s, power_W, np.empty(0))


def earlier_priors(
    sources: Sequence[str | Path], problem: Problem, *, runs_dir: str | Path = "runs", seed: int = 0
) -> tuple[tuple[Prior, ...], tuple[str, ...]]:
    """Return the priors of a problem's candidates, one per source, and a sentence about each.

    Raises:
        InputError: a source cannot be read, or has other knobs than the problem.
    """
    priors: list[Prior] = []
    notes: list[str] = []
    for source in sources:
        earlier = read_earlier(source, runs_dir=runs_dir)
        prior = EarlierPrior(
            earlier,
            problem.candidates,
            prior=problem.prior,
            device=problem.cluster.device.name if problem.cluster else "",
            seed=seed,
        )
        priors.append(prior)
        notes.append(
            f"{len(earlier.configurations)} measurements of {earlier.name} are a prior of the "
            f"search, by {', '.join(prior.knobs)}, while they predict what is measured here"
        )
    return tuple(priors), tuple(notes)


def _shares(
    names: Sequence[str], here: Sequence[Configuration], there: Sequence[Configuration]
) -> dict[str, float]:
    """Return, for each live knob of positive numbers, its maximum here over that there."""
    shares = {}
    for name in names:
        tops = []
        for side in (here, there):
            values = {configuration.get(name) for configuration in side}
            parts = [p for v in values for p in (v if isinstance(v, tuple) else (v,))]
            numbers = [p for p in parts if isinstance(p, int | float) and not isinstance(p, bool)]
            stated = [p for p in parts if p is not None]
            tops.append(float(max(numbers)) if numbers and len(numbers) == len(stated) else 0.0)
        if min(tops) > 0:
            shares[name] = tops[0] / tops[1]
    return shares


def _times(value: Value | None, share: float) -> Any:
    if share == 1.0 or value is None:
        return value
    if isinstance(value, tuple):
        return tuple(part * share for part in value)
    return value * share if isinstance(value, int | float) else value
