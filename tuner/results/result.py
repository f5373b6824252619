"""Result of a study: the front, the choice, and the cost of the search.

All energies are of the meter's scope, which every point carries: a front never mixes two scopes,
and a figure without a meter is labelled "estimated" wherever it is shown.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from tuner.formatting import knob_words
from tuner.models.surrogate.leave_one_out import LeaveOneOut
from tuner.problem.stop_reason import StopReason, stop_sentence
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.errors import UnknownName
from tuner.workload.probe import Measurement, MeterInfo, ProbeRecord

if TYPE_CHECKING:
    import pandas

    from tuner.models.surrogate.surrogates import Surrogates
    from tuner.problem.constraints import Constraints
    from tuner.results.choose import AnotherChoice
    from tuner.results.explain import Explanation
    from tuner.results.plan_facts import PlanFacts
    from tuner.results.recommendation import Recommendation
    from tuner.results.scale_out import Target
    from tuner.results.significance import Comparison, Difference
    from tuner.search_spaces.cluster import Cluster
    from tuner.search_spaces.job import TrainingJob

__all__ = [
    "Attainment",
    "Attempt",
    "Choice",
    "Interval",
    "LeaveOneOut",
    "Point",
    "ProgressPoint",
    "Result",
    "Spent",
    "Verification",
]

#: Coverage of every interval that joulefront shows.
INTERVAL = 0.90


class Interval(NamedTuple):
    """90 % interval."""

    low: float
    high: float


class ProgressPoint(NamedTuple):
    """State of a search after a probe.

    Attributes:
        energy_kJ: energy of all probes so far.
        hypervolume: of the measured front, in log energy and log time.
    """

    energy_kJ: float
    hypervolume: float


@dataclass(frozen=True)
class Point:
    """One configuration with what it costs to train the whole job with it.

    Attributes:
        configuration: the launch and live knobs.
        energy_to_solution_kJ: energy of all optimizer steps, in the meter's scope.
        time_to_solution_s: time of all optimizer steps.
        energy_interval_kJ: 90 % interval.
        time_interval_s: 90 % interval.
        power_W: average power of the whole job.
        source: "measured" at this very setting, or "predicted": by the surrogates, or by the
            analytic models where the cluster is simulated.
        windows: how many windows measured it, or were simulated; 0 for a surrogate's prediction.
        p_nondominated: probability that no other configuration, measured or not, is better on
            both axes.
        meter: scope and source of the energy.
        flags: what a reader must know.
        peak_memory_bytes: fullest rank; None where unknown.
        power_interval_W: 90 % interval; None if unknown.
        peak_power_W: highest power sample within a window; None where the samples were not kept.
    """

    configuration: Configuration
    energy_to_solution_kJ: float
    time_to_solution_s: float
    energy_interval_kJ: Interval
    time_interval_s: Interval
    power_W: float
    source: Literal["measured", "predicted"]
    windows: int
    p_nondominated: float
    meter: MeterInfo
    flags: tuple[str, ...] = ()
    peak_memory_bytes: int | None = None
    power_interval_W: Interval | None = None
    peak_power_W: float | None = None

    @classmethod
    def from_logs(
        cls,
        configuration: Configuration,
        log_time: float,
        time_se: float,
        log_power: float,
        power_se: float,
        *,
        energy_se: float,
        steps: int,
        **more: Any,
    ) -> Point:
        """Return a point from the logarithms of a step's time (s) and power (W).

        Args:
            configuration: the launch and live knobs.
            log_time: mean of the logarithm of the time.
            log_power: mean of the logarithm of the power.
            time_se: standard error of the logarithm of the time.
            power_se: standard error of the logarithm of the power.
            energy_se: standard error of the logarithm of the energy.
            steps: that make the solution.
            more: the other fields.
        """
        from tuner.workload.measure.statistics import log_interval  # imports numpy

        log_energy = log_time + log_power
        return cls(
            configuration=configuration,
            energy_to_solution_kJ=math.exp(log_energy) * steps / 1000,
            time_to_solution_s=math.exp(log_time) * steps,
            energy_interval_kJ=Interval(*log_interval(log_energy, energy_se, steps / 1000)),
            time_interval_s=Interval(*log_interval(log_time, time_se, steps)),
            power_W=math.exp(log_power),
            power_interval_W=Interval(*log_interval(log_power, power_se)),
            **more,
        )

    @property
    def how_measured(self) -> str:
        """Source: "measured, 2 windows, node scope, estimated (utilisation x envelope)"."""
        plural = "s" if self.windows != 1 else ""
        measured = self.source == "measured" and self.windows
        windows = f", {self.windows} window{plural}" if measured else ""
        label = self.meter.label
        return (
            f"{self.source}{windows}, {self.meter.scope} scope, energy {label} "
            f"({self.meter.source})"
        )

    def to_json(self) -> dict[str, Any]:
        """Return the point as JSON values."""
        data = {name: getattr(self, name) for name in self.__dataclass_fields__}
        data["configuration"] = self.configuration.to_json()
        data["meter"] = dict(vars(self.meter))
        data["how_measured"] = self.how_measured
        return data


@dataclass(frozen=True)
class Choice:
    """Rule by which `best` was chosen.

    Attributes:
        rule: the limits asked for ("budget_kJ + max_gpus") and the objective where one was named
            ("budget_kJ + least-edp"); "knee" where nothing was asked.
        met: False where no measured point meets what was asked; `best` is then the nearest.
        sentence: for people.
        objective: what was made least among what meets it (`tuner.problem.constraints.OBJECTIVES`).
        p_met: probability that `best` meets each limit, by its name.
        p_all_met: that it meets all of them; None where none was asked.
        objective_value: what the objective comes to: kJ, s, kJ s, money or grams of CO2; None for
            the knee.
        baseline_met: False if the baseline does not meet the limits; None if it was not measured.
        baseline_value: what the objective comes to for the baseline.
    """

    rule: str
    met: bool
    sentence: str
    objective: str = "knee"
    p_met: Mapping[str, float] = field(default_factory=dict)
    p_all_met: float | None = None
    objective_value: float | None = None
    baseline_met: bool | None = None
    baseline_value: float | None = None


@dataclass(frozen=True)
class Attainment:
    """Band of the true front: the least energy attained within each time, by posterior draws.

    Each draw gives every measured and every predicted point a true time and energy; its front says
    the least energy attained by each time. Over the draws that energy has quantiles, the attainment
    surfaces (Fonseca and Fleming 1996).

    Attributes:
        time_s: time to solution, ascending, (n,).
        energy_kJ_50: energy that the true front attains by then in half of the draws, (n,);
            infinite where nothing is done by then.
        energy_kJ_90: that it attains in 90 % of the draws: the pessimistic edge of the band.
        energy_kJ_10: that it attains in 10 % of the draws: the optimistic edge.
        draws: number of draws.
    """

    time_s: tuple[float, ...]
    energy_kJ_50: tuple[float, ...]
    energy_kJ_90: tuple[float, ...]
    energy_kJ_10: tuple[float, ...]
    draws: int


@dataclass(frozen=True)
class Attempt:
    """Comparison of one configuration with the baseline, by fresh launches in turn.

    Attributes:
        configuration: what was tried.
        pairs: launches of each that measured something, in turn (A B B A ...).
        step_time, energy: how it differs from the baseline in these launches alone: a
            `tuner.results.significance.Difference` each, with `relative`, `low`, `high`, `p_value`
            and `sentence`; None where there were too few.
        survived: True if it was again better where the search had found it better.
        reason: why it did or did not, as a phrase.
        sentence: the verdict with its figures, for people.
        undecided: True if it is not shown yet and further launches may show it.
    """

    configuration: Configuration
    pairs: int
    step_time: Difference | None
    energy: Difference | None
    survived: bool
    reason: str
    sentence: str
    undecided: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the attempt as JSON values."""
        parts = {
            name: {**vars(part), "shown": part.shown, "sentence": part.sentence} if part else None
            for name, part in (("step_time", self.step_time), ("energy", self.energy))
        }
        return {**vars(self), "configuration": self.configuration.to_json(), **parts}


Status = Literal["confirmed", "refuted", "baseline", "unfinished", "off"]


@dataclass(frozen=True)
class Verification:
    """Outcome of measuring the choice against the baseline again before recommending it.

    Attributes:
        status: "confirmed" (it survived), "refuted" (no choice that was tried survived; the
            baseline or the first of them is recommended), "baseline" (the choice is the baseline:
            nothing to verify), "unfinished" (the limits, an interrupt or a missing baseline left
            no verdict), "off" (`verify=False`, or a recording that cannot be measured again).
        sentence: for people; shown beside the choice, whatever the status. The figures are in
            the sentences of the attempts.
        attempts: what was tried, in order; the last one that survived is the choice.
        probes: launches that it took.
        energy_kJ: what they drew.
    """

    status: Status
    sentence: str
    attempts: tuple[Attempt, ...] = ()
    probes: int = 0
    energy_kJ: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the verification as JSON values."""
        return {**vars(self), "attempts": [attempt.to_json() for attempt in self.attempts]}


@dataclass(frozen=True)
class Spent:
    """Cost of the search.

    Attributes:
        energy_kJ: joules of all probes, from request to end, in the meter's scope.
        time_s: wall-clock seconds of the search.
        probes: launches, failed ones included.
        failed: those of them that failed.
        measurements: windows measured.
        payback_steps: optimizer steps of training with `best` instead of the baseline after which
            the joules saved equal those spent; None where `best` saves none.
        payback_share: the same as a share of the whole job.
    """

    energy_kJ: float
    time_s: float
    probes: int
    failed: int
    measurements: int
    payback_steps: float | None
    payback_share: float | None


@dataclass(frozen=True)
class Result:
    """The answer of `tuner.optimize`.

    Attributes:
        name: the study's name.
        run_dir: its folder; None for a study that keeps none.
        front_points: the non-dominated points, fastest first.
        points: every point measured, the front included.
        best: the choice under the constraints, the knee if there are none: the best-looking
            measured configuration that verification did not reject. Whether to run it says
            `recommendation`.
        choice: how it was chosen, in a sentence.
        baseline: what the user would run today, measured by the same meter.
        spent: joules, seconds and probes of the search, and when the savings repay them.
        steps: optimizer steps (or units of work) that make the solution.
        constraints: what was asked, e.g. {"budget_kJ": 25.0}.
        failures: the probes that failed, with why.
        leave_one_out: the surrogates' error; None with fewer than three measurements.
        progress: (probing kJ so far, hypervolume of the front so far) after each probe.
        stop: why the search ended; None if not recorded.
        about: job, cluster, space, versions, for the report's last page.
        windows: the windows that measured each configuration, in their order (not in the JSON: they
            are in the trace).
        verification: comparison of the choice with the baseline by fresh launches; None if nothing
            was measured.
        predicted: points never probed at their own setting that are likely on the front, by the
            surrogates (`source="predicted"`, no windows); never among `points` or `front_points`
            and never chosen. Fastest first.
        attainment: the band in which the true front lies; None where nothing was measured.
        target: the front predicted for more GPUs than were probed; None if not requested.
        job: what is trained; None for a recorded table, which has none.
        cluster: where it was probed; None if unknown.
        plan: facts of a plan (`tuner plan`); None for a study.
        surrogates: the models fitted to the measurements, which the front and `explain` share (not
            in the JSON); None if nothing was measured.
    """

    name: str
    run_dir: Path | None
    front_points: tuple[Point, ...]
    points: tuple[Point, ...]
    best: Point | None
    choice: Choice
    baseline: Point | None
    spent: Spent
    steps: int
    constraints: Mapping[str, float] = field(default_factory=dict)
    failures: tuple[ProbeRecord, ...] = ()
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
    target: Target | None = None
    job: TrainingJob | None = None
    cluster: Cluster | None = None
    plan: PlanFacts | None = None
    surrogates: Surrogates | None = field(default=None, repr=False, compare=False)

    @cached_property
    def recommendation(self) -> Recommendation | None:
        """Advice to train with the choice or to keep the baseline; None if nothing was measured."""
        from tuner.results.recommendation import recommend

        return recommend(self)

    @property
    def recommended(self) -> Point | None:
        """The configuration to run: the choice if it was shown to be better, else the baseline."""
        return self.recommendation.point if self.recommendation is not None else None

    @property
    def stopped(self) -> str:
        """Reason for the end of the search, as a sentence; "" if not recorded."""
        return stop_sentence(self.stop) if self.stop else ""

    @property
    def baseline_name(self) -> str:
        """Origin of the baseline in a phrase: the user's file, or the name of a default."""
        about = self.about.get("baseline")
        return str(about.get("name", "")) if isinstance(about, Mapping) else ""

    def point(self, name: str | Configuration) -> Point:
        """Return a measured point by name.

        Args:
            name: "recommended", "best" (the choice under the constraints), "baseline", "knee" (of
                the front), the number of a point of the front, fastest first ("1"), or a
                configuration, its key, or its knobs in any order ("zero_stage=1 micro_batch=4").

        Raises:
            UnknownName: there is none.
        """
        from tuner.pareto import knee

        named = {
            "recommended": self.recommended,
            "best": self.best,
            "baseline": self.baseline,
        }
        if self.front_points:
            both = [(p.energy_to_solution_kJ, p.time_to_solution_s) for p in self.front_points]
            named["knee"] = self.front_points[knee(both)]
        named |= {str(number): p for number, p in enumerate(self.front_points, start=1)}
        found = named.get(name) if isinstance(name, str) else None
        for point in self.points:
            if name == point.configuration or (
                isinstance(name, str) and knob_words(name) == knob_words(point.configuration.key)
            ):
                found = point
        if found is None:
            known = [name for name, p in named.items() if p is not None and not name.isdigit()]
            known += [f"1 to {len(self.front_points)}"] if self.front_points else []
            raise UnknownName(
                "measured point",
                str(getattr(name, "key", name)),
                [*known, f"or a configuration that was measured (tuner front {self.name})"],
            )
        return found

    def compare(
        self, a: str | Configuration = "baseline", b: str | Configuration = "best"
    ) -> Comparison:
        """Compare step time and energy of `b` with `a`, and test the differences.

        Args:
            a: "best", "baseline", or a configuration or its key.
            b: the same of the other.

        Raises:
            UnknownName: one was not measured.
            InputError: they charge different scopes of energy.
        """
        from tuner.results.significance import compare_measurements

        points = self.point(a), self.point(b)
        first, second = (self.windows.get(p.configuration, ()) for p in points)
        spread = self.about.get("window_spread", {})
        return compare_measurements(
            first,
            second,
            names=(points[0].configuration.key, points[1].configuration.key),
            meters=(points[0].meter, points[1].meter),
            spread=(spread.get("step_time", 0.0), spread.get("power", 0.0)),
        )

    @property
    def front(self) -> pandas.DataFrame:
        """The front, fastest first: one row per point, one column per knob.

        Raises:
            InputError: pandas is not installed; the extra `notebook` brings it.
        """
        from tuner.display.export import frame

        return frame(self, self.front_points)

    @property
    def table(self) -> pandas.DataFrame:
        """Every point, fastest first, in the columns of `front`; raises as `front`."""
        from tuner.display.export import frame

        return frame(self)

    def plot(self, kind: str = "front", *, backend: str = "plotly") -> Any:
        """Return one of the report's figures.

        Args:
            kind: "front", "live", "hypervolume", "probes", ... (see `tuner.display.plots.figures`).
            backend: "plotly" for a `plotly.graph_objects.Figure`, or "matplotlib" for a
                `matplotlib.figure.Figure` of the same data, for papers.

        Raises:
            UnknownName: there is no such figure, or this result has nothing to draw in it.
            InputError: matplotlib is requested and not installed.
        """
        from tuner.display.plots import plot

        return plot(self, kind, backend=backend)

    def export(self, to: str, out: str | Path | None = None) -> Path:
        """Write the result as "csv", "parquet", "t4", "wandb" or "mlflow"; return the path.

        Args:
            to: the format.
            out: the file or folder (default: in the run's folder).

        Raises:
            InputError: the format is unknown, or a package that it needs is not installed.
        """
        from tuner.display.export import export_result

        return export_result(self, to, out)

    def choose(
        self,
        constraints: Constraints | None = None,
        *,
        budget_kJ: float | None = None,
        deadline_s: float | None = None,
        power_cap_W: float | None = None,
        max_slowdown: float | None = None,
    ) -> AnotherChoice:
        """Choose among the measured points under other constraints; nothing is measured.

        Args:
            constraints: every limit on the training job, and the objective.
            budget_kJ: as in `tuner.optimize`.
            deadline_s: as in `tuner.optimize`.
            power_cap_W: as in `tuner.optimize`.
            max_slowdown: as in `tuner.optimize`.

        Raises:
            InputError: nothing was measured, or the slowdown is limited and the baseline was not
                measured.
        """
        from tuner.problem.constraints import Constraints
        from tuner.results.choose import choose

        asked = (constraints or Constraints()).limited(
            budget_kJ, deadline_s, power_cap_W, max_slowdown
        )
        return choose(self, asked)

    def explain(self, point: str | Configuration = "best") -> Explanation:
        """Explain a point: its time and energy by part, the effect of each knob, guidelines.

        Args:
            point: as in `point`.

        Raises:
            UnknownName: there is no such point.
        """
        from tuner.results.explain import explain

        return explain(self, point)

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the recommendation, and the front as a table."""
        from tuner.display.notebook import result_html

        return result_html(self)

    def to_json(self) -> dict[str, Any]:
        """Return everything but the windows and the fitted models as JSON values."""
        return {
            "name": self.name,
            "run_dir": str(self.run_dir) if self.run_dir else None,
            "front": [point.to_json() for point in self.front_points],
            "points": [point.to_json() for point in self.points],
            "best": self.best.to_json() if self.best else None,
            "recommendation": self.recommendation.to_json() if self.recommendation else None,
            "choice": {**vars(self.choice), "p_met": dict(self.choice.p_met)},
            "baseline": self.baseline.to_json() if self.baseline else None,
            "spent": dict(vars(self.spent)),
            "steps": self.steps,
            "constraints": dict(self.constraints),
            "failures": [record.to_json() for record in self.failures],
            "leave_one_out": dict(vars(self.leave_one_out)) if self.leave_one_out else None,
            "progress": [list(pair) for pair in self.progress],
            "stopped": self.stopped,
            "stop_reason": self.stop.to_json() if self.stop else None,
            "verification": self.verification.to_json() if self.verification else None,
            "predicted": [point.to_json() for point in self.predicted],
            "attainment": dict(vars(self.attainment)) if self.attainment else None,
            "baseline_name": self.baseline_name,
            "about": dict(self.about),
            "report": str(self.report_path) if self.report_path else None,
            "target": self.target.to_json() if self.target else None,
            "plan": self.plan.to_json() if self.plan else None,
        }
