"""Socket of executors: one node, inline, is core, and every other kind is an extra.

Those of this package stand in the table of `SOCKET`, which is read without importing them; another
distribution brings one by an entry point of the group `joulefront.executors`, an object of a class
derived from `tuner.executors.base.ExecutorKind`. `tuner.testing.executors` has its contract.
"""

from __future__ import annotations

from typing import Any

from tuner.executors.base import (
    Executor,
    ExecutorKind,
    ExecutorUnavailable,
    Opening,
)
from tuner.executors.local import INLINE
from tuner.search_spaces.cluster import Cluster
from tuner.search_spaces.errors import InputError, UnknownName
from tuner.search_spaces.plugins import Socket, not_installed
from tuner.workload.records.probe import Announce

SOCKET = Socket(
    *("joulefront.executors", "executor", 1, ("is_default", "phrase", "open")),
    {
        "ray": "tuner.cluster:KIND",
        "inline": "tuner.executors.local:INLINE",
        "simulated": "tuner.simulated:KIND",
    },
)


def kind_named(name: str) -> ExecutorKind:
    """Return a kind of executor.

    Raises:
        InputError: there is none of that name, or this installation leaves its extra out.
    """
    if name in SOCKET.shipped:
        if (found := SOCKET.part(name)) is None:
            raise not_installed(f"the executor {name}")
        return found
    if name in SOCKET.plugins.found:
        return _Plugin(name, SOCKET.plugins.found[name])
    faults = "".join(f"; {sentence}" for sentence in SOCKET.plugins.left_out)
    known = (*SOCKET.shipped, *SOCKET.plugins.found)
    raise InputError(f"{UnknownName('executor', name, known)}{faults}")


class _Plugin(ExecutorKind):
    """A kind of another distribution, whose failures are sentences."""

    def __init__(self, name: str, kind: Any) -> None:
        self._name, self._kind = name, kind
        self.measures = bool(getattr(kind, "measures", True))

    def _asked(self, method: str, *arguments: Any, **named: Any) -> Any:
        try:
            return getattr(self._kind, method)(*arguments, **named)
        except InputError:
            raise
        except Exception as error:
            raise InputError(
                f"the executor {self._name!r} cannot be used: {method}() failed "
                f"({type(error).__name__}: {str(error)[:200]})"
            ) from error

    def is_default(self, cluster: Cluster, address: str | None) -> bool:
        return bool(self._asked("is_default", cluster, address))

    def phrase(self, cluster: Cluster, address: str | None) -> str:
        return str(self._asked("phrase", cluster, address))

    def open(self, opening: Opening) -> Executor:
        made = self._asked("open", opening)
        if not isinstance(made, Executor):
            lacks = [name for name in _MEMBERS if not hasattr(made, name)]
            raise InputError(
                f"the executor {self._name!r} cannot be used: open() returned a "
                f"{type(made).__name__} without {', '.join(lacks)}"
            )
        return made


_MEMBERS = ("meter", "capacity", "in_flight", "submit", "wait", "now_s", "close")


def check_executor(name: str | Executor | None) -> None:
    """Raise InputError if there is no executor of that name here."""
    if isinstance(name, str):
        kind_named(name)


def predicts(name: str | Executor | None) -> bool:
    """Return whether the records of an executor are predictions."""
    return isinstance(name, str) and not kind_named(name).measures


def _default(cluster: Cluster, address: str | None, announce: Announce) -> ExecutorKind:
    for name in (*SOCKET.shipped, *SOCKET.plugins.found):
        if name in SOCKET.plugins.found or SOCKET.part(name) is not None:
            try:
                if (kind := kind_named(name)).is_default(cluster, address):
                    return kind
            except InputError as error:  # of a plug-in: the others go on without it
                announce(f"{error}.")
    if cluster.nodes > 1:
        announce(
            f"{not_installed('A probe on several nodes')}; so probes run inline, one at a time."
        )
    return INLINE


def how_started(name: str | Executor | None, cluster: Cluster, address: str | None) -> str:
    """Return how the executor of that name starts probes, as a phrase."""
    if name is not None and not isinstance(name, str):
        return INLINE.phrase(cluster, address)
    kind = kind_named(name) if name else _default(cluster, address, lambda sentence: None)
    return kind.phrase(cluster, address)


def open_executor(name: str | None, opening: Opening) -> Executor:
    """Return a prepared executor.

    By default it is of the first kind that says that it is, and inline elsewhere, or where this
    machine can open none of that kind and no address is given.
    """
    announce = opening.announce
    for sentence in SOCKET.plugins.left_out:
        announce(f"{sentence[:1].upper()}{sentence[1:]}.")
    kind = kind_named(name) if name else _default(opening.cluster, opening.address, announce)
    try:
        return kind.open(opening)
    except ExecutorUnavailable as error:
        if name or opening.address:
            raise
        announce(f"{error.why}, so probes run inline, one at a time.")
    return INLINE.open(opening)
