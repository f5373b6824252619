"""Exits that the fork server tells with its reply to a start."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from tuner.workload.node.rank_server import RankServer, RankSpec


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
