"""Modules that one fork server imports later, for a job that is known by then."""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from tuner.search_spaces.errors import InputError
from tuner.workload.node import rank_server
from tuner.workload.node.rank_server import ImportsAhead, RankServer

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
