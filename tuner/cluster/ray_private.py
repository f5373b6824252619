"""Parts of Ray that are not public: no other module touches them.

Two patches keep a Ray that is started here to its owner. They are needless where the least
supported Ray is `TOKENS_BY_DEFAULT`, and a test says so then.
"""

from __future__ import annotations

import contextlib
import importlib
import json
from collections.abc import Iterator
from typing import Any

#: The first release that requires a token unless its user says otherwise, and keeps to the loopback
#: interface: `on_loopback` and `reload_authentication` go when older ones are not supported.
TOKENS_BY_DEFAULT = (2, 61)


def _raylet() -> Any:
    return importlib.import_module("ray._raylet")


def has_tokens() -> bool:
    """Return True if the installed Ray has token authentication."""
    return hasattr(_raylet(), "AuthenticationTokenLoader")


def requires_token() -> bool:
    """Return True if the Ray of this process requires a token."""
    raylet = _raylet()
    return bool(raylet.get_authentication_mode() != raylet.AuthenticationMode.DISABLED)


def reload_authentication() -> None:
    """Make Ray read its authentication mode and token from the environment again.

    Ray reads both when it is imported, which the user's program may have done before.
    """
    raylet = _raylet()
    # In this order: a thread of Ray that still closes its connections could otherwise look for a
    # token that no longer exists, and would end the process.
    raylet.Config.initialize("")
    raylet.AuthenticationTokenLoader.instance().reset_cache()


@contextlib.contextmanager
def on_loopback() -> Iterator[None]:
    """Have a Ray that is started in the context listen on the loopback interface only."""
    from ray._private import ray_constants, services

    before = ray_constants.ENABLE_RAY_CLUSTER, services.start_api_server
    try:
        # Where clusters are off, as on macOS, Ray gives its node the loopback address, and its
        # servers then listen there only; with the address 127.0.0.2 they listen on all.
        ray_constants.ENABLE_RAY_CLUSTER = False
        # Without a dashboard its server has one task: it asks the cloud's metadata service where it
        # runs, even where usage statistics are off (usage_stats_head.py).
        services.start_api_server = lambda *args, **options: ("", None)
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER, services.start_api_server = before


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep errors of Ray's processes off standard output, where `log_to_driver` does not.

    They would stand in the middle of an answer in JSON: the log of a raylet that died.
    """
    from ray._private import worker

    before = worker.print_to_stdstream
    worker.print_to_stdstream = lambda *args, **options: None
    try:
        yield
    finally:
        worker.print_to_stdstream = before


def node_addresses(address: str, timeout_s: float) -> list[str]:
    """Return the addresses of the live nodes of the cluster at an address, without joining it.

    Raises:
        ray.exceptions.AuthenticationError: the head refuses the token of this user.
        ray.exceptions.RpcError: what listens there is no head of a cluster.
    """
    nodes = _raylet().GcsClient(address=address).get_all_node_info(timeout=timeout_s)
    return [node.node_manager_address for node in nodes.values() if node.state == 0]


def autoscaler_report() -> dict[str, Any] | None:
    """Return the report of the first version's autoscaler; None if there is none."""
    from ray.experimental.internal_kv import _internal_kv_get

    text = _internal_kv_get("__autoscaling_status")
    return (json.loads(text).get("autoscaler_report") or {}) if text else None
