"""Leases of devices on the nodes of a Ray cluster: placement groups, one for each probe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tuner.executors.ray_head import Head
from tuner.executors.ray_nodes import Slot


class Leases:
    """Placement groups that are taken and given back; the latter waits while the head is silent."""

    def __init__(self, ray: Any, head: Head, resource: str) -> None:
        self._ray, self._head, self._resource = ray, head, resource
        self._given_back: list[Any] = []

    def take(self, name: str, slots: Sequence[Slot]) -> Any:
        """Return a lease of the devices of some slots, which may be granted later."""
        from ray.util.placement_group import placement_group

        return placement_group(
            [{self._resource: slot.amount} for slot in slots],
            name=name,
            strategy="STRICT_SPREAD" if len(slots) > 1 else "STRICT_PACK",
            bundle_label_selector=[{"ray.io/node-id": slot.node} for slot in slots],
        )

    def give_back(self, *leases: Any) -> None:
        """Give leases back, and those that could not be before."""
        self._given_back += leases
        while self._given_back and not self._head.silent_s():
            self._ray.util.remove_placement_group(self._given_back.pop())
