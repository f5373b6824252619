"""Joules until a constrained question is answered, by a search that knows it.

Two questions of each problem: the least energy within 1.15 times the least time, and the least time
within 1.1 times the least energy. A question is answered when a measured configuration meets the
limit and comes within 1 % of the best that does, by the noise-free means. The oracle of a question
makes one launch and one window, of the cheapest configuration that answers it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import optuna

from benchmarks.figures import Figure
from benchmarks.pieces import Pieces
from benchmarks.search.names import OURS
from benchmarks.search.problems import SPLITS, Problem, load_problem, split_of
from benchmarks.search.runner import ProblemSearch
from benchmarks.search.statistics import geometric_mean
from benchmarks.search.truth import truth_of
from tuner.problem.constraints import Constraints
from tuner.search.planner import PlanningState
from tuner.search.question import Question
from tuner.search_spaces.configuration import Configuration

#: Deadline over the least time, and energy budget over the least energy.
DEADLINE, BUDGET = 1.15, 1.1
QUESTIONS = ("deadline", "budget")
#: A question is answered by a configuration that is worse than the best by this share at most.
WITHIN = 0.01


@dataclass(frozen=True)
class QuestionTruth:
    """A question of one problem, and what answers it.

    Attributes:
        question: limits and objective.
        answers: the configurations that meet the limits within `WITHIN` of the best.
        oracle_kJ: of launching and measuring the cheapest of these.
    """

    question: Question
    answers: frozenset[Configuration]
    oracle_kJ: float


@lru_cache(maxsize=512)
def truth_of_question(problem: Problem, name: str) -> QuestionTruth:
    """Return a question of a problem and its answers."""
    truth = truth_of(problem)
    log_e, log_t = np.array(list(truth.logs.values())).T
    constraints = Constraints(deadline_s=DEADLINE * math.exp(log_t.min()))
    if name == "budget":
        constraints = Constraints(budget_kJ=BUDGET * math.exp(log_e.min()) / 1000)
    question = Question(constraints, steps=1)
    objective = question.objective(log_e, log_t, np.ones(len(log_e)))
    met = question.excess(log_e, log_t) <= 0
    good = met & (objective <= objective[met].min() + math.log1p(WITHIN))
    answers = {c for c, right in zip(truth.logs, good, strict=True) if right}
    powers = [p.power_W for p in truth.points if p.configuration in answers]
    oracle_J = min(truth.cost.energy_J([power]) for power in powers)
    return QuestionTruth(question, frozenset(answers), oracle_J / 1000)


class _AnswerSearch(ProblemSearch):
    """A search that knows a question, and ends when it is answered."""

    def __init__(self, problem: Problem, seed: int, name: str) -> None:
        super().__init__(problem, OURS, seed)
        self._asked = truth_of_question(problem, name)

    @property
    def _state(self) -> PlanningState:
        return replace(super()._state, question=self._asked.question)

    def _note_end(self, measured: Sequence[Configuration], kJ: float) -> None:
        if self.found is None and not self._asked.answers.isdisjoint(measured):
            self.found = kJ, self.submitted, len(measured)


def answer_search(problem: Problem, name: str, most: int) -> float:
    """Search until a question is answered, and return its joules over its oracle's.

    Args:
        name: of the question.
        most: number of measurements after which the whole table is charged.
    """
    warnings.simplefilter("ignore")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    search = _AnswerSearch(problem, problem.jackknife or 0, name)
    search.run(most)
    paid_kJ = search.found[0] if search.found else search.truth.whole_kJ
    return paid_kJ / truth_of_question(problem, name).oracle_kJ


def question_figures(problems: Sequence[Problem], most: int, pieces: Pieces) -> list[Figure]:
    """Answer the questions of each problem, and return what that costs by split."""
    work = [(problem, name, most) for name in QUESTIONS for problem in problems]
    over = dict(zip(((p, n) for p, n, _ in work), pieces.results(answer_search, work), strict=True))
    figures = []
    for split in SPLITS:
        groups: dict[str, list[Problem]] = {}
        for one in problems:
            if split_of(load_problem(one).name, one.group) == split:
                groups.setdefault(one.group, []).append(one)
        for name in QUESTIONS if groups else ():
            of_groups = [geometric_mean([over[p, name] for p in each]) for each in groups.values()]
            value = geometric_mean(of_groups)
            print(f"{split} groups: the {name} is answered for {value:.2f} x its oracle's joules")
            figures.append(Figure(f"question_over_own_oracle_{name}_{split}", value, "ratio"))
    return figures
