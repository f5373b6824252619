"""Agent of a node: runs the probes that a driver sends it, or its share of another node's.

`tuner.cluster.joining` makes it a Ray actor.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from tuner.cluster.multi_node import MultiNodeProbe
from tuner.cluster.peer import Peer
from tuner.executors.local import run_safely
from tuner.search_spaces.cluster import Cluster
from tuner.search_spaces.configuration import Settings
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.job import TrainingJob
from tuner.workload.node.facts import NodeFacts, inspect_node
from tuner.workload.node.platforms import platform_of
from tuner.workload.node.runner import LocalRunner
from tuner.workload.records.probe import (
    Measurement,
    MeterInfo,
    NextSettings,
    ProbeRecord,
    ProbeRequest,
    Runner,
)

#: Makes a node's runner from the job, the cluster and the run folder.
MakeRunner = Callable[[TrainingJob, Cluster, str], Runner]
#: A launch waits no longer than this for its driver to choose the next settings.
HOLD_S = 60.0


@dataclass(frozen=True)
class NodeStatus:
    """State of a node when a study first requests it; ways for others to enter, a sentence each."""

    facts: NodeFacts
    refused: tuple[str, ...] = ()
    meter: MeterInfo | None = None
    exposures: tuple[str, ...] = ()


def unusable(trouble: str) -> NodeStatus:
    """Return the state of a node that cannot be used, for a reason that is a phrase."""
    host = os.uname().nodename
    return NodeStatus(NodeFacts(host, None, trouble), (f"node {host} is not used: {trouble}",))


class Agent:
    """Agent of one node: inspects it, makes its runner and runs probes, alone or with peers."""

    def __init__(self, run_dir: str) -> None:
        self._run_dir = run_dir
        self._runner: Any = None
        self._share: Any = None
        self._measures = False
        self._open: dict[str, _Dialogue] = {}

    def inspect(self) -> NodeStatus:
        """Inspect the node without preparing it for probes."""
        facts = inspect_node()
        return NodeStatus(facts, facts.refusals())

    def enter(
        self,
        job: TrainingJob,
        cluster: Cluster,
        make_runner: MakeRunner | None,
        devices: Sequence[str] = (),
        prepare: bool = False,
    ) -> NodeStatus:
        """Inspect the node and make its runner; report why it cannot be used rather than raise.

        `devices` are UUIDs of this agent's GPUs, empty for all; without `make_runner` it measures.
        """
        if (folder := job.needed_folder) and not Path(folder).is_dir():
            return unusable(
                f"it has no folder {folder}, which the script starts in; copy it there, or put it "
                "on a shared file system"
            )
        os.environ.update(cluster.device.hiding)  # what its GPUs do is no reason against cores
        if devices:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
        if make_runner is not None:
            self._runner = make_runner(job, cluster, self._run_dir)
            return NodeStatus(NodeFacts(os.uname().nodename, cluster), (), self._runner.meter)
        facts = inspect_node()
        if refused := facts.refusals(cluster):
            return NodeStatus(facts, refused)
        try:
            runner = LocalRunner(job, cluster, run_dir=self._run_dir, keep=True)
            self._runner, self._share, self._measures = runner, Peer(runner), True
            self._platform = platform_of(cluster)
            trouble = self.prepare() if prepare else ""
        except InputError as error:
            trouble = str(error)
        if trouble:
            return NodeStatus(facts, (f"node {facts.host} is not used: {trouble}",))
        return NodeStatus(facts, (), runner.meter)

    def prepare(self) -> str:
        """Import the frameworks; return this node's missing packages, or an empty string."""
        if not self._measures:
            return ""
        try:
            self._runner.prepare()
        except InputError as error:
            return str(error).splitlines()[0]
        return ""

    def busy(self) -> tuple[str, ...]:
        """Return phrases on other processes on this agent's GPUs."""
        return self._platform.busy() if self._measures else ()

    def run(
        self, request: dict[str, Any], peers: Sequence[Peer] = (), address: str = ""
    ) -> dict[str, Any]:
        """Run a probe; return its record as JSON, or {"busy": sentence} if a GPU is in use.

        An extendable probe may return {"visited": record so far} instead; `continue_probe` then
        gives it its next settings. Peers reach this node at `address`.
        """
        probe = ProbeRequest.from_json(request)
        try:
            busy = self.busy()
        except Exception:  # the probe's own meter will report it
            busy = ()
        if busy:
            return {"busy": "; ".join(busy)}
        runner: Runner = self._runner
        if peers and self._measures:
            runner = _Leading(self._runner, peers, address)
        if not probe.extendable:
            return run_safely(runner, probe, self._run_dir).to_json()
        meter = self._runner.meter
        self._open[probe.probe_id] = _Dialogue(
            lambda more: run_safely(runner, probe, self._run_dir, next_settings=more), meter
        )
        return self._next_report(probe.probe_id)

    def continue_probe(self, probe_id: str, live: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Measure more settings in a running launch, or end it if there are none; see `run`."""
        self._open[probe_id].replies.put(tuple(Settings(one) for one in live))
        return self._next_report(probe_id)

    def _next_report(self, probe_id: str) -> dict[str, Any]:
        ended, record = self._open[probe_id].reports.get()
        if ended:
            del self._open[probe_id]
            return record.to_json()
        return {"visited": record.to_json()}

    def share(self, name: str, *arguments: Any, **named: Any) -> Any:
        """Serve a call of `tuner.cluster.peer.Peer` from the node that leads."""
        return getattr(self._share, name)(*arguments, **named)

    def end_share(self) -> None:
        """End the share of a probe whose lead is gone."""
        if self._share is not None:
            self._share.end()

    def cancel(self) -> None:
        """End the running probe."""
        if self._measures:
            self._runner.cancel()
        for dialogue in list(self._open.values()):
            dialogue.replies.put(())

    def close(self) -> None:
        if self._runner is not None:
            self._runner.close()


class _Dialogue:
    def __init__(self, run: Callable[[NextSettings], ProbeRecord], meter: MeterInfo) -> None:
        self.reports: SimpleQueue[tuple[bool, ProbeRecord]] = SimpleQueue()
        self.replies: SimpleQueue[tuple[Settings, ...]] = SimpleQueue()
        self._meter = meter
        threading.Thread(
            target=lambda: self.reports.put((True, run(self._extend))), daemon=True
        ).start()

    def _extend(
        self, request: ProbeRequest, measurements: Sequence[Measurement]
    ) -> tuple[Settings, ...]:
        self.reports.put((False, ProbeRecord(request, tuple(measurements), self._meter)))
        try:
            return self.replies.get(timeout=HOLD_S)
        except Empty:
            return ()


class _Leading(Runner):
    def __init__(self, runner: Any, peers: Sequence[Peer], address: str) -> None:
        self.meter: MeterInfo = runner.meter
        self._runner, self._peers, self._address = runner, peers, address

    def run(self, request: ProbeRequest) -> ProbeRecord:
        return self.run_interactive(request, None)

    def run_interactive(
        self, request: ProbeRequest, next_settings: NextSettings | None
    ) -> ProbeRecord:
        return self._runner.run(
            request,
            lambda node, asked: MultiNodeProbe(node, asked, self._peers, self._address),
            nodes=1 + len(self._peers),
            next_settings=next_settings,
        )
