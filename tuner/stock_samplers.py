"""Optuna's own samplers, and anyone's, in the same study over the same candidates.

A stock sampler knows knobs and their ranges but not which combinations are valid, and nothing of
launches: it is asked for one configuration at a time, again and again until that is a candidate not
tried yet, and every point it chooses is a launch of its own. It asks in a study of its own in
memory, told what the real study is told, so that refused asks leave no trace in the user's study.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import optuna
from optuna.distributions import IntDistribution
from optuna.samplers import BaseSampler
from optuna.trial import Trial, TrialState, create_trial

from search_spaces.errors import InputError, UnknownName
from tuner.acquisition import ProbeCost
from tuner.sampler import CandidateSampler, ProbePlan

if TYPE_CHECKING:
    from models.analytic import Prior
    from search_spaces.space import Candidates

__all__ = ["OURS", "SAMPLERS", "SamplerAsked", "StockSampler", "check_sampler", "make_sampler"]

#: This project's own sampler, `tuner.sampler.CandidateSampler`.
OURS = "joulefront"
#: BoTorch's qLogNEHVI, `tuner.botorch_sampler.BotorchSampler`.
BOTORCH = "botorch"
#: Asks after which a sampler that only repeats itself, or only names what is invalid, gets the open
#: candidate that is nearest to what it asked for last (a deterministic sampler that learns nothing
#: from a refused ask would never end: Optuna's GPSampler passes over failed trials).
ASKS = 50
#: The same for GPSampler, which learns nothing from a refused ask and takes long over each.
GP_ASKS = 2
#: So many refused asks for one and the same point in a row end it at once.
SAME_ASKS = 3


def _tpe(seed: int) -> BaseSampler:
    # Multivariate has to be asked for: with several objectives Optuna 5 keeps TPE independent.
    return optuna.samplers.TPESampler(seed=seed, multivariate=True)


def _nsgaii(seed: int) -> BaseSampler:
    return optuna.samplers.NSGAIISampler(seed=seed, population_size=10)


def _gp(seed: int) -> BaseSampler:
    if importlib.util.find_spec("torch") is None:
        raise InputError('the sampler "gp" needs PyTorch; install joulefront[train]')
    return optuna.samplers.GPSampler(seed=seed)


def _random(seed: int) -> BaseSampler:
    return optuna.samplers.RandomSampler(seed=seed)


_STOCK: dict[str, Callable[[int], BaseSampler]] = {
    "tpe": _tpe,
    "nsgaii": _nsgaii,
    "gp": _gp,
    "random": _random,
}
#: Names that `--sampler` takes.
SAMPLERS = (OURS, *_STOCK, BOTORCH)
#: A name, an Optuna sampler of one's own, or None for this project's.
SamplerAsked = str | BaseSampler | None


class StockSampler(CandidateSampler):
    """Plans what a stock Optuna sampler asks for, one configuration a probe.

    Args:
        candidates: the valid configurations.
        stock: any Optuna sampler for two objectives.
        seed: of the ties among nearest candidates.
        steps: optimizer steps to the solution.
        cost: what a probe costs; such a sampler does not look at it.
        asks: it is asked so often before the nearest open candidate is taken.
    """

    def __init__(
        self,
        candidates: Candidates,
        stock: BaseSampler,
        *,
        seed: int = 0,
        steps: int = 1,
        cost: ProbeCost | None = None,
        asks: int = ASKS,
    ) -> None:
        super().__init__(candidates, steps=steps, cost=cost, seed=seed)
        self.stock, self._asks = stock, asks
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._shadow = optuna.create_study(directions=["minimize", "minimize"], sampler=stock)
        self._asked: dict[int, Trial] = {}  # candidate -> its running trial in the shadow study
        self._mirrored: set[int] = set()  # trials of the real study that the shadow knows

    def _mirror(self, study: optuna.Study) -> None:
        """Tell the shadow study what the real one was told since."""
        finished = (TrialState.COMPLETE, TrialState.FAIL)
        for trial in study.get_trials(deepcopy=False, states=finished):
            if trial.number in self._mirrored:
                continue
            self._mirrored.add(trial.number)
            candidate = self._names.candidate_of(trial)
            if candidate is None:
                continue
            asked = self._asked.pop(candidate, None)
            values = trial.values if trial.state == TrialState.COMPLETE else None
            if asked is not None:
                self._shadow.tell(asked, values, state=trial.state)
            elif values is not None:  # measured before, or as the baseline
                self._shadow.add_trial(
                    create_trial(
                        values=values,
                        params=self.params_of(self._configurations[candidate]),
                        distributions=self.distributions(),
                    )
                )

    def plan(self, study: optuna.Study) -> ProbePlan | None:
        """The next open candidate that the stock sampler asks for; None when none is open."""
        with self._lock, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            closed = self._closed(self._read(study))
            self._mirror(study)
            if closed.all():
                return None
            candidate, trial = self._ask_until_open(closed)
            self._asked[candidate] = trial
            plan = self._plan_of([candidate], f"asked by {type(self.stock).__name__}")
            self._queue.clear()
            self._queue.extend(plan.configurations)
            return plan

    def better_to_wait(self, study: optuna.Study) -> bool:
        """Never: such a sampler was made to fill every slot."""
        return False

    def _ask_until_open(self, closed: np.ndarray) -> tuple[int, Trial]:
        """An open candidate and its running trial in the shadow study."""
        refused: list[dict[str, Any]] = []
        while len(refused) < self._asks:
            trial = self._shadow.ask(self.distributions())
            candidate = self._names.index_of(trial.params)
            if candidate is not None and not closed[candidate]:
                return candidate, trial
            self._shadow.tell(trial, state=TrialState.FAIL)
            refused.append(trial.params)
            last = refused[-SAME_ASKS:]
            if len(last) == SAME_ASKS and all(params == last[0] for params in last):
                break
        candidate = self._nearest(refused[-1], closed)
        return candidate, self._ask_for(candidate)

    def _ask_for(self, candidate: int) -> Trial:
        """A running trial of the shadow study with this candidate's parameters."""
        self._shadow.enqueue_trial(self.params_of(self._configurations[candidate]))
        return self._shadow.ask(self.distributions())

    def _nearest(self, params: dict[str, Any], closed: np.ndarray) -> int:
        """The open candidate with the fewest knobs changed, then the least changed."""
        wanted = np.array([self._ranks[name][params[name]] for name in self._names.knobs])
        distance = np.abs(self._rank_rows - wanted)
        away = (distance > 0).sum(axis=1) + distance.mean(axis=1)
        away[closed] = np.inf
        return int(self._rng.choice(np.flatnonzero(away <= away.min() + 1e-12)))

    @cached_property
    def _ranks(self) -> dict[str, dict[Any, float]]:
        """Knob -> level -> its place among the levels, in [0, 1]."""
        ranks = {}
        for name, distribution in self.distributions().items():
            if isinstance(distribution, IntDistribution):
                levels = range(distribution.low, distribution.high + 1, distribution.step)
            else:
                levels = distribution.choices  # type: ignore[attr-defined]
            ranks[name] = {level: i / max(len(levels) - 1, 1) for i, level in enumerate(levels)}
        return ranks

    @cached_property
    def _rank_rows(self) -> np.ndarray:
        """Each candidate's levels as ranks, shape (candidates, knobs)."""
        rows = [
            [self._ranks[name][value] for name, value in self.params_of(configuration).items()]
            for configuration in self._configurations
        ]
        return np.array(rows)


def check_sampler(asked: SamplerAsked, *, transfer: bool = False) -> None:
    """Refuse a name that no sampler bears, before anything is touched.

    Args:
        asked: as for `make_sampler`.
        transfer: whether it is to look at earlier measurements.

    Raises:
        UnknownName: no sampler has that name.
        InputError: it cannot look at earlier measurements.
    """
    if isinstance(asked, str) and asked not in SAMPLERS:
        raise UnknownName("sampler", asked, SAMPLERS)
    if transfer and asked not in (None, OURS):
        raise InputError(f"only the sampler {OURS} can look at earlier measurements (transfer)")


def make_sampler(
    asked: SamplerAsked,
    candidates: Candidates,
    *,
    prior: Prior | None = None,
    earlier: Sequence[Prior] = (),
    steps: int = 1,
    cost: ProbeCost | None = None,
    memory_bytes: float | None = None,
    seed: int = 0,
) -> CandidateSampler:
    """The sampler of a study, by name, or around anyone's Optuna sampler.

    Args:
        asked: one of `SAMPLERS`; None for this project's own; or an Optuna sampler. One that plans
            these very candidates itself is taken as it is.
        candidates: the valid configurations.
        prior, earlier, steps, cost, memory_bytes, seed: as for `CandidateSampler`.

    Raises:
        UnknownName: no sampler has that name.
        InputError: it needs what is not installed, or is to look at earlier measurements and can
            not.
    """
    if asked is None or asked == OURS:
        return CandidateSampler(
            candidates,
            prior=prior,
            earlier=earlier,
            steps=steps,
            cost=cost,
            memory_bytes=memory_bytes,
            seed=seed,
        )
    if isinstance(asked, CandidateSampler) and asked.candidates is candidates:
        return asked
    check_sampler(asked, transfer=bool(earlier))
    if asked == BOTORCH:
        from tuner.botorch_sampler import BotorchSampler

        return BotorchSampler(candidates, steps=steps, cost=cost, seed=seed)
    stock = asked if isinstance(asked, BaseSampler) else _STOCK[asked](seed)
    asks = GP_ASKS if isinstance(stock, optuna.samplers.GPSampler) else ASKS
    return StockSampler(candidates, stock, seed=seed, steps=steps, cost=cost, asks=asks)
