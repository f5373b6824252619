"""Signals, secrets and user ids: what a study may do to others, and what others may see of it."""

from __future__ import annotations

import os
import socket
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.waiting import is_running, wait_until

pytest.importorskip("torch")

from tuner.problem.run_folder import RunFolder
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.safe_files import private_folder, refuse_sudo
from tuner.study.recorder import open_storage
from tuner.workload.node.rank_group import RankGroup, ServerError
from tuner.workload.node.rank_launch import reserved_port
from tuner.workload.node.rank_server import RankServer, RankSpec, control_socket

#: What a rank runs in place of a training program: it says hello to its agent and does BODY.
PROGRAM = """
import os, subprocess, sys, time
BODY
"""


def wait_for_end(pids: list[int]) -> None:
    wait_until(lambda: not any(is_running(pid) for pid in pids))


@pytest.fixture(scope="module")
def shared_server() -> Iterator[RankServer]:
    """A fork server that imports no more than the hook of its ranks needs."""
    server = RankServer(needs=("torch",))
    server._optional = ()
    yield server
    server.close()


@pytest.fixture
def server(shared_server: RankServer) -> Iterator[RankServer]:
    """The module's fork server; it starts again after a test that ended it or changed it."""
    before = dict(shared_server.env)
    yield shared_server
    if not shared_server.alive or shared_server.env != before:
        shared_server.close()
        shared_server.env = before


Launch = Callable[..., RankGroup]


@pytest.fixture
def launch(server: RankServer, tmp_path: Path) -> Iterator[Launch]:
    """Start one rank that runs a body of Python."""
    removals = []

    def start(body: str, **spec: object) -> RankGroup:
        program = tmp_path / "program.py"
        program.write_text(PROGRAM.replace("BODY", textwrap.dedent(body)))
        listener, address, remove = control_socket()
        removals.append(remove)
        env = {**os.environ, "RANK": "0", **spec.pop("env", {})}
        return server.spawn(
            [
                RankSpec(
                    argv=(str(program),),
                    env=env,
                    log=str(tmp_path / "rank0.log"),
                    cwd=str(tmp_path),
                    address=address,
                    **spec,
                )
            ],
            listener,
        )

    yield start
    for remove in removals:
        remove()


def wait_for(path: Path) -> str:
    """Return the text of a file that a rank writes."""
    wait_until(lambda: path.exists() and path.read_text().endswith("\n"), 120.0, path.name)
    return path.read_text()


#: A rank that starts a child in its own group and one in a session of its own, and writes pids.
CHILDREN = """
    plain = subprocess.Popen(["sleep", "1000"])
    apart = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    with open("pids", "w") as file:
        print(os.getpid(), plain.pid, apart.pid, file=file)
    time.sleep(1000)
"""


def test_no_signal_goes_to_the_group_of_a_rank_that_was_reaped(
    server: RankServer, launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its number may be another user's by now."""
    signalled: list[int] = []
    group = launch("pass")
    (pid,) = group.pids
    while (event := group.next_event(120.0)) is not None and event.kind != "exit":
        pass
    assert event is not None
    monkeypatch.setattr(os, "kill", lambda pid, number: signalled.append(pid))
    monkeypatch.setattr(os, "killpg", lambda pgid, number: signalled.append(pgid))
    group.kill()
    monkeypatch.undo()
    assert pid not in signalled


def test_a_fork_server_that_closes_signals_only_what_lives_below_it(
    server: RankServer, launch: Launch, tmp_path: Path
) -> None:
    """A process group that once was a rank's, and is someone else's now, is left alone."""
    strace = tmp_path / "signals"
    note = (
        "import os\n"
        f"log = os.open({str(strace)!r}, os.O_WRONLY | os.O_CREAT | os.O_APPEND)\n"
        "for name in ('kill', 'killpg'):\n"
        "    def noted(pid, number, name=name, plain=getattr(os, name)):\n"
        "        os.write(log, f'{name} {pid}\\n'.encode())\n"
        "        plain(pid, number)\n"
        "    setattr(os, name, noted)\n"
    )
    (tmp_path / "sitecustomize.py").write_text(note)
    server.close()  # it starts again with what its environment adds
    server.env["PYTHONPATH"] = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    ended = launch("pass")
    while (event := ended.next_event(120.0)) is not None and event.kind != "exit":
        pass
    running = launch(CHILDREN)
    pids = [int(word) for word in wait_for(tmp_path / "pids").split()]
    server.close()
    wait_for_end(pids)
    signalled = [line.split() for line in strace.read_text().splitlines()]
    assert str(pids[0]) in [number for _, number in signalled]
    assert {number for _, number in signalled} <= {str(pid) for pid in pids}
    assert str(ended.pids[0]) not in [number for _, number in signalled]
    assert running.pids[0] == pids[0]


SECRET = "the-token-of-a-test"


@pytest.mark.slow
@pytest.mark.parametrize("new_interpreter", [False, True])
def test_the_environment_of_a_rank_is_not_on_its_command_line(
    server: RankServer, launch: Launch, tmp_path: Path, new_interpreter: bool
) -> None:
    body = """
        with open("seen", "w") as file:
            print(os.getpid(), os.environ["HF_TOKEN"], file=file)
        time.sleep(1000)
    """
    group = launch(body, env={"HF_TOKEN": SECRET}, new_interpreter=new_interpreter)
    pid, token = wait_for(tmp_path / "seen").split()
    assert token == SECRET
    words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    assert (b"rank" in words) == new_interpreter
    assert SECRET.encode() not in b" ".join(words)
    group.kill()


def test_the_storage_may_be_given_outside_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from tuner.cli.main import command_parser

    def given(*words: str) -> str | None:
        found: str | None = command_parser().parse_args(["optimize", *words]).storage
        return found

    url = "postgresql://me:secret@host/db"
    monkeypatch.delenv("JOULEFRONT_STORAGE", raising=False)
    assert given() is None
    monkeypatch.setenv("JOULEFRONT_STORAGE", url)
    assert given() == url
    assert given("--storage", "sqlite:///other.db") == "sqlite:///other.db"


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_a_run_folder_is_closed_to_others_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        run = RunFolder.named(tmp_path / "runs", "one")
        with run.locked():
            run.write_study({"name": "one"})
        private_folder(tmp_path / "runs" / "one")
        open_storage(None, tmp_path / "runs" / "two" / "study.journal")
    finally:
        os.umask(before)
    for name in ("one", "two"):
        assert (tmp_path / "runs" / name).stat().st_mode & 0o777 == 0o700


def test_a_folder_that_exists_keeps_its_mode(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o775)
    private_folder(tmp_path / "shared")
    assert (tmp_path / "shared").stat().st_mode & 0o777 == 0o775


@pytest.mark.extra("tuner.doctor.command")
def test_root_does_nothing_for_the_caller_of_sudo(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from tuner.cli.main import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    refuse_sudo({})
    refuse_sudo({"SUDO_UID": "0"})
    monkeypatch.setenv("SUDO_UID", "54321")
    with pytest.raises(InputError, match="without sudo"):
        RankServer()
    for words in (["doctor"], ["optimize", "tiny-gpt", "--dry-run"], ["apply", "run"]):
        assert main(words) == 2
        told = capsys.readouterr().err
        assert told.count("\n") == 1
        assert "start it again without sudo" in told
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(os, "geteuid", lambda: 1000)  # sudo -u somebody
    refuse_sudo()


def test_ranks_get_no_secret_of_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("JOULEFRONT_STORAGE", "RAY_AUTH_TOKEN"):
        monkeypatch.setenv(name, "x")
    assert not {"JOULEFRONT_STORAGE", "RAY_AUTH_TOKEN"} & set(RankServer().env)


def test_a_reserved_port_goes_to_rank_0_and_to_no_other_socket_by_chance() -> None:
    with reserved_port() as port, socket.socket() as other, socket.socket() as rank:
        with pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        rank.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        rank.bind(("127.0.0.1", port))
        rank.listen()
        with socket.create_connection(("127.0.0.1", port), timeout=60.0):
            pass


def test_ranks_of_one_node_meet_without_a_port(launch: Launch, tmp_path: Path) -> None:
    body = """
        import torch.distributed
        for _ in range(2):  # a program may take its process group down and make it again
            torch.distributed.init_process_group("gloo")
            torch.distributed.barrier()
            torch.distributed.destroy_process_group()
        torch.distributed.init_process_group("gloo")
        with open("met", "w") as file:
            print(os.getpid(), file=file)
        time.sleep(1000)
    """
    with reserved_port() as port:
        env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "1"}
        env |= {"GROUP_WORLD_SIZE": "1", "GLOO_SOCKET_IFNAME": "lo"}
        group = launch(body, env=env)
        wait_for(tmp_path / "met")
        listens = []
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
                local, state = line.split()[1], line.split()[3]
                address, _, number = local.rpartition(":")
                if state == "0A" and int(number, 16) == port:
                    listens.append(address)
        group.kill()
    assert listens == []


def test_a_lock_in_the_users_folder_of_ops_is_left_alone(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another program may be building there; joulefront's own folder is another matter."""
    packages = tmp_path / "packages" / "deepspeed" / "ops"
    packages.mkdir(parents=True)
    (packages.parent / "__init__.py").touch()
    (packages / "__init__.py").touch()
    (packages / "op_builder.py").write_text(
        "class Builder:\n    def load(self, verbose): pass\nA = B = C = Builder\n"
    )
    ops = tmp_path / "ops"
    (ops / "cpu_adam").mkdir(parents=True)
    lock = ops / "cpu_adam" / "lock"
    lock.touch()
    path = [str(tmp_path / "packages"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    server = RankServer(needs=())
    request.addfinalizer(server.close)
    server.env |= {"TORCH_EXTENSIONS_DIR": str(ops), "PYTHONPATH": os.pathsep.join(path)}
    server._optional = ()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(ops))
    server.load_ops(["A"])
    assert lock.exists()
    os.utime(lock, (0, 0))
    with pytest.raises(ServerError, match=r"15 minutes old.*remove it"):
        server.load_ops(["B"])
    assert lock.exists()
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR")
    server.load_ops(["C"])
    assert not lock.exists()
