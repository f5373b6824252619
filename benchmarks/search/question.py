"""Joules until a constrained question is answered, by a search that knows it and one that does not.

Two questions of each problem: the least energy within 1.15 times the least time, and the least time
within 1.1 times the least energy. A question is answered when a measured configuration meets the
limit and comes within 1 % of the best that does, by the noise-free means. The oracle of a question
makes one launch and one window, of the cheapest configuration that answers it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import optuna

from benchmarks.figures import Figure
from benchmarks.search.names import OURS
from benchmarks.search.problems import SPLITS, Problem, load_problem, split_of
from benchmarks.search.runner import ProblemSearch
from benchmarks.search.statistics import geometric_mean
from benchmarks.search.truth import Truth, truth_of
from tuner.problem.constraints import Constraints
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


def _constraints(name: str, truth: Truth) -> Constraints:
    energy_J, time_s = np.exp(np.array(list(truth.logs.values())).min(axis=0))
    if name == "deadline":
        return Constraints(deadline_s=DEADLINE * float(time_s))
    return Constraints(budget_kJ=BUDGET * float(energy_J) / 1000)


@lru_cache(maxsize=512)
def truth_of_question(problem: Problem, name: str) -> QuestionTruth:
    """Return a question of a problem and its answers."""
    truth = truth_of(problem)
    question = Question(_constraints(name, truth), steps=1)
    log_e, log_t = np.array(list(truth.logs.values())).T
    objective = question.objective(log_e, log_t, np.ones(len(log_e)))
    met = question.excess(log_e, log_t) <= 0
    good = met & (objective <= objective[met].min() + math.log1p(WITHIN))
    answers = {c for c, right in zip(truth.logs, good, strict=True) if right}
    return QuestionTruth(
        question,
        frozenset(answers),
        min(truth.cost.energy_J([p.power_W]) for p in truth.points if p.configuration in answers)
        / 1000,
    )


@dataclass(frozen=True)
class Answered:
    """One search and what it paid until questions were answered.

    Attributes:
        problem: what was searched.
        kJ: question -> joules until it was answered, or the whole table's.
    """

    problem: Problem
    kJ: Mapping[str, float]


class _AnswerSearch(ProblemSearch):
    """A search that ends when all of these questions are answered."""

    def __init__(self, problem: Problem, seed: int, names: Sequence[str]) -> None:
        super().__init__(problem, OURS, seed, 1, False)
        self._truths = {name: truth_of_question(problem, name) for name in names}
        self.answered: dict[str, float] = {}

    def _note_ends(self, measured: Sequence[Configuration], kJ: float) -> None:
        for name, each in self._truths.items():
            if name not in self.answered and not each.answers.isdisjoint(measured):
                self.answered[name] = kJ
        if len(self.answered) == len(self._truths):
            self.found = kJ, self.submitted, len(measured)


def answer_search(problem: Problem, seed: int, known: str | None, most: int) -> Answered:
    """Search one problem until its questions are answered.

    Args:
        problem: what is searched.
        seed: of the sampler and of the noise.
        known: the question that the search knows, the only one that it has to answer; None for a
            search of the front, which has to answer all.
        most: number of measurements after which the whole table is charged.
    """
    warnings.simplefilter("ignore")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    names = QUESTIONS if known is None else (known,)
    search = _AnswerSearch(problem, seed, names)
    if known is not None:
        search.ask(truth_of_question(problem, known).question)
    search.run(most)
    whole_kJ = search.truth.whole_kJ
    return Answered(problem, {name: search.answered.get(name, whole_kJ) for name in names})


def answer_searches(
    problems: Sequence[Problem], most: int, jobs: int = 1
) -> dict[str | None, list[Answered]]:
    """Return the searches of each problem by the question that they know, None for the front."""
    every: list[str | None] = [None, *QUESTIONS]
    work = [(p, p.jackknife or 0, known, most) for known in every for p in problems]
    if jobs > 1:
        with ProcessPoolExecutor(jobs) as pool:
            done = list(pool.map(answer_search, *zip(*work, strict=True), chunksize=4))
    else:
        done = [answer_search(*one) for one in work]
    each = len(problems)
    return {known: done[i * each : (i + 1) * each] for i, known in enumerate(every)}


def _over(searches: Sequence[Answered], name: str, oracles: Mapping[Problem, float]) -> float:
    """Return the geometric mean over the groups of the geometric means of their searches."""
    groups: dict[str, list[float]] = {}
    for one in searches:
        ratio = one.kJ[name] / oracles[one.problem]
        groups.setdefault(one.problem.group, []).append(ratio)
    return geometric_mean([geometric_mean(ratios) for ratios in groups.values()])


def question_figures(searches: Mapping[str | None, Sequence[Answered]]) -> list[Figure]:
    """Print what the questions cost by split, and return the figures.

    Args:
        searches: as of `answer_searches`.
    """
    figures = []
    for split in SPLITS:
        mine = {
            known: [
                one
                for one in several
                if split_of(load_problem(one.problem).name, one.problem.group) == split
            ]
            for known, several in searches.items()
        }
        if not mine[None]:
            continue
        problems = [one.problem for one in mine[None]]
        front = {problem: truth_of(problem).oracle_kJ for problem in problems}
        print(f"\n{split} groups, a constrained question answered within 1 %:")
        for name in QUESTIONS:
            oracles = {p: truth_of_question(p, name).oracle_kJ for p in problems}
            for known, end in ((None, "_front_search"), (name, "")):
                over = _over(mine[known], name, oracles)
                over_front = _over(mine[known], name, front)
                who = "knows the question" if known else "searches the front"
                print(
                    f"  {name:8} {who:18} {over:6.2f} x its oracle; "
                    f"{over_front:5.2f} x the front's oracle"
                )
                own = "question_over_own_oracle" if known else "front_search_over_own_oracle"
                figures.append(Figure(f"{own}_{name}_{split}", over, "ratio"))
                figures.append(
                    Figure(f"{name}_over_front_oracle{end}_{split}", over_front, "ratio")
                )
    return figures
