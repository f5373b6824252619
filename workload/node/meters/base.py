"""Protocol of every meter, and its readings and samples.

Energy is a counter: a window's energy is the difference of two readings taken at its boundaries.
Sampled power (`Timeline`) only draws the picture; a sample that could not be taken is counted,
never made up. A meter says what scope it charges and whether it is an estimate; nothing downstream
may forget either.

A meter of the user's own replaces those of a platform. Its name travels in the variable
`JOULEFRONT_METER`, and the folder in which it was given in another one, so that agents and child
processes open the same meter; nothing that is saved with a study names it.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, runtime_checkable

from tuner.search_spaces.errors import InputError
from tuner.search_spaces.plugins import Socket
from tuner.workload.records.probe import MeterInfo, PowerSample

#: Lag of sampled power where a meter states none: two samples of the timeline, of which each may be
#: the mean since the one before it. NVML's instant power is updated every 20 to 100 ms (arXiv
#: 2312.02741).
LAG_S = 0.2

#: Meters that may be left away: of Grace's modules, and of the user's own, which is loaded only if
#: the user names it.
SOCKET = Socket(
    "joulefront.meters",
    "meter",
    1,
    (),
    {
        "superchip": "tuner.workload.node.meters.superchip",
        "own": "tuner.workload.node.meters.user_meter",
    },
)
#: Names of the package's own sources, which tell records of different meters apart.
TAKEN = ("nvml", "superchip", "amdsmi", "rapl", "estimated", "simulated", "table", "time")
#: The user's, for sentences.
_OWN = "a meter of your own"
#: Variables that name the user's meter, and the folder from which its module may be imported.
METER, FOLDER = "JOULEFRONT_METER", "JOULEFRONT_METER_FOLDER"
#: Variable that permits time alone on this node and on the agents that are started here.
TIME_ALONE = "JOULEFRONT_TIME_ALONE"


class MeterError(Exception):
    """Failure to open or read a meter, never zero joules; `grant` is the line that permits it."""

    def __init__(self, sentence: str, *, grant: str = "") -> None:
        super().__init__(sentence)
        self.grant = grant


class NoDriver(MeterError):
    """NVML does not start because this machine has no NVIDIA driver, and so no GPU to use."""


@dataclass(frozen=True)
class Reading:
    """Value of a meter's counter on CLOCK_MONOTONIC, in joules since it was opened.

    `doubt_J` is by how much it may be wrong because power still fell when it was read. Power that
    is sampled within `lag_s` afterwards still shows what was drawn before.
    """

    time_s: float
    energy_J: float
    doubt_J: float = 0.0
    lag_s: float = LAG_S


def over_devices(states: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Combine several devices' states: means, but the hottest temperature and any throttle."""
    merged: dict[str, float] = {}
    for name in {name for state in states for name in state}:
        values = [state[name] for state in states if name in state]
        worst = name.startswith("throttle") or name == "temperature_C"
        merged[name] = max(values) if worst else sum(values) / len(values)
    return dict(sorted(merged.items()))


def each_device(states: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return each device's power and state as "gpu0_power_W", ...; nothing for a single one."""
    if len(states) < 2:
        return {}
    return {
        f"gpu{number}_{name}": state[name] for number, state in enumerate(states) for name in state
    }


def device_number(name: str) -> int | None:
    """Return the number in a name like "gpu3_clock_MHz"; None if it names no single device."""
    number = name.removeprefix("gpu").partition("_")[0]
    return int(number) if name.startswith("gpu") and number.isdigit() else None


def device_states(sample: PowerSample) -> dict[int, dict[str, float]]:
    """Return the sampled values of each device, by its number."""
    states: dict[int, dict[str, float]] = {}
    for name, value in sample.extra.items():
        if (number := device_number(name)) is not None:
            states.setdefault(number, {})[name.partition("_")[2]] = value
    return states


@runtime_checkable
class Meter(Protocol):
    """Source of energy and power readings of one scope.

    `read` and `sample` may be called from two threads. A meter that cannot read raises
    `MeterError`, never returns zero for "no reading". `resolution_s` is the time between two
    updates of its counter.
    """

    info: MeterInfo

    @property
    def resolution_s(self) -> float:
        """Longest time between two updates of the energy counter, seconds."""

    def read(self) -> Reading:
        """Return the counter now."""

    def boundary(self, *, opens: bool) -> Reading:
        """Return a reading for a window's edge, as exact as the source allows.

        It may wait for the counter's next update, while the devices are idle. An opening reading
        tells the energy of the moment in which the call returns, a closing one that of the moment
        in which it was called, so that the wait lies outside the window either way.
        """
        ...

    def sample(self) -> PowerSample:
        """Return the power now."""

    def close(self) -> None:
        """Release the source. May be called twice."""


class CounterMeter:
    """Meter by a counter of joules that is fine enough to need no wait at a window's edge.

    A subclass counts. Power is the slope between two samples; two closer than `min_s` say little.
    """

    idle_W = 0.0  #: drawn whatever the devices do, as far as the meter knows it

    def __init__(
        self,
        name: str,
        *,
        min_s: float,
        clock: Callable[[], float],
        sleep: Callable[[float], None],
    ) -> None:
        self._name, self._min_s = name, min_s
        self._clock, self._sleep = clock, sleep
        self._lock, self._sampling = threading.Lock(), threading.Lock()
        self._closed = False
        self._last = self.read()

    def _count(self) -> Reading:
        raise NotImplementedError

    def read(self) -> Reading:
        with self._lock:
            if self._closed:
                raise MeterError(f"the {self._name} meter is closed")
            return self._count()

    def boundary(self, *, opens: bool) -> Reading:
        return self.read()

    def sample(self) -> PowerSample:
        """Return the mean power since the previous sample (since opening, for the first), watts."""
        with self._sampling:
            reading = self.read()
            while (elapsed_s := reading.time_s - self._last.time_s) < self._min_s:
                self._sleep(self._min_s)
                reading = self.read()
            power_W = (reading.energy_J - self._last.energy_J) / elapsed_s
            self._last = reading
            return PowerSample(reading.time_s, power_W)

    def close(self) -> None:
        with self._lock:
            self._closed = True


@contextlib.contextmanager
def own_meter(name: str | None) -> Iterator[None]:
    """Use the meter of this name, if any, on this node and on the agents that are started here.

    InputError if there is no such meter.
    """
    if name is None:
        yield
        return
    SOCKET.needed("own", _OWN).meter_class(name)
    before = variables(os.environ)
    os.environ.update({METER: name, FOLDER: os.getcwd()})
    try:
        yield
    finally:
        for each in (METER, FOLDER):
            del os.environ[each]
        os.environ.update(before)


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables by which another process opens the same meter."""
    return {name: environ[name] for name in (METER, FOLDER, TIME_ALONE) if name in environ}


def opener_of(environ: Mapping[str, str]) -> Callable[[], Meter] | None:
    """Return a function that opens the user's own meter; None if no meter is named."""
    name = environ.get(METER)
    return partial(_open, name, environ.get(FOLDER)) if name else None


def _open(name: str, folder: str | None) -> Meter:
    try:
        meter: Meter = SOCKET.needed("own", _OWN).opened(name, folder)
    except InputError as error:
        raise MeterError(str(error)) from error
    return meter


class Ticker:
    """Thread that calls `action` every `period_s` seconds; `lost` counts the missed calls.

    It keeps to the grid start + k x period, so that a late call does not shift those after it.
    """

    def __init__(self, action: Callable[[], None], *, period_s: float, name: str) -> None:
        self.lost = 0
        self._action = action
        self._period_s = period_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        due_s = time.monotonic()
        while not self._stop.wait(max(0.0, due_s - time.monotonic())):
            self._action()
            due_s += self._period_s
            late = int((time.monotonic() - due_s) / self._period_s)
            if late > 0:
                self.lost += late
                due_s += late * self._period_s

    def stop(self) -> None:
        """End the thread and wait for the call in progress. May be called twice."""
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join()


class Timeline:
    """Sampler of a meter's power from construction until `stop`.

    `errors` holds a sentence for each sample that was refused, `busy_s` the processor time of the
    thread.
    """

    def __init__(
        self,
        meter: Meter,
        period_s: float = 0.1,
        *,
        state: Callable[[], Mapping[str, float]] | None = None,
    ) -> None:
        self.errors: list[str] = []
        self.busy_s = 0.0
        self.meter, self._state = meter, state
        self._samples: list[PowerSample] = []
        self._ticker = Ticker(self._tick, period_s=period_s, name="joulefront-timeline")

    def _tick(self) -> None:
        try:
            sample = self.meter.sample()
            if self._state is not None:
                sample = replace(sample, extra={**sample.extra, **self._state()})
            self._samples.append(sample)
        except MeterError as error:
            self.errors.append(str(error))
        except Exception as error:  # of a vendor's library: the next sample may be right
            self.errors.append(f"{type(error).__name__}: {error}")
        self.busy_s = time.thread_time()

    @property
    def samples(self) -> tuple[PowerSample, ...]:
        """Samples taken so far."""
        return tuple(self._samples)

    @property
    def lost(self) -> int:
        """Samples missing from the grid: not taken in time, or refused by the meter."""
        return self._ticker.lost + len(self.errors)

    def stop(self) -> tuple[PowerSample, ...]:
        """End the sampling and return every sample. May be called twice."""
        self._ticker.stop()
        return self.samples
