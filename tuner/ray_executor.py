"""Probes on a Ray cluster: one agent actor a node, one placement group a probe.

The agents live as long as the study, so the frameworks are imported once a node; a probe leases its
node through a placement group over all of the node's devices, because the energy of a node shared
with another probe belongs to neither. A probe that outlives its limit is cancelled; an agent that
does not answer is killed, and everything it started dies with it.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from search_spaces.cluster import Cluster
from search_spaces.errors import InputError
from search_spaces.job import TrainingJob
from tuner.executors import run_safely
from workload.probe import Failure, FailureKind, MeterInfo, ProbeRecord, ProbeRequest

__all__ = ["RayExecutor"]

#: What an agent may take beyond the probe's own limit (reading meters, writing files) before it is
#: told to cancel, and then before it is killed.
_GRACE_S = 20.0
_CANCEL_S = 10.0
_LEASE_S = 60.0


@dataclass
class _Flight:
    """One probe on its way."""

    request: ProbeRequest
    node: str
    lease: Any
    deadline_s: float
    cancelled: bool = False


class RayExecutor:
    """Runs probes on every node of a Ray cluster that has the cluster's devices.

    Args:
        job: what is trained.
        cluster: the kind of node; `devices_per_node` devices are leased a probe.
        run_dir: where logs and power samples go (on the agent's node).
        address: "auto" joins a running Ray, an address joins that one, None starts one here.
        say: told what takes long, a sentence each.

    Raises:
        InputError: Ray is not installed, does not answer, or has no node with the devices.
    """

    def __init__(
        self,
        job: TrainingJob,
        cluster: Cluster,
        *,
        run_dir: str | Path,
        address: str | None = None,
        say: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        try:
            import ray
        except ImportError:
            raise InputError(
                "Ray is not installed; install joulefront[ray], or run with --executor inline"
            ) from None
        self._ray = ray
        self._job, self._cluster = job, cluster
        self._run_dir = Path(run_dir).resolve()
        self._say = say
        self._ours = not ray.is_initialized()
        if self._ours:
            say("starting Ray" if address is None else f"joining Ray at {address}")
            self._connect(address)
        self._resource = "GPU" if cluster.device.type == "cuda" else "CPU"
        self._agents: dict[str, Any] = {}
        self._flights: dict[Any, _Flight] = {}
        self._done: deque[ProbeRecord] = deque()
        self._ops: tuple[str, ...] = ()
        self._find_nodes()
        if not self._agents:
            self.close()
            raise InputError(
                f"no node of the Ray cluster has {cluster.devices_per_node} {self._resource}s, "
                f"which cluster {cluster.name!r} asks of each"
            )
        self.meter: MeterInfo = ray.get(next(iter(self._agents.values())).meter.remote())

    # ---- the protocol

    @property
    def capacity(self) -> int:
        return max(1, len(self._agents))

    @property
    def in_flight(self) -> int:
        return len(self._flights) + len(self._done)

    def prepare(self, ops: Sequence[str] = ()) -> None:
        """Import the frameworks and load DeepSpeed ops on every node.

        Raises:
            InputError: a node lacks a framework or cannot build an op.
        """
        self._ops = tuple(ops)
        what = "".join(f" and loading {op}" for op in ops)
        self._say(
            f"importing torch, deepspeed and transformers{what}, once for all probes (an op is "
            "compiled once a machine, up to a minute)"
        )
        for sentence in self._ray.get([a.prepare.remote(self._ops) for a in self._agents.values()]):
            if sentence:
                raise InputError(sentence)

    def submit(self, request: ProbeRequest) -> None:
        from ray.util import placement_group_table

        lease = self._lease()
        if not lease.wait(timeout_seconds=_LEASE_S):
            self._ray.util.remove_placement_group(lease)
            sentence = f"no node came free within {_LEASE_S:.0f} s"
            self._done.append(self._failed(request, "crash", sentence))
            return
        node = placement_group_table(lease)["bundles_to_node_id"][0]
        if node not in self._agents:
            self._agents[node] = self._start_agent(node)
        result = self._agents[node].run.remote(request.to_json())
        deadline_s = time.monotonic() + request.time_limit_s + _GRACE_S
        self._flights[result] = _Flight(request, node, lease, deadline_s)

    def wait(self, timeout_s: float | None = None) -> ProbeRecord | None:
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._done:
            if not self._flights:
                return None
            # Short waits, so that limits are kept and Ctrl-C is heard.
            ready, _ = self._ray.wait(list(self._flights), num_returns=1, timeout=0.5)
            for result in ready:
                self._done.append(self._land(result))
            self._keep_limits()
            if not self._done and until is not None and time.monotonic() >= until:
                return None
        return self._done.popleft()

    def now_s(self) -> float:
        return time.monotonic()

    def close(self) -> None:
        """Kill what is in flight; stop Ray where this executor started it."""
        ray = self._ray
        if not ray.is_initialized():
            return
        for flight in self._flights.values():
            ray.util.remove_placement_group(flight.lease)
        self._flights.clear()
        closing = [agent.close.remote() for agent in self._agents.values()]
        if closing:
            ray.wait(closing, num_returns=len(closing), timeout=10)
        for agent in self._agents.values():
            ray.kill(agent)
        self._agents.clear()
        if self._ours:
            ray.shutdown()

    # ---- nodes, leases, agents

    def _connect(self, address: str | None) -> None:
        """Join or start Ray, quietly.

        Raises:
            InputError: no Ray answers at the address.
        """
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # Ray nices its workers, and ranks inherit it: a measurement would yield to every other
        # process of the machine. A Ray that we only join keeps its own setting.
        os.environ.setdefault("RAY_worker_niceness", "0")
        cpus = self._cluster.devices_per_node if self._cluster.device.type == "cpu" else None
        options: dict[str, Any] = {"include_dashboard": False} if address is None else {}
        if address is None and cpus is not None:
            options["num_cpus"] = cpus
        try:
            self._ray.init(
                address=address, log_to_driver=False, logging_level=logging.ERROR, **options
            )
        except (ConnectionError, ValueError, RuntimeError, OSError) as error:
            first = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
            raise InputError(f"no Ray cluster answers at {address!r}: {first}") from error

    def _find_nodes(self) -> None:
        for node in self._ray.nodes():
            offers = node["Resources"].get(self._resource, 0)
            if node["Alive"] and offers >= self._cluster.devices_per_node:
                self._agents[node["NodeID"]] = self._start_agent(node["NodeID"])

    def _start_agent(self, node: str) -> Any:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        # No resources of its own: the placement group of each probe holds them. Without the
        # variables Ray would hide all GPUs from an actor that asks for none.
        agent = self._ray.remote(_NodeAgent).options(
            num_cpus=0,
            max_concurrency=4,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
            runtime_env={
                "env_vars": {
                    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
                    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
                }
            },
        )
        return agent.remote(self._job, self._cluster, str(self._run_dir))

    def _lease(self) -> Any:
        """A placement group over all devices of one node."""
        from ray.util.placement_group import placement_group

        bundle = {self._resource: float(self._cluster.devices_per_node)}
        return placement_group([bundle], strategy="STRICT_PACK")

    def _land(self, result: Any) -> ProbeRecord:
        """The record of a finished probe. A dead agent's probe failed; the agent is replaced."""
        flight = self._flights.pop(result)
        try:
            return ProbeRecord.from_json(self._ray.get(result))
        except self._ray.exceptions.RayActorError as error:
            kind: FailureKind = "time_limit" if flight.cancelled else "crash"
            sentence = f"the node agent died: {str(error).strip().splitlines()[0]}"
            self._replace_agent(flight.node)
            return self._failed(flight.request, kind, sentence)
        except self._ray.exceptions.RayError as error:
            sentence = f"the agent failed: {type(error).__name__}"
            return self._failed(flight.request, "crash", sentence, str(error))
        finally:
            self._ray.util.remove_placement_group(flight.lease)

    def _replace_agent(self, node: str) -> None:
        self._agents.pop(node, None)
        alive = {n["NodeID"] for n in self._ray.nodes() if n["Alive"]}
        if node in alive:
            self._agents[node] = self._start_agent(node)

    def _keep_limits(self) -> None:
        now = time.monotonic()
        for flight in self._flights.values():
            agent = self._agents.get(flight.node)
            if agent is None or now < flight.deadline_s:
                continue
            if not flight.cancelled:
                flight.cancelled = True
                flight.deadline_s = now + _CANCEL_S
                agent.cancel.remote()
            else:
                self._ray.kill(agent)  # its ranks and fork server die with it
                flight.deadline_s = now + _CANCEL_S

    def _failed(
        self, request: ProbeRequest, kind: FailureKind, sentence: str, log: str = ""
    ) -> ProbeRecord:
        return ProbeRecord(request, (), self.meter, Failure(kind, sentence, log))


class _NodeAgent:
    """The actor: a `LocalRunner` behind Ray's calls. Records travel as plain JSON types."""

    def __init__(self, job: TrainingJob, cluster: Cluster, run_dir: str) -> None:
        from workload.agent import LocalRunner

        self._runner = LocalRunner(job, cluster, run_dir=run_dir)

    def meter(self) -> MeterInfo:
        return self._runner.meter

    def prepare(self, ops: Sequence[str]) -> str:
        """Empty, or one sentence on what this node lacks."""
        from workload.ranks import ServerError

        try:
            self._runner.prepare(ops)
        except (InputError, ServerError) as error:
            return f"a node cannot prepare for training: {str(error).splitlines()[0]}"
        return ""

    def run(self, request: dict[str, Any]) -> dict[str, Any]:
        return run_safely(self._runner, ProbeRequest.from_json(request)).to_json()

    def pid(self) -> int:
        return os.getpid()

    def cancel(self) -> None:
        self._runner.cancel()

    def close(self) -> None:
        self._runner.close()
