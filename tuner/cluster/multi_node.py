"""Probes across nodes: one agent leads, the others hold their share of the ranks for it.

The lead runs the probe as on one node, with ranks, meter, timeline and governor put together from
all nodes. The ranks of all nodes meet at the lead's address. Each node has a monotonic clock of its
own, so the lead measures the offset of each before it uses a time stamp. Energies of one window are
added up, each node's from its own counter; a live setting is set on every node or on none.
"""

from __future__ import annotations

import contextlib
import math
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

from tuner.cluster.peer import (
    SHARED,
    Peer,
    PeerLost,
    interface_of,
    merged,
    nearest,
    together,
    with_shared_states,
)
from tuner.search_spaces.configuration import Settings
from tuner.search_spaces.errors import InputError
from tuner.workload.node.clocks.base import AppliedSettings, Governor, GovernorError
from tuner.workload.node.measure.window import ProbeFailed
from tuner.workload.node.meters import Meter, MeterError, Reading
from tuner.workload.node.meters.base import Timeline
from tuner.workload.node.probe_run import Probe
from tuner.workload.node.rank_group import RankGroup, Ranks, ServerError
from tuner.workload.node.rank_launch import Place, ProbeNode, most_informative, reserved_port
from tuner.workload.node.rank_messages import Event
from tuner.workload.records.probe import (
    Failure,
    NextSettings,
    PowerSample,
    ProbeRecord,
    ProbeRequest,
)

#: Round trips from which a peer's clock is set: the shortest one bounds the error by its half.
_CLOCK_CALLS = 15
#: A reading this much older than the others' is brought up to them.
_SAME_S = 1e-3
#: How long one call for a peer's events may wait for one.
_LISTEN_S = 1.0

T = TypeVar("T")


class Nodes:
    """Peers of one probe, called in parallel."""

    def __init__(self, peers: Sequence[Peer]) -> None:
        self.peers = tuple(peers)
        self.ahead_s = [0.0] * len(self.peers)
        self.relay_s = [0.0] * len(self.peers)
        self._pool = ThreadPoolExecutor(len(self.peers), thread_name_prefix="joulefront-peer")

    def on_all(self, question: Callable[[int, Peer], T]) -> Callable[[], list[T]]:
        """Call every peer (by number) at once; the returned function gives the answers in order."""
        futures = [self._pool.submit(question, i, peer) for i, peer in enumerate(self.peers)]
        return lambda: [future.result() for future in futures]

    def set_clocks(self) -> None:
        """Measure each peer's clock offset from this node's (Cristian's method)."""

        def compare(number: int, peer: Peer) -> None:
            best_s = float("inf")
            for _ in range(_CLOCK_CALLS):
                sent_s = time.monotonic()
                peer_time_s = peer.clock_s()
                back_s = time.monotonic()
                if back_s - sent_s < best_s:
                    best_s = back_s - sent_s
                    self.ahead_s[number] = peer_time_s - (sent_s + back_s) / 2
            self.relay_s[number] = best_s

        self.on_all(compare)()

    def close(self) -> None:
        """Stop the threads that call the peers."""
        self._pool.shutdown(wait=False, cancel_futures=True)


class MultiNodeMeter:
    """Meters of all nodes of a probe as one, on the lead's clock."""

    def __init__(self, own: Meter, nodes: Nodes, devices_per_node: int) -> None:
        self.info = own.info
        self._own, self._nodes, self._devices = own, nodes, devices_per_node
        self.resolution_s = own.resolution_s  # of the slowest counter

    def join(self, resolutions_s: Iterable[float]) -> None:
        """Note the update periods of the other nodes' counters, seconds."""
        self.resolution_s = max(self.resolution_s, *resolutions_s)

    def read(self) -> Reading:
        others = self._nodes.on_all(lambda i, peer: peer.read())
        own = self._own.read()
        return Reading(own.time_s, own.energy_J + sum(other.energy_J for other in others()))

    def boundary(self, *, opens: bool) -> Reading:
        """Return the sum of all nodes' readings at one edge.

        Nodes wait for the updates of their own counters, so they open up to a second apart; those
        that opened early are brought up to the last by the power that they draw there. Closing
        readings tell the moment of the call, which differs by the way to the node only.
        """
        others = self._nodes.on_all(lambda i, peer: peer.boundary(opens=opens))
        own = self._own.boundary(opens=opens)
        edges = [(own, self._own.sample().power_W)]
        for (reading, power_W), ahead_s in zip(others(), self._nodes.ahead_s, strict=True):
            edges.append((replace(reading, time_s=reading.time_s - ahead_s), power_W))
        times = [reading.time_s for reading, _ in edges]
        energy_J = sum(reading.energy_J for reading, _ in edges)
        doubt_J = sum(reading.doubt_J for reading, _ in edges)
        lag_s = max(reading.lag_s for reading, _ in edges)
        if not opens:
            return Reading(min(times), energy_J, doubt_J, lag_s)
        edge_s = max(times)
        late_J = sum(
            power_W * (edge_s - reading.time_s)
            for reading, power_W in edges
            if edge_s - reading.time_s > _SAME_S
        )
        return Reading(edge_s, energy_J + late_J, doubt_J, lag_s)

    def sample(self) -> PowerSample:
        others = self._nodes.on_all(lambda i, peer: peer.sample())
        return merged([self._own.sample(), *others()], self._devices)

    def close(self) -> None:
        """Do nothing: each node closes its own meter."""


class MultiNodeTimeline(Timeline):
    """Timeline of the lead with the other nodes' samples added, each at its own time.

    A sample is merged once. States of devices, of which many nodes have thousands, are merged once
    for `SHARED` samples; power is added up in each.
    """

    def __init__(self, meter: Meter, nodes: Nodes, devices_per_node: int) -> None:
        super().__init__(meter)
        self._nodes, self._devices = nodes, devices_per_node
        self._others: list[list[PowerSample]] = [[] for _ in nodes.peers]
        self._times: list[list[float]] = [[] for _ in nodes.peers]
        self._merged: list[PowerSample] = []
        self._merging = threading.Lock()

    def _fetch(self) -> None:
        reply = self._nodes.on_all(lambda i, peer: peer.samples(len(self._others[i])))()
        for number, (new, ahead_s) in enumerate(zip(reply, self._nodes.ahead_s, strict=True)):
            times = [sample.time_s - ahead_s for sample in new]
            self._others[number] += new
            self._times[number] += times

    @property
    def samples(self) -> tuple[PowerSample, ...]:
        with self._merging:
            with contextlib.suppress(PeerLost):  # the probe hears of it elsewhere
                self._fetch()
            if all(self._others):
                own = with_shared_states(super().samples[len(self._merged) :])
                for first in range(0, len(own), SHARED):
                    self._merged += self._together(own[first : first + SHARED])
            return tuple(self._merged)

    def _together(self, own: Sequence[PowerSample]) -> list[PowerSample]:
        rows = []
        for sample in own:
            places = (nearest(times, sample.time_s) for times in self._times)
            others = [other[i] for other, i in zip(self._others, places, strict=True)]
            rows.append([sample, *others])
        # Other nodes' samples may share states with the one before or after.
        extra = merged(rows[0], self._devices).extra
        if any(a.extra is not b.extra for a, b in zip(rows[0], rows[-1], strict=True)):
            extra = together([extra, merged(rows[-1], self._devices).extra])
        return [PowerSample(r[0].time_s, sum(s.power_W for s in r), extra) for r in rows]


class MultiNodeGovernor:
    """Governor of all nodes: a live setting applies on every node or on none."""

    def __init__(self, own: Governor, nodes: Nodes, devices_per_node: int) -> None:
        self.can_set, self.why_not = own.can_set, own.why_not
        self.supported_clocks_MHz = own.supported_clocks_MHz
        self.limit_range_W = own.limit_range_W
        self._own, self._nodes, self._devices = own, nodes, devices_per_node

    def apply(self, live: Settings, *, ranks: int | None = None) -> AppliedSettings:
        """Set every node, or put all back and raise GovernorError or InputError."""
        count = 1 + len(self._nodes.peers)
        parts = [settings_of_part(live, part, count) for part in range(count)]
        try:
            others = self._nodes.on_all(lambda i, peer: peer.apply(parts[i + 1], self._devices))
            own = self._own.apply(parts[0], ranks=self._devices)
            done = [own, *others()]
        except (GovernorError, InputError, PeerLost) as error:
            with contextlib.suppress(GovernorError):
                self.restore()
            if isinstance(error, PeerLost):
                raise GovernorError(str(error)) from error
            raise
        notes = dict.fromkeys(note for applied in done for note in applied.notes)
        settings = joined_settings(live, [applied.settings for applied in done])
        return AppliedSettings(settings, tuple(notes))

    def delivered(self) -> dict[str, float]:
        return dict(self._own.delivered())

    def foreign(self) -> tuple[str, ...]:
        others = self._nodes.on_all(lambda i, peer: peer.foreign())
        return tuple(dict.fromkeys((*self._own.foreign(), *(s for each in others() for s in each))))

    def restore(self) -> None:
        """Restore every node; raise GovernorError if one could not be, after the others were."""

        def put_back(node: Peer | Governor) -> str:
            try:
                node.restore()
            except (GovernorError, PeerLost) as error:
                return str(error)
            return ""

        others = self._nodes.on_all(lambda i, peer: put_back(peer))
        if troubles := [*filter(None, [put_back(self._own), *others()])]:
            raise GovernorError("; ".join(troubles))

    def close(self) -> None:
        """Do nothing: each node closes its own governor."""


def _spread(value: Any, length: int) -> list[Any]:
    """Return a value, or one a stage, as that number of equal blocks."""
    values = value if isinstance(value, tuple) else (value,)
    return [values[i * len(values) // length] for i in range(length)]


def settings_of_part(live: Settings, part: int, parts: int) -> Settings:
    """Return the settings for node `part` of `parts`, of one value for all or one a stage.

    A node is told one value where all its ranks want the same, and else the shortest list of equal
    blocks that both stages and nodes divide.
    """

    def mine(value: Any) -> Any:
        if not isinstance(value, tuple):
            return value
        each = math.lcm(len(value), parts) // parts
        blocks = _spread(value, each * parts)[part * each : (part + 1) * each]
        return blocks[0] if len(set(blocks)) == 1 else tuple(blocks)

    return Settings({name: mine(value) for name, value in live.items()})


def joined_settings(live: Settings, done: Sequence[Settings]) -> Settings:
    """Return the settings that nodes applied, in the form of the request; the first's if unlike."""
    joined: dict[str, Any] = {}
    for name, futures in live.items():
        reply = [settings.get(name) for settings in done]
        if not isinstance(futures, tuple):
            joined[name] = reply[0]
            continue
        each = math.lcm(*(len(value) if isinstance(value, tuple) else 1 for value in reply))
        row = tuple(block for value in reply for block in _spread(value, each))
        joined[name] = tuple(_spread(row, len(futures)))
    return Settings(joined)


class _MultiNodeRanks(Ranks):
    """Ranks of all nodes: the lead's own, and the others' as relayed by their agents."""

    #: A dead node is known by its agent's silence, seconds after its peers' collectives broke.
    patience_s = 20.0

    def __init__(self, own: RankGroup, nodes: Nodes, world: int) -> None:
        self.size, self.pids = world, own.pids
        self._own, self._nodes = own, nodes
        self._received: list[Event] = []
        self._lost = ""
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._woken, self._waker = socket.socketpair()
        own.receive_events(self._woken, self._take)
        self._threads = [
            threading.Thread(target=self._relay, args=(i, peer), daemon=True)
            for i, peer in enumerate(nodes.peers)
        ]
        for thread in self._threads:
            thread.start()

    def _relay(self, number: int, peer: Peer) -> None:
        ahead_s = self._nodes.ahead_s[number]
        while not self._ended.is_set():
            try:
                events = peer.events(_LISTEN_S)
            except PeerLost as error:
                self._lost = str(error)
                events = []
            if events or self._lost:
                with self._lock:
                    self._received += [replace(e, time_s=e.time_s - ahead_s) for e in events]
                with contextlib.suppress(OSError):  # it is ending
                    self._waker.send(b".")
            if self._lost:
                return

    def _take(self) -> list[Event]:
        with self._lock:
            self._woken.recv(4096)
            received, self._received = self._received, []
        return received

    def next_event(self, timeout_s: float) -> Event | None:
        until = time.monotonic() + timeout_s
        while True:
            event = self._own.next_event(max(0.0, min(0.2, until - time.monotonic())))
            if event is not None:
                return event
            if self._lost:
                raise ProbeFailed(Failure("node", f"node lost: {self._lost}"))
            if time.monotonic() >= until:
                return None

    def send(self, line: str) -> None:
        others = self._nodes.on_all(lambda i, peer: peer.send(line))
        self._own.send(line)
        with contextlib.suppress(PeerLost):  # `next_event` tells it
            others()

    def kill(self) -> None:
        self._ended.set()
        others = self._nodes.on_all(lambda i, peer: peer.end())
        self._own.kill()
        with contextlib.suppress(PeerLost, GovernorError):  # told where clocks are put back
            others()
        for thread in self._threads:
            thread.join(timeout=2 * _LISTEN_S)
        self._woken.close()
        self._waker.close()


class MultiNodeProbe(Probe):
    """Probe with ranks on several nodes, led by this one, which the others reach at `address`."""

    def __init__(
        self, node: ProbeNode, request: ProbeRequest, peers: Sequence[Peer], address: str
    ) -> None:
        super().__init__(node, request)
        self.nodes = 1 + len(peers)
        self._address = address
        self._nodes = Nodes(peers)
        self._each = node.cluster.devices_per_node
        self.meter: MultiNodeMeter = MultiNodeMeter(node.meter, self._nodes, self._each)
        self.governor = MultiNodeGovernor(node.governor, self._nodes, self._each)

    def run(self, next_settings: NextSettings | None = None) -> ProbeRecord:
        try:
            return super().run(next_settings)
        finally:
            with contextlib.suppress(PeerLost, GovernorError):
                self._nodes.on_all(lambda i, peer: peer.end())()
            self._nodes.close()

    def open_timeline(self) -> Timeline:
        """Gather the peers, compare clocks and meters, and begin to sample."""
        joined = self._nodes.on_all(lambda i, peer: peer.join(self.request, self.nodes))()
        self._nodes.set_clocks()
        mine = self.meter.info
        for other in joined:
            theirs = other.meter
            if (theirs.name, theirs.scope) != (mine.name, mine.scope):
                raise MeterError(
                    f"the nodes are metered differently: {theirs.name} ({theirs.scope} scope) on "
                    f"{other.host}, {mine.name} ({mine.scope} scope) on {socket.gethostname()}"
                )
        self.meter.join(other.resolution_s for other in joined)
        self.environment |= {
            "nodes": [socket.gethostname(), *(other.host for other in joined)],
            # What a boundary costs more than inside one node, and bounds the clocks' error.
            "relay_s": max(self._nodes.relay_s),
        }
        return MultiNodeTimeline(self.node.meter, self._nodes, self._each)

    def spawn(self, listener: socket.socket, address: str) -> Ranks:
        world, each = self.launch.configuration.world_size, self._each
        master = (self._address, self.ports.enter_context(reserved_port("")))
        places = [Place(node * each, each, master) for node in range(world // each)]
        others = self._nodes.on_all(lambda i, peer: peer.spawn(places[i + 1]))
        own = replace(places[0], interface=interface_of(towards=self._address))
        group = self.node.server.spawn(self.launch.specs(address, own), listener)
        try:
            others()
        except BaseException as error:
            group.kill()
            if isinstance(error, PeerLost):
                raise ServerError(str(error)) from error
            raise
        return _MultiNodeRanks(group, self._nodes, world)

    def explain_exit(self, rank: int, code: int) -> Failure:
        node = rank // self._each
        if node == 0:
            return super().explain_exit(rank, code)
        try:
            return self._nodes.peers[node - 1].explain_exit(rank, code)
        except PeerLost as error:
            return Failure("node", f"node lost: {error}")

    def log_tail(self) -> str:
        """Return the most informative log tail of all nodes."""

        def on_all(number: int, peer: Peer) -> str:
            with contextlib.suppress(PeerLost):
                return peer.log_tail()
            return ""

        return most_informative([super().log_tail(), *self._nodes.on_all(on_all)()])
