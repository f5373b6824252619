"""Phase marks: how they become seconds a step, and how the hook takes them without waiting."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from tuner.workload.hook import link
from tuner.workload.measure.phases import seconds_a_step, within

# Two steps of 1 s, opened in the wait at a boundary and closed in the next.
MARKS = [
    (9.0, "optimizer"),
    (9.5, "boundary"),
    (10.2, "forward"),
    (10.5, "backward"),
    (11.0, "optimizer"),
    (11.2, "forward"),
    (11.5, "backward"),
    (12.0, "optimizer"),
    (12.2, "boundary"),
    (13.0, "forward"),
]


def test_seconds_a_step_leave_out_the_waits() -> None:
    found = seconds_a_step(MARKS, 10.0, 12.4, 2)
    assert found == {
        "backward": pytest.approx(0.5),
        "forward": pytest.approx(0.3),
        "optimizer": pytest.approx(0.2),
    }
    assert list(found) == ["backward", "forward", "optimizer"]


def test_marks_of_a_window_begin_with_what_stood_as_it_opened() -> None:
    assert within(MARKS, 10.0, 10.5) == ((10.0, "boundary"), (10.2, "forward"), (10.5, "backward"))
    assert within(MARKS, 10.3, 10.4) == ((10.3, "forward"),)
    assert within(MARKS, 1.0, 2.0) == ()
    assert within(list(reversed(MARKS)), 10.0, 10.5) == within(MARKS, 10.0, 10.5)


def test_a_program_that_marks_nothing_has_no_phases() -> None:
    assert seconds_a_step([], 0.0, 1.0, 3) == {}


class FakeCuda:
    """A device that runs behind its host: an event is reached when the device has come so far."""

    def __init__(self) -> None:
        self.device_s = 0.0  # the device's own clock, whose zero is nobody's
        self.queued_s = 0.0  # where the work that the host has queued will end
        self.syncs = 0
        outer = self

        class Event:
            def __init__(self, *, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at_s = outer.queued_s

            def query(self) -> bool:
                return outer.device_s >= self.at_s

            def synchronize(self) -> None:
                outer.syncs += 1
                outer.device_s = max(outer.device_s, self.at_s)

            def elapsed_time(self, later: Any) -> float:
                assert later.query()
                return 1000 * (later.at_s - self.at_s)

        self.Event = Event

    def is_available(self) -> bool:
        return True

    is_initialized = is_available


def times(lines: str) -> list[tuple[str, float]]:
    return [(line.split()[1], float(line.split()[2])) for line in lines.splitlines()]


def test_on_cuda_a_mark_is_when_the_device_came_there(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda()
    now_s = 500.0
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(link.time, "monotonic", lambda: now_s)
    marks = link.Marks()
    # The first boundary: the device is idle at 500 s, which is 0 s of its own.
    assert times(marks.all_lines(500.0)) == [("boundary", 500.0)]
    # The host queues two phases of 2 s within no time, and the device has done 1 s of it.
    marks.add("forward")
    cuda.queued_s = 2.0
    marks.add("backward")
    cuda.queued_s = 4.0
    cuda.device_s = 1.0
    syncs = cuda.syncs
    assert times(marks.lines()) == [("forward", 500.0)]
    assert cuda.syncs == syncs  # nothing waited for the device
    # The step's end is a boundary: the hook has waited, and the host's clock says 504.
    cuda.device_s, now_s = 4.0, 504.0
    assert times(marks.all_lines(504.0)) == [("backward", 502.0), ("boundary", 504.0)]
    # Clocks drift apart; each boundary sets them anew.
    cuda.queued_s = cuda.device_s = 7.0
    now_s = 508.0
    marks.all_lines(508.0)
    marks.add("forward")
    cuda.queued_s = cuda.device_s = 9.0
    now_s = 510.0
    assert times(marks.all_lines(510.0)) == [("forward", 508.0), ("boundary", 510.0)]


def test_on_a_cpu_a_mark_is_the_hosts_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(link.time, "monotonic", lambda: 3.0)
    marks = link.Marks()
    marks.add("forward.encoder")
    assert times(marks.lines()) == [("forward.encoder", 3.0)]
    assert marks.lines() == ""
