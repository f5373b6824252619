"""Answer of a study: the front, the choice, and the cost of the search.

`tuner.result.Result` is an answer together with its views, as users see it.

All energies are of the meter's scope, which every point carries: a front never mixes two scopes,
and a figure without a meter is labelled "estimated" wherever it is shown.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tuner.answer.choice import figures_of
from tuner.answer.configuration_names import named_configurations
from tuner.answer.judge import PROBABLY, Judge, advise, evidence_of, recommend
from tuner.answer.parts import (
    AnotherChoice,
    Attainment,
    Choice,
    ComparesWithToday,
    Comparison,
    Evidence,
    PlanFacts,
    Point,
    ProgressPoint,
    Recommendation,
    ResolvedRequest,
    SearchCost,
    Verification,
)
from tuner.models.surrogate import LeaveOneOut
from tuner.pareto import knee
from tuner.problem.constraints import Constraints, Limits
from tuner.problem.settings import LIMITS, StopReason, stop_sentence
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.errors import InputError, UnknownName
from tuner.workload.node.measure.stragglers import ForeignLoad, Straggler
from tuner.workload.records.probe import Measurement, ProbeRecord

if TYPE_CHECKING:
    from tuner.models.surrogate.surrogates import Surrogates
    from tuner.search_spaces.cluster import Cluster
    from tuner.search_spaces.job import TodayFacts, TrainingJob


#: Launch settings without which nothing is said about a space; a search of a short training ends by
#: itself after about so many.
LEAST_TRIED = 4


@dataclass(frozen=True)
class Answer(ComparesWithToday):
    """Answer of a study or of a plan: its points, its choice and its recommendation.

    Attributes:
        best: the choice under the constraints; without any, what is better than the baseline in
            both energy and time. `recommendation` says whether it is sure enough to run it.
        steps: optimizer steps (or units of work) that the figures are of: those that make the
            solution, or 1 if the length of the training is unknown (null in the JSON).
        predicted: points never probed at their own setting that are likely on the front, by the
            surrogates (`source="predicted"`, no windows); never among `points` or `front_points`
            and never chosen. Fastest first.
    """

    name: str
    run_dir: Path | None
    front_points: tuple[Point, ...]
    points: tuple[Point, ...]
    best: Point | None
    choice: Choice
    baseline: Point | None
    spent: SearchCost
    steps: int
    request: ResolvedRequest = field(default_factory=ResolvedRequest)
    failures: tuple[ProbeRecord, ...] = ()
    stragglers: tuple[tuple[str, Straggler], ...] = ()
    leave_one_out: LeaveOneOut | None = None
    progress: tuple[ProgressPoint, ...] = ()
    stop: StopReason | None = None
    about: Mapping[str, Any] = field(default_factory=dict)
    report_path: Path | None = None
    windows: Mapping[Configuration, tuple[Measurement, ...]] = field(
        default_factory=dict, repr=False
    )
    verification: Verification | None = None
    predicted: tuple[Point, ...] = ()
    attainment: Attainment | None = None
    job: TrainingJob | None = None
    cluster: Cluster | None = None
    plan: PlanFacts | None = None
    surrogates: Surrogates | None = field(default=None, repr=False, compare=False)
    judge: Judge | None = field(default=None, repr=False, compare=False)

    @property
    def disturbed(self) -> ForeignLoad | None:
        """What others used of the machine in the windows of the choice and of the baseline; None if
        too little to matter, or unknown."""
        named = (*([self.best] if self.best else []), *self.compared)
        windows = [
            m for each in {p.configuration for p in named} for m in self.windows.get(each, ())
        ]
        if not (whole_s := math.fsum(window.window_s for window in windows)):
            return None
        used_s = math.fsum(window.foreign_share * window.window_s for window in windows)
        on_device = any(window.foreign_device for window in windows)
        load = ForeignLoad(used_s / whole_s, "another process used a GPU" * on_device)
        return load if load.notes else None

    @property
    def judged(self) -> Judge:
        """The judge of the points; by their intervals alone if the result has none."""
        return self.judge or Judge(self.points, self.baseline, Constraints(), self.steps)

    @property
    def length(self) -> int | None:
        """Steps of the whole training, or of the recorded one; None if unknown."""
        return self.steps if self.job is None or self.job.steps else None

    @property
    def limits(self) -> Limits:
        """Limits on the training job, those relative to the baseline as absolute ones."""
        return self.request.constraints.limits

    @property
    def today_facts(self) -> TodayFacts | None:
        """Today's training of a script, and the source of each value; None for another job."""
        if self.job is None:
            return None
        return self.job.today_facts(self.today_configuration)

    @cached_property
    def recommendation(self) -> Recommendation | None:
        """Advice to train with the choice or to keep the baseline; None if nothing was measured."""
        if self.best is None:
            return None
        return recommend(
            self.judged, self.best, self.choice, self.spent, self.length, self.front_points
        )

    @cached_property
    def saving_known(self) -> bool:
        """False if what was measured cannot tell the others from today, or other processes used so
        much of the machine that it promises nothing: then no saving is shown anywhere."""
        advice = self.recommendation
        if advice is None or advice.action == "train" or not self.compared:
            return True
        promising = advice.promising
        if promising is None:
            return advice.point.source != "measured" or not self.judged.all_may_equal_today
        # Windows beside other work differ many times over: an estimate would be a promise.
        doubts = self.plan is not None and self.plan.doubts
        predicted = evidence_of(self.judged, promising) is Evidence.PREDICTED
        by_windows = not (doubts or predicted) and (advice.p_better or 0.0) < PROBABLY
        return not (by_windows and self.disturbed)

    @property
    def recommended(self) -> Point | None:
        """The configuration to run: the choice if that is sure enough, else the baseline."""
        return self.recommendation.point if self.recommendation is not None else None

    @property
    def stopped(self) -> str:
        """Reason for the end of the search, as a sentence; "" if not recorded."""
        return stop_sentence(self.stop) if self.stop else ""

    @property
    def baseline_name(self) -> str:
        """Origin of the baseline in a phrase: the user's file, or the name of a default."""
        about = self.about.get("baseline")
        if not isinstance(about, Mapping):
            return ""
        for record in self.replaced_baselines:
            default = record.request.launch.short
            return f"the next that fits; the default, {default}, runs out of memory"
        return str(about.get("name", ""))

    @property
    def replaced_baselines(self) -> list[ProbeRecord]:
        """Default baselines that ran out of memory, which a lighter one replaced."""
        return [
            record
            for record in self.failures
            if self.baseline is not None
            and record.request.purpose == "baseline"
            and record.failure is not None
            and record.failure.type.lacks_memory
        ]

    def point(self, name: str | Configuration) -> Point:
        """Return a measured point by name.

        Args:
            name: "recommended", "best" (the choice under the constraints), "today", "knee" (of the
                front), the number of a point of the front, fastest first ("1"), or a configuration,
                its key, or its knobs in any order ("zero_stage=1 micro_batch=4").

        Raises:
            UnknownName: there is none.
        """
        named = {"recommended": self.recommended, "today": self.baseline, "best": self.best}
        if self.front_points:
            figures = [point.inferred for point in self.front_points]
            both = [(p.energy_to_solution_kJ, p.time_to_solution_s) for p in figures]
            named["knee"] = self.front_points[knee(both)]
        names = [word for word, point in named.items() if point is not None]
        names += [f"1 to {len(self.front_points)}"] if self.front_points else []
        named["baseline"] = self.baseline  # of the release before
        named |= {str(number): p for number, p in enumerate(self.front_points, start=1)}
        if isinstance(name, Configuration):
            right, name = [name], name.short
        elif (direct := named.get(name)) is not None:
            return direct
        else:
            measured = [point.configuration for point in self.points]
            right = named_configurations(measured, name, "measured points")
        for point in self.points:
            if point.configuration in right:
                return point
        names.append(f"or a configuration that was measured (tuner show {self.name})")
        raise UnknownName("measured point", name, names)

    def compare(
        self, a: str | Configuration = "baseline", b: str | Configuration = "best"
    ) -> Comparison:
        """Compare step time and energy of `b` with `a`, by the posterior of all launches;
        UnknownName if one was not measured, InputError if they charge different scopes."""
        pair = self.point(a), self.point(b)
        (first, scope), (second, other) = ((p.configuration.short, p.meter.scope) for p in pair)
        for point in pair:
            if point.source != "predicted" and not self.windows.get(point.configuration):
                raise InputError(f"{point.configuration.short} has no measurement to compare")
        if scope != other:
            raise InputError(
                f"{first} charges the {scope} and {second} the {other}; "
                "energies of two scopes cannot be compared"
            )
        found = self.judged.against(pair[0]).differences(pair[1])
        if found is None:
            raise InputError(f"{first} and {second} are the same configuration; name two")
        basis, energy, time = "", *found
        if pair[1].source != "predicted":
            of_a, of_b = (len(self.judged.launches_of(p)) for p in pair)
            basis = (
                f"By the posterior of all launches of the study, {of_a} and {of_b} of them of "
                "these two; it allows for the luck of a configuration that the search selected."
            )
        return Comparison(first, second, time, energy, pair[1].meter, basis)

    def name_of(self, point: Point) -> str:
        """Return the name of a point for `point`: its number on the front, or its knobs."""
        front = [each.configuration for each in self.front_points]
        if point.configuration in front:
            return str(front.index(point.configuration) + 1)
        return point.configuration.short

    @property
    def too_little_tried(self) -> bool:
        """True if a limit ended the search before any conclusion about its space."""
        if self.stop is None or self.stop.kind not in LIMITS:
            return False
        tried = {point.configuration.launch for point in self.points}
        every = int(self.about.get("candidates", 0))
        return len(tried) < LEAST_TRIED and len(self.points) < every

    def parts_W(self, configuration: Configuration) -> Mapping[str, float]:
        """Return the power of a superchip's parts in the longest window that has it (`explain`).

        Empty where no meter did.
        """
        metered = [w for w in self.windows.get(configuration, ()) if w.parts_W]
        return max(metered, key=lambda window: window.window_s).parts_W if metered else {}

    @cached_property
    def has_energy(self) -> bool:
        """False for a study of time alone."""
        failed = [record.meter for record in self.failures]
        return all(m.has_energy for m in (*(p.meter for p in self.points), *failed))


def choose_again(answer: Answer, constraints: Constraints) -> AnotherChoice:
    """Choose among the measured points; without constraints, the run's recommendation."""
    baseline = answer.baseline
    if constraints.given and constraints.need_energy and not answer.has_energy:
        raise InputError(
            f"run {answer.name!r} measured time alone; choose with --minimize time and no limit on "
            "energy or power"
        )
    if constraints.max_slowdown is not None and baseline is None:
        raise InputError(
            f"the slowdown is relative to today, which run {answer.name!r} did not measure; "
            "give a deadline instead"
        )
    if answer.length is None:
        constraints.require_limits_of_a_step()
    limits = replace(constraints, baseline_time_s=answer.today_s)
    own = answer.judged
    judge = own if not constraints.given else replace(own, constraints=limits)
    best, choice = judge.choose()
    if best is None:
        raise InputError(f"run {answer.name!r} measured nothing, so there is nothing to choose")
    if not constraints.given:
        advised = advise(judge, best, met=choice.met).point
        if advised.configuration != best.configuration:
            best, choice = advised, judge.choose([advised])[1]
    energy, time = judge.differences(best) or (None, None)
    return AnotherChoice(
        answer.name,
        answer.name_of(best),
        best,
        choice,
        baseline,
        evidence_of(judge, best),
        judge.p_better(best) if judge.rival(best) else None,
        energy,
        time,
        limits=limits.limits,
        shrunk=judge.shrunk(best) if answer.saving_known else None,
        saving_known=answer.saving_known,
        alone=choice.met and bool(limits.limits) and _alone(judge, best, limits),
    )


def _alone(judge: Judge, best: Point, constraints: Constraints) -> bool:
    others = [p for p in judge.candidates if p.configuration != best.configuration]
    worst = constraints.limits.worst_ratio(figures_of(others)) if others else ()
    return not any(ratio <= 1 for ratio in np.broadcast_to(worst, len(others)))
