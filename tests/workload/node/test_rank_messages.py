"""What an agent makes of the lines that reach it: messages, what is none, and exits."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.shapes import VALUES, bent, of_shape
from tuner.search_spaces.cluster import load_cluster
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.typed_json import has_shape
from tuner.workload import hook
from tuner.workload.node.command_group import CommandGroup
from tuner.workload.node.measure.window import Conductor, ProbeFailed
from tuner.workload.node.rank_group import RankGroup
from tuner.workload.node.rank_messages import (
    MAX_LINE_BYTES,
    OF_ENGINE,
    TABLES,
    Event,
    Facts,
    parsed,
)
from tuner.workload.node.rank_server import RankServer, RankSpec
from tuner.workload.records.probe import FAILURES, Failure
from tuner.workload.scripts.command import Script
from tuner.workload.scripts.inspection import blank_job, job_of_facts
from tuner.workload.scripts.observation import Observation

quick = settings(max_examples=80, deadline=None)
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


def events_of(sent: Sequence[bytes], *, whole: bool = False) -> list[Event]:
    """Return the events that an agent makes of the lines of one connection."""
    with group_of(whole, b"".join(line + b"\n" for line in sent)) as (group, _):
        return list(iter(lambda: group.next_event(0.01), None))


@quick
@given(lines())
def test_a_line_is_a_message_of_its_declared_shape_or_none(line: bytes) -> None:
    event = parsed(line)
    if event is not None and event.kind in TABLES:
        assert has_shape(event.detail, TABLES[event.kind])


@pytest.mark.parametrize("kind", ["set", "peak", "facts"])
@quick
@given(data=st.data())
def test_what_a_rank_reports_arrives_whole(kind: str, data: st.DataObject) -> None:
    table = data.draw(of_shape(TABLES[kind]))
    if {*OF_ENGINE} & {*table}:
        table |= dict.fromkeys(OF_ENGINE, 4)
    event = parsed(f"{kind} {json.dumps(table)}".encode())
    assert event is not None
    assert json.dumps(event.detail, sort_keys=True) == json.dumps(table, sort_keys=True)


@pytest.mark.parametrize(
    ("group", "kept"),
    [
        ({"drawn": [[0, 4, False]], "passes": 1, "shapes": [[4, 2]]}, True),  # of a probe
        ({"drawn": [], "passes": 1, "shapes": [], "loss": None, "took": 1.5}, True),
        ({"drawn": [], "passes": 1, "shapes": [], "scale": "1"}, False),
        ({"drawn": [], "passes": 1}, False),
    ],
)
def test_what_a_step_need_not_tell_may_be_absent(group: dict[str, Any], kept: bool) -> None:
    event = parsed(f"facts {json.dumps({'groups': [group], 'peak': {}})}".encode())
    assert event is not None
    assert ("groups" in event.detail) is kept
    assert parsed(b'peak {"host_bytes": 3}') is not None


def test_every_fact_that_the_hook_reports_is_declared() -> None:
    source = "".join(path.read_text() for path in Path(hook.__file__).parent.glob("*.py"))
    named = set(re.findall(r'seen(?:\.setdefault\(|\[)"(\w+)"', source))
    private = {*hook.state._PRIVATE, "marks_itself", "engines"}
    assert named - private <= {*Facts.__annotations__}
    assert len(named) > 20


@pytest.mark.parametrize("whole", [True, False], ids=["command", "ranks"])
@quick
@given(sent=st.lists(lines(), max_size=6))
def test_lines_of_a_stranger_end_in_an_answer_or_a_failed_probe(
    whole: bool, sent: list[bytes]
) -> None:
    now_s = iter(range(10**6))
    with group_of(whole, b"\n".join([b"hello 0 41 2", *sent, b""])) as (group, _):
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


SCRIPT = Script("python -m json.tool", steps=10, global_batch=8)
BLANK = blank_job(SCRIPT, load_cluster("cpu-2"))


@settings(max_examples=150, deadline=None)
@given(of_shape(Facts))
def test_a_job_is_made_of_any_facts_or_they_are_refused(facts: dict[str, Any]) -> None:
    heard = parsed(b"facts " + json.dumps(facts).encode())
    assert heard is not None
    if process := heard.detail.get("process"):
        Observation.of([{**process, "variables": {}}])
    with contextlib.suppress(InputError):
        job_of_facts(SCRIPT, BLANK, {"first_batches": [0], **heard.detail}, 1.0)


def test_a_world_of_a_million_ranks_costs_nothing_when_its_command_ends() -> None:
    with group_of(True, b"hello 0 41 1000000\n") as (group, _):
        heard = group.next_event(0.5)
        assert heard is not None
        assert heard.kind == "hello"
        assert group.size == 1_000_000
        group._server.kill()
        group._exited(group._server)
        assert [event.kind for event in group._pending] == ["exit"]
        assert group.size == 1


@pytest.mark.parametrize("whole", [True, False], ids=["command", "ranks"])
def test_a_line_without_an_end_is_not_kept(whole: bool) -> None:
    with group_of(whole) as (group, rank):
        sent = 0
        with contextlib.suppress(BlockingIOError, OSError):
            while sent < 2 * MAX_LINE_BYTES:
                sent += rank.send(b"x" * 65536)
                while group.next_event(0.0) is not None:
                    pass
        assert sent < 2 * MAX_LINE_BYTES
        assert not any(group._buffers.values())


@pytest.mark.parametrize(
    "line", [b"hello", b"hello 1", b"hello 0 41 2 7", b"hello a b", b"hello 0", b"hello 5 41 2"]
)
@pytest.mark.parametrize("whole", [True, False], ids=["command", "ranks"])
def test_ranks_are_heard_after_what_is_no_message(line: bytes, whole: bool) -> None:
    sent = [line, b"hello 0 41 1", b"step 1 2.0"]
    assert [event.kind for event in events_of(sent, whole=whole)][-1] == "step"


@pytest.mark.parametrize("whole", [True, False], ids=["command", "ranks"])
def test_one_that_ends_before_its_start_is_answered_is_heard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    """`echo`, say, on a busy machine: the exit was read with the reply, and nobody heard of it."""
    server = RankServer()
    ours, theirs = socket.socketpair()
    monkeypatch.setattr(server, "_socket", ours)
    monkeypatch.setattr(server, "start", lambda: None)
    spec = RankSpec(("echo",), {"RANK": "0"}, "log", str(tmp_path), "address", command=whole)
    reply = {"number": 1, "pids": [4]}
    theirs.sendall(b'%s\n{"exit": 4, "code": 3}\n' % json.dumps(reply).encode())
    with ours, theirs, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "listener"))
        listener.listen()
        group = server.spawn_command(spec, listener, 0) if whole else server.spawn([spec], listener)
        event = group.next_event(0.5)
        assert event is not None
        assert (event.kind, event.detail) == ("exit", {"code": 3})
