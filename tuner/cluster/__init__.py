"""Extra: Ray, and probes on several nodes as one."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any

from tuner.executors.base import Executor, ExecutorKind, Opening
from tuner.search_spaces.cluster import Cluster
from tuner.search_spaces.errors import InputError
from tuner.workload.node.platforms import detect_cluster

if TYPE_CHECKING:
    from tuner.cluster.joining import Survey


class Ray(ExecutorKind):
    """Executor on a Ray of its own on this machine, or on a cluster that is joined."""

    PROTOCOL = 1

    def is_default(self, cluster: Cluster, address: str | None) -> bool:
        """Return True if probes run on several nodes or beside each other on parts of this one.

        Otherwise one runs after the other, since a node's energy and cores belong to one probe.
        """
        ray = sys.modules.get("ray")
        joined = ray is not None and ray.is_initialized()  # by the user's program
        if address is not None or joined or cluster.nodes > 1:
            return True
        if not cluster.device.is_gpu:
            return False
        with contextlib.suppress(InputError):
            here = detect_cluster()
            return here.device.is_gpu and here.devices_per_node > cluster.devices_per_node
        return False

    def phrase(self, cluster: Cluster, address: str | None) -> str:
        return f"Ray, by joining {address}" if address else "a Ray of its own, on loopback only"

    def open(self, opening: Opening) -> Executor:
        from tuner.cluster.executor import RayExecutor

        if opening.node is not None:  # its agents open their own meters
            opening.node.close()
        made = RayExecutor(
            opening.job,
            opening.cluster,
            run_dir=opening.run_dir,
            announce=opening.announce,
            address=opening.address,
        )
        try:
            made.prepare()
        except BaseException:
            made.close()
            raise
        return made

    def survey(self, address: str, **options: Any) -> Survey:
        from tuner.cluster.joining import survey

        return survey(address, **options)


KIND = Ray()
