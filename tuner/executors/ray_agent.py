"""Ray actor that runs probes on a node, and its calls to the actors of other nodes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from tuner.executors.ray_security import exposures, foreign_package, strip_token
from tuner.search_spaces.cluster import Cluster
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.job import TrainingJob
from tuner.workload.agent import Agent, Entered, MakeRunner, unusable
from tuner.workload.clocks.base import GovernorError
from tuner.workload.multi_node.peer import PeerLost

#: A call that only reads or sets takes milliseconds; one that starts ranks may build an op.
CALL_S, START_S = 30.0, 900.0


class NodeAgent(Agent):
    """Agent that is a Ray actor, and reports how others can enter its cluster.

    Args:
        packages: the folder that the packages of joulefront must be imported from; None if it
            differs between nodes.
    """

    def __init__(self, run_dir: str, packages: str | None = None) -> None:
        super().__init__(run_dir)
        self._packages = packages

    def look(self) -> Entered:
        trouble = foreign_package(self._packages)
        return replace(unusable(trouble) if trouble else super().look(), exposures=exposures())

    def enter(
        self,
        job: TrainingJob,
        cluster: Cluster,
        make_runner: MakeRunner | None,
        devices: Sequence[str] = (),
        prepare: bool = False,
    ) -> Entered:
        exposed = exposures()
        strip_token()
        if trouble := foreign_package(self._packages):
            return unusable(trouble)
        entered = super().enter(job, cluster, make_runner, devices, prepare)
        return replace(entered, exposures=exposed)

    def run(
        self, request: dict[str, Any], peers: Sequence[Any] = (), address: str = ""
    ) -> dict[str, Any]:
        others: list[Any] = [RayPeer(actor, name) for name, actor in peers]
        return super().run(request, others, address)

    def pid(self) -> int:
        """Return the process id of this actor."""
        return os.getpid()


def actor_is_gone(ray: Any) -> tuple[type[Exception], ...]:
    """Return the errors by which Ray reports that an actor ended or cannot be reached.

    An actor that Ray's memory monitor ended is reported as OutOfMemoryError, which is no
    RayActorError, by every later call, too.
    """
    return ray.exceptions.RayActorError, ray.exceptions.OutOfMemoryError


class RayPeer:
    """Peer (`tuner.workload.multi_node.peer.Peer`) through the actor of another node."""

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
