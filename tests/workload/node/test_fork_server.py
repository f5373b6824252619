"""Fork server on a twin GPU node: ranks must find NVML and the CUDA driver as a new process does.

The modules that it imports stand for the frameworks: they touch the unmodified pynvml and the
twin's libcuda at import, as releases of DeepSpeed and triton have done."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Protocol

import pytest

from tests.needs import require
from tests.twin import TwinGpu, TwinNode
from tests.waiting import wait_until
from tuner.search_spaces.errors import InputError
from tuner.workload.node import rank_server
from tuner.workload.node.rank_server import ImportsAhead, RankServer, RankSpec, control_socket

NVML_AT_IMPORT = "import pynvml\npynvml.nvmlInit()\npynvml.nvmlDeviceGetCount()\n"
LIBCUDA = "import ctypes\ndriver = ctypes.CDLL('libcuda.so.1')\n"
ASK_NVML = "import pynvml; print('count', pynvml.nvmlDeviceGetCount())\n"
#: What a CUDA build of torch adds: after the first function it refuses CUDA in all later children.
CUDA_BUILD = """
import os, torch
bad_fork = []
def flags():
    os.register_at_fork(after_in_child=lambda: bad_fork.append(True))
    return "sm_90"
torch._C._cuda_getArchFlags, torch._C._cuda_isInBadFork = flags, lambda: bool(bad_fork)
torch.version.cuda = "13.0"
"""
ASK_TORCH = "import torch; print('bad fork', torch._C._cuda_isInBadFork())\n"
ASK_CUDA = LIBCUDA + "print('cuInit', driver.cuInit(0))\n"


#: A thread holds a lock at the fork, which a child needs to come up.
HELD = """
import __main__, os, threading
lock, locked = threading.Lock(), threading.Event()
threading.Thread(target=lambda: (lock.acquire(), locked.set(), threading.Event().wait())).start()
locked.wait()
os.register_at_fork(after_in_child=lock.acquire)
globals_of_server = __main__._in_child.__globals__
globals_of_server["CHILD_LIMIT_S"] = 0.5
"""


@pytest.fixture
def node(tmp_path: Path) -> Iterator[TwinNode]:
    require("cc")
    made = TwinNode(tmp_path / "twin-node", [TwinGpu(), TwinGpu()], virtual_time=False)
    yield made
    made.close()


class Start(Protocol):
    """Starts a fork server that imports a module with this text."""

    def __call__(self, text: str, *, accelerator: str = "cuda") -> RankServer: ...


@pytest.fixture
def start(node: TwinNode, tmp_path: Path) -> Iterator[Start]:
    """Start a fork server that imports a module with this text."""
    servers: list[RankServer] = []

    def make(text: str, *, accelerator: str = "cuda") -> RankServer:
        (tmp_path / "framework.py").write_text(text)
        path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
        env = node.environment() | {"PYTHONPATH": path, "DS_ACCELERATOR": accelerator}
        server = RankServer(needs=("framework",), env=env)
        server._optional = ()
        servers.append(server)
        server.start()
        return server

    yield make
    for server in servers:
        server.close()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """End a server that hangs after half a second, and not after the time of one at work."""
    monkeypatch.setattr(rank_server, "END_LIMIT_S", 0.5)


def output_of_rank(
    server: RankServer, folder: Path, text: str, *, new_interpreter: bool = False
) -> str:
    """Run a program as a rank; return what it printed."""
    program, log = folder / "program.py", folder / "rank0.log"
    program.write_text(text)
    log.unlink(missing_ok=True)
    listener, address, remove = control_socket()
    env = server.env | {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    spec = RankSpec(
        (str(program),), env, str(log), str(folder), address, new_interpreter=new_interpreter
    )
    try:
        group = server.spawn([spec], listener)
        # Not the server's exits: one that came with its reply to the start is the group's already.
        wait_until(lambda: (event := group.next_event(0.05)) is not None and event.kind == "exit")
    finally:
        remove()
    return log.read_text()


@pytest.mark.slow
def test_a_rank_finds_nvml_open_and_cuda_untouched(
    start: Start, node: TwinNode, tmp_path: Path
) -> None:
    """DeepSpeed's accelerator opens NVML when it is imported, and never again."""
    server = start(NVML_AT_IMPORT + LIBCUDA)
    assert server.fork_unsafe == ""
    assert node.cuda_touches() == []
    said = output_of_rank(server, tmp_path, ASK_NVML + ASK_CUDA)
    assert "count 2" in said
    assert "cuInit 0" in said
    ((pid, function),) = node.cuda_touches()
    assert server._process is not None
    assert function == "cuInit"
    assert pid != server._process.pid


#: What programs do with their standard input: `stty size` is in dozens of repositories.
TERMINAL = """
import os, select, subprocess, sys, termios
print("size", *os.popen("stty size").read().split())
print("a child has one", subprocess.run("test -t 0", shell=True).returncode == 0)
print("key pressed", bool(select.select([sys.stdin], [], [], 0)[0]))
print("read", repr(sys.stdin.read()), repr(sys.stdin.readline()))
print("cat", repr(subprocess.run(["cat"], capture_output=True, timeout=20).stdout))
try:
    input("name? ")
except EOFError:
    print("no answer")
own = termios.tcgetattr(0)
try:
    print("no one's terminal", os.open("/dev/tty", os.O_RDWR))
except OSError:
    print("no terminal that stops or kills it")
"""


@pytest.mark.parametrize("new_interpreter", [False, True])
def test_a_rank_has_a_terminal_at_which_nobody_types(
    start: Start, tmp_path: Path, new_interpreter: bool
) -> None:
    said = output_of_rank(
        start("import json"), tmp_path, TERMINAL, new_interpreter=new_interpreter
    ).splitlines()
    assert [line for line in said if line] == [
        "size 24 80",
        "a child has one True",
        "key pressed False",
        "read '' ''",
        "cat b''",
        "name? no answer",
        "no terminal that stops or kills it",
    ]


def test_the_server_keeps_no_descriptor_of_nvml(start: Start, node: TwinNode) -> None:
    server = start(NVML_AT_IMPORT + "pynvml.nvmlInit()\n")
    assert server._process is not None
    folder = Path(f"/proc/{server._process.pid}/fd")
    assert str(node.path) not in [os.readlink(entry) for entry in folder.iterdir()]


def test_an_import_that_starts_the_driver_is_noticed(start: Start, node: TwinNode) -> None:
    server = start(LIBCUDA + "driver.cuInit(0)\n")
    assert "started the CUDA driver" in server.fork_unsafe
    assert [function for _, function in node.cuda_touches()] == ["cuInit"]


@pytest.mark.extra("tuner.workload.program.built_in_job")
@pytest.mark.real
def test_asking_for_torchs_build_leaves_cuda_to_the_ranks(start: Start, tmp_path: Path) -> None:
    """After _cuda_getArchFlags, torch refuses CUDA in each child forked later."""
    server = start(CUDA_BUILD)
    assert server.torch is not None
    assert (server.torch.cuda, server.torch.architectures) == ("13.0", "sm_90")
    assert server.fork_unsafe == ""
    assert "bad fork False" in output_of_rank(server, tmp_path, ASK_TORCH)


@pytest.mark.real
def test_an_import_after_which_torch_refuses_cuda_is_noticed(start: Start, tmp_path: Path) -> None:
    """It starts neither torch's CUDA nor the driver."""
    server = start(CUDA_BUILD + "flags()\n")
    assert "torch refuses CUDA" in server.fork_unsafe
    assert "bad fork True" in output_of_rank(server, tmp_path, ASK_TORCH)


@pytest.mark.real
def test_a_refused_cuda_slows_no_rank_that_trains_on_cores(start: Start, tmp_path: Path) -> None:
    """PyPI's torch on a laptop: DeepSpeed asks it for a device, and there is none."""
    server = start(CUDA_BUILD + "flags()\n", accelerator="cpu")
    assert server.fork_unsafe == ""
    assert "bad fork True" in output_of_rank(server, tmp_path, ASK_TORCH)


def test_a_fork_that_hangs_is_noticed_on_cores_too(start: Start, impatient: None) -> None:
    assert "hangs" in start(HELD, accelerator="cpu").fork_unsafe


@pytest.mark.real
def test_children_that_wait_for_a_lock_for_ever_cost_no_probe(
    start: Start, impatient: None
) -> None:
    """A thread of an import holds a lock at the fork, which a child needs to come up."""
    server = start(CUDA_BUILD + HELD)
    assert "or they hang" in server.fork_unsafe
    assert server.torch is not None
    assert server.torch.architectures == ""  # not known


def test_an_optional_import_that_fails_is_left_to_the_rank(node: TwinNode, tmp_path: Path) -> None:
    """Modules of older releases of DeepSpeed fail for want of nvcc."""
    (tmp_path / "picky.py").write_text("raise RuntimeError('CUDA_HOME does not exist')\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    server = RankServer(needs=(), env=node.environment() | {"PYTHONPATH": path})
    server._optional = ("picky", "no_such_module")
    try:
        server.start()
        assert server.fork_unsafe == ""
    finally:
        server.close()


@pytest.mark.slow
def test_ranks_of_new_interpreters_can_use_a_driver_that_forked_ones_cannot(
    start: Start, tmp_path: Path
) -> None:
    server = start(LIBCUDA + "driver.cuInit(0)\n")
    assert "cuInit 3" in output_of_rank(server, tmp_path, ASK_CUDA)
    assert "cuInit 0" in output_of_rank(server, tmp_path, ASK_CUDA, new_interpreter=True)


@pytest.mark.slow
@pytest.mark.real
def test_the_real_preload_touches_neither_the_driver_nor_keeps_nvml(node: TwinNode) -> None:
    server = RankServer(env=node.environment() | {"DS_ACCELERATOR": "cuda"})
    try:
        server.start()
        assert server.fork_unsafe == ""
        assert node.cuda_touches() == []
    finally:
        server.close()


HEAVY = "class Kept: pass\nheld = [Kept() for _ in range(50_000)]\n"
COUNT = "import gc; print('walked', sum(type(o).__name__ == 'Kept' for o in gc.get_objects()))\n"


@pytest.mark.slow
def test_a_collection_in_a_rank_does_not_walk_what_the_server_has_imported(
    start: Start, tmp_path: Path
) -> None:
    """A walk would copy every page of it: 3.6 s of a start with ZeRO-3 on a busy machine."""
    assert "walked 0" in output_of_rank(start(HEAVY), tmp_path, COUNT)


def test_the_processor_is_asked_about_once(start: Start, tmp_path: Path) -> None:
    (tmp_path / "cpuinfo.py").write_text(
        f"def get_cpu_info():\n    print('asked', file=open({str(tmp_path / 'asked')!r}, 'a'))\n"
        "    return {'arch': 'X86_64'}\n"
    )
    operators = tmp_path / "deepspeed" / "ops"
    operators.mkdir(parents=True)
    (tmp_path / "deepspeed" / "__init__.py").touch()
    (operators / "__init__.py").touch()
    (operators / "op_builder.py").write_text(
        "class OneBuilder:\n"
        "    def load(self, verbose):\n"
        "        from cpuinfo import get_cpu_info\n"
        "        assert get_cpu_info() == {'arch': 'X86_64'}\n"
        "class TwoBuilder(OneBuilder):\n    pass\n"
    )
    server = start("")
    server.load_ops(["OneBuilder"])
    server.load_ops(["TwoBuilder"])
    assert (tmp_path / "asked").read_text() == "asked\n"


COUNTS = "with open({path!r}, 'a') as file: file.write('imported\\n')\n"


@pytest.fixture
def imports(tmp_path: Path) -> Path:
    """File with a line for each import of the module `framework`."""
    path = tmp_path / "imports"
    path.touch()
    (tmp_path / "framework.py").write_text(COUNTS.format(path=str(path)))
    return path


def server_of(folder: Path) -> RankServer:
    return RankServer(needs=("torch",), packages=(), env={"PYTHONPATH": str(folder)})


def test_they_are_imported_once_and_by_the_same_server(tmp_path: Path, imports: Path) -> None:
    with closing(server_of(tmp_path)) as server:
        server.start()
        assert (server.to_import, imports.read_text()) == ((), "")
        before = server.pid
        server.add_imports(("framework",), (), {"framework"})
        assert server.to_import == ("framework",)
        for _ in range(2):
            server.start()
        assert (server.pid, server.to_import) == (before, ())
        server.add_imports(("framework",), ("framework",), None)
        assert "framework" not in server.to_import
    assert imports.read_text() == "imported\n"


def test_a_server_that_ended_imports_all_of_them_again(tmp_path: Path, imports: Path) -> None:
    with closing(server_of(tmp_path)) as server:
        server.add_imports(("framework",), (), {"framework"})
        server.start()
        server.close()
        assert server.to_import == ("framework",)
        server.start()
    assert imports.read_text() == "imported\n" * 2


def test_one_that_is_missing_is_told_each_time(tmp_path: Path) -> None:
    with closing(server_of(tmp_path)) as server:
        server.start()
        server.add_imports(("not_there",), (), {"not_there"})
        for _ in range(2):
            with pytest.raises(InputError, match=r"cannot train .*not_there"):
                server.start()
        assert server.alive


def test_what_was_begun_is_waited_for_and_not_imported_again(tmp_path: Path, imports: Path) -> None:
    with closing(server_of(tmp_path)) as server:
        server.add_imports(("framework",), (), {"framework"})
        server.begin()
        before = server.pid
        server.start()
        assert (server.pid, server.to_import, server.torch) == (before, (), None)
        server.add_imports((), ("json",), {"json"})
        server.start()
        assert server.to_import == ()
    assert imports.read_text() == "imported\n"


def test_a_module_that_is_missing_is_told_when_the_begun_imports_are_waited_for(
    tmp_path: Path,
) -> None:
    with closing(server_of(tmp_path)) as server:
        server.add_imports(("not_there",), (), {"not_there"})
        server.begin()
        for _ in range(2):
            with pytest.raises(InputError, match=r"cannot train .*not_there"):
                server.start()


def test_a_server_ends_at_once_in_the_midst_of_an_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command's own error waited for imports that had begun beside it."""
    monkeypatch.setattr(rank_server, "END_LIMIT_S", 60.0)  # nothing of it is waited for
    (tmp_path / "framework.py").write_text("import time; time.sleep(60)")
    with closing(server_of(tmp_path)) as server:
        server.add_imports(("framework",), (), {"framework"})
        server.begin()
        time.sleep(0.3)
        pid = server.pid
        began_s = time.monotonic()
    assert time.monotonic() - began_s < 10
    assert not Path(f"/proc/{pid}").exists()


def test_a_command_is_started_without_numpy() -> None:
    """Its import took a tenth of what a small program takes to its own error."""
    code = "import tuner.workload.node.runner, tuner.workload.scripts.observing, sys"
    loaded = f"{code}; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", loaded], check=False).returncode == 0


@pytest.mark.parametrize(
    ("idle", "granted", "begins"), [(-1.0, 2.0, True), (-1.0, 1.5, False), (99.0, 2.0, False)]
)
def test_imports_go_ahead_only_beside_an_idle_core(
    idle: float,
    granted: float,
    begins: bool,
    tmp_path: Path,
    imports: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rank_server, "IDLE_CORES", idle)
    monkeypatch.setattr(rank_server, "granted_cores", lambda: granted)
    server = server_of(tmp_path)
    server.add_imports(("framework",), (), {"framework"})
    ahead = ImportsAhead(server, look_s=0.05)
    with closing(ahead):
        time.sleep(0.5)
        taken = ahead.take()
        assert (taken is server) is begins
        if taken is not None:
            taken.start()
            assert imports.read_text() == "imported\n"


def test_a_server_that_began_ahead_succeeds_one_that_starts_commands(
    tmp_path: Path, imports: Path
) -> None:
    with closing(server_of(tmp_path)) as ahead, closing(server_of(tmp_path)) as commands:
        commands.start()
        ahead.begin()
        commands.add_imports(("framework",), (), {"framework"})
        ahead.succeed(commands)
        assert not commands.alive
        ahead.start()
        assert ahead.to_import == ()
    assert imports.read_text() == "imported\n"


def test_compilers_are_imported_for_those_that_compile() -> None:
    def modules(*packages: str) -> set[str]:
        server = RankServer(packages=packages)
        return {*server._modules}

    assert "torch._inductor.compile_fx" not in modules("torch", "setuptools")
    assert "torch._dynamo" in modules("torch", "setuptools")
    assert "torch._inductor.compile_fx" in modules("torch", "torch._inductor")


def test_a_further_module_of_a_package_is_not_called_the_package(
    tmp_path: Path, imports: Path
) -> None:
    with closing(server_of(tmp_path)) as server:
        server.add_imports(("json",), (), {"json"})
        server.start()
        server.add_imports(("json.tool",), (), {"json"})
        assert server.to_import == ("json.tool",)
