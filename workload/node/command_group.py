"""The ranks of a command that was started as it stands.

Nobody knows them before they report: a process below the command connects when it takes its first
optimizer step, and says its rank and world.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import socket
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tuner.workload.node.rank_group import Event, RankGroup

#: Exit code of a rank that is gone without a word, which no launcher has told yet.
GONE = -255
#: Variables of ours in the environment of a command.
OWN_VARIABLES = (
    *("JOULEFRONT_ATTACH", "PYTHONPATH", "BASH_ENV", "JOULEFRONT_BASH_ENV", "JOULEFRONT_LINES"),
)
#: Once a rank has reported, the others have as long as it took, and at least this, seconds.
LEAST_PATIENCE_S = 20.0


class CommandGroup(RankGroup):
    """Ranks below one command, whose process a `RankServer` started.

    Args:
        environment: of the command; a rank's facts say how its own differs.
        ranks: their number, if an earlier launch has shown it; else 1 until the first one reports.
    """

    def __init__(
        self,
        server: Any,
        pid: int,
        listener: socket.socket,
        *,
        environment: Mapping[str, str],
        ranks: int = 0,
    ) -> None:
        super().__init__(server, [pid], listener)
        self.size = ranks or 1
        self._command, self._environment = pid, environment
        self.pids = ()  # of the ranks that have reported
        self._rank_of, self._pid_of = {}, dict[int, int]()
        self._ended: set[int] = set()
        self._errors: list[Event] = []  # of processes that are no ranks
        self._alone = self._complained = False
        self._began_s, self._reported_s = time.monotonic(), 0.0
        self._importing: dict[int, list[str]] = {}  # words of processes that have imported torch

    def next_event(self, timeout_s: float) -> Event | None:
        event = super().next_event(timeout_s)
        return event or self._missing()

    def _missing(self) -> Event | None:
        # Return a failure once ranks have not reported for long.
        first_s, count = self._reported_s, len(self._pid_of)
        if not count or count >= self.size or self._ended or self._complained:
            return None
        patience_s = max(LEAST_PATIENCE_S, first_s - self._began_s)
        if time.monotonic() - first_s < patience_s:
            return None
        self._complained = True
        message = (
            f"{count} of {self.size} ranks train on this machine: the command starts the others on "
            "other ones, which probes do on a Ray cluster (--ray ADDRESS, docs/clusters.md)"
        )
        return Event("fail", -1, detail={"evidence": "refusal", "message": message})

    def _hello(self, link: socket.socket, rank: int, pid: int, world: int = 0) -> Event | None:
        if self._pid_of.get(rank, pid) != pid and rank not in self._ended:
            self._alone = True
            detail = {
                "evidence": "no group",
                "message": (
                    f"processes {self._pid_of[rank]} and {pid} both train as rank {rank} of "
                    f"{max(world, 1)}: the command starts several processes that make no process "
                    "group"
                ),
            }
            return Event("fail", rank, detail=detail)
        self._ended.discard(rank)
        self.size = max(world, 1)
        self._reported_s = self._reported_s or time.monotonic()
        self._pid_of[rank] = pid
        self.pids = tuple(self._pid_of[rank] for rank in sorted(self._pid_of))
        return super()._hello(link, rank, pid)

    def describe(self) -> str:
        """Return which processes of the command may train, a phrase."""
        if self._pid_of:
            return ""
        shown = dict.fromkeys(shlex.join(words[1:])[:80] for words in self._importing.values())
        if not shown:
            return ", and no Python process of the command has imported torch"
        return f", and torch was imported by {', '.join(shown)}"

    def expects_more(self) -> bool:
        """Return True while a process with the words of a rank has not reported as one."""
        words = [self._importing.get(pid) for pid in self.pids]
        late = (
            pid for pid, own in self._importing.items() if pid not in self.pids and own in words
        )
        return any(Path(f"/proc/{pid}").exists() for pid in late)

    def _parse(self, link: socket.socket, line: str) -> Event | None:
        kind, _, rest = line.partition(" ")
        if kind == "imports":
            pid, _, words = rest.partition(" ")
            self._importing[int(pid)] = json.loads(words)
            return None
        event = super()._parse(link, line)
        if event is None:
            return None
        if event.rank < 0:  # it counts if the command ends without training
            self._errors.append(event)
            return None
        if event.kind == "end":
            self._ended.add(event.rank)
        if event.kind == "facts" and "process" in event.detail:
            process = dict(event.detail["process"])
            own = process.pop("environment", {})
            process["variables"] = self._added(own)
            return replace(event, detail={**event.detail, "process": process})
        return event

    def _added(self, own: Mapping[str, str]) -> dict[str, str]:
        # Return what the command has added to its environment, or changed, for a rank.
        return {
            name: value
            for name, value in own.items()
            if name not in OWN_VARIABLES and self._environment.get(name) != value
        }

    def _heard(self, link: socket.socket) -> None:
        super()._heard(link)
        rank = self._ranks.get(link)
        if rank is None or link in self._selector.get_map() or rank in self._ended:
            return
        self._ended.add(rank)
        self._pending.append(Event("exit", rank, detail={"code": GONE}))

    def _exited(self, server: Any, timeout_s: float = 0.0) -> None:
        for pid, code in server.exits(timeout_s):
            if pid != self._command or pid not in self._running:
                continue
            self._running.discard(pid)
            for link in [key.fileobj for key in self._selector.get_map().values()]:
                if link in self._buffers:
                    assert isinstance(link, socket.socket)
                    link.setblocking(False)
                    with contextlib.suppress(OSError, RuntimeError, KeyError):
                        while link in self._selector.get_map() and self._readable(link):
                            self._heard(link)
            if not self._pid_of:
                self._pending.extend(replace(event, rank=0) for event in self._errors)
            for rank in range(self.size):
                told = code if rank == 0 and not self._alone else 0
                self._pending.append(Event("exit", rank, detail={"code": told}))
