"""Holders of the devices of nodes of a Ray cluster, by Ray's records."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

#: Limit on the call of Ray's state API, which only clusters with ray[default] have.
_STATE_S = 5


def holders(nodes: Collection[str], resource: str, own: Collection[str]) -> list[str]:
    """Return a phrase for each placement group and actor that holds devices on one of some nodes.

    Args:
        nodes: Ray's ids of nodes.
        resource: Ray's name of the devices.
        own: ids of placement groups that do not count.
    """
    groups = {f"placement group {name}" for name in _groups(nodes, resource, own)}
    return [*sorted(groups), *sorted(set(_actors(nodes, resource)))]


def _groups(nodes: Collection[str], resource: str, own: Collection[str]) -> Iterator[str]:
    from ray.util import placement_group_table

    for key, group in placement_group_table().items():
        where = group["bundles_to_node_id"]
        requests = (where[n] in nodes and resource in b for n, b in group["bundles"].items())
        if group["state"] == "CREATED" and key not in own and any(requests):
            yield repr(group["name"]) if group["name"] else key[:12]


def _actors(nodes: Collection[str], resource: str) -> Iterator[str]:
    from ray.util.state import list_actors
    from ray.util.state.exception import RayStateApiException

    try:
        listed: list[Any] = list_actors(
            filters=[("state", "=", "ALIVE")], detail=True, timeout=_STATE_S
        )
    except (RayStateApiException, OSError, ValueError):  # the head has no ray[default]
        return
    for actor in listed:
        requests = resource in (actor.required_resources or {})
        if requests and actor.node_id in nodes and not actor.placement_group_id:
            named = f" {actor.name!r}" if actor.name else ""
            yield f"actor {actor.class_name}{named} of Ray job {actor.job_id}"
