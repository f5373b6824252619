"""What was measured elsewhere, as a prior: the same job on another cluster, another job, a table.

The surrogates are fitted to the earlier measurements over the knobs that both studies know. Two
means come of them: what the live settings alone did, averaged over the launches, which holds for
another job too; and the whole, which may hold for the same job elsewhere. The search starts with
the first; from six measurements on, leaving one out says which of them, the analytic model or none
predicts best here, and the scale is always fitted (`models.surrogate`). Where the analytic model is
known on both sides, what is carried over is how far the measurements were off it. The answer of a
study rests on its own measurements alone: only the search looks at this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from models.analytic import Prediction, Prior
from models.features import FeatureMap, knob_names, varying_knobs
from models.process import LEAST_ROWS
from models.surrogate import Surrogates
from search_spaces.candidates import Candidates
from search_spaces.configuration import Configuration, Settings
from search_spaces.errors import InputError
from search_spaces.knobs import KNOBS, Value
from tuner.job_steps import in_job_steps
from tuner.problem import Problem, recorded_problem
from tuner.runs import find_run
from workload.replay import TableRunner, TraceRunner
from workload.table import RecordedTable

__all__ = ["Earlier", "EarlierPrior", "earlier_of_group", "earlier_priors", "read_earlier"]

#: Configurations that are predicted at once: a block of the covariance, not all of it.
BLOCK = 4096
#: Earlier launches that the effect of the live settings is averaged over, about.
LAUNCHES = 50


@dataclass(frozen=True)
class Earlier:
    """Measurements made elsewhere.

    Attributes:
        name: what they are called, for people.
        configurations: what ran, one a measurement.
        step_time_s, power_W: what was measured, (n,).
        prior: the analytic model of that job on that cluster; None where there is none.
        device: the kind of device they were made on; "" where unknown.
    """

    name: str
    configurations: tuple[Configuration, ...]
    step_time_s: np.ndarray
    power_W: np.ndarray
    prior: Prior | None = None
    device: str = ""


def read_earlier(asked: str | Path, *, runs_dir: str | Path = "runs") -> Earlier:
    """Measurements of a run (a name or a folder), a trace, or a recorded table.

    Args:
        asked: of a table with several groups, FOLDER:GROUP.
        runs_dir: where a run that is named is looked for.

    Raises:
        InputError: there is no such thing, it cannot be read, or it measured next to nothing.
    """
    path, group = Path(asked), None
    if not path.exists() and ":" in str(asked):
        before, _, after = str(asked).partition(":")
        if (Path(before) / "table.toml").is_file():
            path, group = Path(before), after
    if not path.exists():
        path = find_run(str(asked), runs_dir).path
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
        raise _too_few(str(asked), len(rows))
    return Earlier(
        name=path.name if path.is_dir() else str(path),
        configurations=tuple(row[0] for row in rows),
        step_time_s=np.array([row[1] for row in rows]),
        power_W=np.array([row[2] for row in rows]),
        prior=problem.prior,
        device=problem.cluster.device.name if problem.cluster else "",
    )


def earlier_of_group(table: RecordedTable, group: str | None = None) -> Earlier:
    """One group of a recorded table as earlier measurements.

    Raises:
        InputError: there is no such group, or it has next to no points.
    """
    found = table.group(group)
    if len(found.points) < LEAST_ROWS:
        raise _too_few(found.name, len(found.points))
    return Earlier(
        name=table.name if found.name == table.name else f"{table.name}, {found.name}",
        configurations=tuple(point.configuration for point in found.points),
        step_time_s=np.array([point.time_s for point in found.points]),
        power_W=np.array([point.power_W for point in found.points]),
    )


def _too_few(name: str, count: int) -> InputError:
    return InputError(
        f"{name} holds {count} measurements, from which nothing can be carried over; at least "
        f"{LEAST_ROWS} are needed"
    )


class EarlierPrior:
    """Predicts this study's configurations by what was measured elsewhere.

    A live knob of numbers is read as a share of its highest value where the devices differ or are
    not known: another device has another range of clocks and power limits. A knob that only one
    side knows tells nothing and is left out.

    Args:
        earlier: the measurements.
        candidates: this study's.
        prior: this study's analytic model; with the earlier one's, errors of it are carried over,
            else the figures themselves.
        device: the kind of device here; "" where unknown.
        seed: of the surrogates.

    Raises:
        InputError: no knob varies on both sides.
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
        self._launch, self._live = _known_to_both(here, there)
        known = {*self._launch, *self._live}
        self.knobs = tuple(n for n in varying_knobs(here) if n in known & {*varying_knobs(there)})
        if not self.knobs:
            raise InputError(
                f"nothing can be carried over from {earlier.name}: no knob that varies there "
                "varies here"
            )
        same = bool(device) and device == earlier.device
        shares = {} if same else _shares(self._live, here, there)
        rows = [self._seen(c, shares) for c in there]
        every = dict.fromkeys([*map(self._seen, here), *rows])
        self._surrogates = Surrogates(FeatureMap(Candidates.from_configurations(every)), seed=seed)
        launches = dict.fromkeys(row.launch for row in rows)
        self._launches = tuple(launches)[:: max(1, len(launches) // LAUNCHES)]
        time_s, power_W = earlier.step_time_s, earlier.power_W
        if self._prior is not None and earlier.prior is not None:
            said = earlier.prior.predict(there)
            time_s, power_W = time_s / said.step_time_s, power_W / said.power_W
        self._surrogates.fit(rows, time_s, power_W)

    def _seen(
        self, configuration: Configuration, shares: dict[str, float] | None = None
    ) -> Configuration:
        """The knobs that both sides know, live ones of another device times their share."""
        launch = {name: configuration.get(name) for name in self._launch}
        live = {
            name: _times(configuration.get(name), (shares or {}).get(name, 1.0))
            for name in self._live
        }
        halves = ({n: v for n, v in half.items() if v is not None} for half in (launch, live))
        return Configuration(*map(Settings, halves))

    @property
    def means(self) -> tuple[Prior, Prior]:
        """What the live settings alone do, averaged over the earlier launches; and the whole."""
        return _LivePrior(self), self

    def predict(self, configurations: Sequence[Configuration]) -> Prediction:
        """Step time and power, the scale of either being the earlier study's; no memory."""
        return self._of_log(self._mean([self._seen(c) for c in configurations]), configurations)

    def predict_live(self, configurations: Sequence[Configuration]) -> Prediction:
        """As `predict`, with the mean over the earlier launches in place of each one's own."""
        lives = [self._seen(c).live for c in configurations]
        place = {live: i for i, live in enumerate(dict.fromkeys(lives))}
        every = [Configuration(launch, live) for live in place for launch in self._launches]
        each = self._mean(every).reshape(2, len(place), len(self._launches)).mean(axis=2)
        return self._of_log(each[:, [place[live] for live in lives]], configurations)

    def _mean(self, rows: Sequence[Configuration]) -> np.ndarray:
        """Posterior means of log time and log power, (2, n), block by block."""
        starts = range(0, max(len(rows), 1), BLOCK)
        return np.hstack([np.stack(self._surrogates.mean(rows[i : i + BLOCK])) for i in starts])

    def _of_log(self, log: np.ndarray, configurations: Sequence[Configuration]) -> Prediction:
        time_s, power_W = np.exp(log)
        if self._prior is not None:
            said = self._prior.predict(configurations)
            time_s, power_W = time_s * said.step_time_s, power_W * said.power_W
        return Prediction(time_s, power_W, np.empty(0))


@dataclass(frozen=True)
class _LivePrior:
    """`EarlierPrior.predict_live` as a prior of its own."""

    whole: EarlierPrior

    def predict(self, configurations: Sequence[Configuration]) -> Prediction:
        return self.whole.predict_live(configurations)


def earlier_priors(
    asked: Sequence[str | Path], problem: Problem, *, runs_dir: str | Path = "runs", seed: int = 0
) -> tuple[tuple[Prior, ...], tuple[str, ...]]:
    """What each of these says of a problem's candidates, two means each, and a sentence about it.

    Raises:
        InputError: one of them cannot be read or says nothing here.
    """
    priors: list[Prior] = []
    notes: list[str] = []
    for one in asked:
        earlier = read_earlier(one, runs_dir=runs_dir)
        prior = EarlierPrior(
            earlier,
            problem.candidates,
            prior=problem.prior,
            device=problem.cluster.device.name if problem.cluster else "",
            seed=seed,
        )
        priors += prior.means
        notes.append(
            f"{len(earlier.configurations)} measurements of {earlier.name} are a prior of the "
            f"search, by {', '.join(prior.knobs)}, while they predict what is measured here"
        )
    return tuple(priors), tuple(notes)


def _known_to_both(
    here: Sequence[Configuration], there: Sequence[Configuration]
) -> tuple[list[str], list[str]]:
    """Launch and live knobs that both sides know and either varies; this side says which is live.

    A standard knob that a side does not name stands at its default there, so both know it.
    """
    names = [knob_names(side) for side in (here, there)]
    named = [{*launch, *live} for launch, live in names]
    varying = dict.fromkeys([*varying_knobs(here), *varying_knobs(there)])
    both = [n for n in varying if n in KNOBS or all(n in side for side in named)]
    lives = {*names[0][1], *(n for n in names[1][1] if n not in named[0])}
    return [n for n in both if n not in lives], [n for n in both if n in lives]


def _shares(
    names: Sequence[str], here: Sequence[Configuration], there: Sequence[Configuration]
) -> dict[str, float]:
    """For each live knob of positive numbers, the highest here over the highest there."""
    shares = {}
    for name in names:
        tops = []
        for side in (here, there):
            values = {configuration.get(name) for configuration in side}
            parts = [p for v in values for p in (v if isinstance(v, tuple) else (v,))]
            numbers = [p for p in parts if isinstance(p, int | float) and not isinstance(p, bool)]
            told = [p for p in parts if p is not None]
            tops.append(float(max(numbers)) if numbers and len(numbers) == len(told) else 0.0)
        if min(tops) > 0:
            shares[name] = tops[0] / tops[1]
    return shares


def _times(value: Value | None, share: float) -> Any:
    if share == 1.0 or value is None:
        return value
    if isinstance(value, tuple):
        return tuple(part * share for part in value)
    return value * share if isinstance(value, int | float) else value
