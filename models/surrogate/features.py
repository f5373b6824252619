"""Configurations as numbers: the feature columns of the surrogates.

Each knob that varies over the candidates becomes one or more columns in [0, 1]. A live knob that is
left to the device has its highest value, and a column of its own marks it. An analytic prior adds
its log time and log power as two columns; its live part (the prediction over the mean of the
launch) is a mean to choose from, without a column.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from tuner.models.prior import CorrectablePrior
from tuner.models.surrogate.gaussian_process import LAUNCH, LIVE, MIXED
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.knob_declarations import CHANGED
from tuner.search_spaces.knobs import KNOBS, Value, stage_values

if TYPE_CHECKING:
    from tuner.models.prior import Prior
    from tuner.search_spaces.space import Candidates

#: An unlisted numeric knob whose values are positive and span more than this factor is logarithmic.
LOG_RATIO = 4.0
#: Number of launches whose windows correct the model's constants; the surrogates learn the rest.
CORRECTING = 4

#: Configurations, or the numbers of candidates.
Rows = Sequence[Configuration] | np.ndarray
_Column = Callable[[Sequence["Value | None"]], "np.ndarray[Any, Any]"]


def feature_knobs(configurations: Sequence[Configuration]) -> list[str]:
    """Return the knobs with more than one value: launch knobs first, each half by name."""
    launch = sorted({name for c in configurations for name in c.launch} - {CHANGED})
    live = sorted({name for c in configurations for name in c.live})
    return [name for name in launch + live if len({c.get(name) for c in configurations}) > 1]


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _numeric(level: object) -> bool:
    return bool(parts := stage_values(level)) and all(map(_number, parts))


def _mean(level: Value) -> float:
    return float(np.mean(np.asarray(level, dtype=float)))


def _numeric_column(levels: Sequence[Value], *, log: bool) -> _Column:
    # Values per stage have one column for each stage of the longest tuple.
    width = max((len(stage_values(level)) for level in levels), default=1)

    def spread(value: Value) -> list[float]:
        parts = stage_values(value)
        return [float(parts[i * len(parts) // width]) for i in range(width)]

    def raw(values: Sequence[Value]) -> np.ndarray:
        rows = np.array([spread(value) for value in values], dtype=float)
        return np.log2(rows) if log else rows

    rows = raw(levels)
    low, high = float(rows.min()), float(rows.max())
    top = max(levels, key=_mean)

    def column(values: Sequence[Value | None]) -> np.ndarray:
        filled = [top if value is None else value for value in values]
        return (raw(filled) - low) / (high - low if high > low else 1.0)

    return column


def _missing_column(values: Sequence[Value | None]) -> np.ndarray:
    return np.array([[value is None] for value in values], dtype=float)


def _one_hot_column(levels: Sequence[Value]) -> _Column:
    # A column per level, or one for two levels. An unknown level is all zeros.
    place = {level: i for i, level in enumerate(levels)}
    eye = np.vstack([np.eye(len(levels)), np.zeros(len(levels))])
    if len(levels) == 2:
        eye = eye[:, 1:]

    def column(values: Sequence[Value | None]) -> np.ndarray:
        return eye[[place.get(value, len(levels)) for value in values]]  # type: ignore[arg-type]

    return column


def _columns_of(
    values: Sequence[Value | None], scale: Literal["log2", "linear", "category"] | None
) -> _Column:
    levels = list(dict.fromkeys(value for value in values if value is not None))
    columns: list[_Column] = []
    if len(levels) > 1 and (scale == "category" or not all(map(_numeric, levels))):
        columns.append(_one_hot_column(sorted(levels, key=str)))
    elif len(levels) > 1:
        flat = np.array([_mean(level) for level in levels])
        log = scale == "log2" or (
            scale is None and flat.min() > 0 and flat.max() / flat.min() > LOG_RATIO
        )
        columns.append(_numeric_column(levels, log=log))
    if None in values:
        columns.append(_missing_column)
    return lambda values: np.hstack([column(values) for column in columns])


class _PredictedLogs:
    # Log step time and log power that a model predicts of the candidates, (n, 2), and their live
    # part: what they are over the mean of the launch. A model that misjudges the launches may still
    # be right about how the live settings bend step time and power within each: a discrepancy of
    # the launches alone.

    def __init__(self, model: Prior, candidates: Sequence[Configuration]) -> None:
        self._model = model
        self.log = self(candidates)
        places = {launch: i for i, launch in enumerate(dict.fromkeys(c.launch for c in candidates))}
        of = np.array([places[c.launch] for c in candidates])
        levels = np.zeros((len(places), 2))
        np.add.at(levels, of, self.log)
        levels /= np.bincount(of)[:, None]
        self._levels = dict(zip(places, levels, strict=True))
        self.live = self.log - levels[of]

    def __call__(self, configurations: Sequence[Configuration]) -> np.ndarray:
        predicted = self._model.predict(configurations)
        return np.log(np.column_stack([predicted.step_time_s, predicted.power_W]))

    def live_of(self, configurations: Sequence[Configuration]) -> np.ndarray:
        # A launch that no candidate has is taken to be like the others.
        middle = np.mean(list(self._levels.values()), axis=0)
        own = [self._levels.get(c.launch, middle) for c in configurations]
        return self(configurations) - np.array(own)


class FeatureMap:
    """Map from configurations to rows of numbers, all columns in [0, 1] over the candidates.

    Args:
        candidates: they set the levels and ranges; knobs that are constant over them are dropped.
        learns_program: let `correct` correct the model. It is for the search: answers keep the mean
            that no measurement moved. One that saw the windows leaves residuals too small to learn
            from: of opt-350m's held-out step times on a simulated cluster 49 % lay in their 90 %
            intervals after 8 windows, instead of 99 %.

    Attributes:
        matrix: rows of the candidates, in their order, (candidates, dimension).
        kinds: kind of each column: launch, live or mixed (`gaussian_process`).
        priors: number of priors: the model, and its live part.
    """

    def __init__(
        self,
        candidates: Candidates,
        *,
        prior: Prior | None = None,
        learns_program: bool = False,
    ) -> None:
        configurations = candidates.configurations
        self._configurations, self._model = configurations, prior
        self._learns_program = learns_program
        self._corrected_by: tuple[object, ...] = (b"",)
        self._row = {c: i for i, c in enumerate(configurations)}
        scales = {name: knob.scale for name, knob in KNOBS.items()}
        scales |= {knob.name: knob.scale for knob in candidates.knobs}
        self._columns = {
            name: _columns_of([c.get(name) for c in configurations], scales.get(name))
            for name in feature_knobs(configurations)
        }
        self._prior = None if prior is None else _PredictedLogs(prior, configurations)
        self._corrected, self.priors = self._prior, 0
        log = np.zeros((len(configurations), 0))
        if self._prior is not None:
            log, live_part = self._prior.log, self._prior.live
            self.priors = 2 if np.ptp(live_part, axis=0).max() > 1e-9 else 1
        self._prior_low, self._prior_span = log.min(axis=0), np.ptp(log, axis=0)
        self.matrix = self._compute(configurations, log)
        live = {name for c in configurations for name in c.live}
        kinds = [
            LIVE if name in live else LAUNCH
            for name, columns in self._columns.items()
            for _ in range(columns([configurations[0].get(name)]).shape[1])
        ]
        self.kinds = np.array(kinds + [MIXED] * (self.dimension - len(kinds)), dtype=int)

    @property
    def dimension(self) -> int:
        """Number of columns."""
        return int(self.matrix.shape[1])

    def correct(self, configurations: Sequence[Configuration], logs: np.ndarray) -> bool:
        """Correct the model's constants by the windows of the first launches; True if it changed.

        The mean of `prior_log` changes and the columns stay.

        Args:
            logs: log step time and log power of each window, (n, 2).
        """
        model, prior = self._model, self._prior
        if not self._learns_program or prior is None or not isinstance(model, CorrectablePrior):
            return False
        first = list(dict.fromkeys(c.launch for c in configurations))[:CORRECTING]
        rows = [i for i, c in enumerate(configurations) if c.launch in first]
        by = (*(configurations[i] for i in rows), logs[rows].tobytes())
        if by == self._corrected_by:
            return False
        self._corrected_by, self._corrected = by, prior
        if rows:
            corrected = model.corrected([configurations[i] for i in rows], logs[rows])
            self._corrected = _PredictedLogs(corrected, self._configurations)
        return True

    def _compute(self, configurations: Sequence[Configuration], prior: np.ndarray) -> np.ndarray:
        parts = [
            columns([configuration.get(name) for configuration in configurations])
            for name, columns in self._columns.items()
        ]
        varying = self._prior_span > 1e-9
        if varying.any():
            parts.append(
                ((prior - self._prior_low) / np.maximum(self._prior_span, 1e-9))[:, varying]
            )
        if not parts:  # a single candidate: one constant column
            parts.append(np.zeros((len(configurations), 1)))
        return np.hstack(parts)

    def _numbered(self, configurations: Rows) -> Rows:
        # As numbers, unless one of them is no candidate.
        if isinstance(configurations, np.ndarray):
            return configurations
        numbers = [self._row.get(configuration, -1) for configuration in configurations]
        return configurations if -1 in numbers else np.array(numbers, dtype=int)

    def transform(self, configurations: Rows) -> np.ndarray:
        """Return rows of features, shape (len(configurations), dimension)."""
        rows = self._numbered(configurations)
        if isinstance(rows, np.ndarray):
            return self.matrix[rows]
        prior = self._prior
        log = np.zeros((len(rows), 0)) if prior is None else prior(rows)
        return self._compute(rows, log)

    def prior_log(self, configurations: Rows, prior: int = 0) -> np.ndarray:
        """Return log step time and log power of the model, or of its live part (prior 1), (n, 2).

        Zeros without a model.
        """
        rows, corrected = self._numbered(configurations), self._corrected
        if corrected is None:
            return np.zeros((len(rows), 2))
        if isinstance(rows, np.ndarray):
            return (corrected.live if prior else corrected.log)[rows]
        return corrected.live_of(rows) if prior else corrected(rows)
