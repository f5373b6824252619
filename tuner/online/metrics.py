"""State of a tuned training as Prometheus metrics, from a server or in a file.

The power of each device has the name and labels that Zeus gives it (`zeus.metric.PowerGauge`), its
clock and temperature those of dcgm-exporter. What neither has is named joulefront_..., in base
units. The file is for the textfile collector of Prometheus' node exporter.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tuner.online.bandit import OnlineTuner
from tuner.online.follow import PowerFollower
from tuner.online.windows import Mark
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.plugins import install_command
from tuner.search_spaces.safe_files import write_text
from tuner.workload.node.meters import Meter, MeterError, Reading
from tuner.workload.node.meters.base import device_states
from tuner.workload.node.platforms.base import GpuFacts

#: Least time between two updates, seconds.
EVERY_S = 2.0
#: Beginning of a file of metrics.
OWN = b"# HELP joulefront_"
#: Quantities of a device's state by their names at Zeus and dcgm-exporter.
OF_DEVICE = {
    "power_monitor_gpu_power_watts": "power_W",
    "DCGM_FI_DEV_SM_CLOCK": "clock_MHz",
    "DCGM_FI_DEV_GPU_TEMP": "temperature_C",
}

#: Type and help of each metric.
METRICS: Mapping[str, tuple[str, str]] = {
    "joulefront_tuning": ("gauge", "1 while the clocks are tuned, else 0."),
    "joulefront_steps": ("counter", "Optimizer steps of the training."),
    "joulefront_step_time_seconds": ("gauge", "Mean time of the latest optimizer steps."),
    "joulefront_energy_joules": ("counter", "Energy since the start, by the meter's scope."),
    "joulefront_power_watts": ("gauge", "Mean power since the last update, by the meter's scope."),
    "joulefront_power_target_watts": ("gauge", "Power that may be drawn."),
    "joulefront_clock_limit_hertz": ("gauge", "Clock that is set; the highest one if none is."),
    "joulefront_max_slowdown_ratio": ("gauge", "Promised limit on the slowdown of the run."),
    "joulefront_slowdown_ratio": ("gauge", "Slowdown so far against the highest setting."),
    "joulefront_saved_joules": ("gauge", "Energy saved so far against the highest setting."),
    "joulefront_saved_low_joules": ("gauge", "Lower end of its 90 % interval."),
    "joulefront_saved_high_joules": ("gauge", "Upper end of its 90 % interval."),
    "power_monitor_gpu_power_watts": ("gauge", "Power of the GPU."),
    "DCGM_FI_DEV_SM_CLOCK": ("gauge", "SM clock frequency (in MHz)."),
    "DCGM_FI_DEV_GPU_TEMP": ("gauge", "GPU temperature (in C)."),
}

Sample = tuple[str, Mapping[str, object], float]


def _for_loopback(app: Callable[..., Any], host: str) -> Callable[..., Any]:
    # A page of another site reaches this server by a name of its own that leads to loopback (DNS
    # rebinding). A browser sends that name; a tunnel's port may be another one.
    names = {"localhost", "127.0.0.1", "[::1]", host}

    def checked(environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
        host_header = environ.get("HTTP_HOST", host).lower()
        if re.sub(r":\d*$", "", host_header) in names:
            return app(environ, start_response)
        start_response("403 Forbidden", [("Content-Type", "text/plain; charset=utf-8")])
        return [b"These metrics are read as localhost only.\n"]

    return checked


def import_prometheus() -> Any:
    """Return the package prometheus_client."""
    try:
        import prometheus_client
    except ImportError as error:
        raise InputError(
            f"metrics need prometheus_client; install it with {install_command('metrics')}"
        ) from error
    return prometheus_client


def families(samples: Iterable[Sample]) -> list[Any]:
    """Return the metric families of samples; samples that are not finite are left out."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    kinds = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}
    by_name: dict[str, Any] = {}
    for name, labels, value in samples:
        if math.isfinite(value):
            kind, text = METRICS[name]
            family = by_name.setdefault(name, kinds[kind](name, text, labels=tuple(labels)))
            family.add_metric([str(word) for word in labels.values()], value)
    return list(by_name.values())


class Metrics:
    """Latest metrics of a training, which `prometheus_client` collects, and a file of them.

    InputError if prometheus_client is not installed, or if the file cannot be written or holds
    something else.
    """

    def __init__(
        self,
        path: str | Path | None = None,
        *,
        announce: Callable[[str], None] = lambda sentence: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = Path(path) if path is not None else None
        # Files of two trainings in one folder must not hold the same series. A name may be any
        # bytes.
        name = self._path.stem if self._path is not None else "train"
        self._run = {"window": name.encode(errors="replace").decode()}
        self._announce, self._clock = announce, clock
        self._meter: Meter | None = None
        self._gpus: Sequence[GpuFacts] = ()
        self._started: Reading | None = None
        self._read: Reading | None = None
        self._marks: list[Mark] = []
        self._info: dict[str, float] = {}
        self._polled_s = -math.inf
        self._prometheus = import_prometheus()
        self.registry = self._prometheus.CollectorRegistry()
        self._families = families([("joulefront_tuning", self._run, 0)])
        self.registry.register(self)
        if self._path is None:
            return
        try:
            if self._path.is_file() and self._path.read_bytes()[: len(OWN)] not in (b"", OWN):
                raise InputError(f"--metrics-file {path} holds no metrics; name another file")
            write_text(self._path, self._text())
        except OSError as error:
            why = error.strerror or error
            raise InputError(f"--metrics-file {path} cannot be written: {why}") from error

    def describe(self) -> Sequence[Any]:
        """Return a family of each name that may be collected; called by prometheus_client."""
        return families((name, {}, 0.0) for name in METRICS)

    def collect(self) -> Sequence[Any]:
        """Return the latest metric families; called by prometheus_client."""
        return self._families

    def _text(self) -> str:
        return str(self._prometheus.generate_latest(self.registry), "utf-8")

    @contextmanager
    def served(self, address: str) -> Iterator[None]:
        """Serve the metrics at PORT on loopback, or at HOST:PORT; port 0 is any free one.

        InputError if it is not such an address, or cannot be listened on.
        """
        host, _, port = address.rpartition(":")
        host = host.strip("[]") or "127.0.0.1"
        if not (port.isascii() and port.isdecimal() and int(port) <= 65535):
            raise InputError(f"--metrics-port {address}: write a port up to 65535, or HOST:PORT")
        try:
            server, _ = self._prometheus.start_http_server(int(port), host, self.registry)
        except OSError as error:
            why = error.strerror or error
            raise InputError(f"cannot listen on {host}:{port}: {why}") from error
        in_url = f"[{host}]" if ":" in host else host
        if host in ("localhost", "::1") or host.startswith("127."):
            server.set_app(_for_loopback(server.get_app(), in_url))
        self._announce(f"metrics are at http://{in_url}:{server.server_port}/metrics")
        try:
            yield
        finally:
            server.shutdown()
            server.server_close()

    def begin(self, meter: Meter, gpus: Sequence[GpuFacts], max_slowdown: float | None) -> None:
        """Begin a training with its meter, its GPUs as CUDA counts them, and its promise."""
        self._meter, self._gpus = meter, gpus
        if max_slowdown is not None:
            self._info["joulefront_max_slowdown_ratio"] = max_slowdown

    def take(self, mark: Mark) -> None:
        """Take in a mark; the steps of the first rank that sends one are counted."""
        if not mark.ready and (not self._marks or mark.rank == self._marks[0].rank):
            self._marks = [*self._marks[:1], mark]

    def poll(self, tuner: OnlineTuner | None = None, clock_MHz: float = math.nan) -> None:
        """Update the published values, if it is time; without a tuner the training is not tuned."""
        now_s = self._clock()
        if self._meter is None or now_s - self._polled_s < EVERY_S:
            return
        self._polled_s = now_s
        try:
            self._update(self._meter, tuner, clock_MHz)
            if self._path is not None:
                write_text(self._path, self._text())
        except Exception as error:  # the training, and its tuning, go on
            self._announce(f"metrics are not up to date: {error}")
            self._announce = lambda sentence: None

    def close(self) -> None:
        """Remove the file, whose figures would be taken for the latest."""
        if self._path is not None:
            with suppress(OSError):
                self._path.unlink()

    def _update(self, meter: Meter, tuner: OnlineTuner | None, clock_MHz: float) -> None:
        info = self._info
        if self._marks:
            first, last = self._marks[0], self._marks[-1]
            if steps := last.step - first.step:
                info["joulefront_step_time_seconds"] = (last.time_s - first.time_s) / steps
            info["joulefront_steps"], self._marks = last.step, [last]
        if tuner is not None:
            balance = tuner.balance
            info["joulefront_slowdown_ratio"] = balance.slowdown[1]
            for end, saved_J in zip(("low_", "", "high_"), balance.saved_J, strict=True):
                info[f"joulefront_saved_{end}joules"] = saved_J
        self._families = families(
            [
                ("joulefront_tuning", self._run, tuner is not None),
                ("joulefront_clock_limit_hertz", self._run, 1e6 * clock_MHz),
                *((name, self._run, value) for name, value in info.items()),
                *self._metered(meter, tuner.target_W if isinstance(tuner, PowerFollower) else None),
            ]
        )

    def _metered(self, meter: Meter, target_W: float | None) -> list[Sample]:
        # None if the meter fails, rather than old ones.
        labels = {**self._run, "scope": meter.info.scope, "figure": meter.info.label}
        samples: list[Sample] = []
        if target_W is not None:
            samples.append(("joulefront_power_target_watts", labels, target_W))
        with suppress(MeterError):
            now, before = meter.read(), self._read
            self._read = now
            self._started = self._started or now
            energy_J = now.energy_J - self._started.energy_J
            samples.append(("joulefront_energy_joules", labels, energy_J))
            if before is not None and now.time_s > before.time_s:
                power_W = (now.energy_J - before.energy_J) / (now.time_s - before.time_s)
                samples.append(("joulefront_power_watts", labels, power_W))
            sample = meter.sample()
            of_one = {0: {"power_W": sample.power_W, **sample.extra}}
            states = device_states(sample) or (of_one if len(self._gpus) == 1 else {})
            for number, state in states.items():
                # dcgm-exporter counts as NVML does, whatever is visible.
                gpu = self._gpus[number] if number < len(self._gpus) else None
                dcgm = {"gpu": gpu.index, "UUID": gpu.uuid} if gpu else {}
                for name, key in OF_DEVICE.items():
                    own = dcgm if name.startswith("DCGM") else {"index": number}
                    samples.append((name, {**self._run, **own}, state.get(key, math.nan)))
        return samples
