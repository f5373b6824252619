"""Metrics of a search in its Ray cluster, for the dashboards that the cluster has."""

from __future__ import annotations

GAUGES = {
    "joulefront_probes": "Probes that are measured now.",
    "joulefront_nodes": "Nodes that these probes have.",
    "joulefront_power_watts": "Power of these probes in their latest windows, watts.",
}


class Gauges:
    """Gauges of one run, by `ray.util.metrics`; Ray exports them every few seconds."""

    def __init__(self, run: str) -> None:
        from ray.util.metrics import Gauge

        self._gauges = {
            name: Gauge(name, description=text, tag_keys=("run",)).set_default_tags({"run": run})
            for name, text in GAUGES.items()
        }

    def set(self, probes: int, nodes: int, power_W: float) -> None:
        """Set them."""
        for gauge, value in zip(self._gauges.values(), (probes, nodes, power_W), strict=True):
            gauge.set(value)
