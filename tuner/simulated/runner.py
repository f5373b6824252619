"""Simulated cluster: records of probes made by the analytic models, on simulated time.

The meter is named "simulated" and marked estimated, so that every page that shows a figure shows
that too. The random draws of a window depend only on the seed, the configuration and the probe's
name, so a resumed study gets the same records as an uninterrupted one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from tuner.executors.simulated_time import draws
from tuner.models.analytic.model import AnalyticModel
from tuner.models.prior import Prior
from tuner.search_spaces.cluster import Cluster
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.search_spaces.errors import UnknownName
from tuner.search_spaces.job import TrainingJob
from tuner.search_spaces.knobs import KNOBS
from tuner.search_spaces.rules import why_it_cannot_run
from tuner.study.forecast import GpuLaunch
from tuner.workload.records.probe import (
    Failure,
    Measurement,
    MeterInfo,
    ProbeRecord,
    ProbeRequest,
    Runner,
    Scope,
    shown_by,
)

if TYPE_CHECKING:
    from tuner.models.prior import Prediction


@dataclass(frozen=True, kw_only=True)
class Conditions(GpuLaunch):
    """Deviations of the simulated cluster from the models; all zero for the models themselves."""

    # time_noise, power_noise: relative standard deviation of one window (time 0.02 to 0.2 %, power
    # 1 to 3 %: three repeats on two A100, 1,000 repeats of one product on an A4000).
    time_noise: float = 0.002
    power_noise: float = 0.012
    # the same of one step within a window (Perseus's recorded iterations: about 1 %).
    step_noise: float = 0.01
    # share by which the first window of a process reads low in power (cold devices; the recorded
    # tables warn of it).
    first_window: float = 0.01
    warm_up: float = 0.02  # largest share by which power rises as devices warm (leakage).
    warm_up_s: float = 60.0
    crash_rate: float = 0.0
    # relative standard deviation between the models and this cluster, drawn once per launch setting
    # for time, half of it for power: the error that a search corrects. Zero for planning, which
    # shows the prediction itself.
    model_error: float = 0.0
    memory_error: float = 0.0
    # log of peak memory over the models', common to all launches: memory of the framework that the
    # models do not count.
    memory_bias: float = 0.0


#: A cluster that measures what the models predict, so that one job has one figure in a plan and in
#: a search on predictions.
AS_PREDICTED = Conditions(
    time_noise=0.0, power_noise=0.0, step_noise=0.0, first_window=0.0, warm_up=0.0
)


def simulated_meter(cluster: Cluster) -> MeterInfo:
    """Return the meter of a prediction: of packages on a CPU, else of modules or the GPUs alone."""
    scope: Scope = "module" if cluster.host_W or cluster.supply_loss else "gpu"
    return MeterInfo(
        "simulated",
        scope if cluster.device.is_gpu else "node",
        "prediction by the analytic models; nothing was measured",
        estimated=True,
    )


class SimulatedRunner(Runner):
    """Runner that makes records from the analytic models, as a cluster would."""

    def __init__(
        self,
        job: TrainingJob,
        cluster: Cluster,
        *,
        seed: int = 0,
        conditions: Conditions | None = None,
        truth: Prior | None = None,
    ) -> None:
        self.job, self.cluster, self.seed = job, cluster, seed
        self.conditions = conditions or Conditions()
        self._truth: Prior = truth or AnalyticModel(job, cluster)
        self.meter = simulated_meter(cluster)

    def run(self, request: ProbeRequest) -> ProbeRecord:
        """Return the record of one probe at once; its `wall_s` is simulated."""
        for name in (*request.launch, *(name for live in request.live for name in live)):
            if name not in KNOBS:
                raise UnknownName("knob of the simulated cluster", name, KNOBS)
        configurations = request.configurations()
        refused = [
            phrase
            for configuration in configurations
            for phrase in why_it_cannot_run(configuration, self.job, self.cluster)
        ]
        if refused:
            return self._record(request, failure=Failure("refused", refused[0]))
        figures = self._disturbed(self._truth.predict(list(configurations)), request.launch)
        draw = draws(self.seed, request.launch.key, request.probe_id)
        ranks = Configuration(request.launch).world_size
        c = self.conditions
        load_s = float(figures.memory_bytes[0]) / c.load_Bps
        launch_s = c.launch_s + c.launch_each_s * math.log2(ranks) + load_s
        launch_s *= 1 + 0.05 * abs(float(draw.standard_normal()))
        first_W = c.launch_power * float(figures.power_W[0])
        if failure := self._launch_failure(figures, draw):
            energy_J = launch_s * first_W
            return self._record(request, failure=failure, launch_s=launch_s, energy_J=energy_J)
        launch_s += c.warm_up_steps * float(figures.step_time_s[0])
        return self._visit(request, figures, launch_s, first_W)

    def _disturbed(self, figures: Prediction, launch: Settings) -> Prediction:
        c = self.conditions
        if not (c.model_error or c.memory_error or c.memory_bias):
            return figures
        time, power, memory = draws(self.seed, "truth", launch.key).standard_normal(3)
        return replace(
            figures,
            step_time_s=figures.step_time_s * math.exp(c.model_error * time),
            power_W=figures.power_W * math.exp(0.5 * c.model_error * power),
            memory_bytes=figures.memory_bytes * math.exp(c.memory_bias + c.memory_error * memory),
        )

    def _launch_failure(self, figures: Prediction, draw: np.random.Generator) -> Failure | None:
        device, host = self.cluster.device.memory_bytes, self.cluster.host_memory_bytes
        for needs, have, words in (
            (figures.memory_bytes, device, "the fullest rank would need {} GB of the device's {}"),
            (figures.host_memory_bytes, host, "a node's ranks would need {} GB of the host's {}"),
        ):
            need = max(map(float, needs), default=0.0)
            if have and need > have:
                message = words.format(f"{need / 1e9:.1f}", f"{have / 1e9:.1f}")
                return Failure(shown_by("no memory"), message)
        if draw.random() < self.conditions.crash_rate:
            return Failure("crash", "a simulated rank crashed while it started")
        return None

    def _visit(
        self,
        request: ProbeRequest,
        figures: Prediction,
        launch_s: float,
        launch_W: float,
    ) -> ProbeRecord:
        now, joules = launch_s, launch_s * launch_W
        measurements: list[Measurement] = []
        failure = None
        for number, configuration in enumerate(request.configurations()):
            power, step = float(figures.power_W[number]), float(figures.step_time_s[number])
            settle = request.window.settle_s if configuration.live else 0.0
            steps = max(request.window.min_steps, math.ceil(request.window.min_s / step))
            if now + settle + steps * step > request.time_limit_s:
                failure = Failure(
                    "time_limit",
                    f"the probe would take longer than its {request.time_limit_s:g} s",
                )
                joules += max(0.0, request.time_limit_s - now) * power
                now = max(now, request.time_limit_s)
                break
            measurement = self._window(request, figures, number, steps, now + settle)
            measurements.append(measurement)
            joules += settle * power + measurement.energy_J
            now += settle + measurement.window_s
        return self._record(
            request,
            failure=failure,
            launch_s=launch_s,
            wall_s=now,
            energy_J=joules,
            measurements=measurements,
        )

    def _window(
        self,
        request: ProbeRequest,
        figures: Prediction,
        number: int,
        steps: int,
        started_s: float,
    ) -> Measurement:
        c, configuration = self.conditions, request.configurations()[number]
        draw = draws(self.seed, configuration.key, request.probe_id, str(number))
        drawn = _steps(c, draw, steps, float(figures.step_time_s[number]))
        # Leakage rises as devices warm; the figure at the end of a long run is the models'.
        cold = c.warm_up * math.exp(-(started_s + drawn.window_s / 2) / c.warm_up_s)
        low = 0.0 if number else c.first_window
        now_W = float(figures.power_W[number]) * (1 - cold - low)
        measured_W = now_W * (1 + c.power_noise * float(draw.standard_normal()))
        delivered: dict[str, float] = {}
        if "clock_MHz" in configuration.live and len(figures.clock_MHz):
            delivered["clock_MHz"] = float(figures.clock_MHz[number])
        return replace(
            drawn,
            live=configuration.live,
            energy_J=measured_W * drawn.window_s,
            power_W=measured_W,
            power_se_W=c.power_noise * measured_W or math.nan,
            delivered=delivered,
            peak_memory_bytes=int(figures.memory_bytes[number]),
            flags=("predicted, not measured",),
            started_s=started_s,
        )

    def _record(
        self,
        request: ProbeRequest,
        *,
        failure: Failure | None,
        launch_s: float = 0.0,
        wall_s: float = 0.0,
        energy_J: float = 0.0,
        measurements: Sequence[Measurement] = (),
    ) -> ProbeRecord:
        return ProbeRecord(
            request=request,
            measurements=tuple(measurements),
            meter=self.meter,
            failure=failure,
            launch_s=launch_s,
            wall_s=wall_s or launch_s,
            energy_J=energy_J,
            host="simulated",
            environment={
                "simulated": True,
                "cluster": self.cluster.name,
                "device": self.cluster.device.name,
                "conditions": asdict(self.conditions),
            },
        )


def _steps(c: Conditions, draw: np.random.Generator, steps: int, step_time_s: float) -> Measurement:
    offset = 1 + c.time_noise * draw.standard_normal()
    spread = 1 + c.step_noise * draw.standard_normal(min(steps, 2000))
    times = step_time_s * offset * np.clip(spread, 0.5, 2.0)
    if steps > len(times):
        times = np.resize(times, steps)
    window_s = float(times.sum())
    return Measurement(
        live=Settings(),
        steps=steps,
        window_s=window_s,
        step_time_s=window_s / steps,
        step_time_se_s=float(times.std(ddof=1) / math.sqrt(steps)) if steps > 1 else math.nan,
        energy_J=math.nan,
        power_W=math.nan,
        step_times_s=tuple(float(t) for t in times[:50]) if steps <= 50 else (),
    )
