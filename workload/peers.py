"""What the agent that leads a probe asks of the other nodes', and how a node answers.

A probe across nodes is led by one agent (`workload.spanning`). To it another node is a `Peer`: a
handful of calls that start that node's ranks, relay what they say, read its meter and set its
clocks. `Share` answers them over that node's own runner; how the calls travel is the caller's
business, Ray's actor calls in a study (`tuner.ray_agent`) and plain ones in tests.
"""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from search_spaces.configuration import Settings
from workload.agent import LocalRunner, Place, Probe, explain_exit, oom_kills
from workload.deepspeed_config import ops_needed
from workload.governor import Applied
from workload.logs import bounded_logs
from workload.meters import MeterError, PowerSample, Reading
from workload.meters.timeline import Timeline
from workload.probe import Failure, MeterInfo, ProbeRequest
from workload.ranks import Event, RankGroup, control_socket

__all__ = ["Joined", "Peer", "PeerLost", "Share", "interface_of"]


class PeerLost(MeterError):
    """Another node of the probe does not answer; one sentence says which."""


@dataclass(frozen=True)
class Joined:
    """What a node says when it joins a probe.

    Attributes:
        host: its name.
        meter: where its energy figures come from.
        resolution_s: its counter's update period.
    """

    host: str
    meter: MeterInfo
    resolution_s: float


class Peer(Protocol):
    """Another node's agent, as the lead calls it.

    Every call may cross a network. All raise `PeerLost` where the node does not answer.
    """

    def clock_s(self) -> float:
        """Its CLOCK_MONOTONIC, seconds."""

    def join(self, request: ProbeRequest, nodes: int) -> Joined:
        """Make ready, and begin to sample power."""

    def spawn(self, place: Place) -> None:
        """Start its ranks."""

    def events(self, timeout_s: float) -> list[Event]:
        """What its ranks said since the last call; waits for the first."""

    def send(self, line: str) -> None:
        """Say the same to all its ranks."""

    def read(self) -> Reading:
        """Its meter now."""

    def boundary(self, *, opens: bool) -> tuple[Reading, float]:
        """Its meter at a window's edge, and the power drawn there, watts."""

    def sample(self) -> PowerSample:
        """Its power now."""

    def samples(self, after: int) -> tuple[PowerSample, ...]:
        """Its timeline but for the first `after` samples."""

    def apply(self, live: Settings, ranks: int) -> Applied:
        """Set its devices."""

    def restore(self) -> None:
        """Put back what stood on its devices."""

    def explain_exit(self, rank: int, code: int) -> Failure:
        """What the exit of one of its ranks means."""

    def log_tail(self) -> str:
        """The last lines of its ranks' logs."""

    def end(self) -> None:
        """End its ranks, put its clocks back, stop sampling. May be called twice."""


class Share:
    """One node's share of a probe that another node leads: a `Peer` over this node's runner.

    Calls may come from several threads; `events` from one at a time.

    Args:
        runner: this node's.
    """

    def __init__(self, runner: LocalRunner) -> None:
        self._runner = runner
        self._request: ProbeRequest | None = None
        self._probe: Probe | None = None
        self._timeline: Timeline | None = None
        self._group: RankGroup | None = None
        self._around = contextlib.ExitStack()  # what ends with the ranks
        self._oom_before = 0
        self._ended = threading.Event()
        self._listening = threading.Lock()

    def clock_s(self) -> float:
        return time.monotonic()

    def join(self, request: ProbeRequest, nodes: int) -> Joined:
        self.end()  # of a lead that was lost
        self._runner.check(request, nodes=nodes)
        self._runner._renew_meter()
        self._ended.clear()
        self._request, self._probe = request, None
        self._timeline = Timeline(self._runner._meter)
        return Joined(socket.gethostname(), self._runner.meter, self._runner.resolution_s)

    def spawn(self, place: Place) -> None:
        assert self._request is not None
        runner = self._runner
        runner._server.load_ops(ops_needed(self._request.launch))
        # In a folder of their own: all nodes may write to one file system.
        self._probe = Probe(runner, self._request, part=f"from-rank{place.first}")
        listener, address, remove = control_socket()
        self._around.callback(remove)
        self._oom_before = oom_kills()
        place = replace(place, interface=interface_of(towards=place.master[0]))
        specs = self._probe.rank_specs(address, place)
        self._around.enter_context(bounded_logs(Path(specs[0].log).parent, {}))
        self._group = runner._server.spawn(specs, listener)

    def events(self, timeout_s: float) -> list[Event]:
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
        if self._group is not None:
            self._group.send(line)

    def read(self) -> Reading:
        return self._runner._meter.read()

    def boundary(self, *, opens: bool) -> tuple[Reading, float]:
        meter = self._runner._meter
        return meter.boundary(opens=opens), meter.sample().power_W

    def sample(self) -> PowerSample:
        return self._runner._meter.sample()

    def samples(self, after: int) -> tuple[PowerSample, ...]:
        return self._timeline.samples[after:] if self._timeline is not None else ()

    def apply(self, live: Settings, ranks: int) -> Applied:
        return self._runner._governor.apply(live, ranks=ranks)

    def restore(self) -> None:
        self._runner._governor.restore()

    def explain_exit(self, rank: int, code: int) -> Failure:
        return explain_exit(rank, code, self._oom_before)

    def log_tail(self) -> str:
        return self._probe.log_tail() if self._probe is not None else ""

    def end(self) -> None:
        self._ended.set()
        with self._listening:
            if self._group is not None:
                self._group.kill()
                self._group = None
            self._around.close()
        if self._timeline is not None:
            self._timeline.stop()
            self._timeline = None
        self._runner._governor.restore()


def interface_of(*, towards: str) -> str:
    """The network interface whose address this node shows to `towards`; empty where unknown.

    The framework's own choice is the interface that the host's name resolves to, which on many
    hosts is loopback (/etc/hosts): no other node reaches that.
    """
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
            way.connect((towards, 9))  # a datagram socket sends nothing to connect
            shown = way.getsockname()[0]
            for _, name in socket.if_nameindex():
                asked = struct.pack("256s", name.encode()[:15])
                with contextlib.suppress(OSError):  # it has no IPv4 address
                    # SIOCGIFADDR (man 7 netdevice); the address stands at bytes 20 to 24.
                    told = fcntl.ioctl(way.fileno(), 0x8915, asked)[20:24]
                    if socket.inet_ntoa(told) == shown:
                        return name
    except OSError:
        pass
    return ""
