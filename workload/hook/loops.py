"""Number of optimizer steps of a training, from the loops around a step.

The source of the frames that are up at a step says in which loops it lies, and bounds are evaluated
there: `range(...)`, a loader's length, and a counter that grew in each step and is compared where a
loop ends. An end that cannot be evaluated (early stopping) makes the number unknown, and so does an
epoch whose last step has fewer micro-batches, for the source decides if that is a step.
"""

import ast
import contextlib
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from types import FrameType
from typing import Any

from .source import Function, Unknown, body_of, callers, evaluate, is_parsed, is_users, own_nodes

Loop = ast.For | ast.While
#: From so many batches on, a loader's length is a trick that stands for "without an end".
_ENDLESS = 1_000_000
#: A bound that no training reaches stands for "until it is stopped".
_NO_END = 100_000_000
#: What hands its first argument on, element by element.
_WRAPPERS = ("enumerate", "tqdm", "trange", "list", "iter", "track")
#: Comparisons with their sides exchanged.
_TURNED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    **{ast.Lt: ast.Gt, ast.Gt: ast.Lt},
    **{ast.LtE: ast.GtE, ast.GtE: ast.LtE},
}
#: Tests for a training that has failed, which no plan counts with.
_FAILED = ("isnan", "isinf", "isfinite")


@dataclass
class _Around:
    """A loop around the step."""

    node: Loop
    frame: FrameType
    line: int
    column: int

    @property
    def names(self) -> list[str]:
        """The loop's own names."""
        if isinstance(self.node, ast.While):
            return []
        return [each.id for each in ast.walk(self.node.target) if isinstance(each, ast.Name)]

    @property
    def indexed(self) -> str:
        """The name of its index, of `range` or `enumerate`; empty for none."""
        if isinstance(self.node, ast.While):
            return ""
        kind, target = _name(_unwrapped(self.node.iter)), self.node.target
        if kind == "enumerate" and isinstance(target, ast.Tuple):
            target = target.elts[0]
        elif kind not in ("range", "trange"):
            return ""
        return str(getattr(target, "id", ""))


class Loops:
    """Reader of the loops around each of the first steps."""

    def __init__(self) -> None:
        self._seen: list[dict[str, int]] = []  # of each step: integers that tests compare

    def step(self, frame: FrameType | None, fetches: int, length: int | None) -> dict[str, Any]:
        """Return `steps` and `by`, as far as this step and those before it tell.

        Where an epoch is uneven, only `about` how many there are; {} if unknown.
        """
        try:
            around = list(_loops(frame))
            self._note(around)
            return self._length(around, fetches, length)
        except Exception:  # no evidence
            return {}

    def _note(self, around: list[_Around]) -> None:
        seen: dict[str, int] = {}
        for loop in around:
            compared: list[ast.expr] = []
            for test, _ in _ends(loop):
                for each in ast.walk(test):
                    if isinstance(each, ast.Compare):
                        compared += [each.left, *each.comparators]
            if loop.indexed:
                compared.append(ast.Name(loop.indexed, ast.Load()))
            for side in compared:
                with contextlib.suppress(Unknown):
                    if type(value := evaluate(side, loop.frame)) is int:
                        seen[_key(side, loop)] = value
        self._seen.append(seen)

    def _growth(self, key: str) -> int:
        # Return by how much an integer grew in each step but the first; 0 if unevenly.
        values = [seen[key] for seen in self._seen if key in seen]
        grown = [b - a for a, b in pairwise(values[1:])]
        often = Counter(each for each in grown if each > 0).most_common(1)
        return often[0][0] if often and all(each <= often[0][0] for each in grown) else 0

    def _length(self, around: list[_Around], fetches: int, length: int | None) -> dict[str, Any]:
        if not around or len(self._seen) < 3:
            return {}
        counts: list[float | None] = []
        how: list[str] = []
        bounds: list[tuple[float, str]] = []
        for depth, loop in enumerate(around):
            count, text = self._count(loop, length, None if depth else fetches)
            for test, breaks in _ends(loop):
                for bound, counter in self._bounds(test, loop, breaks=breaks):
                    if counter in loop.names:
                        if depth or count is None:
                            raise Unknown
                        count, text = min((count, text), (bound, ast.unparse(test)))
                    elif _is_reset(counter, around[depth:]):
                        raise Unknown
                    else:
                        bounds.append((bound, ast.unparse(test)))
            counts.append(count)
            how.insert(0, text)
        if math.inf in counts:
            bounds.append((math.inf, ""))
        elif None in counts:
            return {}
        else:
            # Without a text it is rounded down.
            bounds.append((math.prod(filter(None, counts)), " x ".join(how) if all(how) else ""))
        steps, by = min(bounds)
        if not 0 < steps < _NO_END or steps != int(steps):
            return {}
        if not by:
            return {"about": int(steps)}
        return {"steps": int(steps), "by": f"the loop ({by})"}

    def _count(
        self, loop: _Around, length: int | None, fetches: int | None
    ) -> tuple[float | None, str]:
        if isinstance(loop.node, ast.While):
            return math.inf, ""
        text = ast.unparse(loop.node.iter)
        try:
            count = _count(loop.node.iter, loop.frame, length)
            if fetches is not None and count != math.inf:
                if loop.indexed:
                    fetches = self._growth(_key(ast.Name(loop.indexed, ast.Load()), loop))
                if fetches < 1:
                    raise Unknown
                text = "" if count % fetches else text
                count //= fetches
        except (Unknown, TypeError):
            return None, ""
        return count, text

    def _bounds(
        self, test: ast.expr, loop: _Around, *, breaks: bool
    ) -> Iterator[tuple[float, str]]:
        # Yield the steps until a test ends a loop, each with its counter; or raise Unknown.
        if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.Or) is breaks:
            for part in test.values:  # each ends the loop
                yield from self._bounds(part, loop, breaks=breaks)
            return
        if isinstance(test, ast.BoolOp):
            plain = [part for part in test.values if not self._counter(part, loop)]
            if any(_never(part, loop.frame, breaks=breaks) for part in plain):
                return
            for part in plain:
                if not _constant(part, loop.frame):
                    raise Unknown
            for part in test.values:
                if part not in plain:
                    yield from self._bounds(part, loop, breaks=breaks)
            return
        if counter := self._counter(test, loop):
            if (steps := self._until(test, loop, breaks=breaks)) is not None:
                yield steps, counter
        elif not _never(test, loop.frame, breaks=breaks):
            raise Unknown

    def _counter(self, test: ast.expr, loop: _Around) -> str:
        # Return the counter that a comparison holds on one side; empty for none.
        if not isinstance(test, ast.Compare) or len(test.ops) != 1:
            return ""
        for side in (test.left, test.comparators[0]):
            if self._growth(_key(side, loop)):
                return ast.unparse(side)
        return ""

    def _until(self, test: ast.expr, loop: _Around, *, breaks: bool) -> float | None:
        # Return the steps until a counter reaches its bound; None if it never does.
        assert isinstance(test, ast.Compare)
        sides, kind = (test.left, test.comparators[0]), type(test.ops[0])
        if not self._growth(_key(sides[0], loop)):
            sides = sides[1], sides[0]
            kind = _TURNED.get(kind, kind)
        key, bound = _key(sides[0], loop), evaluate(sides[1], loop.frame)
        if type(bound) not in (int, float) or bound < 0:
            return None  # -1 often stands for "no end"
        if kind not in (ast.Gt, ast.GtE, ast.Lt, ast.LtE, ast.Eq, ast.NotEq):
            raise Unknown
        if (kind in (ast.Gt, ast.GtE, ast.Eq)) is not breaks:
            raise Unknown
        # The first value that ends the loop, and the counter's value where it is tested first.
        last = math.floor(bound) + 1 if kind in (ast.Gt, ast.LtE) else math.ceil(bound)
        grows, lines = self._growth(key), _grown_at(sides[0], loop)
        if (
            not lines and ast.unparse(sides[0]) not in loop.names
        ):  # it grows in another function, and counts the steps that are done
            return max(0, math.ceil(last / grows))
        first = self._seen[-1][key] - (len(self._seen) - 1) * grows
        head = isinstance(loop.node, ast.While) and test.lineno <= loop.node.test.lineno
        step, at = (loop.line, loop.column), (test.lineno, test.col_offset)
        if not head and at > step:
            first += grows * any(step < place <= at for place in lines)
            return max(0, math.ceil((last - first) / grows)) + 1
        top = (loop.node.lineno, 0) if head else at
        first -= grows * any(top <= place < step for place in lines)
        return max(0, math.ceil((last - first) / grows))


def _loops(frame: FrameType | None) -> Iterator[_Around]:
    # Yield the loops around the step, the innermost first; Unknown if others' code is between.
    below = True  # nothing of the program's was met
    beyond = False
    for place in callers(frame):
        if not is_users(place):
            beyond |= not below
            continue
        below = False
        for node in reversed(_path(body_of(place), place.f_lineno)):
            if beyond:
                raise Unknown
            column = list(place.f_code.co_positions())[place.f_lasti // 2][2] or 0
            yield _Around(node, place, place.f_lineno, column)


def _path(body: ast.AST, line: int) -> list[Loop]:
    for node in ast.iter_child_nodes(body):
        if isinstance(node, Function | ast.ClassDef) or not hasattr(node, "lineno"):
            continue
        if not node.lineno <= line <= (getattr(node, "end_lineno", 0) or 0):
            continue
        inner = _path(node, line)
        if not isinstance(node, Loop):
            return inner
        first, last = node.body[0].lineno, node.body[-1].end_lineno or 0
        return [node, *inner] if first <= line <= last else inner  # not in its head or `else`
    return []


def _ends(loop: _Around) -> Iterator[tuple[ast.expr, bool]]:
    if isinstance(loop.node, ast.While):
        constant = isinstance(loop.node.test, ast.Constant)
        if not constant:
            yield loop.node.test, False
    yield from ((node.test, True) for node in _leaving(loop.node.body, breaks=True))


def _leaving(body: list[Any], *, breaks: bool) -> Iterator[ast.If]:
    for node in body:
        if isinstance(node, Function | ast.ClassDef):
            continue
        inner = breaks and not isinstance(node, Loop)
        if isinstance(node, ast.If) and any(
            isinstance(each, ast.Return) or (inner and isinstance(each, ast.Break))
            for each in node.body
        ):
            yield node
            continue
        for name in ("body", "orelse", "handlers", "finalbody"):
            yield from _leaving(getattr(node, name, []), breaks=inner)


def _count(node: ast.expr, frame: FrameType, length: int | None) -> float:
    name = _name(node)
    if isinstance(node, ast.Call) and node.args:
        if name in ("range", "trange"):
            return len(range(*(int(evaluate(each, frame)) for each in node.args)))
        if name == "zip":
            return min(_count(each, frame, length) for each in node.args)
        if name in _WRAPPERS:
            return _count(node.args[0], frame, length)
        if name == "DataLoader" and length is not None:
            return length if length < _ENDLESS else math.inf
        raise Unknown
    if name in ("count", "cycle"):
        return math.inf
    held = evaluate(node, frame)
    count = len(held)  # a generator has none
    return count if count < _ENDLESS else math.inf


def _name(node: ast.AST) -> str:
    if not isinstance(node, ast.Call):
        return ""
    return str(getattr(node.func, "id", getattr(node.func, "attr", "")))


def _key(node: ast.AST, loop: _Around) -> str:
    code = loop.frame.f_code
    return f"{code.co_filename}:{code.co_firstlineno}:{ast.unparse(node)}"


def _unwrapped(node: ast.AST) -> ast.AST:
    while isinstance(node, ast.Call) and _name(node) in ("tqdm", "track", "list") and node.args:
        node = node.args[0]
    return node


def _is_reset(counter: str, around: list[_Around]) -> bool:
    for loop in around:
        if counter in loop.names:
            return True
        for node in own_nodes(loop.node):
            targets = node.targets if isinstance(node, ast.Assign) else []
            if any(ast.unparse(each) == counter for each in targets):
                assert isinstance(node, ast.Assign)
                if counter not in ast.unparse(node.value):
                    return True
    return False


def _grown_at(counter: ast.AST, loop: _Around) -> list[tuple[int, int]]:
    name = ast.unparse(counter)
    grown = []
    for node in own_nodes(loop.node):
        if isinstance(node, ast.Assign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(ast.unparse(target) == name for target in targets):
                grown.append((node.lineno, node.col_offset))
    return grown


def _constant(test: ast.expr, frame: FrameType) -> bool:
    # Return True for a test of what was parsed, and of names that no loop here assigns.
    loops = (node for node in own_nodes(body_of(frame)) if isinstance(node, ast.For | ast.While))
    names = (node for loop in loops for node in ast.walk(loop) if isinstance(node, ast.Name))
    assigned = {node.id for node in names if not isinstance(node.ctx, ast.Load)}
    for node in ast.walk(test):
        if isinstance(node, ast.Call) or (isinstance(node, ast.Name) and node.id in assigned):
            return False
        try:
            if isinstance(node, ast.Attribute) and not is_parsed(evaluate(node.value, frame)):
                return False
        except Unknown:
            return False
    return True


def _never(test: ast.expr, frame: FrameType, *, breaks: bool) -> bool:
    if any(_name(each) in _FAILED for each in ast.walk(test)):
        return True
    return _constant(test, frame) and bool(evaluate(test, frame)) is not breaks
