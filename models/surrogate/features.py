"""Configurations as numbers: the feature columns of the surrogates.

Each knob that varies over the candidates becomes one or more columns in [0, 1]. A live knob that is
left to the device has its highest value, and a column of its own marks it. An analytic prior adds
its log time and log power as two columns; its live part (the prediction over the mean of the
launch) is a mean to choose from, without a column.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from tuner.models.analytic.model import Correctable
from tuner.models.scale_out import ScaleOut
from tuner.models.surrogate.kernel import LAUNCH, LIVE, MIXED
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.search_spaces.declared import CHANGED
from tuner.search_spaces.knobs import KNOBS, Value

if TYPE_CHECKING:
    from tuner.models.analytic.model import Prior
    from tuner.search_spaces.space import Candidates

#: An unlisted numeric knob whose values are positive and span more than this factor is logarithmic.
LOG_RATIO = 4.0
#: Number of launches whose windows correct the model's constants; the surrogates learn the rest.
CORRECTING = 4

_Column = Callable[[Sequence["Value | None"]], "np.ndarray[Any, Any]"]


def knob_names(configurations: Iterable[Configuration]) -> tuple[list[str], list[str]]:
    """Return the names of the launch knobs and of the live knobs of any of these configurations."""
    launch: dict[str, None] = {}
    live: dict[str, None] = {}
    for configuration in configurations:
        launch.update(dict.fromkeys(configuration.launch))
        live.update(dict.fromkeys(configuration.live))
    return sorted(launch), sorted(live)


def varying_knobs(configurations: Sequence[Configuration]) -> list[str]:
    """Return the knobs with more than one value: launch knobs first, each half by name."""
    launch, live = knob_names(configurations)
    names = (name for name in launch + live if name != CHANGED)
    return [name for name in names if len({c.get(name) for c in configurations}) > 1]


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _numbers(level: object) -> bool:
    return isinstance(level, tuple) and bool(level) and all(map(_number, level))


def _mean(level: Value) -> float:
    return float(np.mean(np.asarray(level, dtype=float)))


def _numeric_column(levels: Sequence[Value], *, log: bool) -> _Column:
    # Values per stage have one column for each stage of the longest tuple.
    width = max((len(level) for level in levels if isinstance(level, tuple)), default=1)

    def spread(value: Value) -> list[float]:
        parts = value if isinstance(value, tuple) else (value,)
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
) -> list[_Column]:
    levels = list(dict.fromkeys(value for value in values if value is not None))
    missing = len(levels) < len(set(values))
    numeric = all(_number(level) or _numbers(level) for level in levels)
    columns: list[_Column] = []
    if scale == "category" or not numeric:
        if len(levels) > 1:
            columns.append(_one_hot_column(sorted(levels, key=str)))
    elif len(levels) > 1:
        flat = np.array([_mean(level) for level in levels])
        log = scale == "log2" or (
            scale is None and flat.min() > 0 and flat.max() / flat.min() > LOG_RATIO
        )
        columns.append(_numeric_column(levels, log=log))
    if missing and levels:
        columns.append(_missing_column)
    return columns


class FeatureMap:
    """Map from configurations to rows of numbers, all columns in [0, 1] over the candidates.

    Args:
        candidates: they set the levels and ranges; knobs that are constant over them are dropped.
        learns_program: let `correct` correct the model. It is for the search: answers keep the mean
            that no measurement moved. One that saw the windows leaves residuals too small to learn
            from: of opt-350m's held-out step times on a simulated cluster 49 % lay in their 90 %
            intervals after 8 windows, instead of 99 %.
    """

    def __init__(
        self,
        candidates: Candidates,
        *,
        prior: Prior | None = None,
        learns_program: bool = False,
    ) -> None:
        configurations = candidates.configurations
        self._prior = prior
        self._columns: list[tuple[str, _Column]] = []
        scales = {name: knob.scale for name, knob in KNOBS.items()}
        scales |= {knob.name: knob.scale for knob in candidates.knobs}
        for name in varying_knobs(configurations):
            values = [configuration.get(name) for configuration in configurations]
            columns = _columns_of(values, scales.get(name))
            self._columns += [(name, column) for column in columns]
        self._row = {c: i for i, c in enumerate(configurations)}
        self._levels: dict[Settings, np.ndarray] = {}
        self._configurations, self._learns_program = configurations, learns_program
        self._corrected = prior
        self._corrected_by: tuple[object, ...] = (b"",)
        self._prior_log = self._predict_priors(configurations)
        if prior is not None:
            self._add_live_part(configurations)
        self._prior_low = self._prior_log.min(axis=0)
        self._prior_span = np.ptp(self._prior_log, axis=0)
        self._prior_span[2:] = 0.0
        self._corrected_log, self._corrected_levels = self._prior_log, self._levels
        self._matrix = self._compute(configurations, self._prior_log)
        self._kinds = self._kinds_of_columns(configurations)

    @property
    def matrix(self) -> np.ndarray:
        """Rows of the candidates, in their order: shape (candidates, dimension)."""
        return self._matrix

    @property
    def dimension(self) -> int:
        """Number of columns."""
        return int(self._matrix.shape[1])

    @property
    def kinds(self) -> np.ndarray:
        """Kind of each column: launch, live or mixed (`tuner.models.surrogate.kernel`)."""
        return self._kinds

    def _kinds_of_columns(self, configurations: Sequence[Configuration]) -> np.ndarray:
        _, live = knob_names(configurations)
        first = configurations[:1]
        kinds = [
            LIVE if name in live else LAUNCH
            for name, column in self._columns
            for _ in range(column([c.get(name) for c in first]).shape[1])
        ]
        return np.array(kinds + [MIXED] * (self.dimension - len(kinds)), dtype=int)

    @property
    def priors(self) -> int:
        """Number of priors: the model, and its live part."""
        return int(self._prior_log.shape[1]) // 2

    def _add_live_part(self, configurations: Sequence[Configuration]) -> None:
        # A model that misjudges the launches may still be right about how the live settings bend
        # step time and power within each: a discrepancy of the launches alone.
        levels = self._levels_of(configurations, self._prior_log)
        centred = [self._prior_log[i, -2:] - levels[c.launch] for i, c in enumerate(configurations)]
        if np.ptp(centred, axis=0).max() > 1e-9:
            self._levels = levels
            self._prior_log = self._with_live_part(configurations, self._prior_log)

    @staticmethod
    def _levels_of(
        configurations: Sequence[Configuration], log: np.ndarray
    ) -> dict[Settings, np.ndarray]:
        launches = dict.fromkeys(c.launch for c in configurations)
        places = {launch: i for i, launch in enumerate(launches)}
        of = np.array([places[c.launch] for c in configurations])
        levels = np.zeros((len(places), 2))
        np.add.at(levels, of, log[:, -2:])
        levels /= np.bincount(of)[:, None]
        return dict(zip(places, levels, strict=True))

    def _with_live_part(
        self,
        configurations: Sequence[Configuration],
        log: np.ndarray,
        levels: dict[Settings, np.ndarray] | None = None,
    ) -> np.ndarray:
        levels = self._levels if levels is None else levels
        if not levels:
            return log
        # A launch that no candidate has is taken to be like the others.
        middle = np.mean(list(levels.values()), axis=0)
        own = [levels.get(c.launch, middle) for c in configurations]
        return np.hstack([log, log[:, -2:] - np.array(own).reshape(-1, 2)])

    def correct(self, configurations: Sequence[Configuration], logs: np.ndarray) -> bool:
        """Correct the model's constants by the windows of the first launches; True if it changed.

        The mean of `prior_log` changes and the columns stay.

        Args:
            logs: log step time and log power of each window, (n, 2).
        """
        model = self._prior
        if not self._learns_program or not isinstance(model, Correctable):
            return False
        first = list(dict.fromkeys(c.launch for c in configurations))[:CORRECTING]
        rows = [i for i, c in enumerate(configurations) if c.launch in first]
        by = (*(configurations[i] for i in rows), logs[rows].tobytes())
        if by == self._corrected_by:
            return False
        self._corrected_by, corrected = by, model
        if rows:
            line = ScaleOut.of_prior(model, [configurations[i] for i in rows], logs[rows])
            corrected = model.with_constants(line.constants)
        self._corrected = corrected
        log = self._logs(self._configurations, self._corrected)
        if self._levels:
            self._corrected_levels = self._levels_of(self._configurations, log)
            log = self._with_live_part(self._configurations, log, self._corrected_levels)
        self._corrected_log = log
        return True

    @staticmethod
    def _logs(configurations: Sequence[Configuration], model: Prior | None) -> np.ndarray:
        if model is None:
            return np.zeros((len(configurations), 0))
        predicted = model.predict(configurations)
        return np.log(np.column_stack([predicted.step_time_s, predicted.power_W]))

    def _predict_priors(self, configurations: Sequence[Configuration]) -> np.ndarray:
        return self._with_live_part(configurations, self._logs(configurations, self._prior))

    def _compute(self, configurations: Sequence[Configuration], prior: np.ndarray) -> np.ndarray:
        if not configurations:
            width = self.dimension if hasattr(self, "_matrix") else 1
            return np.empty((0, width))
        parts = []
        read: dict[str, list[Value | None]] = {}
        for name, column in self._columns:
            if name not in read:
                read[name] = [configuration.get(name) for configuration in configurations]
            parts.append(column(read[name]))
        varying = self._prior_span > 1e-9
        if varying.any():
            parts.append(
                ((prior - self._prior_low) / np.maximum(self._prior_span, 1e-9))[:, varying]
            )
        if not parts:  # a single candidate: one constant column
            parts.append(np.zeros((len(configurations), 1)))
        return np.hstack(parts)

    def transform(self, configurations: Sequence[Configuration]) -> np.ndarray:
        """Return rows of features, shape (len(configurations), dimension)."""
        rows = [self._row.get(configuration, -1) for configuration in configurations]
        if -1 not in rows:
            return self._matrix[rows].reshape(len(rows), self.dimension)
        return self._compute(configurations, self._predict_priors(configurations))

    def prior_log(self, configurations: Sequence[Configuration], which: int = 0) -> np.ndarray:
        """Return one prior's log step time and log power, shape (n, 2); zeros without a prior."""
        rows = [self._row.get(configuration, -1) for configuration in configurations]
        if self._prior is None:
            return np.zeros((len(rows), 2))
        if -1 in rows:
            log = self._with_live_part(
                configurations, self._logs(configurations, self._corrected), self._corrected_levels
            )
        else:
            log = self._corrected_log[rows]
        return log.reshape(len(rows), 2 * self.priors)[:, 2 * which : 2 * which + 2]
