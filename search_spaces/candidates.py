"""Finite list of the configurations that a study searches, grouped by launch.

A launch is paid for once and a live setting costs only a window, so the list has one group per
launch. It comes from a search space (`tuner.search_spaces.space`) or from any list of
configurations, such as a recorded table. Configurations are found by hash; indices are not pickled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

from tuner.search_spaces.configuration import Configuration, Settings
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.knob_declarations import Knob
from tuner.search_spaces.knobs import KNOBS


@dataclass(frozen=True)
class Candidates:
    """Finite list of valid configurations, grouped by launch.

    Attributes:
        lives: the live settings of each launch (not every launch of a recorded table has all of
            them). Equal settings are one object.
        among: the list that these were selected from; None if it is complete.
        knobs: knobs that the user declares, which say how far their values are apart.
    """

    launches: tuple[Settings, ...]
    lives: tuple[tuple[Settings, ...], ...]
    among: Candidates | None = None
    knobs: tuple[Knob, ...] = ()

    def __post_init__(self) -> None:
        if len(self.launches) != len(self.lives):
            raise InputError(f"{len(self.launches)} launches but {len(self.lives)} lists of lives")
        if len(set(self.launches)) != len(self.launches):
            raise InputError("a launch setting occurs twice among the candidates")

    @classmethod
    def from_configurations(cls, configurations: Iterable[Configuration]) -> Candidates:
        """Group any list of configurations by launch, in the order of first occurrence."""
        groups: dict[Settings, dict[Settings, None]] = {}
        shared: dict[Settings, Settings] = {}
        for configuration in configurations:
            live = shared.setdefault(configuration.live, configuration.live)
            group = groups.setdefault(configuration.launch, {})
            if live in group:
                raise InputError(f"configuration {configuration.key} occurs twice in the list")
            group[live] = None
        tuples: dict[tuple[Settings, ...], tuple[Settings, ...]] = {}
        lives = (tuple(group) for group in groups.values())
        return cls(tuple(groups), tuple(tuples.setdefault(live, live) for live in lives))

    @property
    def whole(self) -> Candidates:
        """Complete list, which names a study's parameters, whichever of it are searched."""
        return self.among or self

    def where(self, wanted: Callable[[Settings], bool]) -> Candidates:
        """Return the candidates whose launch is wanted."""
        both = zip(self.launches, self.lives, strict=True)
        kept = [(launch, lives) for launch, lives in both if wanted(launch)]
        if len(kept) == len(self.launches):
            return self
        launches, lives = zip(*kept, strict=True) if kept else ((), ())
        return Candidates(launches, lives, self.whole, self.knobs)

    @cached_property
    def configurations(self) -> tuple[Configuration, ...]:
        """All configurations, launch by launch."""
        return tuple(
            Configuration(launch, live)
            for launch, lives in zip(self.launches, self.lives, strict=True)
            for live in lives
        )

    @cached_property
    def _starts(self) -> tuple[int, ...]:
        return tuple(accumulate(map(len, self.lives), initial=0))

    @cached_property
    def _launch_positions(self) -> dict[Settings, int]:
        exact = {launch: i for i, launch in enumerate(self.launches)}
        return {_plain(launch): i for launch, i in exact.items()} | exact

    @cached_property
    def _live_positions(self) -> dict[tuple[Settings, ...], dict[Settings, int]]:
        return {lives: {live: i for i, live in enumerate(lives)} for lives in set(self.lives)}

    def __len__(self) -> int:
        return self._starts[-1]

    def __iter__(self) -> Iterator[Configuration]:
        return iter(self.configurations)

    def __getitem__(self, index: int) -> Configuration:
        return self.configurations[index]

    def __contains__(self, configuration: object) -> bool:
        return isinstance(configuration, Configuration) and self.find(configuration) is not None

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields without the indices, which are rebuilt on demand."""
        return {name: getattr(self, name) for name in ("launches", "lives", "among", "knobs")}

    def _launch_position(self, launch: Settings) -> int | None:
        position = self._launch_positions.get(launch)
        return self._launch_positions.get(_plain(launch)) if position is None else position

    def find(self, configuration: Configuration) -> int | None:
        """Return the position of a configuration, or None; see `index_of`."""
        position = self._launch_position(configuration.launch)
        if position is None:
            return None
        live = self._live_positions[self.lives[position]].get(configuration.live)
        return None if live is None else self._starts[position] + live

    def indices_of_launch(self, launch: Settings) -> range:
        """Return the positions of the configurations of one launch."""
        position = self._launch_position(launch)
        if position is None:
            raise InputError(
                f"launch setting {launch.key} is not among the {len(self.launches)} candidates'"
            )
        return range(self._starts[position], self._starts[position + 1])

    def index_of(self, configuration: Configuration) -> int:
        """Return the position of a configuration; a missing launch knob means its default."""
        index = self.find(configuration)
        if index is None:
            raise InputError(
                f"configuration {configuration.key} is not one of the {len(self)} candidates"
            )
        return index


def _plain(launch: Settings) -> Settings:
    return Settings({n: v for n, v in launch.items() if n not in KNOBS or KNOBS[n].default != v})
