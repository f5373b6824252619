"""Lines to an agent's socket as hypothesis draws them, and an agent that is given them."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

from hypothesis import strategies as st

from tests.support.shapes import VALUES, bent, of_shape
from tuner.workload.node.measure.window import Conductor, ProbeFailed
from tuner.workload.node.rank_group import CommandGroup, RankGroup
from tuner.workload.node.rank_messages import TABLES
from tuner.workload.records.probe import FAILURES, Failure

_NUMBERS = st.integers(0, 5) | st.integers() | st.just(2**20) | st.just(10**400)
_TIMES = st.sampled_from(("1.0", "12.5", "nan", "inf", "-1e300", "x", ""))


@st.composite
def lines(draw: Any) -> bytes:
    """Draw a line of a rank: a message, or something that resembles one."""
    kind = draw(st.sampled_from(("hello", "imports", "step", "at", "ready", "phase", *TABLES)))
    if kind in TABLES:
        sound = of_shape(TABLES[kind])
        if kind == "fail":
            evidence = st.sampled_from([each.evidence for each in FAILURES.values()])
            sound = st.builds(lambda table, text: {**table, "evidence": text}, sound, evidence)
        rest = json.dumps(draw(sound | bent(sound)))
    elif kind == "imports":
        rest = f"{os.getpid()} {json.dumps(draw(st.lists(st.text()) | VALUES), default=str)}"
    elif kind == "hello":
        rest = " ".join(str(draw(_NUMBERS)) for _ in range(draw(st.integers(1, 4))))
    else:
        rest = f"{draw(_NUMBERS)} {draw(_TIMES)}"
    line = f"{kind} {rest}".encode()
    cut = draw(st.integers(0, len(line)))
    return draw(st.sampled_from((line, line, line[:cut], line + b"\0", line.replace(b" ", b""))))


class Server:
    """A server below which a command runs, whose end it tells when it is killed."""

    def __init__(self) -> None:
        self.pid, self._told = os.getpid(), False
        self._ours, self._theirs = socket.socketpair()

    def fileno(self) -> int:
        return self._ours.fileno()

    def exits(self, timeout_s: float) -> list[tuple[int, int]]:
        told, self._told = self._told, False
        return [(41, -9), (42, -9)] if told else []

    def kill(self) -> None:
        self._told = True

    def close(self) -> None:
        self._ours.close()
        self._theirs.close()


@contextlib.contextmanager
def group_of(whole: bool, sent: bytes = b"") -> Iterator[tuple[RankGroup, socket.socket]]:
    """Yield the ranks of a command, or two ranks, and a connection on which `sent` was written."""
    listener, server = socket.socket(socket.AF_UNIX), Server()
    with contextlib.closing(listener), contextlib.closing(server):
        listener.bind("")  # an abstract name of the kernel's choice
        listener.listen()
        group = RankGroup(server, [41, 42], listener)
        if whole:
            group = CommandGroup(server, 41, listener, environment={"PATH": "/bin"})
        with contextlib.closing(socket.socket(socket.AF_UNIX)) as rank:
            rank.connect(listener.getsockname())
            rank.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                rank.sendall(sent)
            yield group, rank
        group.kill()


def act_on(whole: bool, sent: Sequence[bytes]) -> None:
    """Give a probe's agent the lines of one connection: it goes on, or the probe fails."""
    now_s = iter(range(10**6))
    with group_of(whole, b"\n".join([*sent, b""])) as (group, _):
        wait = group.next_event
        at_once = mock.patch.object(group, "next_event", lambda limit_s: wait(min(limit_s, 0.001)))
        conductor = Conductor(
            group,
            deadline_s=20,
            explain_exit=lambda rank, code: Failure("crash", f"rank {rank} ended by {code}"),
            clock=lambda: float(next(now_s)),
        )
        with contextlib.suppress(ProbeFailed), at_once:
            conductor.first_step()
        json.dumps([conductor.facts, list(conductor.peaks)])
        assert isinstance(group.describe(), str)
        group.expects_more()
        group.second_training(0.0)
