"""A Ray cluster as a place to measure: joining it, and what its nodes are.

Nodes are grouped by the kind of their devices, because a front never mixes two kinds: the survey
takes the kind that was asked for, or else the one with the most devices, and says what it left out.
Each node is looked at by a task of our own on it (`workload.preflight`); those that cannot be used
are listed with a sentence each.
"""

from __future__ import annotations

import logging
import os
import socket
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from search_spaces.cluster import Cluster
from search_spaces.errors import InputError, UnknownName
from tuner.ray_agent import NodeAgent
from workload.preflight import NodeFacts

__all__ = ["Survey", "SurveyedNode", "import_ray", "join_ray", "place_agent", "survey"]

#: A node that has not answered by then (a worker's start, our imports) is left out.
LOOK_S = 120.0
#: A head node accepts a connection by then.
CONNECT_S = 10.0


def import_ray() -> Any:
    """The ray package.

    Raises:
        InputError: it is not installed.
    """
    try:
        import ray
    except ImportError:
        raise InputError(
            "Ray is not installed; install joulefront[ray], or run with --executor inline"
        ) from None
    return ray


def join_ray(address: str | None, *, cpus: int | None = None) -> bool:
    """Join the Ray at an address, quietly, or start one here; False where it was joined already.

    Args:
        address: "auto", HOST:PORT, or None to start one.
        cpus: how many cores a Ray that is started here offers.

    Raises:
        InputError: no Ray answers there.
    """
    ray = import_ray()
    if ray.is_initialized():
        return False
    if address not in (None, "auto"):
        _check_address(address)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray nices its workers, and ranks inherit it: a measurement would yield to every other
    # process of the machine. A Ray that we only join keeps its own setting.
    os.environ.setdefault("RAY_worker_niceness", "0")
    options: dict[str, Any] = {"include_dashboard": False} if address is None else {}
    if address is None and cpus is not None:
        options["num_cpus"] = cpus
    try:
        # Without an address Ray would join one that somebody else runs on this machine.
        ray.init(
            address=address or "local",
            log_to_driver=False,
            logging_level=logging.ERROR,
            **options,
        )
    except (ConnectionError, ValueError, RuntimeError, OSError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise InputError(
            f"no Ray cluster answers at {address!r}: {first} (where it asks for a token, as newer "
            "Rays do, set RAY_AUTH_MODE=token and have it in ~/.ray/auth_token)"
        ) from error
    return True


def _check_address(address: str) -> None:
    """Refuse at once what Ray would try for two minutes.

    Raises:
        InputError: it is no HOST:PORT, or nobody listens there.
    """
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdigit() or not 0 < int(port) < 65536:
        raise InputError(
            f"{address!r} is no address of a Ray cluster; it must be auto, or HOST:PORT of its "
            "head node (6379 where nobody chose another port)"
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
    except OSError as error:
        raise InputError(f"no Ray cluster answers at {address!r}: {error}") from error


def place_agent(node: str, run_dir: str, *, calls: int = 8) -> Any:
    """An agent actor on one node. It holds no resources: the lease of each probe does.

    Args:
        node: Ray's id of it.
        run_dir: its run folder.
        calls: how many calls it serves at once.
    """
    ray = import_ray()
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    # Without the variables Ray would hide all GPUs from an actor that asks for none.
    agent = ray.remote(NodeAgent).options(
        num_cpus=0,
        max_concurrency=calls,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        runtime_env={
            "env_vars": {
                "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
                "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
            }
        },
    )
    return agent.remote(run_dir)


@dataclass(frozen=True)
class SurveyedNode:
    """One node of the Ray cluster.

    Attributes:
        node: Ray's id of it.
        address: its IP address.
        facts: what it is.
        devices: of its devices, how many Ray may lease.
        refused: why it is not used, a sentence each.
    """

    node: str
    address: str
    facts: NodeFacts
    devices: int
    refused: tuple[str, ...] = ()


@dataclass(frozen=True)
class Survey:
    """What a Ray cluster offers.

    Attributes:
        nodes: all that are alive.
        cluster: those of the chosen kind that can be used; None where there are none.
    """

    nodes: tuple[SurveyedNode, ...]
    cluster: Cluster | None

    @property
    def kinds(self) -> dict[str, int]:
        """Devices of each kind."""
        kinds: Counter[str] = Counter()
        for node in self.nodes:
            if node.facts.kind:
                kinds[node.facts.kind] += node.devices
        return dict(kinds)

    def sentences(self) -> list[str]:
        """What is used and what is not, and why."""
        said = []
        if self.cluster is not None:
            others = [kind for kind in self.kinds if kind != self.cluster.device.name]
            left = f"; left out: {', '.join(sorted(others))}" if others else ""
            said.append(
                f"{self.cluster.nodes} nodes with {self.cluster.devices_per_node} x "
                f"{self.cluster.device.name} can be used{left}"
            )
        return said + [sentence for node in self.nodes for sentence in node.refused]

    def lines(self) -> list[str]:
        """For people, a node a line, then what is used."""
        lines = []
        for node in self.nodes:
            facts = node.facts
            clocks = "clocks may be set" if not facts.clock_note else "clocks fixed"
            told = [
                f"{node.devices} x {facts.kind or 'unknown'}",
                f"driver {facts.driver}, {clocks}" if facts.driver else "no GPU driver",
                f"compiler {facts.compiler or 'none'}",
                f"{facts.free_bytes / 2**30:.1f} of {facts.memory_bytes / 2**30:.1f} GiB free",
            ]
            verdict = "refused" if node.refused else "ready"
            lines.append(f"node        {facts.host} ({node.address}): {', '.join(told)}: {verdict}")
        return lines + self.sentences()

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
    say: Callable[[str], None] = lambda sentence: None,
) -> Survey:
    """Look at every node of a Ray cluster.

    Args:
        address: "auto" or HOST:PORT.
        device_kind: which kind of device to use; the one with the most devices, GPUs first, when
            not given.
        say: told what takes long.

    Raises:
        InputError: no Ray answers.
        UnknownName: no node has devices of that kind.
    """
    joined = join_ray(address)
    ray = import_ray()
    try:
        alive = [node for node in ray.nodes() if node["Alive"]]
        say(f"looking at the {len(alive)} nodes of the Ray cluster")
        agents = {node["NodeID"]: place_agent(node["NodeID"], ".") for node in alive}
        looks = {name: agent.look.remote() for name, agent in agents.items()}
        ready, _ = ray.wait(list(looks.values()), num_returns=len(looks), timeout=LOOK_S)
        nodes = []
        for node in alive:
            name = node["NodeID"]
            facts = NodeFacts(node["NodeManagerHostname"], None, "it does not answer")
            if looks[name] in ready:
                try:
                    facts = ray.get(looks[name])
                except ray.exceptions.RayError as error:
                    trouble = f"it cannot be looked at: {str(error).strip().splitlines()[-1]}"
                    facts = NodeFacts(node["NodeManagerHostname"], None, trouble)
            devices = (
                min(leasable(node, facts), facts.cluster.devices_per_node) if (facts.cluster) else 0
            )
            nodes.append(
                SurveyedNode(name, node["NodeManagerAddress"], facts, devices, facts.refusals())
            )
        for agent in agents.values():
            ray.kill(agent)
    finally:
        if joined:
            ray.shutdown()
    return _chosen(tuple(nodes), device_kind)


def leasable(node: dict[str, Any], facts: NodeFacts) -> int:
    """Devices of a node that Ray may lease."""
    on_gpus = facts.cluster is not None and facts.cluster.device.type == "cuda"
    return int(node["Resources"].get("GPU" if on_gpus else "CPU", 0))


def _chosen(nodes: tuple[SurveyedNode, ...], device_kind: str | None) -> Survey:
    """The survey with its kind chosen."""
    kinds = {node.facts.kind for node in nodes if node.facts.kind}
    if device_kind is not None and device_kind not in kinds:
        raise UnknownName("device kind of the Ray cluster", device_kind, sorted(kinds))
    usable = [node for node in nodes if not node.refused and node.devices > 0]

    def worth(kind: str) -> tuple[bool, int]:
        mine = [node for node in usable if node.facts.kind == kind]
        on_gpus = any(n.facts.cluster and n.facts.cluster.device.type == "cuda" for n in mine)
        return on_gpus, sum(node.devices for node in mine)

    kind = device_kind or max(sorted(kinds), key=worth, default="")
    mine = [node for node in usable if node.facts.kind == kind]
    if not mine:
        return Survey(nodes, None)
    # A study has one size of node: the one that keeps the most devices in use.
    sizes = {node.devices for node in mine}
    size = max(sizes, key=lambda n: (n * sum(node.devices >= n for node in mine), n))
    enough = [node for node in mine if node.devices >= size]
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
            f"Ray: {len(counted)} nodes of {size} devices; the network between nodes is taken to "
            "be as fast as the link inside one, for nobody told it",
        ),
    )
    return Survey(nodes, cluster)
