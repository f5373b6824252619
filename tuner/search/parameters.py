"""Candidates as Optuna parameters.

A parameter is a knob that varies. Integers at even steps are integer ranges, which stock samplers
and the dashboard can order. A live knob that may be left to the device has the level None.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution

from tuner.models.surrogate.features import varying_knobs
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.errors import UnknownName
from tuner.search_spaces.knobs import KNOBS

if TYPE_CHECKING:
    from tuner.search_spaces.space import Candidates


class ParameterEncoding:
    """Mapping between candidates and their Optuna parameters."""

    def __init__(self, candidates: Candidates) -> None:
        self.configurations = candidates.configurations
        whole = candidates.whole.configurations
        self.knobs = varying_knobs(whole)
        levels = {
            name: list(dict.fromkeys(_as_param(c.get(name)) for c in whole)) for name in self.knobs
        }
        self.distributions = {name: _distribution(name, each) for name, each in levels.items()}
        self._of_params: dict[tuple[Any, ...], int] = {}
        for i, configuration in enumerate(self.configurations):
            params = self.params_of(configuration)
            self._of_params.setdefault(tuple(params[name] for name in self.knobs), i)

    def params_of(self, configuration: Configuration) -> dict[str, Any]:
        """Return a configuration as trial parameters, one per knob of `distributions`."""
        return {name: _as_param(configuration.get(name)) for name in self.knobs}

    def index_of_params(self, params: Mapping[str, Any]) -> int | None:
        """Return the number of the candidate with these parameters, or None."""
        for name in self.knobs:
            if name not in params:
                raise UnknownName("parameter", name, params)
        return self._of_params.get(tuple(params[name] for name in self.knobs))


def _as_param(value: object) -> Any:
    return ",".join(map(str, value)) if isinstance(value, tuple) else value


def _distribution(name: str, levels: list[Any]) -> BaseDistribution:
    integers = all(isinstance(v, int) and not isinstance(v, bool) for v in levels)
    if integers and not (name in KNOBS and KNOBS[name].scale == "category"):
        steps = {b - a for a, b in zip(sorted(levels)[:-1], sorted(levels)[1:], strict=True)}
        if len(steps) == 1:
            return IntDistribution(min(levels), max(levels), step=steps.pop())
    numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in levels)
    return CategoricalDistribution(sorted(levels) if numbers else sorted(levels, key=_level_order))


def _level_order(level: Any) -> tuple[int, float, str]:
    if level is None:
        return (0, 0.0, "")
    if isinstance(level, int | float):
        return (1, float(level), "")
    return (2, 0.0, str(level))
