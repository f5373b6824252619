"""A cluster that is not there: probes answered by the analytic models, on simulated time.

A record comes back as a cluster would give it: launch and warm-up cost time and energy, windows
read with noise, the first one of a process low, devices that warm up drift, what does not fit runs
out of memory, and now and then a launch crashes. Nothing is measured: the meter is named
"simulated", marked estimated, and its source says so, so that every page that shows a figure shows
that too. A visit's draws depend only on the seed, the configuration and the probe's name, so a
resumed study sees what an uninterrupted one would have seen.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from models.analytic import AnalyticModel, Prior
from search_spaces.cluster import Cluster
from search_spaces.configuration import Configuration, Settings
from search_spaces.errors import InvalidValue, UnknownName
from search_spaces.job import TrainingJob
from search_spaces.knobs import KNOBS
from search_spaces.rules import broken_rules
from workload.probe import Failure, Measurement, MeterInfo, ProbeRecord, ProbeRequest, Scope

if TYPE_CHECKING:
    from models.analytic import Prediction

__all__ = ["Conditions", "SimulatedRunner"]


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """How the simulated cluster departs from the models; all zero is the models themselves.

    Attributes:
        time_noise, power_noise: relative standard deviation of one window (time 0.02 to 0.2 %,
            power 1 to 3 %: three repeats on two A100, 1,000 repeats of one product on an A4000).
        step_noise: of one step within a window (Perseus's recorded iterations: about 1 %).
        first_window: share by which the first window of a process reads low in power (cold
            devices; the recorded tables warn of it).
        warm_up: share that power rises by, at most, as devices warm (leakage), ...
        warm_up_s: ... with this time constant, seconds.
        launch_s: a launch's fixed seconds: processes, imports, communicators.
        launch_each_s: and for each doubling of the ranks.
        load_Bps: bytes per second at which a rank makes its states.
        launch_power: share of the step's power drawn while launching.
        warm_up_steps: steps before the first window.
        crash_rate: share of launches that crash for no reason of the configuration's.
        model_error: relative standard deviation between the models and this cluster, drawn once a
            launch setting for time, half of it for power: what a search has to correct. Zero for
            planning, where the prediction itself is asked for.
        memory_error: the same for peak memory.
        memory_bias: log of peak memory over the models', common to all launches: what the
            framework holds beside the models' account.
    """

    time_noise: float = 0.002
    power_noise: float = 0.012
    step_noise: float = 0.01
    first_window: float = 0.01
    warm_up: float = 0.02
    warm_up_s: float = 60.0
    launch_s: float = 20.0
    launch_each_s: float = 3.0
    load_Bps: float = 2e9
    launch_power: float = 0.35
    warm_up_steps: int = 3
    crash_rate: float = 0.0
    model_error: float = 0.0
    memory_error: float = 0.0
    memory_bias: float = 0.0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise InvalidValue(f"condition {name}", value, "a number of at least 0")
        if self.load_Bps == 0 or self.warm_up_s == 0:
            raise InvalidValue("conditions load_Bps and warm_up_s", 0, "numbers above 0")


def _scope(cluster: Cluster) -> Scope:
    """What the prediction charges: packages on a CPU, else modules or the GPUs alone."""
    if cluster.device.type == "cpu":
        return "node"
    return "module" if cluster.host_W or cluster.supply_loss else "gpu"


class SimulatedRunner:
    """Answers probes by the analytic models, as a cluster would.

    Args:
        job: what is trained.
        cluster: what it would run on.
        seed: of every draw.
        conditions: noise, costs and failures.
        truth: what the cluster does, where not what `AnalyticModel` says; it must say the host's
            memory too.

    Raises:
        InputError: the job's model lacks a size.
    """

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
        self.meter = MeterInfo(
            "simulated",
            _scope(cluster),
            "prediction by the analytic models; nothing was measured",
            estimated=True,
        )

    def run(self, request: ProbeRequest) -> ProbeRecord:
        """Answer one probe at once; `wall_s` says how long it would have taken.

        Raises:
            InputError: a knob is none of the standard ones.
        """
        for name in (*request.launch, *(name for live in request.live for name in live)):
            if name not in KNOBS:
                raise UnknownName("knob of the simulated cluster", name, KNOBS)
        configurations = request.configurations()
        refused = [
            phrase
            for configuration in configurations
            for phrase in broken_rules(configuration, self.job, self.cluster)
        ]
        if refused:
            return self._record(request, failure=Failure("refused", refused[0]))
        said = self._disturbed(self._truth.predict(list(configurations)), request.launch)
        draw = self._draws(request.launch.key, request.probe_id)
        ranks = Configuration(request.launch).world_size
        c = self.conditions
        load_s = float(said.memory_bytes[0]) / c.load_Bps
        launch_s = c.launch_s + c.launch_each_s * math.log2(ranks) + load_s
        launch_s *= 1 + 0.05 * abs(float(draw.standard_normal()))
        first_W = c.launch_power * float(said.power_W[0])
        if failure := self._launch_failure(said, draw):
            return self._record(request, failure=failure, launch_s=launch_s, power_W=first_W)
        launch_s += c.warm_up_steps * float(said.step_time_s[0])
        return self._visit(request, said, launch_s, first_W)

    def close(self) -> None:
        """Nothing to close."""

    # -- what departs from the models ----------------------------------------------------------

    def _draws(self, *what: str) -> np.random.Generator:
        """Random numbers that depend on nothing but the seed and these words."""
        text = "\n".join((str(self.seed), *what)).encode()
        return np.random.default_rng(int.from_bytes(hashlib.sha256(text).digest()[:8], "big"))

    def _disturbed(self, said: Prediction, launch: Settings) -> Prediction:
        """What this cluster really does: the models, off by the same factors at every visit."""
        c = self.conditions
        if not (c.model_error or c.memory_error or c.memory_bias):
            return said
        time, power, memory = self._draws("truth", launch.key).standard_normal(3)
        return replace(
            said,
            step_time_s=said.step_time_s * math.exp(c.model_error * time),
            power_W=said.power_W * math.exp(0.5 * c.model_error * power),
            memory_bytes=said.memory_bytes * math.exp(c.memory_bias + c.memory_error * memory),
        )

    def _launch_failure(self, said: Prediction, draw: np.random.Generator) -> Failure | None:
        need, have = float(said.memory_bytes.max()), self.cluster.device.memory_bytes
        if need > have:
            return Failure(
                "out_of_memory",
                f"the fullest rank would need {need / 1e9:.1f} GB of the device's {have / 1e9:.1f}",
            )
        host = float(said.host_memory_bytes.max()) if len(said.host_memory_bytes) else 0.0
        limit = self.cluster.host_memory_bytes
        if limit and host > limit:
            return Failure(
                "out_of_memory",
                f"a node's ranks would need {host / 1e9:.1f} GB of the host's {limit / 1e9:.1f}",
            )
        if draw.random() < self.conditions.crash_rate:
            return Failure("crash", "a simulated rank crashed while it started")
        return None

    # -- windows -------------------------------------------------------------------------------

    def _visit(
        self, request: ProbeRequest, said: Prediction, launch_s: float, launch_W: float
    ) -> ProbeRecord:
        """Visit the live settings one after the other, until the time limit."""
        now, joules = launch_s, launch_s * launch_W
        measurements: list[Measurement] = []
        failure = None
        for number, configuration in enumerate(request.configurations()):
            power, step = float(said.power_W[number]), float(said.step_time_s[number])
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
            measurement = self._window(
                request,
                configuration,
                steps=steps,
                step_time_s=step,
                power_W=power,
                started_s=now + settle,
                first=not measurements,
                said=said,
                number=number,
            )
            measurements.append(measurement)
            joules += settle * power + measurement.energy_J
            now += settle + measurement.window_s
        return self._record(
            request,
            tuple(measurements),
            failure=failure,
            launch_s=launch_s,
            wall_s=now,
            energy_J=joules,
        )

    def _window(
        self,
        request: ProbeRequest,
        configuration: Configuration,
        *,
        steps: int,
        step_time_s: float,
        power_W: float,
        started_s: float,
        first: bool,
        said: Prediction,
        number: int,
    ) -> Measurement:
        c = self.conditions
        draw = self._draws(configuration.key, request.probe_id, str(number))
        offset = 1 + c.time_noise * draw.standard_normal()
        spread = 1 + c.step_noise * draw.standard_normal(min(steps, 2000))
        times = step_time_s * offset * np.clip(spread, 0.5, 2.0)
        if steps > len(times):
            times = np.resize(times, steps)
        window_s = float(times.sum())
        # Leakage rises as devices warm; the figure at the end of a long run is the models'.
        cold = c.warm_up * math.exp(-(started_s + window_s / 2) / c.warm_up_s)
        low = c.first_window if first else 0.0
        noise = c.power_noise * float(draw.standard_normal())
        seen = power_W * (1 - cold - low) * (1 + noise)
        delivered: dict[str, float] = {}
        if "clock_MHz" in configuration.live and len(said.clock_MHz):
            delivered["clock_MHz"] = float(said.clock_MHz[number])
        return Measurement(
            live=configuration.live,
            delivered=delivered,
            steps=steps,
            window_s=window_s,
            step_time_s=window_s / steps,
            step_time_se_s=float(times.std(ddof=1) / math.sqrt(steps)) if steps > 1 else math.nan,
            energy_J=seen * window_s,
            power_W=seen,
            power_se_W=c.power_noise * seen or math.nan,
            peak_memory_bytes=int(said.memory_bytes[number]),
            flags=("predicted, not measured",),
            step_times_s=tuple(float(t) for t in times[:50]) if steps <= 50 else (),
            started_s=started_s,
        )

    def _record(
        self,
        request: ProbeRequest,
        measurements: tuple[Measurement, ...] = (),
        *,
        failure: Failure | None = None,
        launch_s: float = 0.0,
        power_W: float = 0.0,
        wall_s: float | None = None,
        energy_J: float | None = None,
    ) -> ProbeRecord:
        environment: dict[str, Any] = {
            "simulated": True,
            "cluster": self.cluster.name,
            "device": self.cluster.device.name,
            "conditions": asdict(self.conditions),
        }
        return ProbeRecord(
            request=request,
            measurements=measurements,
            meter=self.meter,
            failure=failure,
            launch_s=launch_s,
            wall_s=launch_s if wall_s is None else wall_s,
            energy_J=launch_s * power_W if energy_J is None else energy_J,
            host="simulated",
            environment=environment,
        )
