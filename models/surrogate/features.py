"""Configurations as numbers: the feature columns of the surrogates.

Each knob that varies over the candidates becomes one or more columns in [0, 1]. A live knob that is
left to the device has its highest value, and a column of its own marks it. What an analytic prior
predicts is no column: it is a mean that the surrogates may take (`prior_log`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from tuner.models.prior import CorrectablePrior
from tuner.models.surrogate.gaussian_process import LAUNCH, LIVE
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.knob_declarations import CHANGED
from tuner.search_spaces.knobs import KNOBS, Value, stage_values

if TYPE_CHECKING:
    from tuner.models.prior import Prior
    from tuner.search_spaces.space import Candidates

#: An unlisted numeric knob whose values are positive and span more than this factor is logarithmic.
LOG_RATIO = 4.0
#: Number of launches whose windows correct the model's constants; the surrogates learn the rest.
CORRECTING = 8

#: Configurations, or the numbers of candidates.
Rows = Sequence[Configuration] | np.ndarray
_Column = Callable[[Sequence["Value | None"]], "np.ndarray[Any, Any]"]


def feature_knobs(configurations: Sequence[Configuration]) -> list[str]:
    """Return the knobs with more than one value: launch knobs first, each half by name."""
    launch = sorted({name for c in configurations for name in c.launch} - {CHANGED})
    live = sorted({name for c in configurations for name in c.live})
    return [name for name in launch + live if len({c.get(name) for c in configurations}) > 1]


def _numeric(level: object) -> bool:
    parts = stage_values(level)
    numbers = (isinstance(each, int | float) and not isinstance(each, bool) for each in parts)
    return bool(parts) and all(numbers)


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


def _predicted_logs(model: Prior, configurations: Sequence[Configuration]) -> np.ndarray:
    predicted = model.predict(configurations)
    return np.log(np.column_stack([predicted.step_time_s, predicted.power_W]))


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
        kinds: kind of each column, launch or live (`gaussian_process`).
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
        # Log step time and log power of each candidate by the model, corrected or not, (n, 2).
        self._logs = np.zeros((len(configurations), 2))
        if prior is not None:
            self._logs = _predicted_logs(prior, configurations)
        self._plain, self._corrected = self._logs, prior
        self.matrix = self._compute(configurations)
        live = {name for c in configurations for name in c.live}
        kinds = [
            LIVE if name in live else LAUNCH
            for name, columns in self._columns.items()
            for _ in range(columns([configurations[0].get(name)]).shape[1])
        ]
        self.kinds = np.array(kinds or [LAUNCH], dtype=int)

    @property
    def has_prior(self) -> bool:
        """True if a model predicts the candidates."""
        return self._model is not None

    def correct(self, configurations: Sequence[Configuration], logs: np.ndarray) -> bool:
        """Correct the model's constants by the windows of the first launches; True if it changed.

        What `prior_log` returns changes.

        Args:
            logs: log step time and log power of each window, (n, 2).
        """
        model = self._model
        if not self._learns_program or not isinstance(model, CorrectablePrior):
            return False
        first = list(dict.fromkeys(c.launch for c in configurations))[:CORRECTING]
        rows = [i for i, c in enumerate(configurations) if c.launch in first]
        by = (*(configurations[i] for i in rows), logs[rows].tobytes())
        if by == self._corrected_by:
            return False
        self._corrected_by, self._corrected, self._logs = by, model, self._plain
        if rows:
            self._corrected = model.corrected([configurations[i] for i in rows], logs[rows])
            self._logs = _predicted_logs(self._corrected, self._configurations)
        return True

    def _compute(self, configurations: Sequence[Configuration]) -> np.ndarray:
        parts = [
            columns([configuration.get(name) for configuration in configurations])
            for name, columns in self._columns.items()
        ]
        # Of a single candidate: one constant column.
        return np.hstack(parts or [np.zeros((len(configurations), 1))])

    def _numbered(self, configurations: Rows) -> Rows:
        # As numbers, unless one of them is no candidate.
        if isinstance(configurations, np.ndarray):
            return configurations
        numbers = [self._row.get(configuration, -1) for configuration in configurations]
        return configurations if -1 in numbers else np.array(numbers, dtype=int)

    def transform(self, configurations: Rows) -> np.ndarray:
        """Return rows of features, shape (len(configurations), dimension)."""
        rows = self._numbered(configurations)
        return self.matrix[rows] if isinstance(rows, np.ndarray) else self._compute(rows)

    def prior_log(self, configurations: Rows) -> np.ndarray:
        """Return log step time and log power of the model, (n, 2); zeros without one."""
        rows, model = self._numbered(configurations), self._corrected
        if isinstance(rows, np.ndarray):
            return self._logs[rows]
        return np.zeros((len(rows), 2)) if model is None else _predicted_logs(model, rows)
