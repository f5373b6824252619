"""Nodes that the autoscaler of a Ray cluster starts for a study and keeps until its end."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from tuner.cluster.head import Head
from tuner.cluster.ray_private import autoscaler_report

#: An autoscaler that can start nodes announces them within the first time (it looks every few
#: seconds); they join within the second.
_SIGN_S, _START_S, _POLL_S = 20.0, 900.0, 1.0


class NodeDemand:
    """Demand for nodes with some devices, which Ray's autoscaler meets if the cluster has one.

    Ray keeps one such demand for a cluster, also while no probe runs, so nodes are not taken away
    between probes.
    """

    def __init__(
        self,
        ray: Any,
        head: Head,
        devices: Mapping[str, float],
        nodes: int,
        announce: Callable[[str], None],
    ) -> None:
        """Make the demand of nodes with these devices each, by Ray's name of the resource."""
        self._ray, self._head, self._announce = ray, head, announce
        self._bundle, self._nodes = dict(devices), nodes
        self._made = False

    def meet(self) -> None:
        """Demand the nodes that are missing, and wait for them as long as they are being started.

        Without an autoscaler, or if it has no such nodes, the demand is withdrawn soon.
        """
        before = here = self._count()
        if here >= self._nodes:
            return
        self._request([self._bundle] * self._nodes)
        self._made = True
        begin_s, starting = time.monotonic(), False
        while here < self._nodes:
            waited_s = time.monotonic() - begin_s
            if waited_s > (_START_S if starting else _SIGN_S):
                break
            time.sleep(_POLL_S)
            if not self._head.responds():
                continue
            here = self._count()
            if not starting and (here > before or self._is_starting()):
                starting = True
                self._announce(
                    f"the Ray cluster starts nodes: {here} of {self._nodes} are there; waiting up "
                    f"to {_START_S / 60:.0f} minutes for the others"
                )
        if not starting:
            self.withdraw()
        elif here < self._nodes:
            self._announce(
                f"{here} of {self._nodes} nodes are there after {_START_S / 60:.0f} minutes"
            )

    def withdraw(self) -> None:
        """End the demand, so that the cluster may stop the nodes."""
        if self._made and not self._head.silent_s():
            self._made = False
            self._request([])

    def _count(self) -> int:
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        return sum(
            all(has.get(name, 0) >= amount for name, amount in self._bundle.items())
            for has in nodes
        )

    def _request(self, bundles: list[dict[str, float]]) -> None:
        from ray.autoscaler.sdk import request_resources

        request_resources(bundles=bundles)

    def _is_starting(self) -> bool:
        # What `ray status` shows; autoscalers of both versions exist.
        from ray.autoscaler.v2.sdk import get_cluster_status

        if (report := autoscaler_report()) is not None:
            return bool(report.get("pending_launches") or report.get("pending_nodes"))
        try:
            status = get_cluster_status(self._ray.get_runtime_context().gcs_address)
        except Exception:  # no autoscaler has reported, which Ray tells by errors of many kinds
            return False
        return bool(status.pending_launches or status.pending_nodes)
