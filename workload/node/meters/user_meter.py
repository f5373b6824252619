"""A meter of the user's own: a class that is named on the command line and checked on every call.

`--meter MODULE:CLASS`, or the name of an entry point, replaces the meters of a node's platform
(`tuner.workload.node.meters.base.own_meter`). A class is called without arguments and follows the
protocol `Meter`.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from numbers import Real
from typing import Any, TypeVar

from tuner.search_spaces.errors import InputError
from tuner.workload.node.meters.base import SOCKET, TAKEN, MeterError, Reading
from tuner.workload.records.probe import ENERGY_SCOPES, MeterInfo, PowerSample

#: Seconds in which a call of a meter must return.
CALL_LIMIT_S = 20.0
#: Seconds by which the time of a reading may lie before its call: the counter's last update.
OLDEST_S = 120.0
#: Parts of the protocol that must be callable.
_CALLS = ("read", "boundary", "sample", "close")

Returned = TypeVar("Returned")


def meter_class(name: str, folder: str | None = None) -> type:
    """Return the class that is named MODULE:CLASS or by an entry point; InputError if none is.

    Args:
        folder: where modules are found besides the installed ones; None is the current folder.
    """
    module, colon, attribute = name.partition(":")
    if not colon:
        found = {each.name: each.value for each in entry_points(group=SOCKET.group)}
        if name not in found:
            choices = f"; entry points of {SOCKET.group} here: {', '.join(sorted(found)) or 'none'}"
            raise InputError(
                f"meter is {name!r}; it must be MODULE:CLASS or an entry point{choices}"
            )
        module, _, attribute = found[name].partition(":")
    try:
        with _importable_from(folder or os.getcwd()):
            made = getattr(importlib.import_module(module), attribute, None)
    except Exception as error:
        raise InputError(
            f"meter {name!r}: module {module!r} cannot be imported: {_described(error)}"
        ) from error
    if not isinstance(made, type):
        raise InputError(f"meter {name!r}: module {module!r} has no class {attribute!r}")
    if lacks := [call for call in _CALLS if not callable(getattr(made, call, None))]:
        raise InputError(
            f"meter {name!r}: the class has no {', '.join(lacks)}; a meter has info, resolution_s, "
            f"{', '.join(_CALLS)} (docs/your-meter.md)"
        )
    return made


@contextlib.contextmanager
def _importable_from(folder: str) -> Iterator[None]:
    # The command `tuner` has its own folder on the path instead of the current one.
    sys.path.append(folder)
    try:
        yield
    finally:
        sys.path.remove(folder)


def opened(name: str, folder: str | None) -> CheckedMeter:
    """Open the meter of this name, which is found below a folder; MeterError if it is none."""
    try:
        made = meter_class(name, folder)
    except InputError as error:
        raise MeterError(str(error)) from error
    return CheckedMeter(name, made)


def _described(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


class CheckedMeter:
    """A user's meter whose answers are checked; each fault is a MeterError that names the class."""

    def __init__(
        self,
        name: str,
        made: Callable[[], Any],
        *,
        limit_s: float = CALL_LIMIT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name, self._limit_s, self._clock = name, limit_s, clock
        self._lock = threading.Lock()
        self._last: Reading | None = None
        self._closed = False
        self._meter = self._call("opening", made)
        try:
            self.info = self._checked_info()
            self.resolution_s = self._number("resolution_s", self._meter.resolution_s)
            if self.resolution_s < 0:
                raise self._error(f"resolution_s is {self.resolution_s:g}, less than 0")
        except AttributeError as error:
            self.close()
            raise self._error(f"it lacks a part of the protocol: {error}") from error
        except MeterError:
            self.close()
            raise

    def _error(self, method: str) -> MeterError:
        return MeterError(f"meter {self._name}: {method}")

    def _checked_info(self) -> MeterInfo:
        info = self._meter.info
        if not isinstance(info, MeterInfo):
            raise self._error(f"info is a {type(info).__name__}; it must be a MeterInfo")
        if info.scope not in ENERGY_SCOPES:
            raise self._error(f"scope is {info.scope!r}; it must be gpu, module or node")
        if not isinstance(info.name, str) or not info.name.strip() or info.name in TAKEN:
            raise self._error(
                f"its name is {info.name!r}; it must be a text other than {', '.join(TAKEN)}"
            )
        return info

    def _number(self, method: str, value: Any) -> float:
        if not isinstance(value, Real) or isinstance(value, bool):
            hint = ": the sum over all devices" if hasattr(value, "__len__") else ""
            raise self._error(
                f"{method} is of type {type(value).__name__}; it must be one number{hint}"
            )
        if not math.isfinite(value):
            raise self._error(f"{method} is {value}; it must be a finite number")
        return float(value)

    def _call(self, method: str, call: Callable[[], Returned]) -> Returned:
        # In a thread of its own, which is left behind if it never returns.
        results: list[Returned] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                results.append(call())
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=run, name="joulefront-own-meter", daemon=True)
        thread.start()
        thread.join(self._limit_s)
        if errors:
            raise self._error(f"{method} failed with {_described(errors[0])}") from errors[0]
        if not results:
            raise self._error(f"{method} did not return within {self._limit_s:g} s")
        return results[0]

    def _reading(self, method: str, call: Callable[[], Any]) -> Reading:
        if self._closed:
            raise self._error("it is closed")
        began_s = self._clock()
        given = self._call(method, call)
        if not isinstance(given, Reading):
            raise self._error(f"{method} returned a {type(given).__name__} instead of a Reading")
        time_s = self._time(method, given.time_s, began_s)
        energy_J = self._number(f"energy_J of {method}", given.energy_J)
        reading = Reading(time_s, energy_J)
        with self._lock:
            last = self._last
            if last is None or time_s >= last.time_s:
                self._last = reading
        if last is not None and time_s >= last.time_s and energy_J < last.energy_J:
            raise self._error(
                f"its energy went backwards, from {last.energy_J:.10g} J to {energy_J:.10g} J"
            )
        return reading

    def _time(self, method: str, value: Any, began_s: float) -> float:
        time_s = self._number(f"time_s of {method}", value)
        if not began_s - OLDEST_S <= time_s <= self._clock() + 1.0:
            raise self._error(
                f"time_s of {method} is {time_s:.10g} while time.monotonic() is "
                f"{self._clock():.10g}; it must be of that clock"
            )
        return time_s

    def read(self) -> Reading:
        """Return the counter now."""
        return self._reading("read", self._meter.read)

    def boundary(self, *, opens: bool) -> Reading:
        """Return a reading for a window's edge."""
        return self._reading("boundary", lambda: self._meter.boundary(opens=opens))

    def sample(self) -> PowerSample:
        if self._closed:
            raise self._error("it is closed")
        began_s = self._clock()
        given = self._call("sample", self._meter.sample)
        if not isinstance(given, PowerSample):
            raise self._error(f"sample returned a {type(given).__name__} instead of a PowerSample")
        self._time("sample", given.time_s, began_s)
        if self._number("power_W of sample", given.power_W) < 0:
            raise self._error(f"power_W of sample is {given.power_W:g}, less than 0")
        return given

    def close(self) -> None:
        """Release the source; an error of the user's code in it is of no consequence."""
        if not self._closed:
            self._closed = True
            with contextlib.suppress(MeterError):
                self._call("close", self._meter.close)
