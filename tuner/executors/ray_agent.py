"""Ray actor that runs probes on a node, and its calls to the actors of other nodes.

An actor holds one runner, inspects its node before it takes any probe, and serves a share of a
probe that another node leads. Records are returned to the driver as plain JSON; logs, rendered
files and power samples stay in the run folder, where the actor wrote them.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from tuner.executors.base import run_safely
from tuner.executors.ray_security import exposures, foreign_package, strip_token
from tuner.search_spaces.cluster import Cluster
from tuner.search_spaces.configuration import Settings
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.job import TrainingJob
from tuner.workload.clocks.base import Applied, GovernorError
from tuner.workload.meters import PowerSample, Reading
from tuner.workload.multi_node.peer import Joined, PeerLost
from tuner.workload.node.preflight import NodeFacts, look
from tuner.workload.node.rank_group import Event
from tuner.workload.platforms import platform_of
from tuner.workload.probe import Failure, Measurement, MeterInfo, ProbeRecord, ProbeRequest
from tuner.workload.runners import Continuation, Runner
from tuner.workload.scripts.folder_copy import unpacked
from tuner.workload.scripts.script_job import ScriptJob

#: Makes a node's runner from the job, the cluster and the run folder.
MakeRunner = Callable[[TrainingJob, Cluster, str], Runner]

#: A call that only reads or sets takes milliseconds; one that starts ranks may build an op.
CALL_S, START_S = 30.0, 900.0
#: A launch waits no longer than this for its driver to choose the next settings.
HOLD_S = 60.0


@dataclass(frozen=True)
class Entered:
    """State of a node when a study first asks to use it.

    Attributes:
        exposures: how others can enter the Ray cluster, a sentence each.
    """

    facts: NodeFacts
    refused: tuple[str, ...] = ()
    meter: MeterInfo | None = None
    exposures: tuple[str, ...] = ()


class NodeAgent:
    """Actor that runs probes on one node.

    Args:
        packages: the folder that the packages of joulefront must be imported from; None if it
            differs between nodes.
    """

    def __init__(self, run_dir: str, packages: str | None = None) -> None:
        self._run_dir, self._packages = run_dir, packages
        self._runner: Any = None
        self._share: Any = None
        self._measures = False
        self._open: dict[str, _Dialogue] = {}

    def look(self) -> Entered:
        """Inspect the node without preparing it for probes."""
        trouble = foreign_package(self._packages)
        facts = NodeFacts(os.uname().nodename, None, trouble) if trouble else look()
        return Entered(facts, facts.refusals(), exposures=exposures())

    def enter(
        self,
        job: TrainingJob,
        cluster: Cluster,
        make_runner: MakeRunner | None,
        devices: Sequence[str] = (),
        prepare: bool = False,
        copy: bytes | None = None,
    ) -> Entered:
        """Inspect the node and make its runner; report why it cannot be used rather than raise.

        Args:
            copy: the folder of the job's script, packed, for a node that does not have it.
            devices: UUIDs of this agent's GPUs; empty for all of the node.
            prepare: import the frameworks at once, as `prepare` does.
        """
        exposed = exposures()
        strip_token()
        trouble = foreign_package(self._packages)
        if not trouble and isinstance(job, ScriptJob):
            trouble = _without_folder(job, copy)
        if trouble:
            host = os.uname().nodename
            return Entered(NodeFacts(host, None, trouble), (f"node {host} is not used: {trouble}",))
        entered = self._enter(job, cluster, make_runner, devices, prepare)
        return replace(entered, exposures=exposed)

    def _enter(
        self,
        job: TrainingJob,
        cluster: Cluster,
        make_runner: MakeRunner | None,
        devices: Sequence[str],
        prepare: bool,
    ) -> Entered:
        if devices or cluster.device.type == "cpu":  # what its GPUs do is no reason against cores
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
        if make_runner is not None:
            self._runner = make_runner(job, cluster, self._run_dir)
            return Entered(NodeFacts(os.uname().nodename, cluster), (), self._runner.meter)
        facts = look()
        refused = facts.refusals(cluster)
        if refused:
            return Entered(facts, refused)
        from tuner.workload.multi_node.peer import NodeShare
        from tuner.workload.node.runner import LocalRunner

        try:
            runner = LocalRunner(job, cluster, run_dir=self._run_dir, keep=True)
        except InputError as error:
            return Entered(facts, (f"node {facts.host} is not used: {error}",))
        self._runner, self._share, self._measures = runner, NodeShare(runner), True
        self._platform = platform_of(cluster)
        trouble = self.prepare() if prepare else ""
        if trouble:
            return Entered(facts, (f"node {facts.host} is not used: {trouble}",))
        return Entered(facts, (), runner.meter)

    def prepare(self) -> str:
        """Import the frameworks; return what this node lacks, or an empty string."""
        if not self._measures:
            return ""
        try:
            self._runner.prepare()
        except InputError as error:
            return str(error).splitlines()[0]
        return ""

    def busy(self) -> tuple[str, ...]:
        """Return what other processes do on this agent's GPUs, a phrase each."""
        return self._platform.busy() if self._measures else ()

    def run(
        self, request: dict[str, Any], peers: Sequence[tuple[str, Any]] = (), address: str = ""
    ) -> dict[str, Any]:
        """Run a probe; return its record as JSON, or {"busy": sentence} if a GPU is in use.

        An extendable probe may return {"visited": record so far} instead; `continue_probe` then
        gives it its next settings.

        Args:
            peers: (name, actor) of the other nodes of the lease, in the order of their ranks.
            address: address at which they reach this node.
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
            others = [RayPeer(actor, name) for name, actor in peers]
            runner = _Leading(self._runner, others, address)
        if not probe.extendable:
            return run_safely(runner, probe, self._run_dir).to_json()
        meter = self._runner.meter
        self._open[probe.probe_id] = _Dialogue(
            lambda next_settings: run_safely(
                runner, probe, self._run_dir, next_settings=next_settings
            ),
            meter,
        )
        return self._next_report(probe.probe_id)

    def continue_probe(self, probe_id: str, live: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Measure more settings in a running launch, or end it if there are none; see `run`."""
        self._open[probe_id].answers.put(tuple(Settings(one) for one in live))
        return self._next_report(probe_id)

    def _next_report(self, probe_id: str) -> dict[str, Any]:
        ended, record = self._open[probe_id].reports.get()
        if ended:
            del self._open[probe_id]
            return record.to_json()
        return {"visited": record.to_json()}

    def share(self, name: str, *arguments: Any, **named: Any) -> Any:
        """Serve a call of `tuner.workload.multi_node.peer.Peer` from the node that leads."""
        return getattr(self._share, name)(*arguments, **named)

    def end_share(self) -> None:
        """End the share of a probe whose lead is gone."""
        if self._share is not None:
            self._share.end()

    def pid(self) -> int:
        """Return the process id of this actor."""
        return os.getpid()

    def cancel(self) -> None:
        """End the running probe."""
        if self._measures:
            self._runner.cancel()
        for dialogue in list(self._open.values()):
            dialogue.answers.put(())

    def close(self) -> None:
        """Close the runner."""
        if self._runner is not None:
            self._runner.close()


def _without_folder(job: ScriptJob, copy: bytes | None) -> str:
    """Copy a script's folder to this node if it is lacking; return why it stays so, or ""."""
    folder = Path(job.cwd)
    if copy is not None:
        return unpacked(copy, folder)
    if folder.is_dir():
        return ""
    return (
        f"it has no folder {folder}, which the script starts in; --sync copies it there, or put it "
        "on a shared file system"
    )


class _Dialogue:
    """Extendable probe that runs in a thread of its own.

    A report is (True if it has ended, the record so far); each report of a probe that has not ended
    is answered by the next settings.
    """

    def __init__(self, run: Callable[[Continuation], ProbeRecord], meter: MeterInfo) -> None:
        self.reports: SimpleQueue[tuple[bool, ProbeRecord]] = SimpleQueue()
        self.answers: SimpleQueue[tuple[Settings, ...]] = SimpleQueue()
        self._meter = meter
        threading.Thread(
            target=lambda: self.reports.put((True, run(self._ask))), daemon=True
        ).start()

    def _ask(
        self, request: ProbeRequest, measurements: Sequence[Measurement]
    ) -> tuple[Settings, ...]:
        self.reports.put((False, ProbeRecord(request, tuple(measurements), self._meter)))
        try:
            return self.answers.get(timeout=HOLD_S)
        except Empty:
            return ()


class _Leading:
    """Runner whose probes span this node and its peers."""

    def __init__(self, runner: Any, peers: Sequence[RayPeer], address: str) -> None:
        self.meter: MeterInfo = runner.meter
        self._runner, self._peers, self._address = runner, peers, address

    def run(self, request: ProbeRequest) -> ProbeRecord:
        return self._run(request, None)

    def run_interactive(self, request: ProbeRequest, next_settings: Continuation) -> ProbeRecord:
        return self._run(request, next_settings)

    def _run(self, request: ProbeRequest, next_settings: Continuation | None) -> ProbeRecord:
        from tuner.workload.multi_node.probe import MultiNodeProbe

        return self._runner.run_as(
            lambda node, request: MultiNodeProbe(node, request, self._peers, self._address),
            request,
            nodes=1 + len(self._peers),
            next_settings=next_settings,
        )

    def close(self) -> None:
        """Do nothing: the agent closes the runner."""


def actor_is_gone(ray: Any) -> tuple[type[Exception], ...]:
    """Return the errors by which Ray reports that an actor ended or cannot be reached.

    An actor that Ray's memory monitor ended is reported as OutOfMemoryError, which is no
    RayActorError, by every later call, too.
    """
    return ray.exceptions.RayActorError, ray.exceptions.OutOfMemoryError


class RayPeer:
    """Peer (`tuner.workload.multi_node.peer.Peer`) through the actor of another node."""

    def __init__(self, actor: Any, name: str) -> None:
        import ray

        self._ray, self._actor, self._name = ray, actor, name

    def _call(self, name: str, *arguments: Any, limit_s: float = CALL_S, **named: Any) -> Any:
        errors = self._ray.exceptions
        try:
            return self._ray.get(
                self._actor.share.remote(name, *arguments, **named), timeout=limit_s
            )
        except errors.GetTimeoutError as error:
            raise PeerLost(f"{self._name} did not answer within {limit_s:.0f} s") from error
        except actor_is_gone(self._ray) as error:
            raise PeerLost(f"{self._name} is gone: its agent ended") from error
        except errors.RayTaskError as error:
            # Ray hides the sentence of these in a traceback.
            if isinstance(error.cause, InputError | GovernorError):
                raise error.cause from None
            raise

    def clock_s(self) -> float:
        return float(self._call("clock_s"))

    def join(self, request: ProbeRequest, nodes: int) -> Joined:
        return self._call("join", request, nodes)

    def spawn(self, place: Any) -> None:
        self._call("spawn", place, limit_s=START_S)

    def events(self, timeout_s: float) -> list[Event]:
        return self._call("events", timeout_s, limit_s=timeout_s + CALL_S)

    def send(self, line: str) -> None:
        self._call("send", line)

    def read(self) -> Reading:
        return self._call("read")

    def boundary(self, *, opens: bool) -> tuple[Reading, float]:
        return self._call("boundary", opens=opens)

    def sample(self) -> PowerSample:
        return self._call("sample")

    def samples(self, after: int) -> tuple[PowerSample, ...]:
        return self._call("samples", after)

    def apply(self, live: Settings, ranks: int) -> Applied:
        return self._call("apply", live, ranks)

    def restore(self) -> None:
        self._call("restore")

    def explain_exit(self, rank: int, code: int) -> Failure:
        return self._call("explain_exit", rank, code)

    def log_tail(self) -> str:
        return str(self._call("log_tail"))

    def end(self) -> None:
        self._call("end")
