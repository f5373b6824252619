"""The living ranks of one probe: their events, and the commands that they take."""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from tuner.workload.node.rank_messages import MAX_LINE_BYTES, Event, parsed


class ServerError(RuntimeError):
    """The fork server could not start, import or build."""

    def __init__(self, message: str, detail: str = "", *, kind: str = "") -> None:
        # detail: what it printed, or its traceback; kind: the name of the exception.
        super().__init__(f"{kind}: {message}" if kind else message)
        self.message, self.detail, self.kind = message, detail, kind


class NoReply(ServerError):
    """The fork server did not answer in time; whatever it does, no configuration has caused it."""


class Ranks(Protocol):
    """The ranks of one probe; `patience_s` is how long a cause may arrive after its effect."""

    size: int
    pids: tuple[int, ...]
    patience_s: float

    def next_event(self, timeout_s: float) -> Event | None:
        """Return the next event, or None after `timeout_s` seconds of silence."""

    def second_training(self, limit_s: float) -> str:
        """Return a sentence on processes that train after their ranks have ended, or ""."""

    def describe(self) -> str:
        """Return a phrase on unexpected processes, or ""."""

    def expects_more(self) -> bool:
        """Return True while a process that was not expected may still report as a rank."""

    def send(self, line: str) -> None:
        """Send a command to all ranks: "run N", "set JSON" or "quit"."""

    def kill(self) -> None:
        """End the ranks and all that they started."""


class RankGroup:
    """The ranks of one probe on this node, whose processes a `RankServer` started."""

    patience_s = 1.0

    def __init__(
        self,
        server: Any,
        pids: Sequence[int],
        listener: socket.socket,
        *,
        first_rank: int = 0,
    ) -> None:
        self.size, self.pids = len(pids), tuple(pids)
        self._server, self._listener = server, listener
        self._rank_of = {pid: rank for rank, pid in enumerate(pids, first_rank)}
        self._own = frozenset(self._rank_of.values())  # ranks that may report; empty for any
        self._running = set(pids)
        self._links: dict[int, socket.socket] = {}
        self._buffers: dict[socket.socket, bytes] = {}
        self._ranks: dict[socket.socket, int] = {}
        self._pending: deque[Event] = deque()
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._selector.register(server, selectors.EVENT_READ, self._exited)

    def next_event(self, timeout_s: float) -> Event | None:
        """Return the next event of a rank, or None after `timeout_s` seconds of silence."""
        deadline = time.monotonic() + timeout_s
        while not self._pending:
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            for key, _ in self._selector.select(left):
                # Handling an exit reads its rank's link to the end, which may be next in this list.
                if key.fileobj in self._selector.get_map():
                    handle: Callable[[Any], None] = key.data
                    handle(key.fileobj)
        return self._pending.popleft()

    def notice_exits(self) -> None:
        """Take exits that the server has told already, with its reply to the start.

        Its socket is not readable for them any more, so that nobody would hear of them.
        """
        self._exited(self._server)

    def second_training(self, limit_s: float) -> str:
        """Return nothing: the ranks are those that were started."""
        return ""

    def describe(self) -> str:
        """Return "": the ranks are those that were started."""
        return ""

    def expects_more(self) -> bool:
        """Return False: the ranks are those that were started."""
        return False

    def receive_events(self, source: Any, events: Callable[[], Iterable[Event]]) -> None:
        """Add the events of other nodes' ranks: `events` is called when `source` is readable."""
        self._selector.register(
            source, selectors.EVENT_READ, lambda readable: self._pending.extend(events())
        )

    def send(self, line: str) -> None:
        """Send a command to all ranks. A rank that is gone does not raise an error here."""
        for link in self._links.values():
            with contextlib.suppress(OSError):  # its exit arrives as an event
                link.sendall(line.encode() + b"\n")

    def kill(self) -> None:
        """End the ranks and all that they started, and wait until the ranks are gone."""
        self._server.kill()
        deadline = time.monotonic() + 5.0
        while self._running and time.monotonic() < deadline:
            try:
                self._exited(self._server, timeout_s=0.2)
            except ServerError:
                break
        for link in self._links.values():
            link.close()
        self._selector.close()

    def _accept(self, listener: socket.socket) -> None:
        link, _ = listener.accept()
        self._buffers[link] = b""
        self._selector.register(link, selectors.EVENT_READ, self._received)

    def _received(self, link: socket.socket) -> None:
        try:
            chunk = link.recv(65536)
        except OSError:
            chunk = b""
        if not chunk:
            self._selector.unregister(link)
            return
        buffer = self._buffers[link] + chunk
        *lines, self._buffers[link] = buffer.split(b"\n")
        for line in lines:
            message = parsed(line)  # a program may write to the socket itself
            if message is not None and (event := self._heard(link, message)) is not None:
                self._pending.append(event)
        if len(self._buffers[link]) > MAX_LINE_BYTES:
            self._buffers[link] = b""
            self._selector.unregister(link)

    def _heard(self, link: socket.socket, message: Event) -> Event | None:
        # Return a message as the event of a rank.
        if message.kind == "hello":
            return self._hello(link, message.rank, message.detail["pid"], message.detail["world"])
        rank = self._ranks.get(link)
        if rank is None and message.kind != "fail":
            return None
        return replace(message, rank=-1 if rank is None else rank)

    def _hello(self, link: socket.socket, rank: int, pid: int, world: int) -> Event | None:
        if self._own and rank not in self._own:
            return None
        self._links[rank], self._ranks[link] = link, rank
        self._rank_of[pid] = rank
        return Event("hello", rank)

    def _exited(self, server: Any, timeout_s: float = 0.0) -> None:
        for pid, code in server.exits(timeout_s):
            if pid in self._running:
                self._running.discard(pid)
                # Its last messages are still in its socket: read them before its end is reported.
                rank = self._rank_of[pid]
                link = self._links.get(rank)
                if link is not None:
                    link.setblocking(False)
                    with contextlib.suppress(OSError, RuntimeError):
                        while link in self._selector.get_map() and self._readable(link):
                            self._received(link)
                self._pending.append(Event("exit", rank, detail={"code": code}))

    @staticmethod
    def _readable(link: socket.socket) -> bool:
        with selectors.DefaultSelector() as probe:
            probe.register(link, selectors.EVENT_READ)
            return bool(probe.select(0))
