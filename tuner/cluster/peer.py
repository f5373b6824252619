"""Another node of a probe, as the agent that leads the probe calls it.

A few calls start that node's ranks, relay their events, read its meter and set its clocks. In a
study Ray's actor calls transport them (`tuner.cluster.joining`).
"""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
import threading
import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tuner.search_spaces.configuration import Settings
from tuner.workload.node.clocks.base import AppliedSettings
from tuner.workload.node.meters import MeterError, Reading
from tuner.workload.node.meters.base import Timeline
from tuner.workload.node.probe_run import ops_needed
from tuner.workload.node.rank_group import RankGroup
from tuner.workload.node.rank_launch import Place, RankLaunch, bounded_logs
from tuner.workload.node.rank_messages import Event
from tuner.workload.node.rank_server import control_socket
from tuner.workload.node.runner import LocalRunner
from tuner.workload.records.probe import Failure, MeterInfo, PowerSample, ProbeRequest

# Power samples of several nodes as one, with the states of devices shared by neighbours.
#
# States change slowly, and merging those of a thousand nodes at each sample would take the lead
# longer than the sample lasts. So each node combines its own over some samples before it sends
# them.


#: Samples that share the states of their devices: a second of the timeline.
SHARED = 10


def _is_worst(name: str) -> bool:
    return name.startswith("throttle") or "temperature" in name


def together(states: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Combine the states of successive samples: means; of temperatures and throttling the highest.

    What only some of the samples hold is a mean over those.
    """
    values: dict[str, list[float]] = {}
    for state in states:
        for name, value in state.items():
            values.setdefault(name, []).append(value)
    return {
        name: max(each) if _is_worst(name) else sum(each) / len(each)
        for name, each in values.items()
    }


def with_shared_states(samples: Sequence[PowerSample]) -> tuple[PowerSample, ...]:
    """Return the samples with the states of each `SHARED` of them combined."""
    shared = []
    for first in range(0, len(samples), SHARED):
        block = samples[first : first + SHARED]
        extra = together([sample.extra for sample in block])
        shared += [PowerSample(sample.time_s, sample.power_W, extra) for sample in block]
    return tuple(shared)


def merged(samples: Sequence[PowerSample], devices_per_node: int) -> PowerSample:
    """Combine simultaneous samples of all nodes: power summed, devices numbered through.

    Means over devices become means over nodes; of temperatures and throttling the highest counts.
    """
    extra: dict[str, list[float]] = {}
    several = len(samples) > 1
    for node, sample in enumerate(samples):
        first = node * devices_per_node
        for name, value in sample.extra.items():
            number, _, rest = name.removeprefix("gpu").partition("_")
            if name.startswith("gpu") and number.isdigit():
                name = f"gpu{first + int(number)}_{rest}"
            elif several and devices_per_node == 1 and name.endswith("clock_MHz"):
                extra.setdefault(f"gpu{first}_{name}", []).append(value)
                extra.setdefault(f"gpu{first}_power_W", [sample.power_W])
            extra.setdefault(name, []).append(value)

    def over_nodes(name: str, values: list[float]) -> float:
        if _is_worst(name):
            return max(values)
        return sum(values) / (1 if name.endswith("_W") else len(values))

    return PowerSample(
        samples[0].time_s,
        sum(sample.power_W for sample in samples),
        {name: over_nodes(name, values) for name, values in extra.items()},
    )


def nearest(times: Sequence[float], at_s: float) -> int:
    """Return the place of the time that is nearest."""
    i = bisect_left(times, at_s)
    if i == len(times) or (i > 0 and at_s - times[i - 1] < times[i] - at_s):
        return i - 1
    return i


class PeerLost(MeterError):
    """Failure of another node of the probe to answer; one sentence names it."""


@dataclass(frozen=True)
class JoinReply:
    """Answer of a node that joins a probe."""

    host: str
    meter: MeterInfo
    resolution_s: float


class Peer:
    """Share of a node in a probe that another node leads, over this node's runner.

    Calls may come from several threads, `events` from one at a time. Through Ray every call may
    raise `PeerLost`.
    """

    def __init__(self, runner: LocalRunner) -> None:
        self._runner = runner
        self._request: ProbeRequest | None = None
        self._launch: RankLaunch | None = None
        self._timeline: Timeline | None = None
        self._group: RankGroup | None = None
        self._around = contextlib.ExitStack()  # what ends with the ranks
        self._ended = threading.Event()
        self._listening = threading.Lock()

    def clock_s(self) -> float:
        """Return its CLOCK_MONOTONIC, seconds."""
        return time.monotonic()

    def join(self, request: ProbeRequest, nodes: int) -> JoinReply:
        """Prepare the node, and start to sample power."""
        self.end()  # of a lead that was lost
        self._runner.check(request, nodes)
        self._runner.renew_meter()
        self._ended.clear()
        self._request, self._launch = request, None
        self._timeline = Timeline(self._runner.node.meter)
        return JoinReply(
            socket.gethostname(), self._runner.meter, self._runner.node.meter.resolution_s
        )

    def spawn(self, place: Place) -> None:
        """Start its ranks."""
        assert self._request is not None
        node = self._runner.node
        node.server.load_ops(ops_needed(self._request.launch, node.job))
        # In a folder of their own: all nodes may write to one file system.
        self._launch = RankLaunch(node, self._request, part=f"from-rank{place.first}")
        listener, address, remove = control_socket()
        self._around.callback(remove)
        place = replace(place, interface=interface_of(towards=place.master[0]))
        specs = self._launch.specs(address, place)
        self._around.enter_context(bounded_logs(Path(specs[0].log).parent, {}))
        self._group = node.server.spawn(specs, listener)

    def events(self, timeout_s: float) -> list[Event]:
        """Return its ranks' events since the last call; wait for the first."""
        until = time.monotonic() + timeout_s
        with self._listening:
            while self._group is not None and not self._ended.is_set():
                left_s = until - time.monotonic()
                event = self._group.next_event(min(0.2, max(left_s, 0.0)))
                if event is None and left_s > 0:
                    continue
                found = []
                while event is not None:
                    found.append(event)
                    event = self._group.next_event(0.0)
                return found
        return []

    def send(self, line: str) -> None:
        """Send the same line to all its ranks."""
        if self._group is not None:
            self._group.send(line)

    def read(self) -> Reading:
        """Return its meter's reading now."""
        return self._runner.node.meter.read()

    def boundary(self, *, opens: bool) -> tuple[Reading, float]:
        """Return its meter's reading at a window's edge, and the power drawn there, watts."""
        meter = self._runner.node.meter
        return meter.boundary(opens=opens), meter.sample().power_W

    def sample(self) -> PowerSample:
        return self._runner.node.meter.sample()

    def samples(self, after: int) -> tuple[PowerSample, ...]:
        """Return its timeline after the first `after` samples, with states that they share."""
        return with_shared_states(self._timeline.samples[after:]) if self._timeline else ()

    def apply(self, live: Settings, ranks: int) -> AppliedSettings:
        """Set its devices."""
        return self._runner.node.governor.apply(live, ranks=ranks)

    def foreign(self) -> tuple[str, ...]:
        """Return a sentence for each of its settings that another process has changed."""
        return self._runner.node.governor.foreign()

    def restore(self) -> None:
        self._runner.node.governor.restore()

    def explain_exit(self, rank: int, code: int) -> Failure:
        assert self._launch is not None
        return self._launch.explain_exit(rank, code)

    def log_tail(self) -> str:
        """Return the last lines of its ranks' logs."""
        return self._launch.log_tail() if self._launch is not None else ""

    def end(self) -> None:
        """End its ranks, restore its clocks, stop sampling. May be called twice."""
        self._ended.set()
        with self._listening:
            if self._group is not None:
                self._group.kill()
                self._group = None
            self._around.close()
        if self._timeline is not None:
            self._timeline.stop()
            self._timeline = None
        self._runner.node.governor.restore()


def interface_of(*, towards: str) -> str:
    """Return the network interface with this node's address towards a host; empty if unknown.

    A framework takes the one that the host's name resolves to, on many hosts loopback.
    """
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
            way.connect((towards, 9))  # a datagram socket sends nothing to connect
            shown = way.getsockname()[0]
            for _, name in socket.if_nameindex():
                request = struct.pack("256s", name.encode()[:15])
                with contextlib.suppress(OSError):  # it has no IPv4 address
                    # SIOCGIFADDR (man 7 netdevice); the address stands at bytes 20 to 24.
                    address = fcntl.ioctl(way.fileno(), 0x8915, request)[20:24]
                    if socket.inet_ntoa(address) == shown:
                        return name
    except OSError:
        pass
    return ""
