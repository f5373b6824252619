"""Probes across nodes: settings cut and joined, meters added up, clocks compared, ranks relayed.

The nodes are in this process: a peer is an object whose calls are plain ones. The real ones across
Ray are in test_joining.py.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tuner.cluster.multi_node import (
    MultiNodeGovernor,
    MultiNodeMeter,
    MultiNodeProbe,
    MultiNodeTimeline,
    Nodes,
    joined_settings,
    settings_of_part,
)
from tuner.cluster.peer import SHARED, Peer, PeerLost, interface_of, merged, with_shared_states
from tuner.search_spaces.configuration import Settings
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.job import load_job
from tuner.workload.node.clocks.base import AppliedSettings, GovernorError
from tuner.workload.node.meters import Reading
from tuner.workload.node.platforms import detect_cluster
from tuner.workload.records.probe import MeterInfo, PowerSample, ProbeRequest, WindowPolicy

CLOCKS = (1200, 1300, 1400, 1500)


class FarNode:
    """A peer whose clock is ahead and whose meter is a straight line."""

    def __init__(self, *, ahead_s: float = 0.0, power_W: float = 100.0, delay_s: float = 0.0):
        self.ahead_s, self.power_W, self.delay_s = ahead_s, power_W, delay_s
        self.set: list[Settings] = []
        self.restored = 0
        self.refuses = self.lost = False

    def clock_s(self) -> float:
        return time.monotonic() + self.ahead_s

    def read(self) -> Reading:
        self.read_s = self.clock_s()
        return Reading(self.read_s, self.power_W * self.read_s)

    def boundary(self, *, opens: bool) -> tuple[Reading, float]:
        called = self.read()
        time.sleep(self.delay_s)
        return (self.read() if opens else called), self.power_W

    def sample(self) -> PowerSample:
        return PowerSample(self.clock_s(), self.power_W, {"clock_MHz": 1400.0})

    def apply(self, live: Settings, ranks: int) -> AppliedSettings:
        if self.lost:
            raise PeerLost("node far is gone")
        if self.refuses:
            raise GovernorError("GPU 0 refuses 1300 MHz")
        self.set.append(live)
        return AppliedSettings(live)

    def foreign(self) -> tuple[str, ...]:
        return ()

    def restore(self) -> None:
        self.restored += 1


class NearMeter:
    info = MeterInfo("line", "gpu", "a straight line")
    resolution_s = 0.1

    def __init__(self, power_W: float) -> None:
        self.power_W = power_W

    def read(self) -> Reading:
        self.read_s = time.monotonic()
        return Reading(self.read_s, self.power_W * self.read_s)

    def boundary(self, *, opens: bool) -> Reading:
        return self.read()

    def sample(self) -> PowerSample:
        return PowerSample(time.monotonic(), self.power_W, {"clock_MHz": 1000.0})

    def close(self) -> None:
        pass


class NearGovernor:
    can_set, why_not, supported_clocks_MHz, limit_range_W = True, "", CLOCKS, (0.0, 0.0)

    def __init__(self) -> None:
        self.set: list[Settings] = []
        self.restored = 0

    def apply(self, live: Settings, *, ranks: int | None = None) -> AppliedSettings:
        self.set.append(live)
        return AppliedSettings(live)

    def foreign(self) -> tuple[str, ...]:
        return ()

    def restore(self) -> None:
        self.restored += 1


def nodes(*peers: Any) -> Nodes:
    return Nodes(peers)


# ---- settings


@pytest.mark.parametrize(
    ("value", "parts", "expected"),
    [
        (1200, 2, [1200, 1200]),
        ((1200, 1300), 2, [1200, 1300]),
        (CLOCKS, 2, [(1200, 1300), (1400, 1500)]),
        ((1200, 1300), 4, [1200, 1200, 1300, 1300]),
        ((1200, 1200, 1300), 3, [1200, 1200, 1300]),
        ((1200, 1300, 1400), 2, [(1200, 1200, 1300), (1300, 1400, 1400)]),
    ],
)
def test_each_node_is_told_the_stages_it_holds(value: Any, parts: int, expected: list[Any]) -> None:
    live = Settings(clock_MHz=value, power_limit_W=300)
    told = [settings_of_part(live, part, parts) for part in range(parts)]
    assert [part["clock_MHz"] for part in told] == expected
    assert all(part["power_limit_W"] == 300 for part in told)
    assert joined_settings(live, told) == live


def test_what_nodes_snapped_to_is_what_was_set() -> None:
    live = Settings(clock_MHz=(1201, 1303))
    done = [Settings(clock_MHz=1200), Settings(clock_MHz=1305)]
    assert joined_settings(live, done) == Settings(clock_MHz=(1200, 1305))


def test_one_node_that_refuses_puts_every_node_back() -> None:
    near, good, bad = NearGovernor(), FarNode(), FarNode()
    bad.refuses = True
    governor = MultiNodeGovernor(near, nodes(good, bad), 8)
    with pytest.raises(GovernorError, match="refuses 1300"):
        governor.apply(Settings(clock_MHz=1300))
    assert (near.restored, good.restored, bad.restored) == (1, 1, 1)


def test_a_node_that_is_gone_while_clocks_are_set_is_the_governors_trouble() -> None:
    near, gone = NearGovernor(), FarNode()
    gone.lost = True
    with pytest.raises(GovernorError, match="node far is gone"):
        MultiNodeGovernor(near, nodes(gone), 8).apply(Settings(clock_MHz=1300))
    assert near.restored == 1


def test_a_setting_by_stage_stands_on_every_node() -> None:
    near, far = NearGovernor(), FarNode()
    applied = MultiNodeGovernor(near, nodes(far), 2).apply(Settings(clock_MHz=CLOCKS))
    assert near.set == [Settings(clock_MHz=(1200, 1300))]
    assert far.set == [Settings(clock_MHz=(1400, 1500))]
    assert applied.settings == Settings(clock_MHz=CLOCKS)


# ---- meters and clocks


def test_clocks_are_compared_to_half_a_round_trip() -> None:
    here = nodes(FarNode(ahead_s=1234.5), FarNode(ahead_s=-77.0))
    here.set_clocks()
    for ahead_s, relay_s, truth in zip(here.ahead_s, here.relay_s, (1234.5, -77.0), strict=True):
        assert abs(ahead_s - truth) <= relay_s


def test_energy_of_a_window_is_the_nodes_energies_added_up() -> None:
    """The far node's counter keeps its opening waiting; the near one draws on meanwhile."""
    near, far = NearMeter(100.0), FarNode(ahead_s=500.0, power_W=300.0, delay_s=0.15)
    here = nodes(far)
    here.set_clocks()
    meter = MultiNodeMeter(near, here, 1)
    opened = meter.boundary(opens=True)
    time.sleep(0.3)
    closed = meter.boundary(opens=False)
    length_s = closed.time_s - opened.time_s
    assert length_s > 0.3
    # Straight lines: 400 W over the window, but for what the calls' ways differ by.
    apart_J = 100.0 * (near.read_s - closed.time_s) + 300.0 * (far.read_s - 500.0 - closed.time_s)
    told_J = closed.energy_J - opened.energy_J
    assert told_J - apart_J == pytest.approx(400.0 * length_s, abs=1.0 + 600.0 * here.relay_s[0])


def test_samples_of_all_nodes_make_one() -> None:
    a = PowerSample(1.0, 500.0, {"clock_MHz": 1000.0, "temperature_C": 60.0, "gpu1_power_W": 250.0})
    b = PowerSample(
        1.01, 400.0, {"clock_MHz": 1400.0, "temperature_C": 70.0, "throttle_power": 1.0}
    )
    b = replace(b, extra={**b.extra, "gpu1_power_W": 150.0})
    one = merged([a, b], 2)
    assert one.power_W == 900.0
    assert one.time_s == 1.0
    assert one.extra["clock_MHz"] == 1200.0
    assert one.extra["temperature_C"] == 70.0
    assert one.extra["throttle_power"] == 1.0
    assert (one.extra["gpu1_power_W"], one.extra["gpu3_power_W"]) == (250.0, 150.0)


def test_single_devices_are_told_apart_by_node() -> None:
    one = merged([NearMeter(100.0).sample(), FarNode().sample()], 1)
    assert (one.extra["gpu0_clock_MHz"], one.extra["gpu1_clock_MHz"]) == (1000.0, 1400.0)
    assert (one.extra["gpu0_power_W"], one.extra["gpu1_power_W"]) == (100.0, 100.0)


class Recorded:
    """A node whose samples are already taken, as its agent sends them."""

    def __init__(self, samples: Sequence[PowerSample]) -> None:
        self._samples, self.sent = list(samples), 0

    def samples(self, after: int) -> tuple[PowerSample, ...]:
        new = with_shared_states(self._samples[after:])
        self.sent += len(new)
        return new

    def take(self, sample: PowerSample) -> None:
        self._samples.append(sample)


def test_a_timeline_adds_power_at_each_sample_and_merges_states_once_a_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Looking again costs what is new; a throttle in one sample of one node is not lost."""
    calls = []

    def counted(samples: Sequence[PowerSample], devices: int) -> PowerSample:
        calls.append(len(samples))
        return merged(samples, devices)

    monkeypatch.setattr("tuner.cluster.multi_node.merged", counted)
    peers = [Recorded([PowerSample(k / 10, 100.0 + k) for k in range(40)]) for _ in range(3)]
    hot = PowerSample(4.0, 50.0, {"throttle_power": 1.0, "clock_MHz": 900.0})
    timeline = MultiNodeTimeline(NearMeter(0.0), Nodes(peers), 8)
    timeline._ticker.stop()
    timeline._samples[:] = [PowerSample(k / 10, 10.0 * k) for k in range(40)]
    first = timeline.samples
    assert [s.power_W for s in first] == [10.0 * k + 3 * (100.0 + k) for k in range(40)]
    assert calls == [4] * (40 // SHARED)
    assert not any("throttle_power" in sample.extra for sample in first)
    peers[1].take(hot)
    for peer in (peers[0], peers[2]):
        peer.take(PowerSample(4.0, 140.0))
    timeline._samples.append(PowerSample(4.0, 400.0))
    again = timeline.samples
    assert again[:40] == first
    assert again[40].power_W == 400.0 + 50.0 + 2 * 140.0
    assert again[40].extra == {"throttle_power": 1.0, "clock_MHz": 900.0}
    assert len(calls) == 40 // SHARED + 1
    assert [peer.sent for peer in peers] == [41] * 3
    timeline._nodes.close()


def test_a_node_combines_states_and_keeps_each_power() -> None:
    samples = [
        PowerSample(k / 10, float(k), {"clock_MHz": 1000.0 + k, "temperature_C": 60.0 + k})
        for k in range(SHARED + 2)
    ]
    shared = with_shared_states(samples)
    assert [(s.time_s, s.power_W) for s in shared] == [(s.time_s, s.power_W) for s in samples]
    assert shared[0].extra["clock_MHz"] == pytest.approx(1000.0 + (SHARED - 1) / 2)
    assert shared[0].extra["temperature_C"] == 60.0 + SHARED - 1
    assert shared[0].extra is shared[SHARED - 1].extra
    assert shared[SHARED].extra["clock_MHz"] == pytest.approx(1000.5 + SHARED)


def test_the_interface_is_the_one_that_shows_the_address() -> None:
    assert interface_of(towards="127.0.0.1") == "lo"
    assert interface_of(towards="no such host") == ""


# ---- for real, two runners of this process as two nodes

QUICK = WindowPolicy(min_s=0.3, max_s=0.6, idle_s=0.1)
TWO = Settings(data_parallel=2, micro_batch=2, zero_stage=1)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any, Path]]:
    from tuner.workload.node.runner import LocalRunner

    folder = tmp_path_factory.mktemp("run")
    cluster = replace(detect_cluster(), devices_per_node=1, nodes=2)
    runners = [LocalRunner(load_job(), cluster, run_dir=folder) for _ in range(2)]
    yield runners[0], Peer(runners[1]), folder
    for runner in runners:
        runner.close()


def spanning(lead: Any, share: Any, name: str, **more: Any) -> Any:
    request = ProbeRequest(name, TWO, window=QUICK, **more)
    return lead.run(
        request, lambda node, asked: MultiNodeProbe(node, asked, [share], "127.0.0.1"), nodes=2
    )


@pytest.mark.slow  # two fork servers, which the next tests share
@pytest.mark.real
def test_two_nodes_train_one_job(pair: tuple[Any, Any, Path]) -> None:
    lead, share, folder = pair
    record = spanning(lead, share, "both")
    assert record.ok, record.failure
    assert record.measurements[0].steps >= 3
    assert record.waiting_devices == 0
    assert len(record.environment["nodes"]) == 2
    assert record.environment["relay_s"] > 0
    # Each node's files are its own, and the samples are of both.
    assert (folder / "probes" / "both" / "rank0.log").exists()
    assert (folder / "probes" / "both" / "from-rank1" / "rank1.log").exists()
    # Both nodes are this machine, metered twice: a sample is twice what one meter says.
    single = lead.node.meter.sample().power_W
    assert record.measurements[0].power_W > 1.2 * min(single, share.sample().power_W)


@pytest.mark.slow
@pytest.mark.real
def test_a_rank_that_dies_on_the_other_node_is_told_and_leaves_nothing(
    pair: tuple[Any, Any, Path],
) -> None:
    import os
    import signal
    import threading

    lead, share, _ = pair
    pids: list[int] = []

    def kill() -> None:
        while share._group is None or len(share._group._links) < 1:
            time.sleep(0.05)
        pids.extend(share._group.pids)
        time.sleep(0.5)
        os.kill(pids[0], signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    long = WindowPolicy(min_s=60.0, max_s=60.0, idle_s=0.0)
    request = ProbeRequest("dies", TWO, window=long)
    record = lead.run(
        request, lambda node, asked: MultiNodeProbe(node, asked, [share], "127.0.0.1"), nodes=2
    )
    killer.join()
    assert record.failure.kind == "crash"
    assert "rank 1 was killed by signal 9" in record.failure.message
    assert not Path(f"/proc/{pids[0]}").exists()
    after = spanning(lead, share, "after")
    assert after.ok, after.failure


@pytest.mark.slow
@pytest.mark.real
def test_a_node_that_is_lost_fails_the_probe_as_the_nodes_fault(
    pair: tuple[Any, Any, Path],
) -> None:
    lead, share, _ = pair

    class Vanishes:
        def __getattr__(self, name: str) -> Any:
            return getattr(share, name)

        def events(self, timeout_s: float) -> Any:
            raise PeerLost("node far is gone: its agent ended")

    record = spanning(lead, Vanishes(), "lost")
    assert record.failure.kind == "node"
    assert record.failure.message == "node lost: node far is gone: its agent ended"


@pytest.mark.real
def test_more_ranks_than_the_nodes_have_devices_are_refused(
    pair: tuple[Any, Any, Path],
) -> None:
    lead, _, _ = pair
    with pytest.raises(InputError, match="given one node with 1 devices, and needs 2"):
        lead.run(ProbeRequest("one", TWO, window=QUICK))


def test_records_of_fast_steps_stay_small() -> None:
    from tuner.workload.node.measure.measurement import KEPT_STEPS, kept_steps

    few = tuple(0.1 + 0.001 * k for k in range(KEPT_STEPS))
    assert kept_steps(few) == few
    many = tuple(float(k) for k in range(3000))
    kept = kept_steps(many)
    assert len(kept) == 500
    assert kept[0] == pytest.approx(2.5)  # six at a time
    assert sum(kept) / len(kept) == pytest.approx(sum(many) / len(many))
