"""One guard a GPU: what a second search is told, and what a killed guard leaves."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pynvml
import pytest

from tests.support.guards import guards_of
from tests.twin import TwinGpu, TwinNode
from tests.waiting import is_running, wait_until
from tests.workload.node.clocks.governor_faults import unit
from tests.workload.node.clocks.guard_caller import BEFORE, GPU, Caller, left_wrong, stands, started
from tuner.search_spaces.configuration import Settings
from tuner.workload.node.clocks import guard, own_guard, root_guard
from tuner.workload.node.clocks.base import GovernorError
from tuner.workload.node.clocks.governor import NvmlGovernor
from tuner.workload.node.clocks.root_guard import GUARD_SOCKET

pytestmark = pytest.mark.needs("cc")
Make = Callable[..., TwinNode]
#: A search that sets a clock through NVML, tells that it has, and waits.
SEARCH = """
import sys
from tuner.search_spaces.configuration import Settings
from tuner.workload.node.clocks.governor import NvmlGovernor
governor = NvmlGovernor(environ={})
governor.apply(Settings(clock_MHz=900))
if sys.argv[1:]:
    governor.restore()
print("set", flush=True)
sys.stdin.read()
governor.close()
"""


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tuner.workload.node.clocks.root_guard.END_S", 0.3)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Let the guards of agents wait for half a second until another search ends."""
    text = Path(own_guard.__file__).read_text()
    assert text.count("\nEND_S = 5.0\n") == 1
    (tmp_path / "own_guard.py").write_text(text.replace("END_S = 5.0", "END_S = 0.5"))
    monkeypatch.setattr(own_guard, "__file__", str(tmp_path / "own_guard.py"))


def made(twin_node: Make, *, root: bool) -> TwinNode:
    gpu = TwinGpu(uuid=GPU, limit_W=350.0, memory_MHz=(405, 1593))
    return twin_node(gpu, root=root, virtual_time=False, children=True)


@pytest.fixture
def node(twin_node: Make) -> TwinNode:
    """A node on which users may set clocks."""
    return made(twin_node, root=True)


@pytest.fixture
def foreign(twin_node: Make) -> TwinNode:
    """A node on which only root may."""
    return made(twin_node, root=False)


@contextlib.contextmanager
def searching(*words: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", SEARCH, *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "set\n"
    try:
        yield process
    finally:
        process.communicate()


def refusal(governor: NvmlGovernor) -> str:
    with pytest.raises(GovernorError) as refused:
        governor.apply(Settings(clock_MHz=600, power_limit_W=200))
    return str(refused.value)


class TestTheAgentsOwnGuard:
    @pytest.mark.parametrize("words", [(), ("between its probes",)])
    def test_a_second_search_is_told_who_holds_the_gpu_and_changes_nothing(
        self, node: TwinNode, impatient: None, words: tuple[str, ...]
    ) -> None:
        with searching(*words) as first:
            before, setters = stands(node), len(node.log)
            with closing(NvmlGovernor(environ={})) as second:
                sentence = refusal(second)
            assert f"another search (process {first.pid} of " in sentence
            assert f"sets the clocks of {GPU}" in sentence
            assert "\n" not in sentence
            assert (stands(node), len(node.log)) == (before, setters)
        with closing(NvmlGovernor(environ={})) as third:
            third.apply(Settings(clock_MHz=600))
            assert stands(node)[0] == (600, 600)
        assert stands(node) == BEFORE

    def test_the_lock_of_a_killed_search_is_free_when_its_guard_has_restored(
        self, node: TwinNode
    ) -> None:
        with searching() as first:
            (pid,) = guards_of(first.pid)
            os.kill(pid, signal.SIGSTOP)  # it restores when it goes on, half a second later
            first.kill()
            goes_on = threading.Timer(0.5, os.kill, (pid, signal.SIGCONT))
            goes_on.start()
            with closing(NvmlGovernor(environ={})) as second:
                second.apply(Settings(clock_MHz=600))
                assert stands(node)[0] == (600, 600)
            goes_on.join()

    def test_another_gpu_is_another_lock(self, twin_node: Make) -> None:
        twin_node(TwinGpu(), TwinGpu(), virtual_time=False, children=True)
        one, other = ({"CUDA_VISIBLE_DEVICES": number} for number in "01")
        with closing(NvmlGovernor(environ=one)) as first:
            first.apply(Settings(clock_MHz=900))
            with closing(NvmlGovernor(environ=other)) as second:
                second.apply(Settings(clock_MHz=600))

    def test_of_two_gpus_with_one_held_both_stay(self, twin_node: Make, impatient: None) -> None:
        node = twin_node(TwinGpu(), TwinGpu(), virtual_time=False, children=True)
        with closing(NvmlGovernor(environ={"CUDA_VISIBLE_DEVICES": "1"})) as first:
            first.apply(Settings(clock_MHz=900))
            with closing(NvmlGovernor(environ={})) as second:
                assert "another search" in refusal(second)
            assert [node.locked_MHz(gpu) for gpu in (0, 1)] == [None, (900, 900)]

    def test_a_machine_without_device_files_has_no_lock(self, node: TwinNode) -> None:
        Path(f"{node.path}.gpu0").unlink()
        with searching(), closing(NvmlGovernor(environ={})) as second:
            second.apply(Settings(clock_MHz=600))


class TestTheGuardOfRoot:
    def test_a_second_search_is_told_who_holds_the_gpu(
        self, foreign: TwinNode, tmp_path: Path
    ) -> None:
        with unit(foreign, tmp_path) as path:
            environ = {GUARD_SOCKET: str(path)}
            with closing(NvmlGovernor(environ=environ, guarded=False)) as first:
                first.apply(Settings(clock_MHz=900))
                before = stands(foreign)
                with closing(NvmlGovernor(environ=environ, guarded=False)) as second:
                    assert f"another search (process {os.getpid()} of " in refusal(second)
                assert stands(foreign) == before
        assert stands(foreign) == BEFORE

    def test_it_takes_the_same_lock_as_the_agents_own(
        self, node: TwinNode, tmp_path: Path, impatient: None
    ) -> None:
        with unit(node, tmp_path) as path:
            with searching():
                caller = Caller.of(path)
                assert "another search" in caller.set("GpuLockedClocks", 600, 600)
                assert "another search" in caller.query(verb="restore", gpu=GPU)["error"]
                assert stands(node)[0] == (900, 900)
            assert caller.set("GpuLockedClocks", 600, 600) == ""
            with closing(NvmlGovernor(environ={})) as own:
                assert "another search" in refusal(own)
            caller.socket.close()

    def test_the_kernel_frees_the_lock_of_a_killed_guard(
        self, foreign: TwinNode, tmp_path: Path
    ) -> None:
        with unit(foreign, tmp_path) as path:
            first, second = Caller.of(path), Caller.of(path)
            assert first.set("PowerManagementLimit", 200_000) == ""
            for pid in guards_of(os.getpid()):  # both are this process's
                if f"{foreign.path}.gpu0" in open_files(pid):
                    kill(pid)
            assert first.answer() == {}
            assert second.set("PowerManagementLimit", 250_000) == ""
            second.socket.close()
            assert left_wrong(foreign) == ""  # the first one's note was believed

    def test_a_note_that_an_administrator_has_overtaken_is_not_believed(
        self, foreign: TwinNode, tmp_path: Path
    ) -> None:
        with unit(foreign, tmp_path) as path:
            first = Caller.of(path)
            assert first.set("PowerManagementLimit", 200_000) == ""
            (pid,) = guards_of(os.getpid())
            kill(pid)
            assert first.answer() == {}
            foreign.set(0, limit_W=300.0)
            second = Caller.of(path)
            assert second.set("PowerManagementLimit", 250_000) == ""
            second.socket.close()
        assert foreign.limit_W() == 300.0

    def test_a_configured_limit_comes_back_whatever_nvml_tells(
        self, foreign: TwinNode, tmp_path: Path
    ) -> None:
        root_guard.configured_file().write_text('{"PowerManagementLimit": [300000]}')
        with unit(foreign, tmp_path) as path:
            caller = Caller.of(path)
            assert caller.set("PowerManagementLimit", 200_000) == ""
            caller.socket.close()
        assert foreign.limit_W() == 300.0

    @pytest.mark.parametrize("text", ["{", "[1]", "\xff"])
    def test_a_configuration_that_cannot_be_read_is_told(
        self, foreign: TwinNode, text: str
    ) -> None:
        root_guard.configured_file().write_bytes(text.encode("latin-1"))
        with started(foreign) as (caller, _):
            assert "does not start" in caller.answer()["error"]

    def test_a_configuration_that_the_gpu_does_not_offer_sets_nothing(
        self, foreign: TwinNode
    ) -> None:
        root_guard.configured_file().write_text('{"GpuLockedClocks": [300, 9000]}')
        with started(foreign) as (caller, _):
            assert "9000" in caller.set("GpuLockedClocks", 900, 900)
        assert foreign.log == []


def test_without_a_note_nothing_is_set_and_all_is_restored(foreign: TwinNode) -> None:
    """A disk may be full, or a folder closed."""
    notes = Path(f"{foreign.path}.notes")
    with started(foreign) as (caller, _):
        notes.touch()
        assert "NotADirectoryError" in caller.set("PowerManagementLimit", 200_000)
        assert foreign.log == []
        notes.unlink()
        assert caller.set("PowerManagementLimit", 200_000) == ""
        shutil.rmtree(notes)
        notes.touch()
        caller.socket.close()
        assert left_wrong(foreign) == ""


#: A caller that sets a limit and stops itself.
STOPPED = """
import json, os, signal, socket, sys
asker = socket.socket(socket.AF_UNIX)
asker.connect(sys.argv[1])
message = dict(verb="set", gpu="GPU-twin", what="PowerManagementLimit", values=[200000])
asker.sendall(json.dumps(message).encode() + b"\\n")
assert asker.recv(4096) == b"{}\\n"
os.kill(os.getpid(), signal.SIGSTOP)
"""


def test_a_stopped_caller_is_restored_when_it_is_killed(foreign: TwinNode, tmp_path: Path) -> None:
    with unit(foreign, tmp_path) as path:
        caller = subprocess.Popen([sys.executable, "-c", STOPPED, str(path)])
        assert os.WIFSTOPPED(os.waitpid(caller.pid, os.WUNTRACED)[1])
        assert foreign.limit_W() == 200.0
        caller.kill()
        caller.wait()
        assert left_wrong(foreign) == ""


def test_a_guard_of_root_says_no_where_its_limits_cannot_be_raised(foreign: TwinNode) -> None:
    def limited() -> None:
        import resource

        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        drop_resource_privilege()

    with started(foreign, preexec_fn=limited) as (caller, _):
        assert "does not start" in caller.answer()["error"]


def drop_resource_privilege() -> None:
    """Drop CAP_SYS_RESOURCE (24), which a container's root lacks, too (prctl 24 drops it)."""
    import ctypes

    ctypes.CDLL(None).prctl(24, 24, 0, 0, 0)


def kill(pid: int) -> None:
    """Kill a process; its socket may be closed before its lock, so wait until both are."""
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not is_running(pid))


def open_files(pid: int) -> list[str]:
    found = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            found.append(os.readlink(link))
    return found


def test_it_leaves_no_file_where_control_groups_are_of_the_first_version(foreign: TwinNode) -> None:
    group = Path("/sys/fs/cgroup/cgroup.procs")
    before = group.exists()
    with started(foreign) as (caller, _):
        assert caller.set("GpuLockedClocks", 900, 900) == ""
        (pid,) = guards_of(os.getpid())
        assert Path(f"/proc/{pid}/comm").read_text() == f"guard:{os.getpid()}\n"
        assert os.getsid(pid) == pid
    assert group.exists() == before


def test_no_variable_moves_the_lock_of_the_installed_guard() -> None:
    """What root locks and reads would else be its caller's choice."""
    text = Path(guard.__file__).read_text()
    assert "JOULEFRONT" not in text
    assert text.count("os.environ") == 2  # SUDO_UID, which sudo sets


def test_a_user_cannot_pass_the_lock_off_as_anothers(
    node: TwinNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that calls itself a guard of another user's is named itself."""
    pynvml.nvmlInit()
    path = own_guard.device_of(pynvml, GPU)
    assert path is not None
    program = "import fcntl, sys, time; f = open(sys.argv[1]); fcntl.flock(f, fcntl.LOCK_EX)\n"
    program += "open('/proc/self/comm', 'w').write('guard:1'); print(flush=True); time.sleep(60)"
    holder = subprocess.Popen([sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None
        holder.stdout.readline()
        owners = {holder.pid: 4242, 1: 0}
        monkeypatch.setattr(own_guard, "_uid", owners.__getitem__)
        assert own_guard.holder(path) == f"process {holder.pid} of UID 4242"
        owners[holder.pid] = 0
        assert own_guard.holder(path).startswith("process 1 of ")
    finally:
        holder.kill()
        holder.communicate()
    assert own_guard.holder(path) == ""
