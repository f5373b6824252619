"""Size and shape of the code: lines, longest pieces, layers and cycles.

A report, which fails nothing; `tests/test_size.py` and `tests/test_layers.py` fail on imports and
on a file that no row of the ledger owns. The ledger (`benchmarks/data/ledger.toml`) gives each
production file and test to a capability, and each capability to the core or an extra: lines of both
are printed for each. `--verbose` lists the imports of extras in the core. `--walk` adds the figures
of one request that really runs (`benchmarks.walk`, about a minute). Each longest piece is named
above the figures.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator

from benchmarks.figures import ROOT, Figure, arguments, publish
from benchmarks.ledger import Ledger
from benchmarks.source import Module, production
from benchmarks.walk import PROBE, Walk, figures_of_walk, walk_of_a_request

#: The import package's parts from the ground up: each may import those before it.
LAYERS = (
    *("search_spaces", "workload", "models"),
    *("formatting", "pareto", "terminal"),
    *("problem", "executors", "search", "answer", "study"),
    *("display", "result", "api", "cli", "doctor"),
    *(
        "recordings",
        "cluster",
        "simulated",
        "comparison",
        "receipt",
        "online",
        "callbacks",
        "deploy",
    ),
    *("planner", "exchange", "dashboard", "testing"),
)
#: Packages of `tuner.workload` from the ground up: each may import those before it.
WORKLOAD_PARTS = ("records", "hook", "scripts", "program", "node")
#: Functions whose parameters are the product's interface.
ENTRY_POINTS = ("optimize", "plan", "replay")

#: Lines of a piece of production code above which a review asks for the reason.
MOST_LINES = {"file": 800, "function": 80}


def _lines(*folders: str) -> int:
    return sum(
        path.read_text(encoding="utf-8").count("\n")
        for folder in folders
        for path in (ROOT / folder).rglob("*.py")
    )


def _imports(tree: ast.AST) -> Iterator[str]:
    """Modules that are imported anywhere in a module, also inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            if node.module == "tuner":
                yield from (f"tuner.{alias.name}" for alias in node.names)
            else:
                yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def import_violations(modules: list[Module]) -> list[str]:
    """Imports that look upwards, and imports of our folders under their bare names."""
    found = []
    for module in modules:
        for name in _imports(module.tree):
            top, _, rest = name.partition(".")
            if top in ("search_spaces", "workload", "models", "benchmarks", "tests"):
                found.append(f"{module.name} imports {name}")
            if top != "tuner" or not module.layer:
                continue
            layer = rest.partition(".")[0]
            if layer not in LAYERS or LAYERS.index(layer) > LAYERS.index(module.layer):
                found.append(f"{module.name} imports {name}")
    return found


def workload_violations(modules: list[Module]) -> list[str]:
    """Imports inside `tuner.workload` that run against `WORKLOAD_PARTS`."""
    order = {name: place for place, name in enumerate(WORKLOAD_PARTS)}

    def place(module: str) -> int | None:
        return order.get(module.removeprefix("tuner.workload.").partition(".")[0])

    found = []
    for module in modules:
        if module.layer != "workload" or (own := place(module.name)) is None:
            continue
        for name in _imports(module.tree):
            imported = place(name) if name.startswith("tuner.workload.") else None
            if imported is not None and imported > own:
                found.append(f"{module.name} imports {name}")
    return found


def _parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    arguments = node.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return sum(each.arg not in ("self", "cls") for each in every)


def import_cycles(modules: list[Module]) -> list[list[str]]:
    """Return the groups of modules that import each other, also inside functions."""
    names = {module.name for module in modules}
    graph = {module.name: imported_modules(module, names) for module in modules}
    reach: dict[str, set[str]] = {}
    for start in graph:
        seen: set[str] = set()
        stack = [*graph[start]]
        while stack:
            if (name := stack.pop()) not in seen:
                seen.add(name)
                stack += graph[name]
        reach[start] = seen
    groups = {
        tuple(sorted(other for other in reach[name] if name in reach[other]))
        for name in names
        if name in reach[name]
    }
    return [list(group) for group in sorted(groups)]


def imported_modules(module: Module, names: set[str]) -> set[str]:
    """Return the modules among `names` that a module imports."""
    found = set()
    for node in module.imports:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        else:
            origin = _origin(node, module)
            below = {f"{origin}.{alias.name}" for alias in node.names} & names
            found |= below
            if len(below) < len(node.names):
                found.add(origin)
    return found & names - {module.name}


def _origin(node: ast.ImportFrom, module: Module) -> str:
    # "from ..b import c" in the module tuner.a.d is of tuner.b; in the package tuner.a of b.
    if not node.level:
        return node.module or ""
    parts = module.name.split(".")
    up = node.level - (module.path.name == "__init__.py")
    return ".".join(filter(None, [*parts[: len(parts) - up], node.module or ""]))


def core_imports_extras(modules: list[Module], ledger: Ledger) -> list[str]:
    """Return the imports of an extra's module in a module of the core."""
    names = {module.name for module in modules}
    owners = {
        module.name: ledger.owner(module.path.relative_to(ledger.root).as_posix())
        for module in modules
    }
    found = []
    for module in modules:
        owner = owners[module.name]
        if owner is not None and owner.part == "core":
            for name in sorted(imported_modules(module, names)):
                imported = owners[name]
                if imported is not None and imported.part == "extra":
                    found.append(f"{module.name} imports {name} ({imported.name})")
    return found


def extras_walked(walk: Walk, ledger: Ledger) -> list[str]:
    """Return the files of extras that a request passes, with their capabilities."""
    owners = [(file, ledger.owner(file)) for file in walk.files]
    return [f"{file} ({each.name})" for file, each in owners if each and each.part == "extra"]


def largest_pieces(modules: list[Module]) -> dict[str, list[tuple[int, str]]]:
    """Return files, classes, functions and so on with their sizes, largest first."""
    pieces: dict[str, list[tuple[int, str]]] = {
        "file": [(module.lines, module.name) for module in modules],
        "class": [],
        "function": [],
        "parameters": [],
    }
    for module in modules:
        for name, node in module.definitions():
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if isinstance(node, ast.ClassDef):
                pieces["class"].append((length, name))
                continue
            pieces["function"].append((length, name))
            if not (module.name == "tuner.api" and node.name in ENTRY_POINTS):
                pieces["parameters"].append((_parameters(node), name))
    packages = Counter(module.name.rpartition(".")[0] for module in modules)
    pieces["modules"] = [(count, name) for name, count in packages.items()]
    return {what: sorted(found, reverse=True) for what, found in pieces.items()}


def docs_words() -> int:
    """Return the words of `docs` and of the changelog."""
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "CHANGELOG.md"]
    return sum(len(page.read_text(encoding="utf-8").split()) for page in pages)


def _lines_by_package(modules: list[Module]) -> dict[str, int]:
    packages = {module.layer for module in modules if module.name.count(".") > 1}
    lines: Counter[str] = Counter()
    for module in modules:
        lines[module.layer if module.layer in packages else "tuner"] += module.lines
    return {f"lines.{package}": lines[package] for package in sorted(lines)}


def too_long(pieces: dict[str, list[tuple[int, str]]]) -> dict[str, list[str]]:
    """Return the names of the files and functions above `MOST_LINES`, by kind of piece."""
    return {
        kind: [name for size, name in pieces[kind] if size > most]
        for kind, most in MOST_LINES.items()
    }


def lines_of_parts(ledger: Ledger) -> dict[str, int]:
    """Return the production lines of the core and of the extras, and the lines of tests."""
    lines = ledger.lines()
    parts: Counter[str] = Counter()
    for capability in ledger.capabilities:
        parts[capability.part] += lines[capability.name][0]
    return {
        "production_lines": parts.total(),
        "core_lines": parts["core"],
        "extra_lines": parts["extra"],
        "test_lines": sum(tests for _, tests in lines.values()),
    }


def lines_of_modes(ledger: Ledger) -> dict[str, int]:
    """Return the lines and the files that ask for each mode."""
    found = {}
    for mode in ledger.modes:
        files = ledger.mode(mode)
        found[f"mode_lines.{mode}"] = sum(files.values())
        found[f"mode_files.{mode}"] = len(files)
    return found


def rows_of_ledger(ledger: Ledger) -> list[str]:
    """Return the table of lines by capability, the core before the extras."""
    lines, rows = ledger.lines(), [f"{'lines of':57} {'code':>6} {'tests':>6}"]
    for part, rooms in ledger.rooms.items():
        for room, holds in rooms.items():
            own = [each for each in ledger.capabilities if each.room == room]
            code, tests = map(sum, zip(*(lines[each.name] for each in own), strict=True))
            rows.append(f"{part:6}{holds:51} {code:6} {tests:6}")
            for each in own:
                code, tests = lines[each.name]
                rows.append(f"{'':8}{each.name:49} {code:6} {tests:6}")
    return rows


def measure(
    modules: list[Module], pieces: dict[str, list[tuple[int, str]]], ledger: Ledger
) -> dict[str, int]:
    over = too_long(pieces)
    return {
        **lines_of_parts(ledger),
        "benchmark_lines": _lines("benchmarks"),
        "docs_words": docs_words(),
        "production_files": len(ledger.code()),
        "production_modules": len(modules),
        **_lines_by_package(modules),
        **{f"longest_{kind}": pieces[kind][0][0] for kind in ("file", "class", "function")},
        **{f"{kind}s_over_{most}": len(over[kind]) for kind, most in MOST_LINES.items()},
        "most_parameters": pieces["parameters"][0][0],
        "modules_in_largest_package": pieces["modules"][0][0],
        "imports_running_up": len(import_violations(modules) + workload_violations(modules)),
        "import_cycles": len(import_cycles(modules)),
        "core_imports_extras": len(core_imports_extras(modules, ledger)),
        **lines_of_modes(ledger),
    }


def main() -> None:
    parser = arguments(__doc__, "size")
    parser.add_argument("--top", type=int, default=5, help="pieces to name (default: 5)")
    parser.add_argument("--walk", action="store_true", help="walk through one request (a minute)")
    parser.add_argument(
        "--verbose", action="store_true", help="list what the figures of core and request count"
    )
    options = parser.parse_args()
    modules, ledger = production(), Ledger.read()
    pieces = largest_pieces(modules)
    for what, found in pieces.items():
        for length, name in found[: options.top]:
            print(f"{what:10} {length:5} {name}")
    for kind, names in too_long(pieces).items():
        for name in names:
            print(f"over {MOST_LINES[kind]} lines, the {kind} {name}: what is the reason?")
    print(*rows_of_ledger(ledger), *ledger.mistakes(), sep="\n")
    for cycle in import_cycles(modules):
        print(f"import each other: {' '.join(cycle)}")
    for line in (*import_violations(modules), *workload_violations(modules)):
        print(line)
    measured = measure(modules, pieces, ledger)
    details = core_imports_extras(modules, ledger)
    if options.walk:
        walk = walk_of_a_request()
        measured |= figures_of_walk(walk)
        walked = extras_walked(walk, ledger)
        measured["extra_files_of_a_request"] = len(walked)
        first = len(walk.before(*PROBE).files)
        details += [
            f"file {place} {'before' if place <= first else 'after'} the first probe: {file}"
            for place, file in enumerate(walk.files, 1)
        ]
        details += [f"file of an extra on the way: {each}" for each in walked]
        forwarding = [f"{each.file}:{each.line} {each.name}" for each in walk.forwarding()]
        details += [f"only forwards: {each}" for each in forwarding]
    if options.verbose:
        print(*details, sep="\n")
    publish([Figure(name, value, _unit(name)) for name, value in measured.items()], options.json)


def _unit(name: str) -> str:
    if name.partition(".")[0].endswith("lines") or name.startswith("longest"):
        return "lines"
    return "words" if name == "docs_words" else "count"


if __name__ == "__main__":
    main()
