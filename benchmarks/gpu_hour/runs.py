"""`runs`: does it run on this GPU at all, and does NVML behave as it is assumed to."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from benchmarks.gpu_hour.conditions import read_back
from benchmarks.gpu_hour.hour import Hour, described, recording

SCRIPTS = Path(__file__).parent / "scripts"
#: Seconds of load and of rest. Long pulses show the lag of a sensor, short ones its filter.
WAVE = [(2.0, 1.0)] * 4 + [(0.5, 0.5)] * 8 + [(0.2, 0.2)] * 10


def runs(hour: Hour) -> None:
    query = ("nvidia-smi", "-q", "-d", "CLOCK,POWER,PERFORMANCE,MEMORY,ECC")
    tuner = (sys.executable, "-m", "tuner.cli")
    idle_s = 3.0 if hour.rehearse else 15.0
    hour.check("nvidia-smi", lambda: hour.command(*query)[1])
    hour.check("doctor", lambda: hour.command(*tuner, "doctor")[1])
    hour.check("conditions read back", read_back)
    hour.check("latency of NVML's calls", latencies)
    hour.check("idle recording", lambda: idle(hour, idle_s))
    hour.check("fork server", lambda: forked(hour))
    hour.check("first probe", lambda: described(hour.probe("first", zero_stage=1)))
    hour.check("plain script", lambda: script(hour))
    hour.check("load in a square wave", lambda: wave(hour))


def latencies() -> str:
    """Time 100 of each call that a meter makes."""
    import pynvml as nvml

    nvml.nvmlInit()
    handle = nvml.nvmlDeviceGetHandleByIndex(0)
    calls: dict[str, Callable[[], object]] = {
        "energy": partial(nvml.nvmlDeviceGetTotalEnergyConsumption, handle),
        "instant": partial(nvml.nvmlDeviceGetFieldValues, handle, [nvml.NVML_FI_DEV_POWER_INSTANT]),
        "usage": partial(nvml.nvmlDeviceGetPowerUsage, handle),
        "clock": partial(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM),
        "utilisation": partial(nvml.nvmlDeviceGetUtilizationRates, handle),
        "reasons": partial(nvml.nvmlDeviceGetCurrentClocksEventReasons, handle),
    }
    try:
        return ", ".join(f"{name} {_latency(call)}" for name, call in calls.items())
    finally:
        nvml.nvmlShutdown()


def _latency(call: Callable[[], object]) -> str:
    times_us = []
    for _ in range(100):
        began_ns = time.perf_counter_ns()
        try:
            call()
        except Exception as error:  # of NVML: a call that this driver lacks is a result
            return f"({error})"
        times_us.append((time.perf_counter_ns() - began_ns) / 1000)
    return f"{statistics.median(times_us):.0f} us (99 %: {sorted(times_us)[98]:.0f})"


def idle(hour: Hour, seconds: float) -> str:
    """Record the GPU at rest."""
    with recording(hour.folder / "nvml-idle.json", seconds) as rows:
        return f"{len(rows.result().energies())} readings"


def forked(hour: Hour) -> str:
    """Tell if ranks are forked, and of which torch."""
    hour.runner().prepare()
    server = hour.runner().node.server
    way = f"not forked: {server.fork_unsafe}" if server.fork_unsafe else "ranks are forked"
    return f"{way}; {server.torch}; imports {server.ready_s:.0f} s"


def script(hour: Hour) -> str:
    """Probe a plain script through the command line; compare step times with its own."""
    own_times = hour.work / "own-times.jsonl"
    file = shutil.copy(SCRIPTS / "steps.py", hour.work)
    options = ("--steps", "1000", "--global-batch", "4096")
    folder = ("--runs-dir", str(hour.work / "script-runs"))
    words = ("dev", "probe", "--json", "-q", "--script", file, *options, *folder)
    told, end = hour.command(
        sys.executable, "-m", "tuner.cli", *words, env=os.environ | {"OWN_TIMES": str(own_times)}
    )
    if not told:
        return end
    record = json.loads(told)
    if record.get("failure"):
        return f"{record['failure']['kind']}: {record['failure']['message'][:300]}"
    found = record["measurements"][0]
    own_ms = [time_ms for line in own_times.open().readlines()[1:] for time_ms in json.loads(line)]
    return (
        f"step {1000 * found['step_time_s']:.2f} ms; the steps of the probe "
        f"{_spread([1000 * time_s for time_s in found['step_times_s']])}, by the script's own "
        f"events {_spread(own_ms)}; flags {found['flags']}"
    )


def _spread(times_ms: Sequence[float]) -> str:
    ordered = sorted(times_ms)
    tenth = len(ordered) // 10
    return (
        f"median {statistics.median(ordered):.2f}, 10 to 90 % {ordered[tenth]:.2f} to "
        f"{ordered[-tenth - 1]:.2f} ms"
    )


def wave(hour: Hour) -> str:
    """Record a square wave of load: the counter's period, and how far it lags behind the load."""
    pulses = WAVE[::5] if hour.rehearse else WAVE
    edges = hour.folder / "wave.json"
    seconds = sum(on + off for on, off in pulses) + 12
    load = (sys.executable, SCRIPTS / "load.py", json.dumps(pulses), edges)
    with recording(hour.folder / "nvml-load.json", seconds) as rows:
        end = hour.command(*load)[1]
        found = rows.result()
    if not edges.exists():
        return end
    spans = [(float(began), float(ended)) for began, ended in json.loads(edges.read_text())]
    (hour.folder / "wave.json").write_text(
        json.dumps([[a - found.began_s, b - found.began_s] for a, b in spans])
    )
    energies = found.energies()
    periods = sorted(update_periods_s(energies))
    rows_s = [b[0] - a[0] for a, b in itertools.pairwise(energies)]
    return (
        f"the counter changes every {1000 * statistics.median(periods):.0f} ms (95 %: "
        f"{1000 * periods[int(0.95 * len(periods))]:.0f}) and lags "
        f"{1000 * lag_s(energies, spans):.0f} ms; ten queries take "
        f"{1000 * statistics.median(rows_s):.1f} ms; {len(spans)} pulses"
    )


def update_periods_s(energies: Sequence[tuple[float, float]]) -> list[float]:
    """Return the seconds between the changes of a counter that was read at these times (s, J)."""
    changes = [b[0] for a, b in itertools.pairwise(energies) if b[1] != a[1]]
    return [b - a for a, b in itertools.pairwise(changes)]


def lag_s(energies: Sequence[tuple[float, float]], spans: Sequence[tuple[float, float]]) -> float:
    """Return the delay, up to 0.4 s, after which the counter rises most during the load.

    Args:
        energies: readings of the counter (s, J).
        spans: begin and end of each pulse of load (s).
    """
    rises = [(b[0], b[1] - a[1]) for a, b in itertools.pairwise(energies)]

    def under_load_J(delay_s: float) -> float:
        return sum(
            joules
            for at_s, joules in rises
            if any(began + delay_s <= at_s <= ended + delay_s for began, ended in spans)
        )

    return max((step / 100 for step in range(41)), key=under_load_J)
