"""Checkouts without extras: does what is left still work, and pass its tests?

The ledger (`benchmarks/data/ledger.toml`) says which files and tests an extra has. A checkout
without an extra is a copy of the tracked files in which those are deleted, and those of the extras
that import it; its environment has this one's packages, but not this checkout. In each, every
module that is left is imported, every command that is left prints its help, a script is searched on
one node, and the run is shown, chosen from and replayed. Then the everyday tests of the
capabilities that are left run, but for the files that themselves import what has been deleted,
which are counted, and single tests that say by a mark which extra they go through.

    python -m benchmarks.extras
    python -m benchmarks.extras --quick
    python -m benchmarks.extras --without "Ray and several nodes" --keep build/checkout
    python -m benchmarks.extras --minutes 60

`--quick` runs no tests. `--minutes` begins no further checkout after that time, and a line says so.
"""

from __future__ import annotations

import functools
import math
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.figures import ROOT, Figure, arguments, publish
from benchmarks.ledger import FOLDERS, Capability, Ledger
from benchmarks.size import imported_modules
from benchmarks.source import Module, production
from benchmarks.walk import COMMAND, OPTIONS, SCRIPT
from tuner.cli.command_table import SHIPPED

#: Tests of every day (EVERYDAY of the Makefile).
EVERYDAY = "not (slow or quiet or long)"
#: Tests that install `contrib/amd`.
CONTRIB = "tests/packaging/test_contrib_amd.py"
#: Faults of one checkout that are printed.
SHOWN = 40
#: A command that takes longer has failed.
LIMIT_S = 3600
#: Those of them that nothing runs beside (ALONE of the Makefile); the others share two processes.
ALONE = "ray or root"
PARALLEL = ("-n", "2", "--dist", "worksteal")
#: Exit code of pytest where no test has the marks.
NO_TESTS = 5
#: Line of pytest on tests that are skipped by the mark `extra` (`tests.support.entry_points`).
SKIPPED = re.compile(r"SKIPPED \[(\d+)\] .*: this checkout has no ")

#: Import modules; print for each part of the package that is missed who misses it.
IMPORT = """
import importlib, sys
missed = {}
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ImportError as error:
        if (error.name or "").partition(".")[0] == "tuner":
            missed.setdefault(error.name, []).append(name)
    except BaseException:
        pass  # a program, which wants its arguments
for name, by in missed.items():
    more = f" and {len(by) - 3} more" if len(by) > 3 else ""
    print(f"FAULT {name} is missed by {', '.join(by[:3])}{more}")
"""
#: Print the help of each command; print those that fail.
HELP = """
import contextlib, io
from tuner.cli.main import command_parser, main
for name in [n for action in command_parser()._subparsers._group_actions for n in action.choices]:
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            main([name, "--help"])
    except SystemExit as ended:
        if ended.code:
            print(f"FAULT tuner {name} --help ends with {ended.code}")
    except Exception as error:
        print(f"FAULT tuner {name} --help fails: {type(error).__name__}: {error}")
"""
MAIN = "import sys; from tuner.cli.main import main; sys.exit(main())"


@dataclass
class Outcome:
    """What a checkout did.

    Attributes:
        faults: one line for each thing that failed.
        left_out: test files of what is left that import what has been deleted.
        tests: the last line of the tests.
        skipped: tests that say by their mark that they go through what has been deleted.
    """

    faults: list[str] = field(default_factory=list)
    left_out: Sequence[str] = ()
    tests: str = ""
    skipped: int = 0


def extras_that_import(ledger: Ledger, modules: Sequence[Module]) -> dict[str, set[str]]:
    """Return, for each extra by name, the extras that import it, also through others."""
    names = {module.name for module in modules}
    owner = {each.name: _owner(ledger, each) for each in modules}
    direct: dict[str, set[str]] = {}
    for module in modules:
        own = owner[module.name]
        for name in imported_modules(module, names) if own and own.part == "extra" else ():
            if (imported := owner[name]) and imported.part == "extra":
                direct.setdefault(imported.name, set()).add(own.name)
    found = {}
    for capability in ledger.capabilities:
        if capability.part == "extra":
            found[capability.name] = reach = set[str]()
            stack = [capability.name]
            while stack:
                more = direct.get(stack.pop(), set()) - reach - {capability.name}
                reach |= more
                stack += more
    return found


def _owner(ledger: Ledger, module: Module) -> Capability | None:
    return ledger.owner(module.path.relative_to(ledger.root).as_posix())


def tracked_files(root: Path = ROOT) -> list[str]:
    """Return the files of a checkout that git tracks or would, by their paths in it."""
    words = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(words, cwd=root, capture_output=True, text=True, check=True).stdout
    return [path for path in listed.split("\0") if path and (root / path).exists()]


class Checkout:
    """A copy of this checkout without some capabilities, and an environment of its own.

    Args:
        folder: is made.
        without: names of the capabilities.
    """

    def __init__(self, folder: Path, ledger: Ledger, without: Collection[str]) -> None:
        self.folder, self._ledger = folder, ledger
        self.deleted: list[str] = []
        for path in tracked_files(ledger.root):
            owner = ledger.owner(path) if path.partition("/")[0] in FOLDERS else None
            owner = ledger.owner_of_test(path) if path.startswith("tests/") else owner
            if owner is not None and owner.name in without:
                self.deleted.append(path)
                continue
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ledger.root / path, folder / path, follow_symlinks=False)
        self.python = self._environment()

    def _environment(self) -> str:
        # The packages are those of this environment, but its .pth files, which lead to this
        # checkout, are not read.
        place = self.folder / ".venv"
        venv.create(place, symlinks=True)
        site, python = sysconfig.get_path("purelib"), str(place / "bin" / "python")
        own = sysconfig.get_path("purelib", vars={"base": str(place)})
        (Path(own) / "checkout.pth").write_text(f"{self.folder}\n{site}\n", encoding="utf-8")
        for path in Path(sys.executable).parent.iterdir():
            head, _, rest = (path.read_bytes() if path.is_file() else b"").partition(b"\n")
            if head.startswith(b"#!") and b"python" in head:
                script = place / "bin" / path.name
                script.write_bytes(f"#!{python}\n".encode() + rest)
                script.chmod(0o755)
        return python

    @property
    def environment(self) -> dict[str, str]:
        """Environment in which this checkout's programs are found first."""
        path = f"{Path(self.python).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        kept = {name: v for name, v in os.environ.items() if name != "PYTHONPATH"}
        return {**kept, "PATH": path, "LC_ALL": "C.UTF-8"}

    def run(
        self, *words: str, cwd: Path | None = None, limit_s: float = LIMIT_S
    ) -> subprocess.CompletedProcess[str]:
        """Run this environment's Python with some words and return what it printed."""
        try:
            return subprocess.run(
                [self.python, *words],
                cwd=cwd or self.folder,
                env=self.environment,
                capture_output=True,
                text=True,
                timeout=limit_s,
            )
        except subprocess.TimeoutExpired:
            return subprocess.CompletedProcess(words, 124, "", f"not finished after {limit_s:g} s")

    def import_faults(self) -> list[str]:
        """Import each module that is left; return a line for each that misses what is deleted."""
        names = [module.name for module in self._production if not self._is_deleted(module)]
        return _lines(self.run("-c", IMPORT, *names))

    def help_faults(self) -> list[str]:
        """Print the help of each command that is left; return a line for each that fails."""
        return _lines(self.run("-c", HELP))

    def search_faults(self) -> list[str]:
        """Search a script on this node, show, choose and replay; return a line for each failure.

        A command that has been deleted must end with the sentence that says what to install.
        """
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "train.py").write_text(SCRIPT, encoding="utf-8")
            runs = ("--runs-dir", str(Path(folder) / "runs"))
            name, again = ("--name", "searched"), ("--name", "replayed")
            script = ("--", self.python, *COMMAND)
            steps = (
                ("optimize", *OPTIONS, *runs, *name, *script),
                ("show", "searched", *runs),
                ("choose", "searched", *runs, "--max-slowdown", "50%"),
                ("replay", str(Path(folder) / "runs" / "searched"), *runs, *again, "-q"),
                ("runs", *runs),
                ("doctor", "--brief"),
            )
            found = []
            gone = {
                command
                for each in SHIPPED
                for path in [each.module.replace(".", "/")]
                if {f"{path}.py", f"{path}/__init__.py"} & {*self.deleted}
                for command in each.commands
            }
            for words in steps:
                done = self.run("-c", MAIN, *words, cwd=Path(folder))
                last = "".join((done.stderr.strip() or done.stdout.strip()).splitlines()[-1:])
                refused = done.returncode == 2 and "install all parts" in last
                if not refused if words[0] in gone else done.returncode:
                    found.append(f"tuner {words[0]} ends with {done.returncode}: {last}")
            return found

    def tests(self) -> tuple[list[str], list[str]]:
        """Return the test files of the capabilities that are left, and those left out of them.

        Left out are files that import what has been deleted, themselves or by a helper of theirs.
        """
        chosen, left_out = [], []
        for path in self._ledger.tests():
            owner = self._ledger.owner_of_test(path)
            file = path.rpartition("/")[2]
            if path in self.deleted or owner is None or owner.part == "tests":
                continue
            if file.startswith("test_"):
                (left_out if self._misses(path) else chosen).append(path)
        return chosen, left_out

    @functools.cached_property
    def _production(self) -> list[Module]:
        return production(self._ledger.root)

    @functools.cached_property
    def _modules(self) -> dict[str, Module]:
        found = {module.name: module for module in self._production}
        for path in self._ledger.tests():
            name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            found[name] = Module(name, self._ledger.root / path)
        for file in (self._ledger.root / "benchmarks").glob("*.py"):
            found[f"benchmarks.{file.stem}"] = Module(f"benchmarks.{file.stem}", file)
        return found

    def _is_deleted(self, module: Module) -> bool:
        return module.path.relative_to(self._ledger.root).as_posix() in self.deleted

    def _misses(self, path: str) -> bool:
        seen: set[str] = set()
        stack = [path.removesuffix(".py").replace("/", ".")]
        names = set(self._modules)
        while stack:
            if (name := stack.pop()) in seen:
                continue
            seen.add(name)
            if self._is_deleted(self._modules[name]):
                return True
            if name.startswith(("tests.", "benchmarks.")):
                stack += imported_modules(self._modules[name], names)
        return False

    def test_faults(self, files: Sequence[str]) -> tuple[list[str], str, int]:
        """Run the everyday tests of files.

        Returns:
            A line for each that fails, what pytest ends with, and how many are skipped by the mark
            of an extra.
        """
        failed, last, skipped = [], [], 0
        for marks, more in ((f"not ({ALONE})", PARALLEL), (f"({ALONE})", ())):
            words = ("-q", "--no-header", "-rfEs", *more, "-m", f"{EVERYDAY} and {marks}")
            done = self.run("-E", "-m", "pytest", *words, *files)
            lines = done.stdout.strip().splitlines()
            found = [each for each in lines if each.startswith(("FAILED ", "ERROR "))]
            if done.returncode not in (0, NO_TESTS) and not found:
                said = (done.stderr or done.stdout)[-800:]
                found = [f"pytest ends with {done.returncode}: {said}"]
            failed += found
            last += lines[-1:] if done.returncode != NO_TESTS else []
            skipped += sum(int(told[1]) for each in lines if (told := SKIPPED.match(each)))
        return failed, "; ".join(last), skipped


def _lines(done: subprocess.CompletedProcess[str]) -> list[str]:
    found = [line[6:] for line in done.stdout.splitlines() if line.startswith("FAULT ")]
    if done.returncode:
        found.append((done.stderr.strip().splitlines() or ["it ended without a word"])[-1])
    return found


def outcome_without(
    folder: Path, ledger: Ledger, without: Collection[str], *, quick: bool = False
) -> Outcome:
    """Make a checkout without capabilities in a folder, and return what it does."""
    checkout = Checkout(folder, ledger, without)
    found = Outcome(checkout.import_faults() + checkout.help_faults() + checkout.search_faults())
    chosen, found.left_out = checkout.tests()
    if not quick:
        failed, found.tests, found.skipped = checkout.test_faults(chosen)
        found.faults += failed
    return found


def contrib_faults(root: Path = ROOT) -> list[str]:
    """Install `contrib/amd` by pip and run its contract tests; return what failed."""
    words = [sys.executable, "-m", "pytest", "-q", "--no-header", CONTRIB]
    done = subprocess.run(words, cwd=root, capture_output=True, text=True)
    return [done.stdout[-800:]] if done.returncode else []


def print_outcome(title: str, found: Outcome) -> None:
    print(f"{title}: {'passes' if not found.faults else f'{len(found.faults)} faults'}")
    for fault in found.faults[:SHOWN]:
        print(f"  {fault}")
    if len(found.faults) > SHOWN:
        print(f"  and {len(found.faults) - SHOWN} more")
    for path in found.left_out:
        print(f"  left out, as it imports what is deleted: {path}")
    if found.tests:
        print(f"  {found.tests}; {found.skipped} of the skipped by the mark of an extra")
    sys.stdout.flush()


def folder_of(extra: str) -> str:
    """Return the name of a checkout's folder; an environment takes none with a colon."""
    return "-".join(re.findall(r"\w+", extra))


def main() -> None:
    parser = arguments(__doc__, "extras")
    parser.add_argument("--quick", action="store_true", help="run no tests")
    parser.add_argument("--alone", action="store_true", help="only the core alone")
    parser.add_argument("--without", nargs="+", metavar="EXTRA", help="only without each of these")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin nothing later")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the checkouts here")
    options = parser.parse_args()
    ledger = Ledger.read()
    importing = extras_that_import(ledger, production())
    if unknown := [name for name in options.without or () if name not in importing]:
        parser.error(f"no extra is called {unknown[0]!r}: {', '.join(importing)}")
    place = options.keep or Path(tempfile.mkdtemp(prefix="joulefront-extras-"))
    figures: list[Figure] = []
    ends_s = time.monotonic() + 60 * options.minutes

    def checked(title: str, folder: str, without: Collection[str]) -> Outcome:
        try:
            found = outcome_without(place / folder, ledger, without, quick=options.quick)
        finally:
            if options.keep is None:
                shutil.rmtree(place / folder, ignore_errors=True)
        print_outcome(title, found)
        return found

    if not options.without:
        found = checked("the core alone", "core", set(importing))
        figures.append(Figure("core_alone_passes", not found.faults, "count"))
        figures.append(Figure("core_alone_faults", len(found.faults), "count"))
        figures.append(Figure("core_test_files_left_out", len(found.left_out), "count"))
        figures.append(Figure("core_tests_skipped", found.skipped, "count"))
    if not options.alone:
        passing = tried = 0
        chosen: Mapping[str, set[str]] = {
            name: more for name, more in importing.items() if name in (options.without or importing)
        }
        for name, more in chosen.items():
            if time.monotonic() > ends_s:
                print(
                    f"cut short: {tried} of {len(chosen)} extras tried in {options.minutes:g} min"
                )
                break
            tried += 1
            too = f" (and {', '.join(sorted(more))}, which import it)" if more else ""
            found = checked(f"without {name}{too}", folder_of(name), {name, *more})
            passing += not found.faults
        figures.append(Figure("without_each_passes", passing, "count"))
        figures.append(Figure("without_each_of", tried, "count"))
        figures.append(Figure("extras", len(chosen), "count"))
    if not (options.alone or options.without):
        faults = contrib_faults()
        print(*faults, sep="\n")
        figures.append(Figure("contrib_contract_passes", not faults, "count"))
    if options.keep is None:
        shutil.rmtree(place, ignore_errors=True)
    publish(figures, options.json)


if __name__ == "__main__":
    main()
