"""Shape of production code: import cycles, owners of files, and names of long pieces."""

from pathlib import Path

import pytest

from benchmarks.ledger import Ledger
from benchmarks.size import (
    MOST_LINES,
    Module,
    import_cycles,
    imported_modules,
    largest_pieces,
    too_long,
)


def written(folder: Path, sources: dict[str, str]) -> list[Module]:
    """Write modules of these sources, by dotted name."""
    modules = []
    for name, text in sources.items():
        path = folder / f"{name}.py"
        path.write_text(text)
        modules.append(Module(name, path))
    return modules


def test_no_modules_import_each_other(production_modules: list[Module]) -> None:
    assert import_cycles(production_modules) == []


def test_every_file_has_an_owner_in_the_ledger() -> None:
    assert Ledger.read().mistakes() == []


def test_modules_that_import_each_other_are_found(tmp_path: Path) -> None:
    sources = {
        "tuner.a": "from tuner import b",
        "tuner.b": "def f():\n    from tuner.c import g",
        "tuner.c": "import tuner.a",
        "tuner.d": "import tuner.a",
    }
    cycles = import_cycles(written(tmp_path, sources))
    assert cycles == [["tuner.a", "tuner.b", "tuner.c"]]


@pytest.mark.parametrize("more", [0, 1])
def test_a_file_or_function_is_named_from_one_line_above_its_limit(
    tmp_path: Path, more: int
) -> None:
    def lines(kind: str, head: str, line: str) -> str:
        return f"{head}\n" + f"{line}\n" * (MOST_LINES[kind] - 1 + more)

    sources = {
        "tuner.a": lines("file", "x = 1", "x = 2"),
        "tuner.c": lines("function", "def c():", "    x = 1"),
        "tuner.d": "class D:\n" + lines("function", "    async def d():", "        x = 1"),
    }
    found = too_long(largest_pieces(written(tmp_path, sources)))
    assert found == {
        "file": ["tuner.a"] * more,
        "function": ["tuner.d.D.d", "tuner.c.c"] * more,
    }


def test_an_import_relative_to_its_package_is_an_import(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    sources = {
        "tuner.b": ("b/__init__.py", "from . import c\nfrom .c import f"),
        "tuner.b.c": ("b/c.py", "def g():\n    from .d import h\n    from .. import a"),
        "tuner.b.d": ("b/d.py", "from ..a import x"),
        "tuner.a": ("a.py", ""),
    }
    modules = []
    for name, (file, text) in sources.items():
        (tmp_path / file).write_text(text)
        modules.append(Module(name, tmp_path / file))
    found = {each.name: imported_modules(each, {*sources}) for each in modules}
    assert found == {
        "tuner.b": {"tuner.b.c"},
        "tuner.b.c": {"tuner.b.d", "tuner.a"},
        "tuner.b.d": {"tuner.a"},
        "tuner.a": set(),
    }
