"""What an engineer checks in the first afternoon: packages, interpreters and documentation.

The wheel and the source archive are built and checked by twine; the core and each extra are
installed alone into empty environments; the core runs on every interpreter that this machine has,
without a compiler on the PATH; pip resolves the core for each interpreter and processor; the site
is built under --strict, and pages whose code blocks no test runs are counted. Packages come from
where pip is set up to find them.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from benchmarks.figures import ROOT, Figure, arguments, publish
from benchmarks.install import (
    EXTRAS,
    PYTHONS,
    Built,
    Interpreter,
    build,
    core_works,
    empty_environment,
    extra_alone,
    find_interpreters,
    install,
    packaging_errors,
    resolves,
    seconds_to_install,
)
from tuner.testing.commands import finished

#: Tests of the core that every interpreter runs: no torch, no Ray.
EVERYWHERE = (
    *("tests/search_spaces/test_rules.py", "tests/search_spaces/test_options.py"),
    *("tests/search_spaces/test_units.py", "tests/test_core_only.py", "tests/test_pareto.py"),
)


def interpreter_fails(
    interpreter: Interpreter, wheel: Path, folder: Path, tests: tuple[str, ...] = EVERYWHERE
) -> str:
    """Return what fails on an interpreter: installation, command or tests of the core."""
    assert interpreter.path is not None
    python = empty_environment(folder / interpreter.version, interpreter.path)
    tools = ("pytest", "pytest-timeout", "hypothesis")
    if why := install(python, wheel, *tools, pinned=False):
        return why
    if why := core_works(python, folder / f"{interpreter.version}-work"):
        return why
    words = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", *tests]
    done = finished(words, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    return "" if done.returncode == 0 else done.stdout[-400:]


def untested_pages() -> list[str]:
    """Return the pages that have code blocks which no test runs or parses."""
    from tests.test_docs import PAGES, PARSED, RUN, blocks_of

    known = {*RUN, *PARSED}
    return [
        page.name for page in PAGES if any(block.kind not in known for block in blocks_of(page))
    ]


def docs_are_strict(folder: Path) -> bool:
    """Build the site; return True if mkdocs warned of nothing."""
    done = finished(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )
    return done.returncode == 0 and "WARNING" not in done.stderr


def _line(what: str, why: str, good: str = "works") -> None:
    print(f"{what:28} {f'FAILS: {why}' if why else good}", flush=True)


def _resolution(folder: Path) -> None:
    for version in PYTHONS:
        for machine in ("x86_64", "aarch64"):
            _line(f"wheels {version} {machine}", resolves(version, machine, folder), "resolve")


def _interpreters(built: Built, folder: Path) -> int:
    tested = 0
    for interpreter in find_interpreters():
        if interpreter.path is None:
            print(f"{f'Python {interpreter.version}':28} not tested: {interpreter.why_not}")
            continue
        why = interpreter_fails(interpreter, built.wheel, folder)
        tested += not why
        _line(f"Python {interpreter.version}", why)
    return tested


def main() -> None:
    parser = arguments("packages, interpreters and documentation as a newcomer meets them")
    parser.add_argument("--only", nargs="+", choices=tuple(EXTRAS), metavar="EXTRA")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="joulefront-adoption-") as name:
        folder = Path(name)
        (folder / "dist").mkdir()
        built = build(folder / "dist")
        _line("twine check", packaging_errors(built, folder), "passes")
        _resolution(folder)
        took, why = seconds_to_install(built, folder)
        _line("core", why)
        alone = 0
        for extra in options.only or EXTRAS:
            why = extra_alone(extra, built.wheel, folder)
            alone += not why
            _line(f"extra {extra}", why)
        tested = _interpreters(built, folder)
        pages = untested_pages()
        print(f"{'pages with untested blocks':28} {', '.join(pages) or 'none'}")
        figures = [
            Figure("pythons_tested", tested, "count"),
            Figure("extras_alone", alone, "count"),
            Figure("wheel_MiB", built.wheel.stat().st_size / 2**20, "MiB"),
            Figure("core_install_s", took, "s"),
            Figure("pages_with_untested_blocks", len(pages), "count"),
            Figure("docs_strict", docs_are_strict(folder / "site"), "count"),
        ]
    publish(figures, options.json)


if __name__ == "__main__":
    main()
