"""Which processes below a command are seen."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tuner.workload.node.command_processes import below

#: Starts itself anew so many times in the same process, then waits.
CHAIN = """#!/bin/bash
(( $1 )) || exec sleep 60
exec "$0" $(( $1 - 1 ))
"""


def test_a_process_is_seen_while_it_starts_another_program(tmp_path: Path) -> None:
    chain = tmp_path / "chain.sh"
    chain.write_text(CHAIN)
    chain.chmod(0o755)
    process = subprocess.Popen([chain, "300"])
    try:
        looks, words = 0, tuple[str, ...]()
        while words != ("sleep", "60"):
            found = [each for each in below(os.getpid()) if each.pid == process.pid]
            assert found, f"not seen at look {looks}"
            looks, words = looks + 1, found[0].words
        assert looks > 100
    finally:
        process.kill()
        process.wait()
    assert process.pid not in {each.pid for each in below(os.getpid())}


def test_a_process_that_nobody_has_waited_for_is_not_seen() -> None:
    process = subprocess.Popen(["true"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert process.pid not in {each.pid for each in below(os.getpid())}
    process.wait()
