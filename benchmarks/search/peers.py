"""Peers that sweep: known methods that may visit all live settings of a launch for one launch.

Each chooses launches; of each launch all live settings are visited, from the lowest, and told. A
run may end between two windows of a sweep, so none is charged for a sweep beyond what was needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import optuna
from optuna.trial import Trial, TrialState, create_trial

from benchmarks.search.ask_tell import level_order, peer
from benchmarks.search.names import STOCK
from tuner.pareto import nondominated
from tuner.problem.problem import ProbeCost
from tuner.search.sampler import ParameterEncoding
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.search_spaces.space import Candidates

#: Asks of an Optuna sampler after which a launch is drawn at random: it proposes points that are
#: not valid, or launches that are measured.
MAX_SUGGESTIONS = 50


class Sweep:
    """Base: visits all live settings of the launch that it is started in, and of those of `choose`.

    Args:
        candidates: the valid configurations.
        cost: of probing them.
        seed: of every draw.
    """

    def __init__(self, candidates: Candidates, cost: ProbeCost, seed: int) -> None:
        self.candidates, self.cost, self.seed = candidates, cost, seed
        self.draw = np.random.default_rng(seed)
        self.measured: dict[Configuration, tuple[float, float]] = {}  # energy, time
        self._launch: Settings | None = None

    def tell(self, configuration: Configuration, time_s: float, power_W: float) -> None:
        self.measured[configuration] = (time_s * power_W, time_s)
        if self._launch is None:
            self._launch = configuration.launch

    def ended(self, still_open: Sequence[Configuration]) -> bool:
        """Return False: a sweep without a rule of its own ends with the space."""
        del still_open
        return False

    def ask(self, still_open: Sequence[Configuration]) -> Configuration:
        here = [c for c in still_open if c.launch == self._launch]
        if not here:
            self._launch = self.choose(still_open)
            here = [c for c in still_open if c.launch == self._launch]
        return min(here, key=lambda c: level_order(c.live))

    def choose(self, still_open: Sequence[Configuration]) -> Settings:
        """Return the launch to sweep next."""
        raise NotImplementedError


@peer("random-sweep", ends=True)
class RandomSweep(Sweep):
    """Sweeps launches drawn at random."""

    def choose(self, still_open: Sequence[Configuration]) -> Settings:
        launches = list(dict.fromkeys(c.launch for c in still_open))
        return launches[int(self.draw.integers(len(launches)))]


@peer("hill-climb", ends=True)
class HillClimb(Sweep):
    """Pareto local search over launches (Paquete, Chiarandini & Stuetzle 2004).

    It sweeps the launch that is nearest to one on the front of its measurements, counted in levels
    of the launch knobs; ties are drawn. If no neighbour is left it has ended; asked all the same it
    moves on to the next nearest, so it never has to start again. Unless it is told where the search
    starts, it draws the first launch.
    """

    def __init__(self, candidates: Candidates, cost: ProbeCost, seed: int) -> None:
        super().__init__(candidates, cost, seed)
        names = sorted({name for launch in candidates.launches for name in launch})
        columns = []
        for name in names:
            one = [
                Settings({name: each[name]} if name in each else {}) for each in candidates.launches
            ]
            levels = sorted(set(one), key=level_order)
            columns.append([levels.index(value) for value in one])
        ranks = np.array(columns, dtype=float).T.reshape(len(candidates.launches), len(names))
        self._ranks = dict(zip(candidates.launches, ranks, strict=True))

    def choose(self, still_open: Sequence[Configuration]) -> Settings:
        launches = list(dict.fromkeys(c.launch for c in still_open))
        distance = self._distances(launches)
        return launches[int(self.draw.choice(np.flatnonzero(distance <= distance.min() + 1e-9)))]

    def ended(self, still_open: Sequence[Configuration]) -> bool:
        """Return True if no launch is left next to one on the front, nor a setting of these."""
        distance = self._distances(list(dict.fromkeys(c.launch for c in still_open)))
        return bool(self.measured) and bool(distance.min() > 1)

    def _distances(self, launches: Sequence[Settings]) -> np.ndarray:
        """Return the levels between each launch and the nearest on the front; zeros without one."""
        if not self.measured:
            return np.zeros(len(launches))
        energy, time = np.array(list(self.measured.values())).T
        front = nondominated(energy, time)
        best = {c.launch for c, on in zip(self.measured, front, strict=True) if on}
        centres = np.array([self._ranks[launch] for launch in best])
        return np.array([np.abs(centres - self._ranks[one]).sum(axis=1).min() for one in launches])


class OptunaSweep(Sweep):
    """Sweeps the launches that an Optuna sampler proposes, and tells it every setting.

    Args:
        candidates, cost, seed: as of `Sweep`.
        sampler: for two objectives; proposes whole configurations.
    """

    def __init__(
        self,
        candidates: Candidates,
        cost: ProbeCost,
        seed: int,
        sampler: optuna.samplers.BaseSampler,
    ) -> None:
        super().__init__(candidates, cost, seed)
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._encoding = ParameterEncoding(candidates)
        self._study = optuna.create_study(directions=["minimize", "minimize"], sampler=sampler)
        self._proposed: dict[Configuration, Trial] = {}

    def tell(self, configuration: Configuration, time_s: float, power_W: float) -> None:
        super().tell(configuration, time_s, power_W)
        trial = self._proposed.pop(configuration, None)
        values, params = [time_s * power_W, time_s], self._encoding.params_of(configuration)
        if trial is None and not isinstance(self._study.sampler, optuna.samplers.NSGAIISampler):
            of = self._distributions
            self._study.add_trial(create_trial(values=values, params=params, distributions=of))
            return
        if trial is None:  # by ask, so that a genetic sampler counts it to its generation
            self._study.enqueue_trial(params)
            trial = self._study.ask(self._distributions)
        self._study.tell(trial, values)

    @property
    def _distributions(self) -> dict[str, Any]:
        return dict(self._encoding.distributions)

    def choose(self, still_open: Sequence[Configuration]) -> Settings:
        for _ in range(MAX_SUGGESTIONS):
            trial = self._study.ask(self._distributions)
            index = self._encoding.index_of_params(trial.params)
            if index is not None:
                chosen = self._encoding.configurations[index]
                if chosen in still_open:
                    self._proposed[chosen] = trial
                    return chosen.launch
                if any(chosen.launch == c.launch for c in still_open):
                    self._study.tell(trial, state=TrialState.FAIL)
                    return chosen.launch
            self._study.tell(trial, state=TrialState.FAIL)
        return still_open[int(self.draw.integers(len(still_open)))].launch


def _optuna_sweep(
    name: str, make: Callable[[int], optuna.samplers.BaseSampler]
) -> Callable[..., OptunaSweep]:
    def sweep(candidates: Candidates, cost: ProbeCost, seed: int) -> OptunaSweep:
        return OptunaSweep(candidates, cost, seed, make(seed))

    peer(name)(sweep)
    return sweep


for _name in ("tpe", "nsgaii"):
    _optuna_sweep(f"{_name}-sweep", STOCK[_name])
