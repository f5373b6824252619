"""Which processes below a command are seen."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.waiting import wait_until
from tuner.workload.node.rank_group import below

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
