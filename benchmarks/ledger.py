"""Owners of the production files and tests: capabilities, and the rooms of core and extras.

The table is `benchmarks/data/ledger.toml`, which says how a file finds its owner.

    python -m benchmarks.ledger planner

prints the test files of one room, which `make test-of EXTRA=planner` runs.
"""

from __future__ import annotations

import ast
import fnmatch
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.figures import ROOT

TABLE = Path(__file__).parent / "data" / "ledger.toml"
#: Folders of production code.
FOLDERS = ("search_spaces", "workload", "models", "tuner")
#: Endings of files that hold code, templates included; facts (.toml, .json) have no owner.
CODE = ("", ".py", ".html", ".js", ".css", ".sh", ".sbatch", ".txt")


@dataclass(frozen=True)
class Capability:
    """A row of the table.

    Attributes:
        name: its name.
        room: name of the room.
        part: "core", "extra" or "tests".
        files: patterns of the production files that it owns.
        tests: patterns of its tests.
        parts: functions of others' files that it owns, by file.
    """

    name: str
    room: str
    part: str
    files: tuple[str, ...]
    tests: tuple[str, ...]
    parts: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class Ledger:
    """The table of owners of a checkout.

    Attributes:
        capabilities: the rows.
        rooms: what each room holds, by its name, for "core", "extra" and "tests".
        modes: pattern of the lines that ask for a mode, by its name.
        root: folder of the checkout.
    """

    capabilities: Sequence[Capability]
    rooms: Mapping[str, Mapping[str, str]]
    modes: Mapping[str, str]
    root: Path = ROOT

    @classmethod
    def read(cls, table: Path = TABLE, root: Path = ROOT) -> Ledger:
        found = tomllib.loads(table.read_text(encoding="utf-8"))
        rooms = {part: found[part] for part in ("core", "extra", "tests")}
        part_of = {room: part for part, each in rooms.items() for room in each}
        capabilities = []
        for row in found["capability"]:
            parts = dict(text.split("::") for text in row.get("parts", ()))
            capabilities.append(
                Capability(
                    row["name"],
                    row["room"],
                    part_of[row["room"]],
                    tuple(row["files"]),
                    tuple(row["tests"]),
                    {path: tuple(names.split(",")) for path, names in parts.items()},
                )
            )
        return cls(capabilities, rooms, found["modes"], root)

    def owner(self, path: str) -> Capability | None:
        """Return the owner of a production file, by its path in the checkout."""
        return _longest([(p, each) for each in self.capabilities for p in each.files], path)

    def owner_of_test(self, path: str) -> Capability | None:
        """Return the owner of a file below `tests`."""
        return _longest([(p, each) for each in self.capabilities for p in each.tests], path)

    def code(self) -> list[str]:
        """Return the production files, by their paths in the checkout."""
        return [
            path for folder in FOLDERS for path in self._below(folder) if Path(path).suffix in CODE
        ]

    def tests(self) -> list[str]:
        """Return the .py files below `tests`."""
        return [path for path in self._below("tests") if path.endswith(".py")]

    def tests_of(self, room: str) -> list[str]:
        """Return the test files of a room's capabilities.

        Raises:
            ValueError: there is no such room.
        """
        if room not in (*self.rooms["extra"], *self.rooms["core"]):
            extras, core = (", ".join(self.rooms[part]) for part in ("extra", "core"))
            begin = f"no extra is called {room!r}" if room else "no extra is named"
            raise ValueError(f"{begin}: EXTRA is one of {extras}, or a part of the core ({core})")
        return [
            path
            for path in self.tests()
            if (owner := self.owner_of_test(path)) is not None and owner.room == room
            if path.rpartition("/")[2].startswith("test_")
        ]

    def _below(self, folder: str) -> Iterator[str]:
        for path in sorted((self.root / folder).rglob("*")):
            hidden = path.name.startswith(".") or "__pycache__" in path.parts
            if path.is_file() and not hidden:
                yield path.relative_to(self.root).as_posix()

    def mistakes(self) -> list[str]:
        """Return a sentence for each file without an owner and for each pattern without a file."""
        code, tests = self.code(), self.tests()
        where = "name it in a row of benchmarks/data/ledger.toml"
        found = [f"{path} has no owner: {where}" for path in code if not self.owner(path)]
        found += [f"{path} has no owner: {where}" for path in tests if not self.owner_of_test(path)]
        patterns = Counter(p for each in self.capabilities for p in (*each.files, *each.tests))
        found += [
            f"{p} is named {count} times: keep one" for p, count in patterns.items() if count > 1
        ]
        for capability in self.capabilities:
            rules = [(p, code) for p in capability.files]
            rules += [(p, tests) for p in capability.tests]
            for pattern, paths in rules:
                if not any(fits(path, pattern) for path in paths):
                    found.append(f"{capability.name}: no file fits {pattern}; delete it")
            for path, names in capability.parts.items():
                have = _top_level(self.root / path) if path in code else {}
                found += [
                    f"{capability.name}: {path} has no {name}; delete it"
                    for name in names
                    if name not in have
                ]
        return found

    def mode(self, name: str) -> dict[str, int]:
        """Return the number of lines that ask for a mode, by production file."""
        asks, found = re.compile(self.modes[name]), {}
        for path in self.code():
            lines = (self.root / path).read_text(encoding="utf-8").splitlines()
            if path.endswith(".py") and (count := sum(bool(asks.search(line)) for line in lines)):
                found[path] = count
        return found

    def lines(self) -> dict[str, tuple[int, int]]:
        """Return the lines of production code and of tests by capability, .py files only."""
        production: Counter[str] = Counter()
        tests: Counter[str] = Counter()
        for path in self.code():
            owner = self.owner(path)
            if owner is None or not path.endswith(".py"):
                continue
            production[owner.name] += (self.root / path).read_text(encoding="utf-8").count("\n")
            for other in self.capabilities:
                if names := other.parts.get(path):
                    pieces = _top_level(self.root / path)
                    moved = sum(pieces[name] for name in names)
                    production[owner.name] -= moved
                    production[other.name] += moved
        for path in self.tests():
            if (owner := self.owner_of_test(path)) is not None:
                tests[owner.name] += (self.root / path).read_text(encoding="utf-8").count("\n")
        return {each.name: (production[each.name], tests[each.name]) for each in self.capabilities}


def _longest(rules: list[tuple[str, Capability]], path: str) -> Capability | None:
    fitting = [rule for rule in rules if fits(path, rule[0])]
    return max(fitting, key=lambda rule: (rule[0] == path, len(rule[0])))[1] if fitting else None


def fits(path: str, pattern: str) -> bool:
    """Return if a path fits a pattern: a name, one with "*", or a folder that ends with "/"."""
    if pattern.endswith("/"):
        return path.startswith(pattern)
    parts, wanted = path.split("/"), pattern.split("/")
    return len(parts) == len(wanted) and all(map(fnmatch.fnmatchcase, parts, wanted))


def _top_level(path: Path) -> dict[str, int]:
    # Lines of each top-level definition of a file, with the gap before it.
    found, before = {}, 0
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        end = node.end_lineno or node.lineno
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found[node.name] = end - before
        before = end
    return found


def main() -> None:
    try:
        print(*Ledger.read().tests_of(" ".join(sys.argv[1:])), sep="\n")
    except ValueError as error:
        print(error, file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
