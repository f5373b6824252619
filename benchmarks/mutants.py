"""Small changes of the code that no test notices: the measure of the suite, in place of its lines.

    pip install cosmic-ray
    python -m benchmarks.mutants
    python -m benchmarks.mutants --only window --number 40 --seed 7

Cosmic Ray makes the changes: an operator for another, a number one more or less, a condition
turned round, a loop left at once. They are drawn at random from the files that decide what is
measured, set, spent, recommended and kept. Each is made alone, in a copy of this checkout, and
the everyday tests of that file run there until one fails. A change that none notices has survived;
it is printed with its line, and either gets a test or a reason in `benchmarks/data/mutants.toml`
(most often that it changes nothing that can be seen). Some 20 minutes of processor time.
"""

from __future__ import annotations

import ast
import random
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.extras import Checkout
from benchmarks.figures import ROOT, Figure, arguments, publish
from benchmarks.ledger import Ledger

#: The files, and the tests that are to notice a change of each.
SUBJECTS = {
    "window": (
        "workload/node/measure/window.py",
        ("tests/workload/node/measure", "tests/workload/node/meters/test_failing_calls.py"),
    ),
    "governor": ("workload/node/clocks/governor.py", ("tests/workload/node/clocks",)),
    "budget": ("tuner/study/loop.py", ("tests/study",)),
    "verdict": ("tuner/answer/judge.py", ("tests/answer", "tests/display")),
    "trace": ("workload/records/trace.py", ("tests/workload/records", "tests/study")),
}
REASONS = ROOT / "benchmarks" / "data" / "mutants.toml"
#: Tests that take long, or measure, are left out.
EVERYDAY = "not (slow or quiet or long or ray or root)"
#: A test run may take so many times what it takes without a change, and so much more, seconds.
MOST_TIMES, MORE_S = 5.0, 60.0


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
    return kind != "VariableReplacer" and kind != "VariableInserter"


@dataclass(frozen=True)
class Change:
    """One change of one file.

    Attributes:
        subject: key of `SUBJECTS`.
        line: of the file, as it stands.
        after: the line, changed.
        code: the whole file, changed.
    """

    subject: str
    line: str
    after: str
    code: str

    def __str__(self) -> str:
        return f"{self.subject}: {self.line}  ->  {self.after}"


def drawn(subject: str, text: str, number: int, seed: int) -> Iterator[Change]:
    """Yield so many changes of a file's text, of different lines as long as there are some.

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
        order.append((visits[row], len(order), operator, occurrence))
        visits[row] += 1
    lines = text.splitlines()
    for _, _, operator, occurrence in sorted(order, key=lambda each: each[:2]):
        code = mutate_code(text, operator, occurrence)
        pairs = zip(lines, code.splitlines() if code else (), strict=False)
        differing = next(((a.strip(), b.strip()) for a, b in pairs if a != b), None)
        # What is a sum here may be a type elsewhere: such a change cannot be compiled.
        if code is None or differing is None or not compiles(code):
            continue
        yield Change(subject, *differing, code)
        if (number := number - 1) == 0:
            return


def compiles(code: str) -> bool:
    """Return whether a text is Python."""
    try:
        ast.parse(code)
    except SyntaxError:
        return False
    return True


def fails(copy: Checkout, tests: tuple[str, ...], limit_s: float) -> bool:
    """Return whether a test fails in a copy, or they take longer than the limit."""
    words = ("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", EVERYDAY, *tests)
    return copy.run(*words, limit_s=limit_s).returncode != 0


def reasons(table: Path = REASONS) -> dict[tuple[str, str, str], str]:
    """Return why a change that survives is none: by subject, line and changed line."""
    if not table.exists():
        return {}
    rows = tomllib.loads(table.read_text(encoding="utf-8")).get("survivor", [])
    return {(row["subject"], row["line"], row["after"]): row["reason"] for row in rows}


def main() -> None:
    parser = arguments("small changes of the code that no test notices")
    parser.add_argument("--only", choices=SUBJECTS, help="changes of this file alone")
    parser.add_argument("--number", type=int, default=200, help="changes in all (default: 200)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    subjects = [options.only] if options.only else list(SUBJECTS)
    known, made, survived = reasons(), 0, []
    with tempfile.TemporaryDirectory(prefix="joulefront-mutants-") as temporary:
        copy = Checkout(Path(temporary) / "copy", Ledger.read(), ())
        for subject in subjects:
            name, tests = SUBJECTS[subject]
            file = copy.folder / name
            text = file.read_text(encoding="utf-8")
            began_s = time.monotonic()
            if fails(copy, tests, 1800.0):
                sys.exit(f"the tests of {subject} fail without any change: {' '.join(tests)}")
            limit_s = MOST_TIMES * (time.monotonic() - began_s) + MORE_S
            share = options.number // len(subjects)
            for change in drawn(subject, text, share, options.seed):
                file.write_text(change.code, encoding="utf-8")
                made += 1
                if not fails(copy, tests, limit_s):
                    survived.append(change)
                    reason = known.get((subject, change.line, change.after), "")
                    print(f"survived: {change}  {f'({reason})' if reason else ''}", flush=True)
            file.write_text(text, encoding="utf-8")
            print(f"{subject}: {made} changes, {len(survived)} survived so far", flush=True)
    keys = [(each.subject, each.line, each.after) for each in survived]
    publish(
        [
            Figure("mutants", made, "count"),
            Figure("survived", len(survived), "count"),
            Figure("survived_without_a_reason", sum(key not in known for key in keys), "count"),
        ],
        options.json,
    )


if __name__ == "__main__":
    main()
