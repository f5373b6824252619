"""Modules that one fork server imports later, for a job that is known by then."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from tuner.search_spaces.errors import InputError
from tuner.workload.node.rank_server import RankServer

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
