"""The nodes with which a study on a Ray cluster begins: those that answer first, or come free."""

from __future__ import annotations

import time
from collections.abc import Callable

from tuner.executors.ray_nodes import NodePool
from tuner.search_spaces.errors import InputError

#: A study starts when all nodes have answered, or so long after the first did. While none has, it
#: waits for the longest time: hundreds of workers that import from one file system take minutes.
_GRACE_S, _LATEST_S, _NOTICE_S = 30.0, 300.0, 60.0
#: It waits so long for the first node that others do not use, and looks so often.
_BUSY_S, _RETRY_S = 600.0, 1.0
#: Limit on one wait for answers, so that Ctrl-C is heard.
_WAIT_S = 2.0


def admit_first(pool: NodePool, announce: Callable[[str], None]) -> None:
    """Use the nodes that answer in time; InputError if none can be used.

    Those that are late are admitted while the study runs.
    """
    begin_s = now_s = time.monotonic()
    until_s, notified = begin_s + _LATEST_S, False
    while pool.unanswered and now_s < until_s:
        if not notified and not pool.slots and now_s >= begin_s + _NOTICE_S:
            notified = True
            announce(f"{_unanswered(pool, now_s - begin_s)}; waiting up to {_LATEST_S:.0f} s")
        none = not pool.slots
        pool.admit(min(until_s - now_s, _WAIT_S))
        now_s = time.monotonic()
        if none and pool.slots:
            until_s = now_s + _GRACE_S
    if not pool.slots and pool.unanswered:
        raise InputError(f"{_unanswered(pool, now_s - begin_s)}; mend that, and try again")
    if not pool.slots and pool.has_busy:
        _wait_for_busy(pool, announce)
    pool.require_slots()


def _wait_for_busy(pool: NodePool, announce: Callable[[str], None]) -> None:
    announce(f"waiting up to {_BUSY_S / 60:.0f} minutes until a node is free")
    until_s = time.monotonic() + _BUSY_S
    while not pool.slots and time.monotonic() < until_s:
        time.sleep(_RETRY_S)
        pool.refresh()
        pool.admit(_WAIT_S)


def _unanswered(pool: NodePool, waited_s: float) -> str:
    names = pool.unanswered
    have = f"{names[0]} has" if len(names) == 1 else f"{len(names)} nodes have"
    return (
        f"{have} the devices, and none answered within {waited_s:.0f} s: their processes start "
        "slowly (imports from a shared file system), or ports between the nodes are closed"
    )
