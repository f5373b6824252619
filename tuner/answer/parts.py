"""Parts of a result: points, intervals, choice, verification, and the cost of the search."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from enum import Enum, StrEnum
from typing import Any, Literal, NamedTuple

from tuner.formatting import knob_text, percent, signed_percent, value_text
from tuner.problem.constraints import LIMITS, Constraints, Limits
from tuner.problem.settings import NoVerdict, SearchSettings
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.knobs import Value
from tuner.workload.records.probe import Basis, MeterInfo

#: A difference is called one at this level.
LEVEL = 0.05
#: Two-sided probability of no difference from which on a recommendation names none: nine in ten on
#: one side, since how sure the whole is stands beside it.
UNCLEAR = 0.2


@dataclass(frozen=True)
class Difference:
    """Difference of one quantity from `a` to `b`."""

    quantity: str  # "step_time", "power" or "energy_per_step"
    relative: float  # b / a - 1; -0.05 is 5 % less
    low: float
    high: float
    p_value: float  # two-sided, of no difference at all; not shown of a prediction
    method: str
    predicted: bool = False  # by models, whose known error the interval is

    @property
    def shown(self) -> bool:
        """True if the interval leaves out zero."""
        return self.p_value < LEVEL

    @property
    def named(self) -> bool:
        """True if a recommendation names it."""
        return self.p_value < UNCLEAR

    @property
    def sentence(self) -> str:
        """The difference in words; a difference that is not significant is not called one."""
        quantity = self.quantity.replace("_", " ")
        word = "less" if self.relative < 0 else "more"
        if self.predicted:
            ends = f"{100 * self.low:+.0f} to {100 * self.high:+.0f} %"
            return f"{quantity}: {percent(abs(self.relative))} {word} ({ends}), predicted"
        change = f"{100 * abs(self.relative):.2f} % {word}"
        interval = f"[{100 * self.low:+.2f}, {100 * self.high:+.2f}] %"
        # A smaller one than a few launches can tell is only bounded.
        p = f"p = {self.p_value:.2g}" if self.p_value >= 1e-4 else "p < 0.0001"
        why = f"{interval} ({p}, {self.method})"
        if not self.shown:
            return f"{quantity}: no difference shown; if any, within {why}"
        return f"{quantity}: {change}, {why}"

    def to_json(self) -> dict[str, Any]:
        values = {**vars(self)}
        if values.pop("predicted"):
            values |= {"p_value": None, "method": "known error of the models"}
        return values


@dataclass(frozen=True)
class Comparison:
    """Changes from `a` to `b`."""

    a: str
    b: str
    step_time: Difference
    energy: Difference
    meter: MeterInfo
    basis: str = ""

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> list[str]:
        label = self.meter.label
        energy = f"{self.energy.sentence}; {self.meter.scope} scope, {label} ({self.meter.source})"
        return [
            f"from  {self.a}",
            f"to    {self.b}",
            self.step_time.sentence,
            self.meter.shown(energy) or self.meter.sentence,
            *([self.basis] if self.basis else []),
        ]

    def to_json(self) -> dict[str, Any]:
        parts = {
            name: {**part.to_json(), "shown": part.shown, "sentence": part.sentence}
            for name, part in (("step_time", self.step_time), ("energy", self.energy))
        }
        meter = dict(vars(self.meter))
        data = {"a": self.a, "b": self.b, **parts, "meter": meter, "basis": self.basis}
        return self.meter.known(data)


def as_json(value: Any) -> Any:
    """Return parts of a result as JSON values: a dataclass by its fields, an enum by its word."""
    if hasattr(value, "to_json"):
        return value.to_json()
    if is_dataclass(value) and not isinstance(value, type):
        return as_json(vars(value))
    if isinstance(value, Mapping):
        return {name: as_json(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(part) for part in value]
    return value.value if isinstance(value, Enum) else value


def without_probabilities(data: Any) -> Any:
    """Return JSON values in which every probability (`p_...`) is null."""
    if isinstance(data, dict):
        return {
            name: None if name.startswith("p_") else without_probabilities(value)
            for name, value in data.items()
        }
    return [without_probabilities(each) for each in data] if isinstance(data, list) else data


class Interval(NamedTuple):
    """90 % interval."""

    low: float
    high: float


class ProgressPoint(NamedTuple):
    """State of a search after a probe."""

    energy_kJ: float
    hypervolume: float


class Estimate(NamedTuple):
    """Figures of a point by the posterior of all launches, which shrinks noisy ones towards each
    other: what choices and verdicts stand on."""

    energy_to_solution_kJ: float
    time_to_solution_s: float
    energy_interval_kJ: Interval
    time_interval_s: Interval
    power_W: float


@dataclass(frozen=True)
class Point:
    """One configuration with the cost of training the whole job.

    Its figures are what was measured: the medians of its windows, with the intervals (90 %) that
    its own launches support. Of a prediction they are the models'.

    Attributes:
        source: "measured" at this very setting, or "predicted": by the surrogates, or by the
            analytic models where the cluster is simulated.
        windows: how many windows measured it, or were simulated; 0 for a surrogate's prediction.
        peak_power_W: highest power sample within a window; None where the samples were not kept.
        of_step: energy and time are those of one optimizer step: the length of the training is
            unknown.
        estimate: the same figures by the posterior of all launches; None of a prediction.
    """

    configuration: Configuration
    energy_to_solution_kJ: float
    time_to_solution_s: float
    energy_interval_kJ: Interval
    time_interval_s: Interval
    power_W: float
    source: Basis
    windows: int
    p_nondominated: float
    meter: MeterInfo
    flags: tuple[str, ...] = ()
    peak_memory_bytes: int | None = None
    power_interval_W: Interval | None = None
    peak_power_W: float | None = None
    of_step: bool = False
    estimate: Estimate | None = None

    @classmethod
    def from_logs(
        cls,
        configuration: Configuration,
        logs: Iterable[float],
        *,
        steps: int,
        **more: Any,
    ) -> Point:
        """Return a point from the logarithm and its standard error of a step's time (s) and of its
        power (W), and that of its energy."""
        from tuner.workload.node.measure.statistics import log_interval  # imports numpy

        log_time, time_se, log_power, power_se, energy_se = map(float, logs)
        log_energy = log_time + log_power
        return cls(
            configuration=configuration,
            energy_to_solution_kJ=math.exp(log_energy) * steps / 1000,
            time_to_solution_s=math.exp(log_time) * steps,
            energy_interval_kJ=Interval(*log_interval(log_energy, energy_se, steps / 1000)),
            time_interval_s=Interval(*log_interval(log_time, time_se, steps)),
            power_W=math.exp(log_power),
            power_interval_W=Interval(*log_interval(log_power, power_se)),
            **{"p_nondominated": math.nan, **more},
        )

    @property
    def inferred(self) -> Estimate | Point:
        """The figures that choices and verdicts stand on."""
        return self.estimate or self

    def measured(self, medians: tuple[float, float, float], errors: Iterable[float]) -> Point:
        """Return this estimate as the point of what was measured.

        Args:
            medians: energy to solution (kJ), time to solution (s) and power (W) of its windows.
            errors: standard errors of their logarithms, by its own launches.
        """
        from tuner.workload.node.measure.statistics import log_interval  # imports numpy

        energy_kJ, time_s, power_W = medians
        energy, time, power = (
            Interval(*log_interval(math.log(median), float(error)))
            for median, error in zip(medians, errors, strict=True)
        )
        estimate = Estimate(
            self.energy_to_solution_kJ,
            self.time_to_solution_s,
            self.energy_interval_kJ,
            self.time_interval_s,
            self.power_W,
        )
        return replace(
            self,
            energy_to_solution_kJ=energy_kJ,
            time_to_solution_s=time_s,
            power_W=power_W,
            energy_interval_kJ=energy,
            time_interval_s=time,
            power_interval_W=power,
            estimate=estimate,
        )

    @property
    def how_measured(self) -> str:
        """Source: "measured, 2 windows, node scope, estimated (utilisation x envelope)"."""
        meter, windows = self.meter, ""
        if self.source == "measured" and self.windows:
            windows = f", {self.windows} window{'s' * (self.windows != 1)}"
        scope = meter.shown(f"{meter.scope} scope, energy {meter.label} ({meter.source})")
        return f"{self.source}{windows}, {scope or meter.sentence}"

    def to_json(self) -> dict[str, Any]:
        """Return the point as JSON values."""
        data = {
            **vars(self),
            "configuration": self.configuration.to_json(),
            "short_name": self.configuration.short,
            "meter": dict(vars(self.meter)),
            "how_measured": self.how_measured,
        }
        del data["of_step"]  # it is said once, by the result's "steps": null
        if self.estimate is not None:
            data["estimate"] = self.meter.known(self.estimate._asdict())
        return self.meter.known(data)


def with_probabilities(points: Sequence[Point], probabilities: Iterable[float]) -> list[Point]:
    """Return the points with their probabilities of being on the front, the first ones'."""
    pairs = zip(points, probabilities, strict=False)
    return [replace(point, p_nondominated=float(p)) for point, p in pairs]


@dataclass(frozen=True)
class Shrunk:
    """A point whose energy, or else its time, counts as something else than what was measured.

    Attributes:
        ratios: energy and time that count over the baseline's; None without a baseline.
    """

    point: Point
    of_energy: bool
    ratios: tuple[float, float] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the configuration and its quantity."""
        quantity = "energy" if self.of_energy else "time"
        found: dict[str, Any] = {
            "configuration": self.point.configuration.to_json(),
            "quantity": quantity,
        }
        if self.ratios is not None:
            energy, time = self.ratios
            found |= self.point.meter.known({"energy_relative": energy - 1})
            found["time_relative"] = time - 1
        return found


@dataclass(frozen=True)
class Choice:
    """Rule by which `best` was chosen.

    Attributes:
        rule: the limits asked for ("budget_kJ + max_gpus") and the objective where one was named
            ("budget_kJ + edp"); "knee" where nothing was asked.
        objective_value: what the objective comes to: kJ, s, kJ s, money or grams of CO2; None for
            the knee.
        baseline_p_met: probability that the baseline meets the limits; None if none was asked, or
            it was not measured.
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
    baseline_p_met: float | None = None


@dataclass(frozen=True)
class ResolvedRequest:
    """Request that a result answers.

    Attributes:
        constraints: limits, objective and prices of the training job, relative to the baseline.
        search: settings of the search; None of a plan.
    """

    constraints: Constraints = field(default_factory=Constraints)
    search: SearchSettings | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the arguments that are not absolute limits, by name, units in the names."""
        absolute = {row.name for row in LIMITS}
        given = self.constraints.given.items()
        return {
            **{name: value for name, value in given if name not in absolute},
            **(self.search.limits if self.search is not None else {}),
        }


@dataclass(frozen=True)
class Attainment:
    """Band of the true front: attainment surfaces (Fonseca and Fleming 1996) of posterior draws.

    In q % of the draws, the front attains `energy_kJ_q` or less by `time_s` (ascending); infinite
    where nothing is done by then. 90 is the pessimistic edge.
    """

    time_s: tuple[float, ...]
    energy_kJ_50: tuple[float, ...]
    energy_kJ_90: tuple[float, ...]
    energy_kJ_10: tuple[float, ...]
    draws: int


class Evidence(StrEnum):
    """Evidence that a recommendation rests on."""

    VERIFIED = "verified"  #: launches made after the configuration was chosen
    MEASURED = "measured"  #: the launches of the search
    PREDICTED = "predicted"  #: the analytic models; nothing was measured
    NO_BASELINE = "no_baseline"  #: today was not measured, so there is nothing to compare with


@dataclass(frozen=True)
class Verification:
    """Launches of the choice and of the baseline that were made after the search."""

    probes: int = 0
    energy_kJ: float = 0.0
    ended: NoVerdict | None = None


@dataclass(frozen=True)
class SearchCost:
    """Cost of the search; after `payback_steps` optimizer steps with `best` instead of the baseline
    the joules saved equal those spent (None if it saves none)."""

    energy_kJ: float
    time_s: float
    probes: int
    failed: int
    measurements: int
    payback_steps: float | None
    payback_share: float | None


@dataclass(frozen=True)
class FurtherLaunches:
    """Further launches that are expected to decide."""

    launches: int
    of_baseline: bool


@dataclass(frozen=True)
class Recommendation:
    """Recommended action after a study.

    Attributes:
        action: "train" with `point`, or "keep" the baseline, which `point` is then.
        p_better: probability that `point` is better than the baseline in what was asked, or meets
            the limits if the baseline does not; of "keep", that of the choice. None if unknown.
        promising: the choice, where it is neither sure enough nor unlikely to be better; None if
            there is none.
        trade: the point with the least product of energy and time of those that save one for more
            of the other, where nothing was asked; None if that is no less than the baseline's.
        trade_objective: objective that chooses `trade`; None if none does.
    """

    action: Literal["train", "keep"]
    point: Point
    evidence: Evidence
    p_better: float | None = None
    for_limits: bool = False
    energy: Difference | None = None
    time: Difference | None = None
    promising: Point | None = None
    trade: Point | None = None
    trade_objective: str | None = None
    more: FurtherLaunches | None = None
    launch_s: float | None = None
    launch_kJ: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the recommendation as JSON values; points by their configuration."""
        return {
            name: as_json(value.configuration if isinstance(value, Point) else value)
            for name, value in vars(self).items()
        }


class ComparesWithToday:
    """What compares points with today, which was measured or, for now or at all, was not.

    Who only shows or counts today asks here, and need not know which.
    """

    baseline: Point | None

    @property
    def compared(self) -> tuple[Point, ...]:
        """The baseline's point, to show beside others; empty if it was not measured."""
        return (self.baseline,) if self.baseline is not None else ()

    @property
    def today_configuration(self) -> Configuration | None:
        """Configuration of the baseline; None if it was not measured."""
        return next((point.configuration for point in self.compared), None)

    @property
    def today_s(self) -> float | None:
        """Seconds of the training as it runs today; None if it was not measured."""
        return next((point.inferred.time_to_solution_s for point in self.compared), None)


@dataclass(frozen=True)
class AnotherChoice(ComparesWithToday):
    """A choice among the points of a run.

    Attributes:
        alone: no other point meets the limits.
        saving_known: `Answer.saving_known` of the run.
    """

    run: str
    name: str  # of the point for `--point`: its number on the front, or its knobs
    point: Point
    choice: Choice
    baseline: Point | None
    evidence: Evidence
    p_better: float | None = None
    energy: Difference | None = None
    time: Difference | None = None
    limits: Limits = field(default_factory=Limits)
    alone: bool = False
    shrunk: Shrunk | None = None
    saving_known: bool = True

    @property
    def met(self) -> bool:
        """True if the point meets the limits."""
        return self.choice.met

    def to_json(self) -> dict[str, Any]:
        """Return the choice as JSON values."""
        data = {name: as_json(value) for name, value in vars(self).items()}
        return self.point.meter.known(data)


class RelativeChange(NamedTuple):
    """Relative change with its 90 % interval; -0.1 is 10 % less."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class KnobEffect:
    """Effect of one knob's value at the point, against another value, all else equal.

    Energy and power are None in a study of time alone.
    """

    knob: str
    value: Value | None
    instead_of: Value | None
    time: RelativeChange
    energy: RelativeChange | None
    power: RelativeChange | None
    measured: bool
    of_baseline: bool

    @property
    def sentence(self) -> str:
        """ "micro_batch=4 instead of 1 (today's): time -12 % [-14, -10], energy ..." """

        def text(change: RelativeChange) -> str:
            middle, low, high = (signed_percent(share, 1) for share in change)
            return f"{middle} [{low.removesuffix(' %')}, {high.removesuffix(' %')}]"

        other = value_text(self.instead_of)
        owner = " (today's)" if self.of_baseline else ""
        how = "" if self.measured else "; predicted"
        energy = f", energy {text(self.energy)}" if self.energy is not None else ""
        return (
            f"{knob_text(self.knob, self.value)} instead of {other}{owner}: "
            f"time {text(self.time)}{energy}{how}"
        )


@dataclass(frozen=True)
class Explanation:
    """Explanation of a point, by the model's shares of the measured step."""

    point: Point
    # seconds by part, largest first; empty where no model knows the job.
    time_s: Mapping[str, float] = field(default_factory=dict)
    energy_J: Mapping[str, float] = field(default_factory=dict)
    # the model's own step time and energy as shares of the measured ones, minus 1.
    model_error: Mapping[str, float] = field(default_factory=dict)
    knobs: tuple[KnobEffect, ...] = ()
    mark: str = ""
    notes: tuple[str, ...] = ()
    # measured power of a superchip's parts, as `Measurement.parts_W`.
    parts_W: Mapping[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the explanation as JSON values."""
        knobs = [{**as_json(effect), "sentence": effect.sentence} for effect in self.knobs]
        data = {**{name: as_json(value) for name, value in vars(self).items()}, "knobs": knobs}
        return self.point.meter.known(data)


@dataclass(frozen=True)
class SizeOfPlan:
    """The answer on one number of GPUs."""

    gpus: int
    best: Point
    choice: Choice
    least_time: Point
    least_energy: Point
    # True for the size beyond which more GPUs buy time dearest: the knee of the curve of energy
    # over time through the choices.
    is_knee: bool = False


@dataclass(frozen=True)
class PlanFacts:
    """Facts of a plan."""

    configurations: int
    fitting: int
    seconds: float
    sizes: tuple[SizeOfPlan, ...] = ()
    # configurations whose measurement would reduce the uncertainty of the front most, the baseline
    # first.
    probes: tuple[Configuration, ...] = ()
    parameter_count: int | None = None
    # sentences on what of the model no formula describes
    doubts: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the facts as JSON values; a size with the figures of its points."""

        def figures(point: Point) -> dict[str, Any]:
            names = "configuration", "time_to_solution_s", "energy_to_solution_kJ"
            return {name: as_json(getattr(point, name)) for name in names}

        sizes = [
            {
                "gpus": size.gpus,
                "met": size.choice.met,
                "is_knee": size.is_knee,
                "best": figures(size.best),
                "least_time": figures(size.least_time),
                "least_energy": figures(size.least_energy),
            }
            for size in self.sizes
        ]
        return {**vars(self), "sizes": sizes, "probes": as_json(self.probes)}
