"""Shape of production code: import cycles, owners of files, and names of long pieces."""

from pathlib import Path

from benchmarks.ledger import Ledger
from benchmarks.size import (
    Module,
    import_cycles,
    imported_modules,
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
