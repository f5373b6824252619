"""What a study answers: the front, the choice, and what finding them cost.

All energies are of the meter's scope, which every point carries: a front never mixes two scopes,
and a figure that nobody metered is labelled "estimated" wherever it is shown.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from models.leave_one_out import LeaveOneOut
from search_spaces.configuration import Configuration
from search_spaces.errors import UnknownName
from workload.probe import Measurement, MeterInfo, ProbeRecord

if TYPE_CHECKING:
    from tuner.compare import Comparison

__all__ = ["Choice", "LeaveOneOut", "Point", "Result", "Spent"]

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
        rule: "budget_kJ", "deadline_s", "power_cap_W", several of them, or "knee".
        met: False where no point of the front meets what was asked; `best` is then the nearest.
        sentence: for people.
    """

    rule: str
    met: bool
    sentence: str


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

    def point(self, name: str | Configuration) -> Point:
        """A measured point by name: "best", "baseline", or a configuration or its key.

        Raises:
            UnknownName: there is none.
        """
        named = {"best": self.best, "baseline": self.baseline}
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
            a, b: "best", "baseline", or a configuration or its key.

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
            "choice": dict(vars(self.choice)),
            "baseline": self.baseline.to_json() if self.baseline else None,
            "spent": dict(vars(self.spent)),
            "steps": self.steps,
            "constraints": dict(self.constraints),
            "failures": [record.to_json() for record in self.failures],
            "leave_one_out": dict(vars(self.leave_one_out)) if self.leave_one_out else None,
            "progress": [list(pair) for pair in self.progress],
            "stopped": self.stopped,
            "about": dict(self.about),
            "report": str(self.report_path) if self.report_path else None,
        }
