"""Result of a study: the front, the choice, and the cost of the search.

All energies are of the meter's scope, which every point carries: a front never mixes two scopes,
and a figure without a meter is labelled "estimated" wherever it is shown.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from tuner.answer.configuration_names import named_configurations
from tuner.answer.parts import (
    AnotherChoice,
    Attainment,
    Choice,
    Explanation,
    PlanFacts,
    Point,
    ProgressPoint,
    Recommendation,
    ResolvedRequest,
    SearchCost,
    Verification,
    as_json,
    without_probabilities,
)
from tuner.answer.significance import Comparison
from tuner.models.surrogate import LeaveOneOut
from tuner.pareto import knee
from tuner.problem.constraints import Constraints, LimitOptions
from tuner.problem.limits import Limits
from tuner.problem.stop_reason import StopReason, stop_sentence
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.errors import InputError, UnknownName
from tuner.search_spaces.typed_json import JSON_SCHEMA
from tuner.workload.node.measure.stragglers import Straggler
from tuner.workload.records.probe import Measurement, ProbeRecord
from tuner.workload.records.without_energy import known_figures

if TYPE_CHECKING:
    import pandas
    import plotly.graph_objects as go

    from tuner.answer.judge import Judge
    from tuner.answer.micro_batch import MicroBatchAdvice
    from tuner.models.surrogate.surrogates import Surrogates
    from tuner.search_spaces.cluster import Cluster
    from tuner.search_spaces.job import TrainingJob
    from tuner.search_spaces.today_facts import TodayFacts


#: Names in the JSON of a result, in their order.
_IN_JSON = (
    *("name", "run_dir", "front", "points", "best", "headline", "recommendation", "choice"),
    *("baseline", "spent", "steps", "limits", "request", "failures", "leave_one_out", "progress"),
    *("stopped", "stop_reason", "verification", "predicted", "attainment", "baseline_name"),
    *("today", "about", "report", "plan", "micro_batch"),
)


@dataclass(frozen=True)
class Result:
    """The answer of `tuner.optimize`.

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
    def judged(self) -> Judge:
        """The judge of the points; by their intervals alone if the result has none."""
        from tuner.answer.judge import Judge

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
    def today(self) -> TodayFacts | None:
        """Today's training of a script, and the source of each value; None for another job."""
        if self.job is None:
            return None
        return self.job.today_facts(self.baseline.configuration if self.baseline else None)

    @property
    def micro_batch(self) -> MicroBatchAdvice | None:
        """The fastest and the largest safe micro-batch; None unless space `micro-batch` was
        searched."""
        from tuner.answer.micro_batch import is_searched, micro_batch_answer

        if self.job is None or not is_searched(self.about):
            return None
        return micro_batch_answer(self.judged, self.failures, self.job, self.cluster)

    @property
    def headline(self) -> str:
        """Recommendation, its saving and its certainty, in one sentence."""
        from tuner.display.advice import headline

        return headline(self)

    @cached_property
    def recommendation(self) -> Recommendation | None:
        """Advice to train with the choice or to keep the baseline; None if nothing was measured."""
        from tuner.answer.recommendation import recommend

        return recommend(self)

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
            both = [(p.energy_to_solution_kJ, p.time_to_solution_s) for p in self.front_points]
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
        if not pair[1].meter.is_simulated:
            of_a, of_b = (len(self.judged.launches_of(p)) for p in pair)
            basis = (
                f"By the posterior of all launches of the study, {of_a} and {of_b} of them of "
                "these two; it allows for the luck of a configuration that the search selected."
            )
        return Comparison(first, second, time, energy, pair[1].meter, basis)

    @property
    def front(self) -> pandas.DataFrame:
        """The front as a table, fastest first, by the numbers that `point` takes; InputError if
        pandas is not installed (extra `notebook`)."""
        from tuner.display.export import front_frame

        return front_frame(self)

    @property
    def table(self) -> pandas.DataFrame:
        """Every point with all its figures, fastest first; raises as `front`."""
        from tuner.display.export import frame

        return frame(self)

    def plot(self, kind: str = "front") -> go.Figure:
        """Return one of the report's figures (`tuner.display.plots.figures`), whose `write_image`
        (kaleido) makes a PDF or SVG; UnknownName if there is none, or nothing to draw in it."""
        from tuner.display.plots import plot

        return plot(self, kind)

    def to_csv(self, out: str | Path | None = None) -> Path:
        """Write the points as CSV and return the path (default: in the run's folder); InputError if
        the file cannot be written."""
        from tuner.display.export import write_csv

        return write_csv(self, out)

    def choose(
        self, constraints: Constraints | None = None, **limits: Unpack[LimitOptions]
    ) -> AnotherChoice:
        """Choose among the measured points under other constraints; nothing is measured. InputError
        if nothing was, or if the slowdown is limited and the baseline was not measured."""
        from tuner.answer.recommendation import choose

        return choose(self, (constraints or Constraints()).limited(**limits))

    def parts_W(self, configuration: Configuration) -> Mapping[str, float]:
        """Return the power of a superchip's parts in the longest window that has it (`explain`).

        Empty where no meter did.
        """
        metered = [w for w in self.windows.get(configuration, ()) if w.parts_W]
        return max(metered, key=lambda window: window.window_s).parts_W if metered else {}

    def explain(self, point: str | Configuration = "best") -> Explanation:
        """Explain a point: its time and energy by part and the effect of each knob."""
        from tuner.answer.explain import explain

        return explain(self, point)

    def _repr_html_(self) -> str:
        """Return the recommendation and the front as a table, for a notebook."""
        from tuner.display.notebook import result_html

        return result_html(self)

    def __str__(self) -> str:
        """Return the answer that `tuner optimize` ends with."""
        from tuner.display.text import answer_lines

        return "\n".join(answer_lines(self))

    def __repr__(self) -> str:
        """Return the name, the size of the front and the recommendation, in a few lines."""
        counts = f"{len(self.front_points)} of {len(self.points)} points on the front"
        return f"<Result {self.name}: {counts}. {self.headline or 'Nothing was measured.'}>"

    @cached_property
    def has_energy(self) -> bool:
        """False for a study of time alone."""
        failed = [record.meter for record in self.failures]
        return all(m.has_energy for m in (*(p.meter for p in self.points), *failed))

    def to_json(self) -> dict[str, Any]:
        """Return everything but the windows and the fitted models as JSON values.

        docs/report.md describes them; `schema` rises if one changes its meaning or goes.
        """
        named = {
            "run_dir": str(self.run_dir) if self.run_dir else None,
            "front": self.front_points,
            "steps": self.length,
            "stop_reason": self.stop,
            "report": str(self.report_path) if self.report_path else None,
        }
        values = {name: named[name] if name in named else getattr(self, name) for name in _IN_JSON}
        if self.plan is not None:
            values |= {n: getattr(self.plan, n) for n in ("parameter_count", "doubts")}
        data = known_figures(as_json(values), energy=self.has_energy)
        doubted = self.plan is not None and self.plan.doubts
        return {"schema": JSON_SCHEMA, **(without_probabilities(data) if doubted else data)}
