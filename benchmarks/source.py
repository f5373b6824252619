"""Modules of the import package, each of which is read and parsed once."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from benchmarks.figures import ROOT

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True)
class Module:
    """A module of the import package.

    Attributes:
        name: dotted name.
        path: its file.
    """

    name: str
    path: Path

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def imports(self) -> list[ast.Import | ast.ImportFrom]:
        """Its import statements, those in functions too."""
        return [n for n in ast.walk(self.tree) if isinstance(n, ast.Import | ast.ImportFrom)]

    @property
    def lines(self) -> int:
        return self.text.count("\n")

    @property
    def layer(self) -> str:
        """The part of the import package that holds it; "" for `tuner/__init__.py`."""
        parts = self.name.split(".")
        return parts[1] if len(parts) > 1 else ""

    def definitions(self) -> Iterator[tuple[str, Definition]]:

        def below(node: ast.AST, prefix: str) -> Iterator[tuple[str, Definition]]:
            for child in ast.iter_child_nodes(node):
                if isinstance(child, Definition):
                    name = f"{prefix}.{child.name}"
                    yield name, child
                    yield from below(child, name)
                else:
                    yield from below(child, prefix)

        yield from below(self.tree, self.name)


def production(root: Path = ROOT) -> list[Module]:
    """Every module of the import package of a checkout."""
    roots = {"tuner": "tuner"}
    roots |= {f"tuner.{name}": name for name in ("search_spaces", "workload", "models")}
    found = []
    for package, folder in roots.items():
        for path in sorted((root / folder).rglob("*.py")):
            parts = path.relative_to(root / folder).with_suffix("").parts
            if package == "tuner" and parts[0] in roots.values():
                continue
            kept = parts[:-1] if parts[-1] == "__init__" else parts
            found.append(Module(".".join((package, *kept)), path))
    return found
