"""What an agent makes of the lines that reach it: messages, what is none, and exits."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.agent_lines import act_on, group_of, lines
from tests.support.shapes import of_shape
from tests.waiting import wait_until
from tuner.search_spaces.cluster import load_cluster
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.fields import has_shape
from tuner.workload import hook
from tuner.workload.node.rank_group import below
from tuner.workload.node.rank_messages import (
    MAX_LINE_BYTES,
    OF_ENGINE,
    TABLES,
    Event,
    Facts,
    parsed,
)
from tuner.workload.node.rank_server import RankServer, RankSpec
from tuner.workload.scripts.command import Observation, Script
from tuner.workload.scripts.inspection import blank_job, job_of_facts

quick = settings(max_examples=80, deadline=None)


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
    act_on(whole, [b"hello 0 41 2", *sent])


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


def test_what_was_said_before_the_command_ended_is_heard() -> None:
    """Both are there at once on a busy machine: the words of a process, and the command's end."""
    with group_of(True, b'imports 77 ["python", "-c", "import torch"]\n') as (group, _):
        group._server.kill()
        group.notice_exits()
        assert group.describe() == ", and torch was imported by -c 'import torch'"


def test_what_a_rank_said_before_it_ended_is_heard_before_its_end() -> None:
    detail = json.dumps({"evidence": "error", "message": "no data", "effect": False})
    sent = f"hello 0 41 2\nfail {detail}\n".encode()
    with group_of(False, sent) as (group, _):
        group._server.kill()
        group.notice_exits()
        heard = [group.next_event(0.0) for _ in range(3)]
        assert [event.kind for event in heard if event] == ["hello", "fail", "exit"]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("order", list(itertools.permutations(("server", "listener", "link"))))
@pytest.mark.parametrize("whole", [True, False], ids=["command", "ranks"])
def test_an_exit_is_heard_in_any_order_beside_what_living_ranks_send(
    whole: bool, order: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All are ready at once on a busy machine, and to hear the exit first empties the others."""
    with group_of(whole, b"hello 0 41 2\n") as (group, rank):
        hello = group.next_event(0.5)
        assert hello is not None
        assert hello.kind == "hello"
        rank.sendall(b"step 1 2.0\n")
        names = {group._server: "server", group._listener: "listener"}
        select = group._selector.select

        def in_this_order(timeout_s: float) -> Any:
            return sorted(select(timeout_s), key=lambda found: order.index(named(found[0])))

        def named(key: Any) -> str:
            return names.get(key.fileobj, "link")

        monkeypatch.setattr(group._selector, "select", in_this_order)
        with contextlib.closing(socket.socket(socket.AF_UNIX)) as other:
            other.connect(group._listener.getsockname())
            other.sendall(b"hello 1 42 2\n")
            group._server.kill()
            group._server._theirs.send(b"x")
            kinds = [event.kind for event in iter(lambda: group.next_event(0.05), None)]
        assert sorted(kinds) == ["exit", "exit", "hello", "step"]


#: Starts itself anew in the same process until a file exists, then waits.
CHAIN = """#!/bin/bash
[[ -e $1 ]] && exec sleep 60
exec "$0" "$1"
"""


def test_a_process_is_seen_while_it_starts_another_program(tmp_path: Path) -> None:
    chain = tmp_path / "chain.sh"
    chain.write_text(CHAIN)
    chain.chmod(0o755)
    enough = tmp_path / "enough"
    process = subprocess.Popen([chain, enough])

    def words() -> tuple[str, ...]:
        (found,) = (each for each in below(os.getpid()) if each.pid == process.pid)
        return found.words

    try:
        for _ in range(300):
            words()
        enough.touch()
        wait_until(lambda: words() == ("sleep", "60"))
    finally:
        process.kill()
        process.wait()
    assert process.pid not in {each.pid for each in below(os.getpid())}


def test_a_process_that_nobody_has_waited_for_is_not_seen() -> None:
    process = subprocess.Popen(["true"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert process.pid not in {each.pid for each in below(os.getpid())}
    process.wait()


def test_what_a_process_leaves_as_it_ends_is_seen(monkeypatch) -> None:
    """A shell that starts a training and ends meanwhile."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    left = subprocess.Popen(["sleep", "60"])
    looks = iter([{ended.pid}, {left.pid}])
    monkeypatch.setattr(
        "tuner.workload.node.rank_group.family", lambda server: next(looks, {left.pid})
    )
    try:
        assert [each.pid for each in below(os.getpid())] == [left.pid]
    finally:
        left.kill()
        left.wait()
