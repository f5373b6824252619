"""The guard of root: what it sets for whom, what it refuses, and when it restores."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pynvml
import pytest

from tests.support.guards import guards_of, installed_guard
from tests.twin import TwinGpu, TwinNode
from tests.waiting import wait_until
from tests.workload.node.clocks.governor_faults import FAULTS, try_root_fault, unit
from tests.workload.node.clocks.guard_caller import BEFORE, GPU, Caller, stands
from tuner.search_spaces.configuration import Settings
from tuner.workload.node.clocks import root_guard
from tuner.workload.node.clocks.base import GovernorError, UnsupportedKnob
from tuner.workload.node.clocks.clock_backends import available_backends
from tuner.workload.node.clocks.governor import NvmlGovernor
from tuner.workload.node.clocks.root_guard import GUARD_SOCKET, RootGuardNvml
from tuner.workload.node.meters.gpus import Gpu

pytestmark = pytest.mark.needs("cc")
Make = Callable[..., TwinNode]
FOREIGN = 54321


@pytest.fixture
def node(twin_node: Make) -> TwinNode:
    gpu = TwinGpu(uuid=GPU, limit_W=350.0, memory_MHz=(405, 1593))
    return twin_node(gpu, root=False, virtual_time=False)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that every user can enter: pytest's own are closed."""
    with tempfile.TemporaryDirectory(prefix="joulefront-guard-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture
def listens(node: TwinNode, folder: Path) -> Iterator[Path]:
    with unit(node, folder) as path:
        yield path


@pytest.fixture
def asker(listens: Path) -> Iterator[Caller]:
    made = Caller.of(listens)
    yield made
    made.socket.close()


@pytest.mark.parametrize("fault", FAULTS)
def test_no_clock_is_left_wrong(tmp_path: Path, fault: str) -> None:
    assert try_root_fault(fault, 2, tmp_path) == ""


@pytest.mark.parametrize("fault", ["kill_group", "exception", "clean"])
def test_no_end_undoes_a_limit_that_another_has_set(tmp_path: Path, fault: str) -> None:
    assert try_root_fault(fault, 2, tmp_path, others_W=137) == ""


def test_a_governor_without_rights_sets_all_three_by_the_guard(
    node: TwinNode, listens: Path
) -> None:
    governor = NvmlGovernor(environ={GUARD_SOCKET: str(listens)}, guarded=False)
    assert (governor.can_set, governor.means, node.log) == (True, "guard", [])
    governor.apply(Settings(clock_MHz=900, memory_clock_MHz=405, power_limit_W=200))
    assert stands(node) == ((900, 900), (405, 405), 200.0)
    governor.apply(Settings(clock_MHz=1200))
    assert stands(node) == ((1200, 1200), None, 350.0)
    governor.close()
    assert stands(node) == BEFORE


def test_the_guard_after_a_killed_one_learns_what_stood(node: TwinNode, listens: Path) -> None:
    governor = NvmlGovernor(environ={GUARD_SOCKET: str(listens)}, guarded=False)
    governor.apply(Settings(power_limit_W=200))
    os.kill(guards_of(os.getpid())[0], 9)
    governor.apply(Settings(power_limit_W=250))
    governor._nvml._drop()  # as if this process were gone
    wait_until(lambda: node.limit_W() == 350.0)


@pytest.mark.parametrize("again", [False, True])
def test_a_limit_that_another_has_set_since_stays(
    node: TwinNode, asker: Caller, again: bool
) -> None:
    assert asker.set("PowerManagementLimit", 300_000) == ""
    node.set(0, limit_W=250.0)
    if again:
        assert asker.set("PowerManagementLimit", 200_000) == ""
    asker.set("GpuLockedClocks", 900, 900)
    asker.socket.close()
    wait_until(lambda: node.locked_MHz() is None)
    wait_until(lambda: node.limit_W() == 250.0)


def test_a_lock_that_an_administrator_has_configured_comes_back(
    node: TwinNode, listens: Path
) -> None:
    environ = {GUARD_SOCKET: str(listens), "EARLIER_CLOCKS_MHZ": "300,1095"}
    governor = NvmlGovernor(environ=environ, guarded=False)
    assert not governor.can_set  # the user's word is not believed, and not silently dropped
    assert '{"GpuLockedClocks": [300, 1095]}' in governor.why_not
    governor.close()
    root_guard.configured_file().write_text('{"GpuLockedClocks": [300, 1095]}')
    governor = NvmlGovernor(environ=environ, guarded=False)
    assert governor.apply(Settings(clock_MHz=900)).notes == ()  # nothing will be released
    governor._nvml._drop()  # as if this process were gone
    wait_until(lambda: node.locked_MHz() == (300, 1095))


def test_zeusd_comes_first_and_nothing_is_tried_where_nothing_is_installed(
    listens: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(root_guard, "DEFAULT_SOCKET", str(folder / "none"))
    monkeypatch.setattr(root_guard, "PROGRAM", str(folder / "none"))
    gpu = Gpu(0, GPU, "", None, None)
    both = {GUARD_SOCKET: str(listens), "ZEUSD_SOCK_PATH": "/run/zeusd.sock"}
    assert [way.means for way in available_backends(pynvml, gpu, both)] == [
        "locked clocks",
        "zeusd",
        "guard",
    ]
    assert [way.means for way in available_backends(pynvml, gpu, {})] == ["locked clocks"]
    (folder / "none").touch()
    if os.geteuid() == 0:
        os.chown(folder / "none", FOREIGN, FOREIGN)
    assert [way.means for way in available_backends(pynvml, gpu, {})] == [
        "locked clocks"
    ]  # it is not root's


@pytest.mark.parametrize(
    ("what", "values"),
    [
        ("GpuLockedClocks", (900, 1500)),
        ("GpuLockedClocks", (1200, 900)),
        ("GpuLockedClocks", (0, 100)),
        ("GpuLockedClocks", (-1, 900)),
        ("GpuLockedClocks", (900,)),
        ("GpuLockedClocks", (True, 900)),
        ("GpuLockedClocks", ("900", "900")),
        ("MemoryLockedClocks", (405, 2**40)),
        ("ApplicationsClocks", (405, 900)),
        ("PowerManagementLimit", (1,)),
        ("PowerManagementLimit", (401_000,)),
        ("PowerManagementLimit", (200_000.0,)),
        ("PersistenceMode", (1,)),
        ("MigMode", (1,)),
    ],
)
def test_what_a_gpu_does_not_offer_is_refused(
    node: TwinNode, asker: Caller, what: str, values: tuple[Any, ...]
) -> None:
    assert asker.set(what, *values)
    assert node.log == []
    assert asker.set("GpuLockedClocks", 210, 1410) == ""  # and it lives on


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"{",
        b"[" * 4000,
        b"[]",
        b'{"verb": "run"}',
        b'{"verb": "set", "gpu": 1, "what": "GpuLockedClocks", "values": [900, 900]}',
        b'{"verb": "set", "gpu": "GPU-none", "what": "GpuLockedClocks", "values": [900, 900]}',
        b'{"verb": "set"}',
        b'{"verb": "restore", "gpu": [], "what": {}}',
        b"\xff\xfe",
    ],
)
def test_whatever_is_sent_it_stays_to_restore(node: TwinNode, asker: Caller, line: bytes) -> None:
    asker.set("GpuLockedClocks", 900, 900)
    asker.announce(line)
    assert node.locked_MHz() == (900, 900)
    assert asker.query(verb="restore") == {}
    assert stands(node) == BEFORE


def test_a_line_without_end_ends_it(node: TwinNode, asker: Caller) -> None:
    asker.set("GpuLockedClocks", 900, 900)
    asker.socket.sendall(b"x" * 5000)
    wait_until(lambda: stands(node) == BEFORE)


def test_restore_takes_back_one_thing_or_all(node: TwinNode, asker: Caller) -> None:
    asker.set("GpuLockedClocks", 900, 900)
    asker.set("PowerManagementLimit", 200_000)
    asker.set("PowerManagementLimit", 250_000)
    assert asker.query(verb="restore", gpu=GPU, what="GpuLockedClocks") == {}
    assert stands(node) == (None, None, 250.0)
    asker.set("MemoryLockedClocks", 405, 405)
    assert asker.query(verb="restore") == {}
    assert stands(node) == BEFORE


@pytest.mark.root
class TestAsRoot:
    """With a second user."""

    @pytest.fixture
    def listens(self, node: TwinNode, folder: Path) -> Iterator[Path]:
        """A unit for one other user, who need not exist."""
        with unit(node, folder, "65534") as path:
            yield path

    @staticmethod
    def as_user(uid: int, path: Path, then: Callable[[Caller], None]) -> int:
        """Do something as another user, and return the process, which has not been reaped."""
        if pid := os.fork():
            return pid
        code = 9
        try:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            then(Caller.of(path))
            code = 0
        finally:
            os._exit(code)

    def test_a_killed_user_leaves_no_clock_wrong(self, node: TwinNode, listens: Path) -> None:
        stays, end = os.pipe()

        def sets_and_dies(asker: Caller) -> None:
            assert asker.set("GpuLockedClocks", 900, 900) == ""
            assert asker.set("PowerManagementLimit", 200_000) == ""
            if os.fork() == 0:  # a child keeps the socket open
                os.close(end)
                os.read(stays, 1)
                os._exit(0)
            os.kill(os.getpid(), 9)

        pid = self.as_user(65534, listens, sets_and_dies)
        assert os.waitpid(pid, 0)[1] == 9
        wait_until(lambda: stands(node) == BEFORE)
        os.close(end)
        os.close(stays)
        assert ("nvmlDeviceSetGpuLockedClocks", 0, (900, 900)) in node.log

    def test_another_user_gets_nothing(self, node: TwinNode, listens: Path) -> None:
        def asks(asker: Caller) -> None:
            assert "UID 54321 may not" in asker.answer()["error"]

        pid = self.as_user(FOREIGN, listens, asks)
        assert os.waitpid(pid, 0)[1] == 0
        assert node.log == []

    def test_sudo_lets_its_caller_ask_and_takes_no_words(self, node: TwinNode) -> None:
        """Its words would be the caller's: a rule of sudo's may forget to forbid them."""
        environ = os.environ | node.environment() | {"SUDO_UID": str(FOREIGN)}
        for words, told in (
            ([], "UID 0 may not"),
            (["root"], "UID 0 may not"),
            (["--nvml", "os", "--agent", "1"], ""),
        ):
            ours, theirs = socket.socketpair()
            with theirs:
                command = [sys.executable, "-IS", str(installed_guard(node)), *words]
                process = subprocess.Popen(
                    command, stdin=theirs, env=environ, stderr=subprocess.PIPE
                )
            with ours, ours.makefile("rb") as file:
                assert told.encode() in file.readline()
            assert process.communicate()[1] is not None
            assert process.returncode != 0

    def test_nothing_is_asked_of_a_socket_of_another_user(
        self, node: TwinNode, folder: Path
    ) -> None:
        folder.chmod(0o777)
        path = folder / "theirs"

        def listen(path: Path) -> int:
            if pid := os.fork():
                return pid
            os.setresuid(FOREIGN, FOREIGN, FOREIGN)
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(f"{path}-new")
                listener.listen()
                os.rename(f"{path}-new", path)
                time.sleep(120)
            os._exit(0)

        pid = listen(path)
        try:
            wait_until(path.exists)
            assert f"UID {FOREIGN} listens" in RootGuardNvml(pynvml, str(path)).why_not()
            governor = NvmlGovernor(environ={"ZEUSD_SOCK_PATH": str(path)}, guarded=False)
            assert f"UID {FOREIGN} listens" in governor.why_not
            governor.close()
        finally:
            os.kill(pid, 9)
            os.waitpid(pid, 0)


def test_a_guard_that_is_gone_before_it_set_anything_costs_the_knob(
    node: TwinNode, folder: Path
) -> None:
    with unit(node, folder) as path:
        governor = NvmlGovernor(environ={GUARD_SOCKET: str(path)}, guarded=False)
        os.kill(guards_of(os.getpid())[0], 9)
        path.unlink()
        (folder / "other").touch()
        governor._nvml._path = str(folder / "other")
        with pytest.raises(UnsupportedKnob, match="guard refuses any lock of its clock"):
            governor.apply(Settings(clock_MHz=900))
        governor.close()
        assert node.log == []


def test_a_guard_that_is_gone_later_is_a_failed_setting(node: TwinNode, folder: Path) -> None:
    with unit(node, folder) as path:
        governor = NvmlGovernor(environ={GUARD_SOCKET: str(path)}, guarded=False)
        governor.apply(Settings(clock_MHz=900))
        path.unlink()
        os.kill(guards_of(os.getpid())[0], 9)
        (folder / "other").touch()
        governor._nvml._path = str(folder / "other")
        with pytest.raises(GovernorError, match="did not take"):
            governor.apply(Settings(clock_MHz=1200))
        with pytest.raises(GovernorError, match="was not put back"):
            governor.close()
