"""The head of a Ray cluster: whether it takes a token, knows this machine, and still answers."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from tuner.cluster.ray_private import autoscaler_report, node_addresses
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.fields import whole_number

#: Limit for connecting to a head node.
CONNECT_S = 10.0
#: A node that has just been started gets this long to be one of the cluster's.
_NODE_S = 10.0
#: The head gets this long when it is asked whether it is there.
_REPLY_S = 3.0
#: A call is looked after this often, and an interrupted one gets this long to end.
_POLL_S, _END_S = 1.0, 10.0
#: Ray ends a process by itself whose head has not answered for 60 s.
GONE_S = 30.0

_TOKEN = "set RAY_AUTH_MODE=token, and have the cluster's token in ~/.ray/auth_token"


def address_of(named: str) -> str:
    """Return the address that a user's word means: that of RAY_ADDRESS for "auto", if it is set."""
    return os.environ.get("RAY_ADDRESS") or named if named == "auto" else named


def check_address(address: str) -> None:
    """Raise InputError for an invalid address, or one without a listener."""
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not 0 < (whole_number(port) or 0) < 65536:
        raise InputError(
            f"{address!r} is not an address of a Ray cluster; it must be auto, or HOST:PORT of its "
            "head node (6379 unless another port was chosen)"
        )
    try:
        _connect(address, CONNECT_S)
    except OSError as error:
        raise InputError(f"no Ray cluster answers at {address!r}: {error}") from error


def require_node_here(address: str) -> None:
    """Raise InputError unless the head accepts this user's token and this machine is one of its
    nodes.

    A driver of Ray needs a node's processes on its own machine. Without this question Ray would
    wait for them for a minute, and blame the connection.
    """
    import ray

    refused = getattr(ray.exceptions, "AuthenticationError", ())
    until_s = time.monotonic() + _NODE_S
    while True:
        try:
            alive = node_addresses(address, CONNECT_S)
        except refused as error:
            raise InputError(
                f"the Ray cluster at {address!r} refuses the token of this user; {_TOKEN}"
            ) from error
        except ray.exceptions.RpcError as error:
            raise InputError(
                f"what listens at {address!r} is not the head of a Ray cluster; give its HOST:PORT "
                "(6379 unless another port was chosen)"
            ) from error
        if any(map(_is_here, alive)):
            return
        if time.monotonic() > until_s:
            raise InputError(
                f"this machine is not a node of the Ray cluster at {address!r}, which Ray asks of "
                f"the machine where tuner runs; start one here with 'ray start --address={address} "
                "--num-cpus=0 --num-gpus=0'"
            )
        time.sleep(0.5)


def _is_here(address: str) -> bool:
    # Only an address of this machine can be bound to.
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as own:
        try:
            own.bind((address, 0))
        except OSError:
            return False
    return True


def _connect(address: str, timeout_s: float) -> None:
    host, _, port = address.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s).close()


class Head:
    """The head that a connection has, and Ray's process on this machine (its raylet).

    While the head does not answer, each of Ray's calls that need it would wait for a minute and
    then end the process, so it is asked before them. A connection does not outlive its raylet.
    """

    def __init__(
        self,
        address: Callable[[], str],
        query: Callable[[str, float], None] = _connect,
        raylet: str = "",
    ) -> None:
        self._address, self._query = address, query
        self._replied_s = time.monotonic()
        # A firewall may refuse connections to one that runs, which then says nothing.
        self._raylet = raylet if raylet and not self._refuses(raylet) else ""

    def silent_s(self) -> float:
        """Ask it, and return the seconds since it answered last; 0 if it does now."""
        begin_s = time.monotonic()
        try:
            self._query(self._address(), _REPLY_S)
        except OSError:
            return time.monotonic() - self._replied_s
        self._replied_s = begin_s
        return 0.0

    def _refuses(self, address: str) -> bool:
        try:
            self._query(address, _REPLY_S)
        except OSError as error:  # one that is slow does not refuse
            return isinstance(error, ConnectionRefusedError)
        return False

    @property
    def raylet_ended(self) -> bool:
        """True if the raylet of this machine has ended."""
        return bool(self._raylet) and self._refuses(self._raylet)

    def _require_raylet(self) -> None:
        if self.raylet_ended:
            raise InputError(
                "Ray's process on this machine (raylet) has ended; every finished probe is kept, "
                "and the same command continues the search (on a cluster of yours, start Ray here "
                "first)"
            )

    def responds(self) -> bool:
        """Ask it, and return True if it answers.

        InputError if it has not for too long, or the raylet of this machine has ended.
        """
        self._require_raylet()
        silent_s = self.silent_s()
        if silent_s > GONE_S:
            raise InputError(
                f"the head of the Ray cluster has not answered for {GONE_S:.0f} s; every finished "
                "probe is kept, and the same command continues the search once the cluster is back"
            )
        return not silent_s

    def call(self, work: Callable[[], None]) -> None:
        """Run an action that needs the head; InputError if the head stays silent.

        What fails because the raylet has ended is an InputError that says so.

        Ray's calls hear nothing while they wait, so they run in a thread of their own.
        """
        errors: list[BaseException] = []

        def guarded() -> None:
            try:
                work()
            except BaseException as error:  # it is raised again below
                errors.append(error)

        thread = threading.Thread(target=guarded, daemon=True)
        thread.start()
        try:
            while thread.is_alive():
                thread.join(_POLL_S)
                if thread.is_alive():
                    self.responds()
        except KeyboardInterrupt:
            thread.join(_END_S)
            raise
        if errors:
            self._require_raylet()
            raise errors[0]


#: An autoscaler that can start nodes announces them within the first time (it looks every few
#: seconds); they join within the second.
_SIGN_S, _START_S, _SURVEY_S = 20.0, 900.0, 1.0


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
            time.sleep(_SURVEY_S)
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
