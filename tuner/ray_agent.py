"""The Ray actor on each node, and how one of them calls another.

An actor holds one runner, the real one unless told otherwise, looks at its node before it takes any
probe, and serves a share of a probe that another node leads. Records go back to the driver as plain
JSON; logs, rendered files and power samples stay in the run folder, where the actor wrote them.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

from search_spaces.cluster import Cluster
from search_spaces.configuration import Settings
from search_spaces.errors import InputError
from search_spaces.job import TrainingJob
from tuner.executors import run_safely
from workload.governor import Applied
from workload.meters import PowerSample, Reading
from workload.peers import Joined, PeerLost
from workload.preflight import NodeFacts, busy_gpus, look
from workload.probe import Failure, GoOn, Measurement, MeterInfo, ProbeRecord, ProbeRequest, Runner
from workload.ranks import Event

__all__ = ["Entered", "MakeRunner", "NodeAgent", "RayPeer"]

#: Makes a node's runner of job, cluster and run folder.
MakeRunner = Callable[[TrainingJob, Cluster, str], Runner]

#: A call that only reads or sets takes milliseconds; one that starts ranks may build an op.
CALL_S, START_S = 30.0, 900.0
#: A launch is not kept up longer than this for a driver that does not say whether it goes on.
HOLD_S = 60.0


@dataclass(frozen=True)
class Entered:
    """What a node says when a study first asks it.

    Attributes:
        facts: the node as it stands.
        refused: why it cannot be used, a sentence each; empty where it can.
        meter: where its energy figures come from; None where it is refused.
    """

    facts: NodeFacts
    refused: tuple[str, ...] = ()
    meter: MeterInfo | None = None


class NodeAgent:
    """The actor.

    Args:
        run_dir: where logs and power samples go, on this node.
    """

    def __init__(self, run_dir: str) -> None:
        self._run_dir = run_dir
        self._runner: Any = None
        self._share: Any = None
        self._measures = False
        self._open: dict[str, _Dialogue] = {}

    def look(self) -> NodeFacts:
        return look()

    def enter(
        self,
        job: TrainingJob,
        cluster: Cluster,
        make_runner: MakeRunner | None,
        devices: Sequence[str] = (),
        ops: Sequence[str] | None = None,
    ) -> Entered:
        """Look at the node and make its runner; says why it cannot be used rather than raise.

        Args:
            job, cluster: of the study.
            make_runner: None makes the real one, and asks the node for what that needs.
            devices: UUIDs of the GPUs that are this agent's; empty: all of the node.
            ops: DeepSpeed ops to load at once, as `prepare`; None leaves that for later.
        """
        if devices:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
        if make_runner is not None:
            self._runner = make_runner(job, cluster, self._run_dir)
            return Entered(NodeFacts(os.uname().nodename, cluster), (), self._runner.meter)
        facts = look()
        refused = facts.refusals(cluster)
        if refused:
            return Entered(facts, refused)
        from workload.agent import LocalRunner
        from workload.peers import Share

        try:
            runner = LocalRunner(job, cluster, run_dir=self._run_dir, keep=True)
        except InputError as error:
            return Entered(facts, (f"node {facts.host} is not used: {error}",))
        self._runner, self._share, self._measures = runner, Share(runner), True
        trouble = self.prepare(ops) if ops is not None else ""
        if trouble:
            return Entered(facts, (f"node {facts.host} is not used: {trouble}",))
        return Entered(facts, (), runner.meter)

    def prepare(self, ops: Sequence[str]) -> str:
        """Import the frameworks and load ops; empty, or one sentence on what this node lacks."""
        from workload.ranks import ServerError

        if not self._measures:
            return ""
        try:
            self._runner.prepare(ops)
        except (InputError, ServerError) as error:
            return f"a node cannot prepare for training: {str(error).splitlines()[0]}"
        return ""

    def busy(self) -> tuple[str, ...]:
        """What others do on this agent's GPUs."""
        return busy_gpus() if self._measures else ()

    def run(
        self, request: dict[str, Any], peers: Sequence[tuple[str, Any]] = (), address: str = ""
    ) -> dict[str, Any]:
        """Run a probe; its record as JSON, or {"busy": sentence} where a GPU is in use.

        An open probe may answer {"visited": record so far} instead, and is told by `go_on`.

        Args:
            request: as JSON.
            peers: (name, actor) of the other nodes of the lease, in the order of their ranks.
            address: where they reach this node.
        """
        asked = ProbeRequest.from_json(request)
        try:
            busy = self.busy()
        except Exception as error:  # it is the probe's own meter that must tell
            busy = ()
            del error
        if busy:
            return {"busy": "; ".join(busy)}
        runner: Runner = self._runner
        if peers and self._measures:
            others = [RayPeer(actor, name) for name, actor in peers]
            runner = _Leading(self._runner, others, address)
        if not asked.open:
            return run_safely(runner, asked, self._run_dir).to_json()
        meter = self._runner.meter
        self._open[asked.probe_id] = _Dialogue(
            lambda go_on: run_safely(runner, asked, self._run_dir, go_on=go_on), meter
        )
        return self._hear(asked.probe_id)

    def go_on(self, probe_id: str, live: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Visit these too in a launch that is kept up, or none and end it; as `run` answers."""
        self._open[probe_id].answers.put(tuple(Settings(one) for one in live))
        return self._hear(probe_id)

    def _hear(self, probe_id: str) -> dict[str, Any]:
        ended, record = self._open[probe_id].told.get()
        if ended:
            del self._open[probe_id]
            return record.to_json()
        return {"visited": record.to_json()}

    def share(self, name: str, *arguments: Any, **named: Any) -> Any:
        """One call of `workload.peers.Peer`, from the node that leads."""
        return getattr(self._share, name)(*arguments, **named)

    def end_share(self) -> None:
        """The lead is gone: end what was done for it."""
        if self._share is not None:
            self._share.end()

    def pid(self) -> int:
        return os.getpid()

    def memory_bytes(self) -> int:
        """Resident memory of this actor's process."""
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def cancel(self) -> None:
        if self._measures:
            self._runner.cancel()
        for dialogue in list(self._open.values()):
            dialogue.answers.put(())

    def close(self) -> None:
        if self._runner is not None:
            self._runner.close()


class _Dialogue:
    """A probe that runs in a thread of its own and asks what else to visit.

    Attributes:
        told: (whether it has ended, the record so far).
        answers: what else to visit, each time that it has not.
    """

    def __init__(self, run: Callable[[GoOn], ProbeRecord], meter: MeterInfo) -> None:
        self.told: SimpleQueue[tuple[bool, ProbeRecord]] = SimpleQueue()
        self.answers: SimpleQueue[tuple[Settings, ...]] = SimpleQueue()
        self._meter = meter
        threading.Thread(target=lambda: self.told.put((True, run(self._ask))), daemon=True).start()

    def _ask(
        self, request: ProbeRequest, measurements: Sequence[Measurement]
    ) -> tuple[Settings, ...]:
        self.told.put((False, ProbeRecord(request, tuple(measurements), self._meter)))
        try:
            return self.answers.get(timeout=HOLD_S)
        except Empty:
            return ()


class _Leading:
    """A runner whose probes span this node and its peers."""

    def __init__(self, runner: Any, peers: Sequence[RayPeer], address: str) -> None:
        self.meter: MeterInfo = runner.meter
        self._runner, self._peers, self._address = runner, peers, address

    def run(self, request: ProbeRequest) -> ProbeRecord:
        return self._run(request, None)

    def run_open(self, request: ProbeRequest, go_on: GoOn) -> ProbeRecord:
        return self._run(request, go_on)

    def _run(self, request: ProbeRequest, go_on: GoOn | None) -> ProbeRecord:
        from workload.spanning import SpanningProbe

        record: ProbeRecord = self._runner.run_as(
            lambda runner, asked: SpanningProbe(runner, asked, self._peers, self._address),
            request,
            nodes=1 + len(self._peers),
            go_on=go_on,
        )
        return record

    def close(self) -> None:
        """The runner is the agent's to close."""


class RayPeer:
    """`workload.peers.Peer` through the actor of another node."""

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
        except errors.RayActorError as error:
            raise PeerLost(f"{self._name} is gone: its agent ended") from error

    def clock_s(self) -> float:
        return float(self._call("clock_s"))

    def join(self, request: ProbeRequest, nodes: int) -> Joined:
        joined: Joined = self._call("join", request, nodes)
        return joined

    def spawn(self, place: Any) -> None:
        self._call("spawn", place, limit_s=START_S)

    def events(self, timeout_s: float) -> list[Event]:
        events: list[Event] = self._call("events", timeout_s, limit_s=timeout_s + CALL_S)
        return events

    def send(self, line: str) -> None:
        self._call("send", line)

    def read(self) -> Reading:
        reading: Reading = self._call("read")
        return reading

    def boundary(self, *, opens: bool) -> tuple[Reading, float]:
        edge: tuple[Reading, float] = self._call("boundary", opens=opens)
        return edge

    def sample(self) -> PowerSample:
        sample: PowerSample = self._call("sample")
        return sample

    def samples(self, after: int) -> tuple[PowerSample, ...]:
        samples: tuple[PowerSample, ...] = self._call("samples", after)
        return samples

    def apply(self, live: Settings, ranks: int) -> Applied:
        applied: Applied = self._call("apply", live, ranks)
        return applied

    def restore(self) -> None:
        self._call("restore")

    def explain_exit(self, rank: int, code: int) -> Failure:
        failure: Failure = self._call("explain_exit", rank, code)
        return failure

    def log_tail(self) -> str:
        return str(self._call("log_tail"))

    def end(self) -> None:
        self._call("end")
