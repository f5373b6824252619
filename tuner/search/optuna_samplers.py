"""Optuna's samplers, and any that implement its interface, over the same candidates.

A stock sampler does not know which combinations are valid. It is asked for one configuration at a
time, in a shadow study in memory, until that is a candidate not tried yet.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import optuna
from optuna.samplers import BaseSampler
from optuna.trial import Trial, TrialState, create_trial

from tuner.problem.configuration_names import named_configurations, same_value
from tuner.problem.probe_cost import ProbeCost
from tuner.search.planner import ProbePlan, ProbePlanner
from tuner.search.sampler import CandidateSampler
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.errors import InputError, UnknownName
from tuner.search_spaces.knobs import parse_words

if TYPE_CHECKING:
    from tuner.search_spaces.space import Candidates

#: This project's own sampler, `tuner.search.sampler.CandidateSampler`.
OURS = "joulefront"
#: Number of asks after which the open candidate nearest to the last proposal is taken instead, for
#: samplers that only repeat themselves or propose invalid points (a deterministic sampler that
#: ignores failed trials, as Optuna's GPSampler does, would never end).
MAX_ASKS = 50
#: Number of equal proposals in a row that end the asking at once.
SAME_ASKS = 3


_STOCK: dict[str, Callable[[int], BaseSampler]] = {
    # Optuna 5 keeps TPE independent with several objectives unless multivariate is set.
    "tpe": lambda seed: optuna.samplers.TPESampler(seed=seed, multivariate=True),
    "nsgaii": lambda seed: optuna.samplers.NSGAIISampler(seed=seed, population_size=10),
    "random": lambda seed: optuna.samplers.RandomSampler(seed=seed),
}
#: Values of `--sampler`.
SAMPLERS = (OURS, *_STOCK)
#: A name of `SAMPLERS`, an Optuna sampler, or None for this project's.
SamplerChoice = str | BaseSampler | None


class StockSampler(ProbePlanner):
    """Planner that follows any Optuna sampler, one configuration a probe."""

    def __init__(
        self,
        candidates: Candidates,
        stock: BaseSampler,
        *,
        seed: int = 0,
        cost: ProbeCost | None = None,
    ) -> None:
        super().__init__(candidates, cost=cost, seed=seed)
        self.stock = stock
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._shadow = optuna.create_study(directions=["minimize", "minimize"], sampler=stock)
        self._running: dict[int, Trial] = {}  # candidate -> its running trial in the shadow study
        self._mirrored: set[int] = set()  # trials of the real study that the shadow study has

    def plan(self, study: optuna.Study) -> ProbePlan | None:
        """Plan the next open candidate that the stock sampler proposes; None if none is open."""
        with self._lock, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            closed = self._closed(self._observe(study))
            self._mirror(study)
            if closed.all():
                return self._enqueue(None)
            candidate, trial = self._ask_until_open(closed)
            self._running[candidate] = trial
            reason = f"proposed by {type(self.stock).__name__}"
            return self._enqueue(self._plan_of([candidate], reason))

    def _mirror(self, study: optuna.Study) -> None:
        finished = (TrialState.COMPLETE, TrialState.FAIL)
        for trial in study.get_trials(deepcopy=False, states=finished):
            if trial.number in self._mirrored:
                continue
            self._mirrored.add(trial.number)
            candidate = self._encoding.index_of_trial(trial)
            if candidate is None:
                continue
            values = trial.values if trial.state == TrialState.COMPLETE else None
            if (running := self._running.pop(candidate, None)) is not None:
                self._shadow.tell(running, values, state=trial.state)
            elif values is not None:  # measured in an earlier session, or as the baseline
                own, knobs = self.params_of(self._configurations[candidate]), self.distributions()
                told = create_trial(values=values, params=own, distributions=knobs)
                self._shadow.add_trial(told)

    def _ask_until_open(self, closed: np.ndarray) -> tuple[int, Trial]:
        refused: list[dict[str, Any]] = []
        while len(refused) < MAX_ASKS:
            trial = self._shadow.ask(self.distributions())
            candidate = self._encoding.index_of_params(trial.params)
            if candidate is not None and not closed[candidate]:
                return candidate, trial
            self._shadow.tell(trial, state=TrialState.FAIL)
            refused.append(trial.params)
            last = refused[-SAME_ASKS:]
            if len(last) == SAME_ASKS and all(params == last[0] for params in last):
                break
        candidate = self._nearest(refused[-1], closed)
        self._shadow.enqueue_trial(self.params_of(self._configurations[candidate]))
        return candidate, self._shadow.ask(self.distributions())

    def _nearest(self, params: dict[str, Any], closed: np.ndarray) -> int:
        every = map(self.params_of, self._configurations)
        changed = np.array([sum(params[n] != v for n, v in each.items()) for each in every])
        nearest = np.flatnonzero(~closed & (changed == changed[~closed].min()))
        return int(self._rng.choice(nearest))


def check_sampler(sampler: SamplerChoice, *, tries: bool = False) -> None:
    """Raise UnknownName or InputError if there is no such sampler, before anything is started."""
    if isinstance(sampler, str) and sampler not in SAMPLERS:
        raise UnknownName("sampler", sampler, SAMPLERS)
    if tries and sampler not in (None, OURS):
        raise InputError(f"--try is for the sampler {OURS}")


def make_sampler(
    sampler: SamplerChoice,
    candidates: Candidates,
    *,
    cost: ProbeCost | None = None,
    seed: int = 0,
    **ours: Any,
) -> ProbePlanner:
    """Return the planner of a study, by name, or around any Optuna sampler; a planner of these very
    candidates is returned as it is. `ours` are more arguments of `CandidateSampler` alone."""
    if sampler is None or sampler == OURS:
        return CandidateSampler(candidates, cost=cost, seed=seed, **ours)
    if isinstance(sampler, ProbePlanner) and sampler.candidates is candidates:
        return sampler
    check_sampler(sampler)
    stock = sampler if isinstance(sampler, BaseSampler) else _STOCK[sampler](seed)
    return StockSampler(candidates, stock, seed=seed, cost=cost)


def first_tries(
    candidates: Candidates, given: Sequence[str | Configuration]
) -> tuple[Configuration, ...]:
    """Return the candidates that these configurations or names mean; InputError otherwise."""
    return tuple(_candidate(candidates.configurations, each) for each in given)


def _candidate(every: Sequence[Configuration], given: str | Configuration) -> Configuration:
    words: dict[str, Any] = {}
    if isinstance(given, Configuration):
        found, text = [each for each in every if each == given], given.short
    else:
        found, text = named_configurations(every, given, "configurations"), given
    if found:
        return found[0]
    if isinstance(given, str):
        try:
            words = parse_words(given, standard=False)
        except InputError as error:
            raise InputError(f"cannot try {text!r}: {error}") from error
    for knob, value in words.items():
        levels = {each.get(knob) for each in every}
        if not any(same_value(level, value) for level in levels):
            shown = ", ".join(sorted(str(level) for level in levels if level is not None))
            raise InputError(
                f"cannot try {text!r}: this search has no {knob}={value}"
                + (f"; its values are {shown}" if shown else "")
            )
    raise InputError(
        f"cannot try {text!r}: it is not a valid configuration of this search (tuner dev "
        "probe says why a configuration is not valid)"
    )
