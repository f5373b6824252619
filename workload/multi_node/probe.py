"""Probes across nodes: one agent leads, the others hold their share of the ranks for it.

The lead runs the probe as on one node, with ranks, meter and governor put together from all nodes.
The ranks of all nodes meet at the lead's address.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import replace

from tuner.workload.clocks.base import GovernorError
from tuner.workload.measure.window import ProbeFailed
from tuner.workload.meters import MeterError
from tuner.workload.meters.timeline import Timeline
from tuner.workload.multi_node.devices import (
    MultiNodeGovernor,
    MultiNodeMeter,
    MultiNodeTimeline,
    Nodes,
)
from tuner.workload.multi_node.peer import Peer, PeerLost, interface_of
from tuner.workload.node.probe_run import Probe
from tuner.workload.node.rank_group import Event, RankGroup, Ranks, ServerError
from tuner.workload.node.rank_launch import Place, ProbeNode, most_telling, reserved_port
from tuner.workload.probe import Failure, ProbeRecord, ProbeRequest
from tuner.workload.runners import Continuation

#: How long one call for a peer's events may wait for one.
_LISTEN_S = 1.0


class _MultiNodeRanks:
    """Ranks of all nodes: the lead's own, and the others' as relayed by their agents."""

    #: A dead node is known by its agent's silence, seconds after its peers' collectives broke.
    patience_s = 20.0

    def __init__(self, own: RankGroup, nodes: Nodes, world: int) -> None:
        self.size, self.pids = world, own.pids
        self._own, self._nodes = own, nodes
        self._heard: list[Event] = []
        self._lost = ""
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._woken, self._waker = socket.socketpair()
        own.hear(self._woken, self._take)
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
                    self._heard += [replace(e, time_s=e.time_s - ahead_s) for e in events]
                with contextlib.suppress(OSError):  # it is ending
                    self._waker.send(b".")
            if self._lost:
                return

    def _take(self) -> list[Event]:
        with self._lock:
            self._woken.recv(4096)
            heard, self._heard = self._heard, []
        return heard

    def next_event(self, timeout_s: float) -> Event | None:
        """Return the next event, as `RankGroup.next_event` does."""
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
        others = self._nodes.ask(lambda i, peer: peer.send(line))
        self._own.send(line)
        with contextlib.suppress(PeerLost):  # `next_event` tells it
            others()

    def kill(self) -> None:
        self._ended.set()
        others = self._nodes.ask(lambda i, peer: peer.end())
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

    def run(self, next_settings: Continuation | None = None) -> ProbeRecord:
        try:
            return super().run(next_settings)
        finally:
            with contextlib.suppress(PeerLost, GovernorError):
                self._nodes.ask(lambda i, peer: peer.end())()
            self._nodes.close()

    def open_timeline(self) -> Timeline:
        """Gather the peers, compare clocks and meters, and begin to sample."""
        joined = self._nodes.ask(lambda i, peer: peer.join(self.request, self.nodes))()
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
        others = self._nodes.ask(lambda i, peer: peer.spawn(places[i + 1]))
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

        def ask(number: int, peer: Peer) -> str:
            with contextlib.suppress(PeerLost):
                return peer.log_tail()
            return ""

        return most_telling([super().log_tail(), *self._nodes.ask(ask)()])
