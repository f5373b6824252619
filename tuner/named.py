"""The candidates as an Optuna study names them: a parameter a knob that varies.

Integers at even steps are integer ranges, which stock samplers and the dashboard order; everything
else is a categorical over its levels in rising order. A live knob that may be left to the device
has the level None. A trial is about the candidate whose key it carries, or whose parameters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution

from models.features import varying_knobs
from search_spaces.configuration import Configuration
from search_spaces.errors import InvalidConfiguration, UnknownName
from search_spaces.knobs import KNOBS

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

    from search_spaces.space import Candidates

__all__ = ["NamedCandidates"]


class NamedCandidates:
    """Candidates by their parameters and by their keys.

    Attributes:
        configurations: the candidates, in their order.
        knobs: those that vary: the parameters' names.
        distributions: one a knob, over its levels in the whole list (`Candidates.whole`).
    """

    def __init__(self, candidates: Candidates) -> None:
        self.configurations = candidates.configurations
        named = candidates.whole.configurations
        self.knobs = varying_knobs(named)
        levels = {
            name: list(dict.fromkeys(_as_param(c.get(name)) for c in named)) for name in self.knobs
        }
        self.distributions = {name: _distribution(name, known) for name, known in levels.items()}
        self._of_key = {c.key: i for i, c in enumerate(self.configurations)}
        self._of_params: dict[tuple[Any, ...], int] = {}
        for i, configuration in enumerate(self.configurations):
            params = self.params_of(configuration)
            self._of_params.setdefault(tuple(params[name] for name in self.knobs), i)

    def params_of(self, configuration: Configuration) -> dict[str, Any]:
        """A configuration as trial parameters, one a knob of `distributions`."""
        return {name: _as_param(configuration.get(name)) for name in self.knobs}

    def index_of(self, params: dict[str, Any]) -> int | None:
        """The candidate with these parameters, as a number; None where none has them.

        Raises:
            UnknownName: a parameter is missing.
        """
        for name in self.knobs:
            if name not in params:
                raise UnknownName("parameter", name, params)
        return self._of_params.get(tuple(params[name] for name in self.knobs))

    def configuration_of(self, params: dict[str, Any]) -> Configuration:
        """The candidate with these parameters.

        Raises:
            UnknownName: a parameter is missing.
            InvalidConfiguration: no candidate has them: the combination is not valid.
        """
        place = self.index_of(params)
        if place is None:
            text = " ".join(f"{name}={value}" for name, value in params.items())
            raise InvalidConfiguration(text, ["it is not among the candidates"])
        return self.configurations[place]

    def candidate_named(self, key: str) -> int | None:
        """The candidate with this key; None where none has it."""
        return self._of_key.get(key)

    def candidate_of(self, trial: FrozenTrial) -> int | None:
        """Which candidate a trial is about; None where it is about none."""
        key = trial.user_attrs.get("configuration")
        if key is not None:
            return self.candidate_named(key)
        if not self.knobs or any(name not in trial.params for name in self.knobs):
            return None
        return self.index_of(trial.params)


def _as_param(value: object) -> Any:
    """A knob's value as Optuna stores it: a tuple (one value a stage) as text."""
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
    """None first, then numbers, then text."""
    if level is None:
        return (0, 0.0, "")
    if isinstance(level, int | float):
        return (1, float(level), "")
    return (2, 0.0, str(level))
