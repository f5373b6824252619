"""Joining a Ray cluster, the agents on its nodes, and a survey of them.

Nodes are grouped by the kind of their devices, because a front never mixes two kinds: the survey
takes the requested kind, or else the one with the most devices, and lists what it left out. Each
node is inspected by an agent on it (`tuner.workload.node.facts`); those that cannot be used are
listed with a sentence each.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import secrets
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from tuner.cluster.agent import Agent, NodeStatus, unusable
from tuner.cluster.head import Head, NodeDemand, address_of, check_address, require_node_here
from tuner.cluster.peer import PeerLost
from tuner.cluster.ray_private import has_tokens, quiet, reload_authentication
from tuner.cluster.security import (
    PACKAGES_FOLDER,
    exposures,
    foreign_package,
    import_folder,
    private_folder,
    starting,
    strip_token,
)
from tuner.executors.base import ExecutorUnavailable
from tuner.formatting import counted
from tuner.search_spaces.cluster import Cluster
from tuner.search_spaces.errors import InputError, UnknownName
from tuner.search_spaces.plugins import install_command
from tuner.workload.node.clocks.base import GovernorError
from tuner.workload.node.facts import NodeFacts
from tuner.workload.node.meters.base import variables

#: A node that has not answered by then (worker start, imports) is left out.
POLL_S = 120.0
#: Most characters of a sentence of Ray's that are shown.
_LONGEST = 300


def import_ray() -> Any:
    """Return the package; ExecutorUnavailable if it is missing, or too old to require a token."""
    try:
        import ray
    except ImportError:
        raise ExecutorUnavailable("Ray is not installed", install_command("ray")) from None
    if not has_tokens():
        why = (
            f"Ray {ray.__version__} has no token authentication, so other users could run code "
            "through it"
        )
        raise ExecutorUnavailable(why, "install ray>=2.52")
    return ray


@dataclass(frozen=True)
class JoinedRay:
    """A connection; `leave` ends it, and stops a cluster that was started here."""

    started: bool
    leave: Callable[[], None]
    head: Head


def join_ray(address: str | None, *, cpus: int | None = None) -> JoinedRay:
    """Join the Ray at an address, or start a private one on this machine.

    A connection that the user's program made before is used as it is.
    """
    ray = import_ray()
    if ray.is_initialized():
        return JoinedRay(False, lambda: None, _head_of(ray))
    if address is not None and (address := address_of(address)) != "auto":
        check_address(address)
        require_node_here(address)
    # Without an address Ray would join one that another user runs on this machine.
    options: dict[str, Any] = {"address": address or "local"}
    if address is None and cpus is not None:
        options["num_cpus"] = cpus
    with contextlib.ExitStack() as leaving, contextlib.ExitStack() as connecting:
        if address is None:
            folder = leaving.enter_context(private_folder()).path
        else:
            connecting.enter_context(contextlib.chdir(import_folder()))
        try:
            if address is None:
                options |= connecting.enter_context(starting(folder))
                leaving.callback(reload_authentication)
            leaving.enter_context(quiet())
            leaving.callback(ray.shutdown)
            connecting.enter_context(_sigterm_of_python())
            ray.init(log_to_driver=False, logging_level=logging.ERROR, **options)
        # Ray raises a bare Exception where a busy machine starts it too slowly, and another release
        # of Ray may lack an attribute that its privacy needs.
        except Exception as error:
            words = str(error).strip() or repr(error)
            if address is None:
                first = words.splitlines()[0].rstrip(".")
                why = f"Ray {ray.__version__} cannot be started: {first}"
                raise ExecutorUnavailable(why, "try again") from error
            # A mismatch of versions takes several lines.
            words = " ".join(words.split())[:_LONGEST]
            raise InputError(f"the Ray cluster at {address!r} cannot be joined: {words}") from error
        leave = leaving.pop_all().close
        # A program that ends without it must stop Ray before its folder is removed, or Ray would
        # make the folder again.
        atexit.register(leave)
        return JoinedRay(address is None, leave, _head_of(ray))
    raise AssertionError("unreachable")


@contextlib.contextmanager
def _sigterm_of_python() -> Iterator[None]:
    """Have Python handle SIGTERM after the context, as before it or by Ray's function.

    Ray installs a handler in C++, which prints a stack and may abort the process. Before that, one
    of its own exits without a word: where the program had a handler, that is an interrupt.
    """
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    except SystemExit as error:
        if error.code == signal.SIGTERM and callable(before):
            raise KeyboardInterrupt from error
        raise
    finally:
        handler = signal.getsignal(signal.SIGTERM) if before == signal.SIG_DFL else before
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and handler is not None:
            signal.signal(signal.SIGTERM, handler)


def _head_of(ray: Any) -> Head:
    here = ray.get_runtime_context().get_node_id()
    (own,) = (node for node in ray.nodes() if node["NodeID"] == here)
    raylet = f"{own['NodeManagerAddress']}:{own['NodeManagerPort']}"
    return Head(lambda: ray.get_runtime_context().gcs_address, raylet=raylet)


#: A call that only reads or sets takes milliseconds; one that starts ranks may build an op.
CALL_S, START_S = 30.0, 900.0


class NodeAgent(Agent):
    """Agent that is a Ray actor, and reports how others can enter its cluster.

    The packages of joulefront must be imported from `packages`, if that is given.
    """

    def __init__(self, run_dir: str, packages: str | None = None) -> None:
        super().__init__(run_dir)
        self._packages = packages

    def inspect(self) -> NodeStatus:
        trouble = foreign_package(self._packages)
        return replace(unusable(trouble) if trouble else super().inspect(), exposures=exposures())

    def enter(self, *arguments: Any, **named: Any) -> NodeStatus:
        exposed = exposures()
        strip_token()
        if trouble := foreign_package(self._packages):
            return unusable(trouble)
        return replace(super().enter(*arguments, **named), exposures=exposed)

    def run(
        self, request: dict[str, Any], peers: Sequence[Any] = (), address: str = ""
    ) -> dict[str, Any]:
        others: list[Any] = [RayPeer(actor, name) for name, actor in peers]
        return super().run(request, others, address)

    def pid(self) -> int:
        return os.getpid()


def actor_is_gone(ray: Any) -> tuple[type[Exception], ...]:
    """Return the errors by which Ray reports that an actor ended or cannot be reached.

    An actor that Ray's memory monitor ended is reported as OutOfMemoryError, which is no
    RayActorError, by every later call, too.
    """
    return ray.exceptions.RayActorError, ray.exceptions.OutOfMemoryError


class RayPeer:
    """Peer (`tuner.cluster.peer.Peer`) through the actor of another node."""

    def __init__(self, actor: Any, name: str) -> None:
        import ray

        self._ray, self._actor, self._name = ray, actor, name

    def __getattr__(self, name: str) -> Any:
        """Return the call of this name; each is one of the protocol's."""
        if name.startswith("_"):
            raise AttributeError(name)
        return partial(self._call, name)

    def _call(self, name: str, *arguments: Any, **named: Any) -> Any:
        errors, limit_s = self._ray.exceptions, START_S if name == "spawn" else CALL_S
        if name == "events":  # it waits for the first
            limit_s += arguments[0]
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


def place_agent(node: str, run_dir: str, *, calls: int = 8, local: bool = False) -> Any:
    """Return a new agent actor on one node; if `local`, it must import this process's packages."""
    ray = import_ray()
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    # Without the variables Ray would hide all GPUs from an actor that asks for none.
    agent = ray.remote(NodeAgent).options(
        # Who looks at the cluster sees whose it is; one that died may still have its name.
        name=f"joulefront-{Path(run_dir).name or 'doctor'}-{node[:6]}-{secrets.token_hex(3)}",
        num_cpus=0,
        max_concurrency=calls,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        runtime_env={
            "env_vars": {
                "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
                "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
                **variables(os.environ),
            }
        },
    )
    return agent.remote(run_dir, str(PACKAGES_FOLDER) if local else None)


@dataclass(frozen=True)
class SurveyedNode:
    """Node of the Ray cluster."""

    node: str
    address: str
    facts: NodeFacts
    devices: int

    @property
    def refused(self) -> tuple[str, ...]:
        """The reasons against the node, a sentence each."""
        return self.facts.refusals()


@dataclass(frozen=True)
class Survey:
    """Nodes of a Ray cluster, and those of the chosen kind that can be used, if there are any."""

    nodes: tuple[SurveyedNode, ...]
    cluster: Cluster | None
    exposures: tuple[str, ...] = ()

    @property
    def kinds(self) -> dict[str, int]:
        kinds: dict[str, int] = {}
        for node in self.nodes:
            kinds[node.facts.kind] = kinds.get(node.facts.kind, 0) + node.devices
        return {kind: count for kind, count in kinds.items() if kind}

    def sentences(self) -> list[str]:
        """Return sentences on the nodes in use and on the reason against each other node."""
        used = []
        if self.cluster is not None:
            others = [kind for kind in self.kinds if kind != self.cluster.device.name]
            left = f"; left out: {', '.join(sorted(others))}" if others else ""
            used.append(
                f"{counted(self.cluster.nodes, 'node')} with {self.cluster.devices_per_node} x "
                f"{self.cluster.device.name} can be used{left}"
            )
        return used + [sentence for node in self.nodes for sentence in node.refused]

    def lines(self) -> list[str]:
        """Return the survey as text: a line for each node, then the nodes in use."""
        lines = []
        for node in self.nodes:
            facts = node.facts
            clocks = "clocks may be set" if not facts.why_clocks_fixed else "clocks fixed"
            properties = [
                f"{node.devices} x {facts.kind or 'unknown'}",
                f"driver {facts.driver}, {clocks}" if facts.driver else "no GPU driver",
                f"compiler {facts.programs.get('g++') or 'none'}",
                f"{facts.cores:g} cores",
                f"{facts.free_bytes / 2**30:.1f} of {facts.memory_bytes / 2**30:.1f} GiB free",
            ]
            verdict = "refused" if node.refused else "ready"
            lines.append(
                f"node        {facts.host} ({node.address}): {', '.join(properties)}: {verdict}"
            )
        sentences = [*filter(None, [n.facts.warning() for n in self.nodes if not n.refused])]
        warnings = [f"warning: {sentence}" for sentence in (*sentences, *self.exposures)]
        return [*lines, *self.sentences(), *warnings]

    def to_json(self) -> dict[str, Any]:
        return {
            "nodes": [
                {
                    "node": node.node,
                    "address": node.address,
                    **node.facts.to_json(),
                    "leasable": node.devices,
                    "refused": list(node.refused),
                }
                for node in self.nodes
            ],
            "kinds": self.kinds,
            "exposures": list(self.exposures),
            "cluster": None
            if self.cluster is None
            else {
                "device": self.cluster.device.name,
                "devices_per_node": self.cluster.devices_per_node,
                "nodes": self.cluster.nodes,
                "clock_control": self.cluster.clock_control,
            },
        }


def survey(
    address: str,
    *,
    device_kind: str | None = None,
    starts: bool = False,
    announce: Callable[[str], None] = lambda sentence: None,
) -> Survey:
    """Inspect every node of a Ray cluster, and choose the kind with the most devices, GPUs first.

    With `starts`, a cluster none of whose nodes has devices is asked to start one with a GPU, if
    it scales.

    InputError if no Ray answers, UnknownName if no node has devices of that kind.
    """
    link = join_ray(address)
    ray = import_ray()
    exposed = dict.fromkeys(exposures())
    demand = NodeDemand(ray, link.head, {"GPU": 1.0}, 1, announce)
    try:
        if starts and not _has_devices(ray):
            demand.meet()
        alive = [node for node in ray.nodes() if node["Alive"]]
        announce(f"looking at the Ray cluster: {counted(len(alive), 'node')}")
        agents = {node["NodeID"]: place_agent(node["NodeID"], ".") for node in alive}
        statuses = {name: agent.inspect.remote() for name, agent in agents.items()}
        ready, _ = ray.wait(list(statuses.values()), num_returns=len(statuses), timeout=POLL_S)
        nodes = []
        for node in alive:
            name = node["NodeID"]
            facts = NodeFacts(node["NodeManagerHostname"], None, "it does not answer")
            if statuses[name] in ready:
                try:
                    entered = ray.get(statuses[name])
                    facts = entered.facts
                    exposed |= dict.fromkeys(entered.exposures)
                except ray.exceptions.RayError as error:
                    trouble = f"it cannot be looked at: {str(error).strip().splitlines()[-1]}"
                    facts = NodeFacts(node["NodeManagerHostname"], None, trouble)
            here = facts.cluster
            devices = min(_leasable(node, here), here.devices_per_node) if here else 0
            nodes.append(SurveyedNode(name, node["NodeManagerAddress"], facts, devices))
        for agent in agents.values():
            ray.kill(agent)
    finally:
        demand.withdraw()  # the study's own probes keep the node
        link.leave()
    return replace(_choose_kind(tuple(nodes), device_kind), exposures=tuple(exposed))


def _has_devices(ray: Any) -> bool:
    alive = (node["Resources"] for node in ray.nodes() if node["Alive"])
    return any(has.get(name, 0) > 0 for has in alive for name in ("CPU", "GPU"))


def resource_of(cluster: Cluster) -> str:
    """Return Ray's name of the resource that a cluster's devices are."""
    return "GPU" if cluster.device.is_gpu else "CPU"


def _leasable(node: dict[str, Any], cluster: Cluster) -> int:
    return int(node["Resources"].get(resource_of(cluster), 0))


def _choose_kind(nodes: tuple[SurveyedNode, ...], device_kind: str | None) -> Survey:
    kinds = {node.facts.kind for node in nodes if node.facts.kind}
    if device_kind is not None and device_kind not in kinds:
        raise UnknownName("device kind of the Ray cluster", device_kind, sorted(kinds))
    usable = [node for node in nodes if not node.refused and node.devices > 0]

    def worth(kind: str) -> tuple[bool, int]:
        members = [node for node in usable if node.facts.kind == kind]
        on_gpus = any(n.facts.cluster and n.facts.cluster.device.is_gpu for n in members)
        return on_gpus, sum(node.devices for node in members)

    kind = device_kind or max(sorted(kinds), key=worth, default="")
    members = [node for node in usable if node.facts.kind == kind]
    if not members:
        return Survey(nodes, None)
    # A study has one size of node: the one that keeps the most devices in use.
    sizes = {node.devices for node in members}
    size = max(sizes, key=lambda n: (n * sum(node.devices >= n for node in members), n))
    enough = [node for node in members if node.devices >= size]
    able = [node for node in enough if node.facts.cluster and node.facts.cluster.clock_control]
    clocks = 2 * len(able) > len(enough)
    counted = able if clocks else enough
    first = counted[0].facts.cluster
    assert first is not None
    cluster = replace(
        first,
        name=f"ray-{kind}",
        devices_per_node=size,
        nodes=len(counted),
        clock_control=clocks,
        sources=(
            *first.sources,
            f"Ray: {len(counted)} nodes of {size} devices; the network between nodes is assumed to "
            "be as fast as the link inside one, because its bandwidth is not known",
        ),
    )
    return Survey(nodes, cluster)
