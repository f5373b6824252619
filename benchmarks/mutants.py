"""Small changes of the code that no test notices: the measure of the suite, in place of its lines.

    pip install cosmic-ray
    python -m benchmarks.mutants
    python -m benchmarks.mutants --only window --number 40 --seed 7

Cosmic Ray makes the changes: an operator for another, a number one more or less, a condition
turned round, a loop left at once. They are drawn at random from the files that decide what is
measured, set, spent, recommended and kept. Each is made alone, in a copy of this checkout, and
the everyday tests of that file run there until one fails: first those that run the changed line,
the quickest first, then the others, which may run it in a process of theirs. A change that none
notices has survived; it is printed with its line, and either gets a test or a reason in
`benchmarks/data/mutants.toml` (most often that it changes nothing that can be seen). Half an hour
of processor time.
"""

from __future__ import annotations

import ast
import json
import math
import random
import subprocess
import sys
import tempfile
import threading
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice, pairwise
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks.extras import Checkout
from benchmarks.figures import ROOT, Figure, arguments, publish
from benchmarks.ledger import Ledger

#: The files, and the tests that are to notice a change of each.
SUBJECTS = {
    "window": (
        "workload/node/measure/window.py",
        (
            "tests/workload/node/measure",
            "tests/workload/node/test_device_watch.py",
            "tests/workload/node/test_healthy_nodes.py",
        ),
    ),
    "governor": (
        "workload/node/clocks/governor.py",
        ("tests/workload/node/clocks", "tests/online/test_settings.py"),
    ),
    "budget": ("tuner/study/budget.py", ("tests/study",)),
    "loop": ("tuner/study/loop.py", ("tests/study",)),
    "verdict": (
        "tuner/answer/judge.py",
        (
            "tests/answer",
            "tests/problem/test_limits.py",
            "tests/display/test_figures.py",
            "tests/display/test_one_figure.py",
        ),
    ),
    "trace": ("workload/records/trace.py", ("tests/workload/records", "tests/study")),
}
REASONS = ROOT / "benchmarks" / "data" / "mutants.toml"
#: Tests that take long, or measure, are left out.
EVERYDAY = "not (slow or quiet or long or ray or root)"
#: Tests may take so many times what they take without a change, and so much more, seconds.
MOST_TIMES, MORE_S = 5.0, 60.0
#: Note what each test runs of a file (`Touched`), and what it imports from elsewhere.
TOUCH = "import sys; from benchmarks.mutants import touch; touch(*sys.argv[1:])"
#: Answer each line, the words of pytest and a limit in seconds, with the status of such a run. What
#: is imported from elsewhere is imported once, and each run is a fork.
SERVE = """
import importlib, json, os, signal, sys, time
import pytest
for name in json.loads(sys.stdin.readline()):
    try:
        importlib.import_module(name)
    except Exception:
        pass
for line in sys.stdin:
    words, limit_s = json.loads(line)
    if not (pid := os.fork()):
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        for number in range(3):
            os.dup2(null, number)
        os._exit(int(pytest.main(words)))
    until_s, done = time.monotonic() + limit_s, 0
    while not done and time.monotonic() < until_s:
        done, status = os.waitpid(pid, os.WNOHANG)
        time.sleep(0.02)
    if not done:
        os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    print(os.waitstatus_to_exitcode(status) if done else 124, flush=True)
"""
#: One thread each, as the tests have (tests/environment.py).
THREADS = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")

#: Replacements that a person could have typed: a comparison turned round or off by one,
#: an operation for another; not `is` for `==`, nor a bit's operation for a sum.
COMPARISONS = {"Eq": {"NotEq"}, "NotEq": {"Eq"}, "Is": {"IsNot"}, "IsNot": {"Is"}}
ORDERS, SUMS = {"Lt", "LtE", "Gt", "GtE"}, {"Add", "Sub", "Mul", "Div"}


def is_likely(operator: str) -> bool:
    """Return whether a person could have made such a change by mistake."""
    kind, _, pair = operator.rpartition("/")[2].partition("_")
    old, _, new = pair.partition("_")
    if kind == "ReplaceComparisonOperator":
        return new in COMPARISONS.get(old, ()) or {old, new} <= ORDERS
    if kind == "ReplaceBinaryOperator":
        return {old, new} <= SUMS
    return kind not in ("VariableReplacer", "VariableInserter", "RemoveDecorator")


@dataclass(frozen=True)
class Change:
    """One change of one file.

    Attributes:
        subject: key of `SUBJECTS`.
        row: number of the line, from 1.
        line: of the file, as it stands.
        after: the line, changed.
        code: the whole file, changed.
    """

    subject: str
    row: int
    line: str
    after: str
    code: str

    @property
    def key(self) -> tuple[str, str, str]:
        """What names it in the table of reasons."""
        return self.subject, self.line, self.after

    def __str__(self) -> str:
        return f"{self.subject}: {self.line}  ->  {self.after}"


def drawn(
    subject: str, text: str, seed: int = 0, lines: Iterable[str] | None = None
) -> Iterator[Change]:
    """Yield the changes of a file's text at random, one of each line before a second of any.

    Args:
        lines: only changes of these.

    Raises:
        SystemExit: Cosmic Ray is not installed.
    """
    try:
        from cosmic_ray.ast import ast_nodes, get_ast
        from cosmic_ray.mutating import mutate_code
        from cosmic_ray.plugins import get_operator, operator_names
    except ImportError as error:
        sys.exit(f"the changes are made by Cosmic Ray ({error}): pip install cosmic-ray")
    nodes = list(ast_nodes(get_ast(text)))
    operators = [get_operator(name)() for name in operator_names() if is_likely(name)]
    places = [
        (start[0], operator, occurrence)
        for operator in operators
        for occurrence, start in enumerate(
            start for node in nodes for start, _ in operator.mutation_positions(node)
        )
    ]
    random.Random(f"{subject} {seed}").shuffle(places)
    visits = Counter[int]()
    order = []
    for row, operator, occurrence in places:
        order.append((visits[row], len(order), row, operator, occurrence))
        visits[row] += 1
    whole = text.splitlines()
    for _, _, row, operator, occurrence in sorted(order, key=lambda each: each[:2]):
        if lines is not None and whole[row - 1].strip() not in lines:
            continue
        try:
            code = mutate_code(text, operator, occurrence)
        except AttributeError:  # an exception with a dot in its name, which it cannot replace
            continue
        pairs = zip(whole, code.splitlines() if code else (), strict=False)
        differing = next(((a.strip(), b.strip()) for a, b in pairs if a != b), None)
        # What is a sum here may be a type elsewhere: such a change cannot be compiled. Nor is the
        # star of a signature an operation.
        if code is None or differing is None or not compiles(code):
            continue
        if differing[0].replace("*,", "/,") != differing[1]:
            yield Change(subject, row, *differing, code)


def compiles(code: str) -> bool:
    """Return whether a text is Python."""
    try:
        ast.parse(code)
    except SyntaxError:
        return False
    return True


@dataclass(eq=False)  # pytest keeps plug-ins in sets
class Touched:
    """Plug-in of pytest that notes which lines of a file each test runs in this process.

    Attributes:
        name: end of the file's path.
        lines: by the test.
        seconds: that the test took, by the test.
    """

    name: str
    lines: dict[str, set[int]] = field(default_factory=dict)
    seconds: Counter[str] = field(default_factory=Counter)

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds[report.nodeid] += report.duration

    def pytest_runtest_protocol(self, item: Any) -> None:
        found = self.lines.setdefault(item.nodeid, set())

        def within(frame: FrameType, event: str, argument: object) -> Any:
            found.add(frame.f_lineno)
            return within

        def entered(frame: FrameType, event: str, argument: object) -> Any:
            return within if frame.f_code.co_filename.endswith(self.name) else None

        threading.settrace(entered)
        sys.settrace(entered)


def touch(name: str, result: str, *words: str) -> None:
    """Run pytest with some words; write for each test its seconds and the lines that it runs."""
    import pytest

    plugin = Touched(name)
    status = pytest.main(list(words), plugins=[plugin])
    sys.settrace(None)
    own = tuple(f"{each}." for each in ("tests", "tuner", "benchmarks"))
    modules = [each for each in sys.modules if not f"{each}.".startswith(own)]
    found = {test: (plugin.seconds[test], sorted(rows)) for test, rows in plugin.lines.items()}
    Path(result).write_text(json.dumps((modules, found)), encoding="utf-8")
    sys.exit(status)


def statement(text: str, row: int) -> range:
    """Return the lines of the innermost statement of a line, without those of its body."""
    best = range(0)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            end = body[0].lineno if body else (node.end_lineno or node.lineno) + 1
            rows = range(node.lineno, max(end, node.lineno + 1))
            if row in rows and (not best or len(rows) <= len(best)):
                best = rows
    return best


class Suite:
    """The tests of one file, in a copy of this checkout.

    Args:
        copy: the checkout.
        name: the file.
        places: folders and files of its tests.

    Raises:
        SystemExit: a test fails without any change.
    """

    def __init__(self, copy: Checkout, name: str, places: Sequence[str]) -> None:
        result = copy.folder / "touched.json"
        words = ("-q", "-p", "no:cacheprovider", "-m", EVERYDAY, *places)
        done = copy.run("-c", TOUCH, name, str(result), *words, limit_s=1800.0)
        if done.returncode:
            sys.exit(f"a test of {name} fails without any change:\n{done.stdout[-2000:]}")
        modules, found = json.loads(result.read_text(encoding="utf-8"))
        self._server = subprocess.Popen(
            [copy.python, "-c", SERVE],
            cwd=copy.folder,
            env={**copy.environment, **THREADS},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._ask(modules)
        self.seconds: Mapping[str, float] = {test: taken for test, (taken, _) in found.items()}
        self.lines: Mapping[str, set[int]] = {test: set(rows) for test, (_, rows) in found.items()}

    def in_order(self, rows: Iterable[int]) -> tuple[list[str], list[str]]:
        """Return the tests that run some lines, and the others, the quickest first.

        Lines that none runs are read as the file is imported, so that any of its tests may notice.
        """
        rows = set(rows)
        ordered = sorted(self.seconds, key=lambda test: self.seconds[test])
        first = [test for test in ordered if self.lines[test] & rows]
        first = first or [test for test in ordered if self.lines[test]]
        chosen = set(first)
        return first, [test for test in ordered if test not in chosen]

    def notice(self, rows: Iterable[int], most_s: float = math.inf) -> bool:
        """Return whether a test fails, or the tests take much longer than without a change.

        Args:
            rows: lines that are changed.
            most_s: run tests of so many seconds, of those that run the lines.
        """
        first, others = self.in_order(rows)
        if most_s < math.inf:
            until = accumulate(self.seconds[test] for test in first)
            first, others = [t for t, s in zip(first, until, strict=True) if s <= most_s], []
        return self._fail(first) or self._fail(others)

    def close(self) -> None:
        """End the process that runs the tests."""
        self._server.communicate()

    def _ask(self, words: object) -> None:
        assert self._server.stdin is not None
        self._server.stdin.write(f"{json.dumps(words)}\n")
        self._server.stdin.flush()

    def _fail(self, tests: Sequence[str]) -> bool:
        if not tests:
            return False
        limit_s = MOST_TIMES * sum(self.seconds[test] for test in tests) + MORE_S
        self._ask((["-q", "-x", "-p", "no:cacheprovider", *tests], limit_s))
        assert self._server.stdout is not None
        return int(self._server.stdout.readline()) != 0


def reasons(table: Path = REASONS) -> dict[tuple[str, str, str], str]:
    """Return why a change that survives is none: by subject, line and changed line."""
    if not table.exists():
        return {}
    rows = tomllib.loads(table.read_text(encoding="utf-8")).get("survivor", [])
    return {(row["subject"], row["line"], row["after"]): row["reason"] for row in rows}


def outdated(known: Iterable[tuple[str, str, str]]) -> list[str]:
    """Return what is wrong with a table of reasons: changes that cannot be made any more."""
    found = []
    for subject in {subject for subject, _, _ in known}:
        rows = {(line, after) for name, line, after in known if name == subject}
        if subject not in SUBJECTS:
            found.append(f"{subject} is none of {', '.join(SUBJECTS)}")
            continue
        text = (ROOT / SUBJECTS[subject][0]).read_text(encoding="utf-8")
        made = {(c.line, c.after) for c in drawn(subject, text, 0, {line for line, _ in rows})}
        found += [f"{subject}: {line}  ->  {after}" for line, after in sorted(rows - made)]
    return found


def shares(number: int, parts: int) -> list[int]:
    """Return a number in so many parts that differ by one at most."""
    ends = [number * place // parts for place in range(parts + 1)]
    return [end - begin for begin, end in pairwise(ends)]


def main() -> None:
    parser = arguments(__doc__, "mutants")
    parser.add_argument("--only", choices=SUBJECTS, help="changes of this file alone")
    parser.add_argument("--number", type=int, default=200, help="changes in all (default: 200)")
    parser.add_argument(
        "--skip", type=int, default=0, help="changes of each file that are not made"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--most",
        type=float,
        default=math.inf,
        metavar="S",
        help="only tests that run the changed line, the quickest first, of S seconds in all: what "
        "survives them may be noticed by others",
    )
    options = parser.parse_args()
    subjects = [options.only] if options.only else list(SUBJECTS)
    known, made, survived = reasons(), 0, []
    if wrong := outdated(known):
        sys.exit("\n".join([f"{REASONS.name} has reasons for changes that are none:", *wrong]))
    with tempfile.TemporaryDirectory(prefix="joulefront-mutants-") as temporary:
        copy = Checkout(Path(temporary) / "copy", Ledger.read(), ())
        for subject, share in zip(subjects, shares(options.number, len(subjects)), strict=True):
            name, places = SUBJECTS[subject]
            file = copy.folder / name
            text = file.read_text(encoding="utf-8")
            tests = Suite(copy, name, places)
            until = options.skip + share
            for change in islice(drawn(subject, text, options.seed), options.skip, until):
                file.write_text(change.code, encoding="utf-8")
                made += 1
                if not tests.notice(statement(text, change.row), options.most):
                    survived.append(change)
                    reason = known.get(change.key, "")
                    print(f"survived: {change}  {f'({reason})' if reason else ''}", flush=True)
            tests.close()
            file.write_text(text, encoding="utf-8")
            print(f"{subject}: {made} changes, {len(survived)} survived so far", flush=True)
    publish(
        [
            Figure("mutants", made, "count"),
            Figure("survived", len(survived), "count"),
            Figure("survived_without_a_reason", sum(c.key not in known for c in survived), "count"),
        ],
        options.json,
    )


if __name__ == "__main__":
    main()
