"""The meters, timelines and governors of several nodes as one of each, on the lead's clock.

Each node has a monotonic clock of its own, so the lead measures the offset of each before it uses a
time stamp. Energies of one window are added up, each node's from its own counter; a live setting is
set on every node or on none.
"""

from __future__ import annotations

import contextlib
import math
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

from tuner.search_spaces.configuration import Settings
from tuner.search_spaces.errors import InputError
from tuner.workload.clocks.base import Applied, Governor, GovernorError
from tuner.workload.meters import Meter, PowerSample, Reading
from tuner.workload.meters.timeline import Timeline
from tuner.workload.multi_node.peer import Peer, PeerLost

#: Round trips from which a peer's clock is set: the shortest one bounds the error by its half.
_CLOCK_CALLS = 15
#: A reading this much older than the others' is brought up to them.
_SAME_S = 1e-3

T = TypeVar("T")


class Nodes:
    """Peers of one probe, called in parallel."""

    def __init__(self, peers: Sequence[Peer]) -> None:
        self.peers = tuple(peers)
        self.ahead_s = [0.0] * len(self.peers)
        self.relay_s = [0.0] * len(self.peers)
        self._pool = ThreadPoolExecutor(len(self.peers), thread_name_prefix="joulefront-peer")

    def ask(self, question: Callable[[int, Peer], T]) -> Callable[[], list[T]]:
        """Call every peer (by number) at once; the returned function gives the answers in order."""
        asked = [self._pool.submit(question, i, peer) for i, peer in enumerate(self.peers)]
        return lambda: [answer.result() for answer in asked]

    def set_clocks(self) -> None:
        """Measure each peer's clock offset from this node's (Cristian's method)."""

        def compare(number: int, peer: Peer) -> None:
            best_s = float("inf")
            for _ in range(_CLOCK_CALLS):
                sent_s = time.monotonic()
                told_s = peer.clock_s()
                back_s = time.monotonic()
                if back_s - sent_s < best_s:
                    best_s = back_s - sent_s
                    self.ahead_s[number] = told_s - (sent_s + back_s) / 2
            self.relay_s[number] = best_s

        self.ask(compare)()

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
        others = self._nodes.ask(lambda i, peer: peer.read())
        own = self._own.read()
        return Reading(own.time_s, own.energy_J + sum(other.energy_J for other in others()))

    def boundary(self, *, opens: bool) -> Reading:
        """Return the sum of all nodes' readings at one edge.

        Nodes wait for the updates of their own counters, so they open up to a second apart; those
        that opened early are brought up to the last by the power that they draw there. Closing
        readings tell the moment of the call, which differs by the way to the node only.
        """
        others = self._nodes.ask(lambda i, peer: peer.boundary(opens=opens))
        own = self._own.boundary(opens=opens)
        edges = [(own, self._own.sample().power_W)]
        for (reading, power_W), ahead_s in zip(others(), self._nodes.ahead_s, strict=True):
            edges.append((replace(reading, time_s=reading.time_s - ahead_s), power_W))
        times = [reading.time_s for reading, _ in edges]
        if not opens:
            return Reading(min(times), sum(reading.energy_J for reading, _ in edges))
        edge_s = max(times)
        late_J = sum(
            power_W * (edge_s - reading.time_s)
            for reading, power_W in edges
            if edge_s - reading.time_s > _SAME_S
        )
        return Reading(edge_s, sum(reading.energy_J for reading, _ in edges) + late_J)

    def sample(self) -> PowerSample:
        others = self._nodes.ask(lambda i, peer: peer.sample())
        return merged([self._own.sample(), *others()], self._devices)

    def close(self) -> None:
        """Do nothing: each node closes its own meter."""


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

    def together(name: str, values: list[float]) -> float:
        if name.startswith("throttle") or "temperature" in name:
            return max(values)
        return sum(values) / (1 if name.endswith("_W") else len(values))

    return PowerSample(
        samples[0].time_s,
        sum(sample.power_W for sample in samples),
        {name: together(name, values) for name, values in extra.items()},
    )


class MultiNodeTimeline(Timeline):
    """Timeline of the lead with the other nodes' samples added, each at its own time."""

    def __init__(self, meter: Meter, nodes: Nodes, devices_per_node: int) -> None:
        super().__init__(meter)
        self._nodes, self._devices = nodes, devices_per_node
        self._others: list[list[PowerSample]] = [[] for _ in nodes.peers]

    def _fetch(self) -> None:
        told = self._nodes.ask(lambda i, peer: peer.samples(len(self._others[i])))()
        for mine, new, ahead_s in zip(self._others, told, self._nodes.ahead_s, strict=True):
            mine += [replace(sample, time_s=sample.time_s - ahead_s) for sample in new]

    @property
    def samples(self) -> tuple[PowerSample, ...]:
        with contextlib.suppress(PeerLost):  # the probe hears of it elsewhere
            self._fetch()
        own = super().samples
        if not all(self._others):
            return ()
        times = [[sample.time_s for sample in other] for other in self._others]
        return tuple(
            merged(
                [
                    sample,
                    *(
                        other[_nearest(at, sample.time_s)]
                        for other, at in zip(self._others, times, strict=True)
                    ),
                ],
                self._devices,
            )
            for sample in own
        )


def _nearest(times: Sequence[float], at_s: float) -> int:
    i = bisect_left(times, at_s)
    if i == len(times) or (i > 0 and at_s - times[i - 1] < times[i] - at_s):
        return i - 1
    return i


class MultiNodeGovernor:
    """Governor of all nodes: a live setting applies on every node or on none."""

    def __init__(self, own: Governor, nodes: Nodes, devices_per_node: int) -> None:
        self.can_set, self.why_not = own.can_set, own.why_not
        self.supported_clocks_MHz = own.supported_clocks_MHz
        self.limit_range_W = own.limit_range_W
        self._own, self._nodes, self._devices = own, nodes, devices_per_node

    def apply(self, live: Settings, *, ranks: int | None = None) -> Applied:
        """Set every node, or put all back and raise GovernorError or InputError."""
        count = 1 + len(self._nodes.peers)
        parts = [settings_of_part(live, part, count) for part in range(count)]
        try:
            others = self._nodes.ask(lambda i, peer: peer.apply(parts[i + 1], self._devices))
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
        return Applied(settings, tuple(notes))

    def delivered(self) -> dict[str, float]:
        return dict(self._own.delivered())

    def restore(self) -> None:
        """Restore every node; raise GovernorError if one could not be, after the others were."""

        def put_back(node: Peer | Governor) -> str:
            try:
                node.restore()
            except (GovernorError, PeerLost) as error:
                return str(error)
            return ""

        others = self._nodes.ask(lambda i, peer: put_back(peer))
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
    for name, asked in live.items():
        told = [settings.get(name) for settings in done]
        if not isinstance(asked, tuple):
            joined[name] = told[0]
            continue
        each = math.lcm(*(len(value) if isinstance(value, tuple) else 1 for value in told))
        row = tuple(block for value in told for block in _spread(value, each))
        joined[name] = tuple(_spread(row, len(asked)))
    return Settings(joined)
