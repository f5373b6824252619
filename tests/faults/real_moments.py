"""Faults that strike real ranks, their server, their guard or their driver at random moments.

The search is that of `tests.faults.probe`: real processes, windows and records of a small program.
Its figures are measured, so fronts are not compared; nothing may be lost, doubled or left. On a
twin GPU node the clocks are set by then, and have to be put back.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from tests.faults import device
from tests.faults.driver import KILLED
from tests.faults.harness import MARK, QUICK, Fault, living
from tests.faults.moments import Kind, Missed, Search
from tests.faults.probe import real_runner, study, without_deepspeed
from tests.twin import TwinGpu, TwinNode

#: Time to look for a process, seconds.
POLL_S = 60.0


def session(folder: Path, storage: str | None = None) -> int:
    """One session of the search, with a fork server of its own."""
    return _finished(study(folder, real_runner(folder, shared=False)))


def clocked_session(folder: Path, storage: str | None = None) -> int:
    """One session of a search over two twin GPUs, whose clocks it sets under a guard."""
    runner = device.clocked(folder, device.CLOCKS, guarded=True, shared=False)
    return _finished(study(folder, runner, space=device.SPACE, window=QUICK))


def _finished(notes: list[str]) -> int:
    print(*notes, "done", sep="\n", flush=True)
    return 0


# ---- the processes of a search: of its driver and the mark of all


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def _guards(driver: int, mark: str) -> list[int]:
    name = b"own_guard.py"
    return [pid for pid in living(mark) if name in Path(f"/proc/{pid}/cmdline").read_bytes()]


def _driver(driver: int, mark: str) -> list[int]:
    return [driver]


def _server(driver: int, mark: str) -> list[int]:
    guards = _guards(driver, mark)
    return [pid for pid in living(mark) if _parent(pid) == driver and pid not in guards]


def _ranks(driver: int, mark: str) -> list[int]:
    servers = _server(driver, mark)
    return [pid for pid in living(mark) if _parent(pid) in servers]


Find = Callable[[int, str], list[int]]


def _kill(find: Find, search: Search, draw: random.Random) -> Callable[[], None]:
    """Kill a process of the search, waiting for one, and for clocks to be set if they will be."""
    until_s = time.monotonic() + POLL_S
    while time.monotonic() < until_s and not search.ended_within(0.01):
        with contextlib.suppress(OSError, IndexError):  # one of them ended meanwhile
            found = find(search.driver, os.environ[MARK])
            if found and (search.folder not in _nodes or clocks_wrong(search.folder)):
                os.kill(found[0], signal.SIGKILL)
                return _nothing
    search.end()
    raise Missed


def _nothing() -> None:
    """Undo nothing."""


# ---- GPUs with clocks

_nodes: dict[Path, tuple[TwinNode, list[tuple[object, ...]]]] = {}


@contextlib.contextmanager
def _torch_alone(folder: Path) -> Iterator[None]:
    without_deepspeed()  # made here, it is no driver's to remove
    yield None


@contextlib.contextmanager
def _twin_node(folder: Path) -> Iterator[None]:
    without_deepspeed()
    with device.on_twin_node(folder, [TwinGpu(), TwinGpu()], children=True) as node:
        _nodes[folder] = node, device.stands(node)
        yield None


def clocks_wrong(folder: Path) -> int:
    """Count the GPUs whose clocks or limits are not what they were."""
    node, before = _nodes[folder]
    return sum(a != b for a, b in zip(before, device.stands(node), strict=True))


_real = partial(Kind, session=session, needs=_torch_alone, fast=False)
_clocked = partial(
    Kind, needs=_twin_node, session=clocked_session, clocks_wrong=clocks_wrong, fast=False
)
KINDS: tuple[Kind, ...] = (
    _real("driver of real ranks killed", 10, partial(_kill, _driver), codes=(KILLED,)),
    _real("fork server killed", 10, partial(_kill, _server), codes=(0,)),
    _real("rank killed", 10, partial(_kill, _ranks), codes=(0,)),
    _clocked("driver killed with clocks set", 4, partial(_kill, _driver), codes=(KILLED,)),
    _clocked("guard killed", 4, partial(_kill, _guards), codes=(0,)),
    _clocked("rank killed with clocks set", 2, partial(_kill, _ranks), codes=(0,)),
)
FAULTS: tuple[Fault, ...] = tuple(fault for kind in KINDS for fault in kind.faults())
