"""Picture of the packages and their imports, for docs/develop/architecture.md.

usage: python -m benchmarks.picture [FILE]

A package stands above those that it imports; an arrow that follows from others is left out. Inside
`workload` its five packages are drawn.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from benchmarks.figures import ROOT
from benchmarks.size import imported_modules
from benchmarks.source import Module, production

FILE = ROOT / "docs" / "develop" / "packages.svg"
#: Packages that are small helpers of all others.
LEFT_OUT = ("tuner", "result", "formatting", "pareto", "storage", "terminal")
WIDTH, BOX_WIDTH, BOX_HEIGHT, ROW = 980, 150, 34, 78


def package_of(name: str) -> str:
    """Return the package that a module is drawn as."""
    parts = name.split(".")[1:] or ["tuner"]
    return "/".join(parts[:2]) if parts[0] == "workload" and len(parts) > 1 else parts[0]


def imports(modules: Sequence[Module]) -> dict[str, set[str]]:
    """Return which packages each package imports, without `LEFT_OUT`."""
    names = {module.name for module in modules}
    found: dict[str, set[str]] = {}
    for module in modules:
        own = package_of(module.name)
        below = {package_of(name) for name in imported_modules(module, names)}
        found.setdefault(own, set()).update(below - {own})
    kept = found.keys() - {*LEFT_OUT, "workload"}
    return {name: found[name] & kept for name in sorted(kept)}


def heights(graph: Mapping[str, set[str]]) -> dict[str, int]:
    """Return the row of each package, 0 at the bottom; RecursionError if packages form a circle."""
    rows: dict[str, int] = {}

    def row(name: str) -> int:
        if name not in rows:
            rows[name] = 1 + max((row(below) for below in graph[name]), default=-1)
        return rows[name]

    for name in graph:
        row(name)
    return rows


def direct(graph: Mapping[str, set[str]]) -> list[tuple[str, str]]:
    """Return the arrows that do not follow from others."""

    def reached(name: str) -> set[str]:
        return graph[name].union(*map(reached, graph[name]))

    return [
        (name, below)
        for name, imported in graph.items()
        for below in sorted(imported)
        if not any(below in reached(other) for other in imported - {below})
    ]


def picture(graph: Mapping[str, set[str]]) -> str:
    """Return an SVG of packages and arrows."""
    rows = heights(graph)
    places = {}
    for row in range(max(rows.values()) + 1):
        names = [name for name in graph if rows[name] == row]
        for place, name in enumerate(names, start=1):
            x = WIDTH * place / (len(names) + 1)
            places[name] = (x, 20 + ROW * (max(rows.values()) - row))
    height = 40 + BOX_HEIGHT + ROW * max(rows.values())
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        'font-family="system-ui, sans-serif" font-size="15">',
        "<title>Packages, each above those that it imports</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" '
        'markerHeight="8" orient="auto"><path d="M0 0 8 4 0 8z" fill="#6b7280"/></marker></defs>',
    ]
    for name, below in direct(graph):
        (x, y), (to_x, to_y) = places[name], places[below]
        top = y + BOX_HEIGHT
        bend = (to_y - top) / 2
        lines.append(
            f'<path d="M{x:.0f} {top} C{x:.0f} {top + bend:.0f} {to_x:.0f} {to_y - bend:.0f} '
            f'{to_x:.0f} {to_y - 2}" fill="none" stroke="#6b7280" marker-end="url(#tip)"/>'
        )
    for name, (x, y) in places.items():
        lines.append(
            f'<rect x="{x - BOX_WIDTH / 2:.0f}" y="{y}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" '
            f'rx="6" fill="{"#e0f2fe" if "/" in name else "#f3f4f6"}" stroke="#374151"/>'
            f'<text x="{x:.0f}" y="{y + 22}" text-anchor="middle">{escape(name)}</text>'
        )
    return "\n".join([*lines, "</svg>"]) + "\n"


def main() -> None:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else FILE
    path.write_text(picture(imports(production())))
    print(path)


if __name__ == "__main__":
    main()
