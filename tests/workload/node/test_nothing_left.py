"""What a search started, and its temporary folders, are gone after any end, builds included."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.waiting import wait_until
from tuner.search_spaces import safe_files
from tuner.search_spaces.safe_files import SHORT_PREFIX, TemporaryFolder
from tuner.workload.node.rank_server import RankServer

#: Stands for a framework whose import, or whose op's build, starts compilers and waits for them.
BUILD = """
import os, pathlib, subprocess
{before}
here = pathlib.Path(__file__).parent
(here / "server").write_text(str(os.getpid()))
try:
    subprocess.run(["sh", "-c", "sleep 300 & setsid sleep 300 & echo > begun; wait"], cwd=here)
except {swallowed}:
    subprocess.run(["sh", "-c", "sleep 300"], cwd=here)
"""
AGENT = """
from tuner.workload.node import rank_server
from tuner.workload.node.rank_server import RankServer
rank_server.END_LIMIT_S = 1.0
server = RankServer(needs=("framework",), env={{"PYTHONPATH": {folder!r}}})
server._optional = ()
try:
    server.start()
finally:
    server.close()
"""


def inside(folder: Path) -> list[int]:
    """Return the processes that work in a folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(entry / "cwd") == str(folder):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Start an agent whose fork server builds, and wait until the compilers run."""
    agents = []

    def started(before: str = "", swallowed: str = "Exception") -> subprocess.Popen[bytes]:
        text = BUILD.format(before=before, swallowed=swallowed)
        (tmp_path / "framework.py").write_text(text)
        agent = subprocess.Popen(
            [sys.executable, "-c", AGENT.format(folder=str(tmp_path))], stderr=subprocess.DEVNULL
        )
        agents.append(agent)
        wait_until(lambda: len(inside(tmp_path)) >= 3 and (tmp_path / "begun").exists())
        return agent

    yield started
    for agent in agents:
        agent.kill()
        agent.wait()
    for pid in inside(tmp_path):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_search_that_ends_in_a_build_leaves_no_compiler(
    number: signal.Signals, begin: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    agent = begin()
    agent.send_signal(number)
    wait_until(lambda: not inside(tmp_path))
    server = int((tmp_path / "server").read_text())
    wait_until(lambda: not Path(f"/proc/{server}").exists())


def test_a_build_that_swallows_every_error_is_ended_too(
    begin: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    begin(swallowed="BaseException").kill()
    wait_until(lambda: not inside(tmp_path))


def test_a_server_that_is_killed_in_a_build_leaves_no_compiler(
    begin: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    begin()
    os.kill(int((tmp_path / "server").read_text()), signal.SIGKILL)
    own_session = 1  # which left the server's; a framework's compilers stay in it
    wait_until(lambda: len(inside(tmp_path)) <= own_session)


def test_a_server_that_hears_nothing_is_ended_when_it_is_closed(
    begin: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    block = "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGIO})"
    agent = begin(before=block)
    agent.send_signal(signal.SIGINT)
    wait_until(lambda: len(inside(tmp_path)) <= 1)


def test_a_server_answers_after_its_agent_has_spoken_much(tmp_path: Path) -> None:
    (tmp_path / "framework.py").write_text("")
    server = RankServer(needs=("framework",), env={"PYTHONPATH": str(tmp_path)})
    server._optional = ()
    server.start()
    for _ in range(50):
        assert server._request_reply({"op": "kill", "more": "x" * 100_000}, timeout_s=60)["killed"]
    assert server.alive
    server.close()


MAKER = """
import sys, time
from tuner.search_spaces.safe_files import TemporaryFolder
made = TemporaryFolder(parent=sys.argv[1])
(made.path / "agent").write_text("x")
print(made.path, flush=True)
time.sleep(300)
"""


def test_a_folder_of_a_killed_process_is_removed_by_the_next_start(tmp_path: Path) -> None:
    words = [sys.executable, "-c", MAKER, str(tmp_path)]
    living, killed = (subprocess.Popen(words, stdout=subprocess.PIPE, text=True) for _ in "ab")
    try:
        assert living.stdout is not None
        assert killed.stdout is not None
        kept, left = (Path(process.stdout.readline().strip()) for process in (living, killed))
        killed.kill()
        killed.wait()
        assert left.exists()
        others = ("joulefront-older", "somebody", "jfoo", "jf_results", "joulefront_data")
        for other in others:
            (tmp_path / other).mkdir()
            (tmp_path / other / "file").touch()
        (tmp_path / "joulefront_link").symlink_to(tmp_path / "somebody")
        with TemporaryFolder(parent=str(tmp_path), prefix=SHORT_PREFIX) as made:
            assert made.path.stat().st_mode & 0o777 == 0o700
            assert not left.exists()
            assert (kept / "agent").exists()
            safe_files.remove_abandoned(str(tmp_path))  # this process's own is not abandoned
            assert made.path.exists()
        assert not made.path.exists()
        assert all((tmp_path / other / "file").exists() for other in others)
        made.remove()
    finally:
        for process in (living, killed):
            process.kill()
            process.wait()


@pytest.mark.root
def test_the_folder_of_another_user_stops_nobody() -> None:
    """Two users of one machine: the folder of the first may not be entered by the second."""
    shared = Path(tempfile.mkdtemp(dir="/tmp"))
    shared.chmod(0o777)
    theirs = shared / "joulefront_theirs"
    theirs.mkdir()
    (theirs / safe_files.MARK).touch()
    theirs.chmod(0)
    if is_root := os.geteuid() == 0:  # whom no mode keeps out
        os.seteuid(65534)
    try:
        with pytest.raises(PermissionError):
            os.listdir(theirs)
        with TemporaryFolder(parent=str(shared)) as made:
            assert made.path.exists()
    finally:
        if is_root:
            os.seteuid(0)
        theirs.chmod(0o700)
    assert (theirs / safe_files.MARK).exists()
    shutil.rmtree(shared)
