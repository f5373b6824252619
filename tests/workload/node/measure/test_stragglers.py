"""Attribution of lost time to ranks: arrivals that are made up, and processes that are real."""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.studies import METER, measured
from tuner.answer.posterior import LaunchPosterior, Windows
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.workload.node.host import CpuContention, busy_ticks
from tuner.workload.node.measure.stragglers import (
    Arrivals,
    ForeignLoad,
    HostWatch,
    RankState,
    cause_of,
    late_ranks,
    sentence,
    stragglers,
)
from tuner.workload.records.probe import Measurement, ProbeRecord, ProbeRequest

Late = Callable[[int, int], float]


def arrivals(late: Late, *, ranks: int = 4, steps: int = 200, seed: int = 0) -> Arrivals:
    """Steps of 0.2 s with 2 % of noise; `late` tells what a rank takes more in a step, seconds."""
    draw, found, now_s = random.Random(seed), Arrivals(), 0.0
    for step in range(steps):
        arrived = [now_s + 0.2 * draw.gauss(1, 0.02) + late(rank, step) for rank in range(ranks)]
        for rank, at_s in enumerate(arrived):
            found.add(rank, step, at_s)
        now_s = max(arrived) + 0.01
    return found


@pytest.mark.parametrize("ranks", [2, 4, 16])
@pytest.mark.parametrize("share", [0.05, 0.1, 0.5])
def test_a_slow_rank_is_named_with_its_cost(ranks: int, share: float) -> None:
    found = arrivals(lambda rank, step: 0.2 * share * (rank == 1), ranks=ranks)
    (named,) = stragglers(found, {})
    assert named.state.rank == 1
    assert named.behind == pytest.approx(share / (1.05 + share), abs=0.015)
    assert named.cost <= named.behind


@pytest.mark.parametrize("ranks", [2, 3, 4, 16])
@pytest.mark.parametrize("seed", range(5))
def test_noise_names_nobody(ranks: int, seed: int) -> None:
    assert not late_ranks(arrivals(lambda rank, step: 0.0, ranks=ranks, seed=seed))


@pytest.mark.parametrize(
    "late",
    [
        pytest.param(lambda rank, step: 0.5 * (step % 7 == 0), id="a data stall of all ranks"),
        pytest.param(lambda rank, step: 3.0 * (rank == 0 and step % 50 == 0), id="evaluation"),
        pytest.param(lambda rank, step: 0.06 * (rank == 2 and step < 20), id="only at first"),
        pytest.param(lambda rank, step: 0.05 * (step % 4 == rank), id="each in its turn"),
        pytest.param(lambda rank, step: 0.002 * (rank == 3), id="one percent"),
    ],
)
def test_what_is_no_straggler(late: Late) -> None:
    assert not late_ranks(arrivals(late))


def test_a_quota_that_holds_back_now_and_then_is_seen() -> None:
    assert set(late_ranks(arrivals(lambda rank, step: 0.1 * (rank == 3 and step % 3 == 0)))) == {3}


def test_two_of_four_are_both_named_and_of_all_none() -> None:
    assert set(late_ranks(arrivals(lambda rank, step: 0.04 * (rank > 2 or rank == 1)))) == {1, 3}
    assert not late_ranks(arrivals(lambda rank, step: 0.03))


def test_few_blocks_lost_marks_and_a_single_rank_name_nobody() -> None:
    slow: Late = lambda rank, step: 0.1 * (rank == 1)  # noqa: E731
    assert not late_ranks(arrivals(slow, steps=30))
    assert not late_ranks(arrivals(slow, ranks=1))
    found = Arrivals()
    for step in range(0, 400, 2):  # of every other step nothing is known
        for rank in range(2):
            found.add(rank, step, 0.2 * step + 0.1 * rank)
    assert not late_ranks(found)


USUAL = [
    RankState(n, device=n, clock_MHz=1755, nice=0, busy=0.9, waiting=0.01, held=0.0)
    for n in range(3)
]


@pytest.mark.parametrize(
    ("more", "cause", "said"),
    [
        (
            {"clock_MHz": 1305, "throttled": {"hw": 1.0, "thermal": 1.0}},
            "hardware",
            "GPU 5 of node b: power brake or hardware slowdown, 1,305 MHz where the others run "
            "1,755; costs 9 % of the step",
        ),
        ({"clock_MHz": 1500, "throttled": {"thermal": 0.6}}, "heat", "heat, 1,500 MHz"),
        ({"clock_MHz": 1500}, "clock", "without a reason"),
        # A reason that holds nothing back is none.
        ({"clock_MHz": 1755, "throttled": {"power": 1.0}}, "unknown", "neither"),
        ({"faults": {"remapped rows": 2}}, "memory", "2 memory errors where the others had 0"),
        ({"held": 0.31}, "quota", "held its threads back 0.31 s in each second (other ranks: 0 s)"),
        ({"nice": 10, "waiting": 0.2}, "priority", "nice 10 where the others have 0"),
        # A lower priority that waits for no core is none.
        ({"nice": 10}, "unknown", "neither"),
        ({"waiting": 1.7}, "cores", "waited 1.7 s for a core in each second (other ranks: 0.01 s)"),
        ({"busy": 0.5}, "idle", "computed 0.5 s in each second (other ranks: 0.9 s)"),
    ],
)
def test_the_cause_is_what_sets_it_apart(more: dict[str, object], cause: str, said: str) -> None:
    usual = {"clock_MHz": 1755, "nice": 0, "busy": 0.9, "waiting": 0.01, "held": 0.0}
    state = RankState(3, "b", 5, **{**usual, **more})
    assert cause_of(state, USUAL)[0] == cause
    found = arrivals(lambda rank, step: 0.0243 * (rank == 3))
    (named,) = stragglers(found, {**dict(enumerate(USUAL)), 3: state})
    assert said in sentence(named)


@pytest.mark.parametrize(
    ("waiting", "others", "nice", "cause"),
    [
        pytest.param(1.73, [1.67, 1.60, 1.71], 0, "unknown", id="all wait on a busy machine"),
        pytest.param(1.73, [1.67, 1.60, 1.71], 10, "unknown", id="all wait, one is niced"),
        pytest.param(0.015, [0.0, 0.0, 0.001], 0, "unknown", id="hardly a wait"),
        pytest.param(6.4, [0.1, 0.2, 0.1], 0, "cores", id="one rank with many threads"),
        pytest.param(0.9, [0.02, 0.9, 0.03], 0, "cores", id="pinned to a core that is shared"),
        pytest.param(2.4, [1.67, 1.60, 1.71], 10, "priority", id="niced on a busy machine"),
    ],
)
def test_a_wait_for_a_core_is_a_cause_if_the_others_wait_less(
    waiting: float, others: list[float], nice: int, cause: str
) -> None:
    state = RankState(3, nice=nice, waiting=waiting)
    rest = [RankState(n, nice=0, waiting=each) for n, each in enumerate(others)]
    assert cause_of(state, rest)[0] == cause


def test_a_limit_that_all_devices_share_sets_none_apart() -> None:
    throttled = {"power": 1.0}
    others = [RankState(n, clock_MHz=1400, throttled=throttled) for n in range(3)]
    state = RankState(3, clock_MHz=1395, throttled=throttled)
    assert cause_of(state, others)[0] == "unknown"


def test_the_host_tells_of_a_process(tmp_path: Path) -> None:
    proc, group = tmp_path / "proc", tmp_path / "cgroup" / "cpu" / "a"
    task = proc / "7" / "task" / "7"
    task.mkdir(parents=True)
    group.mkdir(parents=True)
    (proc / "7" / "cgroup").write_text("3:cpu:/a\n0::/\n")
    watch = HostWatch(proc=proc, cgroup=tmp_path / "cgroup")
    for busy, waited_ns, held_ns in ((0, 0, 0), (10**9, 10**15, 10**15)):
        fields = ["S", *["0"] * 10, str(busy), "0", "0", "0", "20", "5", *["0"] * 10]
        (proc / "7" / "stat").write_text(f"7 (a ) b) {' '.join(fields)}")
        (task / "schedstat").write_text(f"1 {waited_ns} 3")
        (group / "cpu.stat").write_text(f"nr_periods 4\nthrottled_time {held_ns}\n")
        watch.read({0: 7, 1: 8})
    state = watch.state(RankState(0))
    assert state.nice == 5
    assert min(state.busy or 0, state.waiting or 0, state.held or 0) > 1
    assert watch.state(RankState(1)) == RankState(1)  # its process is gone


def test_this_process_is_seen_to_compute() -> None:
    watch = HostWatch()
    watch.read({0: os.getpid()})
    sum(number * number for number in range(3_000_000))
    watch.read({0: os.getpid()})
    state = watch.state(RankState(0))
    # On a loaded machine it waits for a core most of the time.
    assert state.busy
    assert state.waiting is not None
    assert state.busy + state.waiting > 0.5


QUIET, BUSY, HALF = ForeignLoad(), ForeignLoad(0.88), ForeignLoad(0.35)
ON_DEVICE = ForeignLoad(0.0, "at the end of the window, GPU 0 is used by process 4242")


def window(time_s: float = 1.0, load: ForeignLoad = QUIET) -> Measurement:
    return load.widened(measured(Settings(), time_s=time_s, power_W=100.0))


@pytest.mark.parametrize("load", [QUIET, ForeignLoad(0.09)])
def test_a_window_on_a_quiet_node_is_as_it_was(load: ForeignLoad) -> None:
    assert window(load=load) == replace(window(), foreign_share=load.share)
    assert load.notes == ()


@pytest.mark.parametrize("load", [HALF, BUSY, ON_DEVICE, replace(BUSY, device="a GPU is used")])
def test_a_disturbed_window_states_less(load: ForeignLoad) -> None:
    found = window(load=load)
    assert found.step_time_rse > 0.4
    assert found.power_rse > 0.4
    assert found.step_time_s == window().step_time_s  # what was measured stays
    assert len(load.notes) == bool(load.device) + (load.share > 0.1)


def test_an_unknown_error_becomes_a_known_one() -> None:
    unknown = replace(measured(Settings(), time_s=1.0, power_W=100.0), step_time_se_s=math.nan)
    assert math.isfinite(HALF.widened(unknown).step_time_rse)
    assert math.isfinite(ForeignLoad(1.0).error)  # all of the cores


def sure(loads: tuple[ForeignLoad, ForeignLoad]) -> float:
    """Return how sure it is that a configuration with a quarter of the step time is faster."""
    records = [
        ProbeRecord(
            ProbeRequest(f"p{number}", Configuration.of(micro_batch=number + 1).launch),
            (window(time_s, load),),
            METER,
        )
        for number, (time_s, load) in enumerate(zip((1.0, 0.25), loads, strict=True))
    ]
    today, faster = (record.request.configurations()[0] for record in records)
    posterior = LaunchPosterior.of(Windows.of(records))
    return posterior.saving(faster, today, energy=0.0, time=1.0).above(0.0)


def test_nothing_is_sure_of_windows_that_were_disturbed_differently() -> None:
    assert sure((QUIET, QUIET)) > 0.95
    assert sure((BUSY, HALF)) < 0.9
    assert sure((BUSY, QUIET)) < 0.9
    assert sure((QUIET, ON_DEVICE)) < sure((QUIET, QUIET))


STAT = "cpu  9 0 9 9 0 0 0\ncpu0 {0} 0 0 0 0 0 0 0 0 0\ncpu1 {1} 0 0 0 0 0 0 0 0 0\nintr 1\n"
TICK = os.sysconf("SC_CLK_TCK")


def write(folder: Path, cpu0: int, cpu1: int, own: int) -> None:
    (folder / "stat").write_text(STAT.format(cpu0, cpu1))
    (folder / "77").mkdir(exist_ok=True)
    (folder / "77" / "stat").write_text(f"77 (a (b) c) R {' 0' * 10} {own} 0 0 0\n")


def test_only_the_wanted_cores_count(tmp_path: Path) -> None:
    write(tmp_path, 5, 7, 0)
    assert busy_ticks([1], tmp_path / "stat") == {1: 7}
    assert busy_ticks([0, 1, 9], tmp_path / "stat") == {0: 5, 1: 7}


@pytest.mark.parametrize(("others", "said"), [(0, False), (15, False), (60, True)])
def test_others_are_what_the_ranks_did_not_use(tmp_path: Path, others: int, said: bool) -> None:
    write(tmp_path, 0, 0, 0)
    watch = CpuContention([77], [0, 1], proc=tmp_path)
    write(tmp_path, TICK, others * TICK // 100, TICK)  # in one second of two cores
    share = watch.share(1.0)
    assert share == pytest.approx(others / 200, abs=0.01)
    assert (share > 0.10) == said


def test_a_process_that_ended_is_no_error(tmp_path: Path) -> None:
    write(tmp_path, 0, 0, 0)
    watch = CpuContention([77, 99], [0, 1], proc=tmp_path)
    (tmp_path / "77" / "stat").unlink()
    assert 0.0 <= watch.share(1.0) <= 1.0


def test_a_real_neighbour_is_noticed() -> None:
    core = min(os.sched_getaffinity(0))
    spin = f"import os; os.sched_setaffinity(0, [{core}]); print(flush=True)\n"
    spin += "while True: pass"
    other = subprocess.Popen([sys.executable, "-c", spin], stdout=subprocess.PIPE)
    assert other.stdout is not None
    other.stdout.readline()
    watch = CpuContention([os.getpid()], [core])
    mine = CpuContention([os.getpid(), other.pid], [core])
    time.sleep(1.0)
    with_it, without_it = mine.share(), watch.share()
    other.kill()
    other.wait()
    assert without_it > 0.2
    assert with_it < without_it
