"""Conditions over knobs, such as `zero_stage >= 1 and optimizer_offload != "none"`.

A condition says when a declared knob (`tuner.search_spaces.declared`) applies. It is parsed by
Python's own parser and walked node by node: names of knobs, numbers, texts, `true`, `false`,
comparisons, `in` with a list, `and`, `or`, `not` and parentheses. Nothing is evaluated by Python.
"""

from __future__ import annotations

import ast
import operator
import warnings
from collections.abc import Callable, Collection
from functools import lru_cache
from typing import Any, Protocol

from tuner.search_spaces.errors import InputError, UnknownName

#: Longest condition, so that neither the parser nor the walk can be made to recurse without end.
LONGEST = 500


class Values(Protocol):
    """Values of knobs by name, such as a dictionary."""

    def get(self, name: str, /) -> Any:
        """Return a value; None if there is none."""


_TRUTH = {"true": True, "false": False, "True": True, "False": False}
_ORDER: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_GRAMMAR = (
    "a condition has names of knobs, numbers, texts in quotes, true, false, comparisons, in [...], "
    "and, or, not and parentheses"
)


@lru_cache(maxsize=256)
def _parsed(text: str) -> ast.expr:
    if not text.strip() or len(text) > LONGEST:
        raise InputError(f"a condition must have 1 to {LONGEST} characters")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # "1and x", which is valid Python
            tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise InputError(f"the condition {text!r} cannot be read: {_GRAMMAR}") from None
    _check(tree, text)
    return tree


def _check(node: ast.expr, text: str) -> None:
    if isinstance(node, ast.BoolOp):
        parts: list[ast.expr] = node.values
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        parts = [node.operand]
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        parts = [node.operand] if _is_number(node.operand) else []
        if not parts:
            raise _refused(node, text)
    elif isinstance(node, ast.Compare):
        parts = [node.left, *node.comparators]
        for op, right in zip(node.ops, node.comparators, strict=True):
            listed = isinstance(right, ast.List | ast.Tuple)
            if listed != isinstance(op, ast.In | ast.NotIn) or isinstance(op, ast.Is | ast.IsNot):
                raise _refused(node, text)
        if isinstance(node.left, ast.List | ast.Tuple):
            raise _refused(node, text)
    elif isinstance(node, ast.List | ast.Tuple):
        parts = list(node.elts)
    elif isinstance(node, ast.Constant) and not isinstance(node.value, bool | int | float | str):
        raise _refused(node, text)
    elif isinstance(node, ast.Name | ast.Constant):
        return
    else:
        raise _refused(node, text)
    for part in parts:
        _check(part, text)


def _is_number(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) in (int, float)


def _refused(node: ast.expr, text: str) -> InputError:
    part = ast.get_source_segment(text.strip(), node) or text
    return InputError(f"the condition {text!r} cannot have {part!r}: {_GRAMMAR}")


def names_in(text: str) -> frozenset[str]:
    """Return the names of the knobs that a condition reads."""
    found = (node.id for node in ast.walk(_parsed(text)) if isinstance(node, ast.Name))
    return frozenset(name for name in found if name not in _TRUTH)


def check_condition(text: str, known: Collection[str], where: str) -> None:
    """Check that a condition can be read and that the knobs it names exist."""
    try:
        names = names_in(text)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
    for name in sorted(names):
        if name not in known:
            raise UnknownName("knob", name, known, where=f" in {where}")


def holds(text: str, values: Values) -> bool:
    """Return the truth of a condition under these values of knobs.

    A knob without a value equals nothing and has no order, so `x != 1` holds and `x > 1` does not.
    """
    return bool(compiled(text)(values))


@lru_cache(maxsize=256)
def compiled(text: str) -> Callable[[Values], Any]:
    """Return a condition as a function of the values of knobs."""
    return _compiled(_parsed(text))


def _compiled(node: ast.expr) -> Callable[[Values], Any]:
    if isinstance(node, ast.BoolOp):
        parts = [_compiled(part) for part in node.values]
        if isinstance(node.op, ast.And):
            return lambda values: all(part(values) for part in parts)
        return lambda values: any(part(values) for part in parts)
    if isinstance(node, ast.UnaryOp):
        operand = _compiled(node.operand)
        if isinstance(node.op, ast.Not):
            return lambda values: not operand(values)
        return lambda values: -operand(values)
    if isinstance(node, ast.Compare):
        sides = [_compiled(part) for part in (node.left, *node.comparators)]
        pairs = list(zip(map(_comparison, node.ops), sides[:-1], sides[1:], strict=True))
        return lambda values: all(
            holds(left(values), right(values)) for holds, left, right in pairs
        )
    if isinstance(node, ast.List | ast.Tuple):
        elements = [_compiled(part) for part in node.elts]
        return lambda values: [element(values) for element in elements]
    if isinstance(node, ast.Name) and node.id not in _TRUTH:
        name = node.id
        return lambda values: values.get(name)
    constant = _TRUTH[node.id] if isinstance(node, ast.Name) else getattr(node, "value", None)
    return lambda values: constant


def _comparison(op: ast.cmpop) -> Callable[[Any, Any], bool]:
    if isinstance(op, ast.Eq):
        return lambda left, right: left is not None and left == right
    if isinstance(op, ast.NotEq):
        return lambda left, right: left is None or left != right
    if isinstance(op, ast.In):
        return lambda left, right: left is not None and left in right
    if isinstance(op, ast.NotIn):
        return lambda left, right: left is None or left not in right
    order = _ORDER[type(op)]
    kinds = (int, float)
    return lambda left, right: (
        isinstance(left, kinds) and isinstance(right, kinds) and order(left, right)
    )
