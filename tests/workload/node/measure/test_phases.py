"""Phase marks: how they become seconds a step, and how the hook takes them without waiting."""

from __future__ import annotations

import sys
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from tuner.workload.hook import link
from tuner.workload.node.measure.statistics import seconds_a_step, within

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

            def record(self, stream: int) -> None:
                assert stream == 1, "an event on a device that holds nothing of this rank"
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

    def device_count(self) -> int:
        return 2

    def memory_reserved(self, index: int) -> int:
        return index  # the second device holds the rank's tensors

    def current_stream(self, index: int) -> int:
        return index

    def synchronize(self, index: int) -> None:
        self.syncs += 1
        self.device_s = self.queued_s


def times(lines: str) -> list[tuple[str, float]]:
    return [(line.split()[1], float(line.split()[2])) for line in lines.splitlines()]


def test_on_cuda_a_mark_is_when_the_device_came_there(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda()
    now_s = 500.0
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(link.time, "monotonic", lambda: now_s)
    marks = link.DeviceTimes()
    # The first boundary: the device is idle at 500 s, which is 0 s of its own.
    assert marks.all_lines() == ""
    # The host queues two phases of 2 s within no time, and the device has done 1 s of it.
    marks.add("phase forward")
    cuda.queued_s = 2.0
    marks.add("phase backward")
    cuda.queued_s = 4.0
    cuda.device_s = 1.0
    syncs = cuda.syncs
    assert times(marks.lines()) == [("forward", 500.0)]
    assert cuda.syncs == syncs  # nothing waited for the device
    # The step's end is a boundary: the hook has waited, and the host's clock says 504.
    cuda.device_s, now_s = 4.0, 504.0
    assert times(marks.all_lines()) == [("backward", 502.0)]
    # Clocks drift apart; each boundary sets them anew.
    cuda.queued_s = cuda.device_s = 7.0
    now_s = 508.0
    marks.all_lines()
    marks.add("phase forward")
    cuda.queued_s = cuda.device_s = 9.0
    now_s = 510.0
    assert times(marks.all_lines()) == [("forward", 508.0)]


def test_on_cuda_a_step_ends_when_the_device_has_done_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of 100 ms that the host launches in 10 ms each are steps of 100 ms."""
    cuda = FakeCuda()
    host_s = 500.0

    class Host:
        monotonic = staticmethod(lambda: host_s)

    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(link, "time", Host)
    rank = object.__new__(link.Link)
    rank.steps, rank._until, rank._times = 0, 1, link.DeviceTimes()
    rank._reports_phases = rank._phases = False
    sent: list[str] = []
    granted = iter(["run 21", "run 1000"])
    monkeypatch.setattr(rank, "send", lambda text: sent.extend(text.splitlines()))
    monkeypatch.setattr(rank, "_receive", lambda: next(granted))

    def synchronize(index: int) -> None:
        nonlocal host_s
        cuda.device_s = cuda.queued_s
        host_s = max(host_s, 500.0 + cuda.device_s)

    cuda.synchronize = synchronize  # type: ignore[method-assign]
    syncs = 0
    for step in range(1, 22):
        host_s += 0.01
        cuda.queued_s = max(cuda.queued_s, host_s - 500.0) + 0.1
        cuda.device_s = max(cuda.device_s, host_s - 500.0)
        before = cuda.syncs
        rank.step_done()
        syncs += (cuda.syncs - before) * (1 < step < 21)
    ends = [float(line.split()[2]) for line in sent]
    assert [int(line.split()[1]) for line in sent] == list(range(1, 22))
    # The first of a block may hold the host's delay after the boundary.
    assert [b - a for a, b in pairwise(ends[1:])] == pytest.approx([0.1] * 19)
    assert syncs == 0, "the hook waited for the device within a block"


def test_on_a_cpu_a_mark_is_the_hosts_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(link.time, "monotonic", lambda: 3.0)
    marks = link.DeviceTimes()
    marks.add("phase forward.encoder")
    assert times(marks.lines()) == [("forward.encoder", 3.0)]
    assert marks.lines() == ""
