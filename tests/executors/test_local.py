import time
from itertools import chain, cycle, repeat

import pytest

from tests.support.fake_clock import FakeClock
from tests.support.studies import METER, record, request
from tuner.executors.base import Executor
from tuner.executors.local import InlineExecutor, run_safely
from tuner.executors.simulated_time import SimulatedExecutor
from tuner.search_spaces.errors import InputError
from tuner.workload.node.measure.stragglers import ForeignLoad
from tuner.workload.records.probe import ProbeRecord


class Scripted:
    """Answers each probe with the seconds its name is given, or raises."""

    meter = METER

    def __init__(self, **seconds):
        self.seconds = seconds
        self.closed = 0

    def run(self, asked) -> ProbeRecord:
        answer = self.seconds[asked.probe_id]
        if isinstance(answer, BaseException):
            raise answer
        return record(asked.probe_id, request=asked, wall_s=answer)

    def close(self):
        self.closed += 1


@pytest.fixture(params=[InlineExecutor, SimulatedExecutor])
def executor(request):
    return request.param(Scripted(a=5.0, b=2.0, c=ValueError("odd"), d=InputError("no such knob")))


# The contract of every executor.


def test_it_is_an_executor_and_tells_its_meter_before_the_first_probe(executor):
    assert isinstance(executor, Executor)
    assert executor.meter == METER
    assert executor.capacity == 1
    assert executor.in_flight == 0
    assert executor.wait(timeout_s=0.0) is None


def test_what_is_submitted_comes_back_once(executor):
    before = executor.now_s()
    executor.submit(request("a"))
    assert executor.in_flight == 1
    assert executor.wait().request.probe_id == "a"
    assert executor.in_flight == 0
    assert executor.wait() is None
    assert executor.now_s() >= before


@pytest.mark.parametrize(
    ("name", "kind", "told"), [("c", "crash", "odd"), ("d", "refused", "knob")]
)
def test_whatever_a_runner_raises_becomes_that_probes_failure(executor, name, kind, told):
    executor.submit(request(name))
    failed = executor.wait()
    assert failed.failure.kind == kind
    assert told in failed.failure.message
    assert failed.meter == METER
    executor.submit(request("a"))
    assert executor.wait().ok


def test_closing_drops_what_is_in_flight_and_closes_the_runner(executor):
    executor.submit(request("a"))
    executor.close()
    assert executor.in_flight == 0
    executor.close()
    assert executor._runner.closed >= 1


# Simulated time.


def test_probes_end_in_the_order_of_their_simulated_ends():
    executor = SimulatedExecutor(Scripted(a=5.0, b=2.0, c=2.0, d=1.0), capacity=3)
    for name in "abc":
        executor.submit(request(name))
    assert executor.wait().request.probe_id == "b"  # before c, which ends at the same instant
    assert executor.now_s() == 2.0
    executor.submit(request("d"))  # starts at 2, ends at 3
    ends = [(executor.wait().request.probe_id, executor.now_s()) for _ in range(3)]
    assert ends == [("c", 2.0), ("d", 3.0), ("a", 5.0)]


def test_waiting_with_a_limit_advances_the_clock_by_it():
    executor = SimulatedExecutor(Scripted(a=5.0))
    executor.submit(request("a"))
    assert executor.wait(timeout_s=3.0) is None
    assert executor.now_s() == 3.0
    assert executor.wait(timeout_s=3.0).request.probe_id == "a"
    assert executor.now_s() == 5.0


@pytest.mark.parametrize("capacity", [0, -1])
def test_a_capacity_below_one_is_refused(capacity):
    with pytest.raises(InputError, match="at least 1"):
        SimulatedExecutor(Scripted(), capacity=capacity)


def test_an_interrupt_is_no_failure_of_the_probe():
    with pytest.raises(KeyboardInterrupt):
        run_safely(Scripted(a=KeyboardInterrupt()), request("a"))
    executor = InlineExecutor(Scripted(a=KeyboardInterrupt()))
    executor.submit(request("a"))
    with pytest.raises(KeyboardInterrupt):
        executor.wait()
    assert executor.in_flight == 0


# --wait-until-quiet.

QUIET, BUSY, GPU = (
    ForeignLoad(),
    ForeignLoad(share=0.63),
    ForeignLoad(device="GPU 0 is used by process 7"),
)


class Watched(Scripted):
    """A runner on a machine that others use as the looks say, one after the other."""

    def __init__(self, looks, monkeypatch):
        super().__init__()
        self.looks, self.clock = iter(looks), FakeClock()
        monkeypatch.setattr(time, "monotonic", self.clock)

    def foreign_load(self, seconds):
        self.clock.advance(seconds)
        return next(self.looks)


@pytest.mark.parametrize(
    ("looks", "waited_s"),
    [
        ([QUIET], 1),
        ([BUSY, *[QUIET] * 5], 6),
        ([GPU, *[QUIET] * 5], 6),
        # A load that comes and goes is one.
        ([BUSY, *[QUIET] * 4, BUSY, *[QUIET] * 5], 11),
    ],
)
def test_a_launch_waits_until_others_leave_the_machine(looks, waited_s, monkeypatch):
    told: list[str] = []
    executor = InlineExecutor(Watched(looks, monkeypatch))
    assert executor.wait_until_quiet(1800.0, told.append, lambda: False) == waited_s
    assert next(executor._runner.looks, None) is None
    assert bool(told) == (waited_s > 1)


def test_waiting_ends_by_its_limit_and_says_what_still_uses_the_machine(monkeypatch):
    told: list[str] = []
    executor = InlineExecutor(Watched(repeat(BUSY), monkeypatch))
    assert executor.wait_until_quiet(150.0, told.append, lambda: False) == 150.0
    waiting = "waiting until this machine is quiet: other processes use 63 % of the cores"
    assert [words.startswith(waiting) for words in told] == [True, True, True, False]
    assert told[-1].endswith("measured all the same")


@pytest.mark.parametrize(
    ("load", "said"),
    [
        (BUSY, "other processes use 63 % of the cores after 50 s: measured all the same"),
        (GPU, "GPU 0 is used by process 7 after 50 s: measured all the same"),
    ],
)
def test_what_comes_and_goes_until_the_limit_is_named(load, said, monkeypatch):
    told: list[str] = []
    executor = InlineExecutor(Watched(cycle([load, QUIET]), monkeypatch))
    assert executor.wait_until_quiet(50.0, told.append, lambda: False) == 50.0
    assert told[-1] == said


def test_waiting_ends_when_the_search_is_stopped(monkeypatch):
    executor = InlineExecutor(Watched(chain([BUSY], repeat(GPU)), monkeypatch))
    stops = chain([False] * 9, repeat(True))
    assert executor.wait_until_quiet(1800.0, lambda words: None, lambda: next(stops)) == 10.0


def test_a_runner_that_cannot_look_is_not_waited_for():
    assert InlineExecutor(Scripted()).wait_until_quiet(9.0, print, lambda: False) == 0.0
