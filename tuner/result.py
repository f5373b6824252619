"""What a study answers: the front, the choice, and what finding them cost.

All energies are of the meter's scope, which every point carries: a front never mixes two scopes,
and a figure that nobody metered is labelled "estimated" wherever it is shown.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from models.leave_one_out import LeaveOneOut
from search_spaces.configuration import Configuration
from search_spaces.errors import UnknownName
from workload.probe import Measurement, MeterInfo, ProbeRecord

if TYPE_CHECKING:
    from tuner.compare import Comparison, Difference

__all__ = [
    "Attainment",
    "Attempt",
    "Choice",
    "LeaveOneOut",
    "Point",
    "Result",
    "Spent",
    "Verification",
]

#: Coverage of every interval that joulefront shows.
INTERVAL = 0.90


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
        source: "measured" at this very setting, or "predicted" by the surrogates.
        windows: how many windows measured it.
        p_nondominated: probability that no other configuration is better on both axes.
        meter: scope and source of the energy.
        flags: what a reader must know.
        peak_memory_bytes: fullest rank; None where unknown.
        power_interval_W: 90 % interval; None where nobody said.
        peak_power_W: highest power sample within a window; None where the samples were not kept.
    """

    configuration: Configuration
    energy_to_solution_kJ: float
    time_to_solution_s: float
    energy_interval_kJ: tuple[float, float]
    time_interval_s: tuple[float, float]
    power_W: float
    source: Literal["measured", "predicted"]
    windows: int
    p_nondominated: float
    meter: MeterInfo
    flags: tuple[str, ...] = ()
    peak_memory_bytes: int | None = None
    power_interval_W: tuple[float, float] | None = None
    peak_power_W: float | None = None

    @property
    def how_measured(self) -> str:
        """For people: "measured, 2 windows, node scope, estimated (utilisation x envelope)"."""
        plural = "s" if self.windows != 1 else ""
        windows = f", {self.windows} window{plural}" if self.windows else ""
        label = "estimated" if self.meter.estimated else "metered"
        return (
            f"{self.source}{windows}, {self.meter.scope} scope, energy {label} "
            f"({self.meter.source})"
        )

    def to_json(self) -> dict[str, Any]:
        data = {name: getattr(self, name) for name in self.__dataclass_fields__}
        data["configuration"] = self.configuration.to_json()
        data["meter"] = dict(vars(self.meter))
        data["how_measured"] = self.how_measured
        return data


@dataclass(frozen=True)
class Choice:
    """How `best` was chosen.

    Attributes:
        rule: the limits asked for ("budget_kJ + max_gpus") and the objective where one was named
            ("budget_kJ + least-edp"); "knee" where nothing was asked.
        met: False where no measured point meets what was asked; `best` is then the nearest.
        sentence: for people.
        objective: what was made least among what meets it (`tuner.decide.OBJECTIVES`).
        p_met: probability that `best` meets each limit, by its name.
        p_all_met: that it meets all of them; None where none was asked.
        objective_value: what the objective comes to: kJ, s, kJ s, money or grams of CO2; None for
            the knee.
    """

    rule: str
    met: bool
    sentence: str
    objective: str = "knee"
    p_met: Mapping[str, float] = field(default_factory=dict)
    p_all_met: float | None = None
    objective_value: float | None = None


@dataclass(frozen=True)
class Attainment:
    """Where the true front lies: the best energy attained within each time, by posterior draws.

    Each draw gives every measured and every predicted point a true time and energy; its front says
    the least energy attained by each time. Over the draws that energy has quantiles, the attainment
    surfaces (Fonseca and Fleming 1996).

    Attributes:
        time_s: time to solution, ascending, (n,).
        energy_kJ_50: energy that the true front attains by then in half of the draws, (n,);
            infinite where nothing is done by then.
        energy_kJ_90: that it attains in 90 % of the draws: the pessimistic edge of the band.
        energy_kJ_10: that it attains in 10 % of the draws: the optimistic edge.
        draws: how many draws there were.
    """

    time_s: tuple[float, ...]
    energy_kJ_50: tuple[float, ...]
    energy_kJ_90: tuple[float, ...]
    energy_kJ_10: tuple[float, ...]
    draws: int


@dataclass(frozen=True)
class Attempt:
    """One configuration held against the baseline again, by fresh launches in turn.

    Attributes:
        configuration: what was tried.
        pairs: launches of each that measured something, in turn (A B B A ...).
        step_time, energy: how it differs from the baseline in these launches alone: a
            `tuner.compare.Difference` each, with `relative`, `low`, `high`, `p_value` and
            `sentence`; None where there were too few.
        survived: whether it showed itself better where the search had found it better.
        reason: why it did or did not, as a phrase.
        sentence: the verdict with its figures, for people.
    """

    configuration: Configuration
    pairs: int
    step_time: Difference | None
    energy: Difference | None
    survived: bool
    reason: str
    sentence: str

    def to_json(self) -> dict[str, Any]:
        parts = {
            name: {**vars(part), "shown": part.shown, "sentence": part.sentence} if part else None
            for name, part in (("step_time", self.step_time), ("energy", self.energy))
        }
        return {**vars(self), "configuration": self.configuration.to_json(), **parts}


@dataclass(frozen=True)
class Verification:
    """Whether the choice was measured against the baseline again before it was recommended.

    Attributes:
        status: "confirmed" (it survived), "refuted" (no choice that was tried survived; the
            baseline or the first of them is recommended), "baseline" (the choice is the baseline:
            nothing to verify), "unfinished" (the limits, an interrupt or a missing baseline left
            no verdict), "off" (`verify=False`, or a recording that cannot be measured again).
        sentence: for people; shown beside the choice, whatever the status. The figures stand in
            the sentences of the attempts.
        attempts: what was tried, in order; the last one that survived is the choice.
        probes: launches that it took.
        energy_kJ: what they drew.
    """

    status: Literal["confirmed", "refuted", "baseline", "unfinished", "off"]
    sentence: str
    attempts: tuple[Attempt, ...] = ()
    probes: int = 0
    energy_kJ: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "attempts": [attempt.to_json() for attempt in self.attempts]}


@dataclass(frozen=True)
class Spent:
    """What the search used.

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
class Target:
    """What is predicted for more GPUs.

    Attributes:
        gpus: how many.
        cluster: the cluster that they were taken from.
        front_points: the predicted front, fastest first; `source` is "predicted", no window.
        best: the choice among them under the study's constraints.
        choice: how it was chosen.
        baseline: the space's default configuration there, predicted.
        candidates: how many configurations were predicted, and ...
        left_out: ... how many more are unlikely to fit in memory.
        windows: how many measured windows corrected the models.
        probed_gpus: the GPU counts that they ran on.
        simulated: whether those windows were themselves a simulation's.
    """

    gpus: int
    cluster: str
    front_points: tuple[Point, ...]
    best: Point | None
    choice: Choice
    baseline: Point | None
    candidates: int
    left_out: int
    windows: int
    probed_gpus: tuple[int, ...]
    simulated: bool = False

    @property
    def sentence(self) -> str:
        """What it is and what it rests on, for people."""
        sizes = ", ".join(str(size) for size in self.probed_gpus)
        plural = "s" if self.windows != 1 else ""
        of = "simulated" if self.simulated else "measured"
        return (
            f"Predicted for {self.gpus} GPUs, not measured: {self.candidates:,} configurations by "
            f"the analytic models, corrected by {self.windows} {of} window{plural} on {sizes} GPUs."
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "predicted": True,
            "sentence": self.sentence,
            "gpus": self.gpus,
            "cluster": self.cluster,
            "front": [point.to_json() for point in self.front_points],
            "best": self.best.to_json() if self.best else None,
            "choice": asdict(self.choice),
            "baseline": self.baseline.to_json() if self.baseline else None,
            "candidates": self.candidates,
            "left_out": self.left_out,
            "windows": self.windows,
            "probed_gpus": list(self.probed_gpus),
            "simulated": self.simulated,
        }


@dataclass(frozen=True)
class Result:
    """The answer of `tuner.optimize`.

    Attributes:
        name: the study's name.
        run_dir: its folder; None for a study that keeps none.
        front_points: the non-dominated points, fastest first.
        points: every point measured, the front included.
        best: the choice under the constraints; the knee where there are none.
        choice: how it was chosen, in a sentence.
        baseline: what the user would run today, measured by the same meter.
        spent: joules, seconds and probes of the search, and when the savings repay them.
        steps: optimizer steps (or units of work) that make the solution.
        constraints: what was asked, e.g. {"budget_kJ": 25.0}.
        failures: the probes that failed, with why.
        leave_one_out: the surrogates' error; None with fewer than three measurements.
        progress: (probing kJ so far, hypervolume of the front so far) after each probe.
        stopped: why the search ended, in a sentence.
        about: job, cluster, space, versions, for the report's last page.
        windows: the windows that measured each configuration, in their order (not in the JSON: they
            are in the trace).
        verification: how the choice was held against the baseline again; None where nothing was
            measured.
        predicted: points never measured at their own setting that are likely on the front, by the
            surrogates (`source="predicted"`, no windows); never among `points` or `front_points`
            and never chosen. Fastest first.
        attainment: the band in which the true front lies; None where nothing was measured.
        target: the front predicted for more GPUs than were probed; None where none was asked for.
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
    progress: tuple[tuple[float, float], ...] = ()
    stopped: str = ""
    about: Mapping[str, Any] = field(default_factory=dict)
    report_path: Path | None = None
    windows: Mapping[Configuration, tuple[Measurement, ...]] = field(
        default_factory=dict, repr=False
    )
    verification: Verification | None = None
    predicted: tuple[Point, ...] = ()
    attainment: Attainment | None = None
    target: Target | None = None

    @property
    def baseline_name(self) -> str:
        """What the baseline is, in a phrase: the user's file, or which default."""
        about = self.about.get("baseline")
        return str(about.get("name", "")) if isinstance(about, Mapping) else ""

    def point(self, name: str | Configuration) -> Point:
        """A measured point by name.

        Args:
            name: "best", "baseline", "knee" (of the front), the number of a point of the front,
                fastest first ("1"), or a configuration or its key.

        Raises:
            UnknownName: there is none.
        """
        from tuner.pareto import knee

        named = {"best": self.best, "baseline": self.baseline}
        if self.front_points:
            both = [(p.energy_to_solution_kJ, p.time_to_solution_s) for p in self.front_points]
            named["knee"] = self.front_points[knee(both)]
        named |= {str(number): p for number, p in enumerate(self.front_points, start=1)}
        found = named.get(name) if isinstance(name, str) else None
        for point in self.points:
            if name in (point.configuration, point.configuration.key):
                found = point
        if found is None:
            known = [name for name, point in named.items() if point is not None]
            keys = [point.configuration.key for point in self.points]
            raise UnknownName("measured point", str(getattr(name, "key", name)), known + keys)
        return found

    def compare(
        self, a: str | Configuration = "baseline", b: str | Configuration = "best"
    ) -> Comparison:
        """By how much `b` differs from `a` in step time and energy, and whether that is shown.

        Args:
            a: "best", "baseline", or a configuration or its key.
            b: the same of the other.

        Raises:
            UnknownName: one was not measured.
            InputError: they charge different scopes of energy.
        """
        from tuner.compare import compare_measurements

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

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "run_dir": str(self.run_dir) if self.run_dir else None,
            "front": [point.to_json() for point in self.front_points],
            "points": [point.to_json() for point in self.points],
            "best": self.best.to_json() if self.best else None,
            "choice": {**vars(self.choice), "p_met": dict(self.choice.p_met)},
            "baseline": self.baseline.to_json() if self.baseline else None,
            "spent": dict(vars(self.spent)),
            "steps": self.steps,
            "constraints": dict(self.constraints),
            "failures": [record.to_json() for record in self.failures],
            "leave_one_out": dict(vars(self.leave_one_out)) if self.leave_one_out else None,
            "progress": [list(pair) for pair in self.progress],
            "stopped": self.stopped,
            "verification": self.verification.to_json() if self.verification else None,
            "predicted": [point.to_json() for point in self.predicted],
            "attainment": dict(vars(self.attainment)) if self.attainment else None,
            "baseline_name": self.baseline_name,
            "about": dict(self.about),
            "report": str(self.report_path) if self.report_path else None,
            "target": self.target.to_json() if self.target else None,
        }
