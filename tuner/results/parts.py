"""Parts of a result: points, intervals, the choice, its verification, and what the search spent."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, NamedTuple

from tuner.problem.stop_reason import NoVerdict
from tuner.search_spaces.configuration import Configuration
from tuner.workload.probe import MeterInfo


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
        of_step: energy and time are those of one optimizer step: the length of the training is
            unknown.
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
    of_step: bool = False

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
        # That the figures are of one step is said once, by the result's "steps": null.
        names = (name for name in self.__dataclass_fields__ if name != "of_step")
        data = {name: getattr(self, name) for name in names}
        data["configuration"] = self.configuration.to_json()
        data["short_name"] = self.configuration.short
        data["meter"] = dict(vars(self.meter))
        data["how_measured"] = self.how_measured
        return data


@dataclass(frozen=True)
class Choice:
    """Rule by which `best` was chosen.

    Attributes:
        rule: the limits asked for ("budget_kJ + max_gpus") and the objective where one was named
            ("budget_kJ + edp"); "knee" where nothing was asked.
        met: False where no measured point meets what was asked; `best` is then the nearest.
        sentence: for people.
        objective: what was made least among what meets it (`tuner.problem.constraints.OBJECTIVES`).
        p_met: probability that `best` meets each limit, by its name.
        p_all_met: that it meets all of them; None where none was asked.
        objective_value: what the objective comes to: kJ, s, kJ s, money or grams of CO2; None for
            the knee.
        baseline_met: False if the baseline does not meet the limits; None if it was not measured.
        baseline_value: what the objective comes to for the baseline.
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


class Evidence(StrEnum):
    """Evidence that a recommendation rests on."""

    VERIFIED = "verified"  #: launches made after the configuration was chosen
    MEASURED = "measured"  #: the launches of the search
    PREDICTED = "predicted"  #: the analytic models; nothing was measured
    NO_BASELINE = "no_baseline"  #: today was not measured, so there is nothing to compare with


@dataclass(frozen=True)
class Verification:
    """Launches of the choice and of the baseline that were made after the search.

    Attributes:
        probes: number of launches.
        energy_kJ: energy that they took.
        ended: why no more were made; None if none was worth its energy.
    """

    probes: int = 0
    energy_kJ: float = 0.0
    ended: NoVerdict | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the verification as JSON values."""
        return {**vars(self), "ended": self.ended.to_json() if self.ended else None}


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
        payback_share: the same as a share of the whole job; None if its length is unknown.
    """

    energy_kJ: float
    time_s: float
    probes: int
    failed: int
    measurements: int
    payback_steps: float | None
    payback_share: float | None
