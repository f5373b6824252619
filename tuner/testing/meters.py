"""Contract tests of a meter: a test class that a user's meter inherits.

    from tuner.testing.meters import MeterContract

    class TestPdu(MeterContract):
        def open_meter(self):
            return Pdu()

The meter is opened through the same checks as in a search. The source must be reachable and the
node may do anything meanwhile; a test takes a few updates of the counter.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tuner.workload.node.meters.base import Meter, MeterError, Timeline
from tuner.workload.node.meters.user_meter import CheckedMeter
from tuner.workload.records.probe import MeterInfo


class MeterContract:
    """Tests that every meter of a user's own passes.

    Attributes:
        most_W: power that the scope never exceeds; a unit that is wrong by a factor exceeds it.
    """

    most_W = 1e6

    def open_meter(self) -> Any:
        """Return a new meter."""
        raise NotImplementedError("define open_meter")

    @pytest.fixture
    def meter(self) -> Iterator[Meter]:
        """Return the meter, checked as in a search."""
        made = CheckedMeter(type(self).__name__, self.open_meter)
        yield made
        made.close()

    def _updates(self, meter: Meter, count: float = 3) -> None:
        time.sleep(min(30.0, max(0.05, count * meter.resolution_s)))

    def test_it_states_its_source_and_scope(self, meter: Meter) -> None:
        """The report shows them, and records of different meters are told apart by them."""
        assert isinstance(meter, Meter)
        assert isinstance(meter.info, MeterInfo)
        assert meter.info.scope in ("gpu", "module", "node")
        assert len(meter.info.source) > 10
        assert len(meter.info.host) > 10, "host must say what of the node is charged"
        assert meter.resolution_s > 0

    def test_energy_grows_by_a_plausible_power(self, meter: Meter) -> None:
        """Joules, neither watt-hours nor a power, and the sum over all devices."""
        first = meter.read()
        self._updates(meter)
        second = meter.read()
        assert second.time_s > first.time_s
        spent_J = second.energy_J - first.energy_J
        assert 0 < spent_J <= self.most_W * (second.time_s - first.time_s + meter.resolution_s)

    def test_readings_never_decrease(self, meter: Meter) -> None:
        """Across the counter's updates."""
        readings = []
        for _ in range(10):
            readings.append(meter.read())
            self._updates(meter, 0.4)
        assert [each.energy_J for each in readings] == sorted(each.energy_J for each in readings)

    def test_boundaries_enclose_the_energy_between_them(self, meter: Meter) -> None:
        """A window's energy is not negative and lies within what plain readings tell."""
        outer = [meter.read()]
        inner = [meter.boundary(opens=True)]
        self._updates(meter)
        inner.append(meter.boundary(opens=False))
        outer.append(meter.read())
        assert inner[1].time_s > inner[0].time_s
        assert inner[1].energy_J - inner[0].energy_J >= 0
        slack_J = self.most_W * meter.resolution_s
        assert inner[1].energy_J - inner[0].energy_J <= (
            outer[1].energy_J - outer[0].energy_J + slack_J
        )

    def test_power_is_plausible_and_agrees_with_the_counter(self, meter: Meter) -> None:
        """Power is in watts; it draws the timeline and checks the counter."""
        self._updates(meter)
        powers = []
        for _ in range(3):
            powers.append(meter.sample().power_W)
            self._updates(meter, 1)
        assert all(0 <= power <= self.most_W for power in powers)

    def test_two_threads_may_read(self, meter: Meter) -> None:
        """The timeline samples while windows are read."""
        timeline = Timeline(meter, period_s=0.01)
        for _ in range(5):
            meter.read()
            threading.Event().wait(0.02)
        until_s = time.monotonic() + 60.0  # of a busy machine
        while not (timeline.samples or timeline.errors) and time.monotonic() < until_s:
            time.sleep(0.02)
        timeline.stop()
        assert not timeline.errors
        assert timeline.samples

    def test_it_opens_again_and_closes_twice(self, meter: Meter) -> None:
        """A study opens its meter once for a look at the node and once for its probes."""
        meter.close()
        meter.close()
        again = CheckedMeter(type(self).__name__, self.open_meter)
        again.read()
        again.close()

    def test_closed_it_does_not_read(self) -> None:
        """A closed meter raises MeterError and never returns an old figure."""
        made: Callable[[], Any] = self.open_meter
        meter = made()
        meter.close()
        with pytest.raises(MeterError):
            meter.read()
