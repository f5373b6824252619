"""Conditions over knobs, such as `zero_stage >= 1 and optimizer_offload != "none"`.

A condition says when a declared knob (`tuner.search_spaces.knob_declarations`) applies. It is
parsed by Python's own parser and compiled node by node: names of knobs, numbers, texts, `true`,
`false`, comparisons, `in` with a list, `and`, `or`, `not` and parentheses. Nothing is evaluated by
Python.
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


Condition = Callable[[Values], Any]
_TRUTH = {"true": True, "false": False, "True": True, "False": False}
_NUMBERS = (int, float)
_LISTED = (ast.List, ast.Tuple)


def _ordered(order: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    return lambda left, right: (
        isinstance(left, _NUMBERS) and isinstance(right, _NUMBERS) and order(left, right)
    )


_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Lt: _ordered(operator.lt),
    ast.LtE: _ordered(operator.le),
    ast.Gt: _ordered(operator.gt),
    ast.GtE: _ordered(operator.ge),
    ast.Eq: lambda left, right: left is not None and left == right,
    ast.NotEq: lambda left, right: left is None or left != right,
    ast.In: lambda left, right: left is not None and left in right,
    ast.NotIn: lambda left, right: left is None or left not in right,
}
_GRAMMAR = (
    "a condition has names of knobs, numbers, texts in quotes, true, false, comparisons, in [...], "
    "and, or, not and parentheses"
)


@lru_cache(maxsize=256)
def _parsed(text: str) -> tuple[Condition, frozenset[str]]:
    if not text.strip() or len(text) > LONGEST:
        raise InputError(f"a condition must have 1 to {LONGEST} characters")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # "1and x", which is valid Python
            tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise InputError(f"the condition {text!r} cannot be read: {_GRAMMAR}") from None
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return _compiled(tree, text), frozenset(names - _TRUTH.keys())


def _compiled(node: ast.expr, text: str) -> Condition:
    if isinstance(node, ast.BoolOp):
        parts = [_compiled(part, text) for part in node.values]
        every = all if isinstance(node.op, ast.And) else any
        return lambda values: every(part(values) for part in parts)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        denied = _compiled(node.operand, text)
        return lambda values: not denied(values)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        number: Any = getattr(node.operand, "value", None)
        if type(number) in _NUMBERS:
            return lambda values: -number
    if isinstance(node, ast.Compare) and not isinstance(node.left, _LISTED):
        rights = zip(node.ops, node.comparators, strict=True)
        if all(
            type(op) in _COMPARISONS
            and isinstance(op, ast.In | ast.NotIn) == isinstance(r, _LISTED)
            for op, r in rights
        ):
            sides = [_compiled(part, text) for part in (node.left, *node.comparators)]
            checks = [_COMPARISONS[type(op)] for op in node.ops]
            pairs = list(zip(checks, sides[:-1], sides[1:], strict=True))
            return lambda values: all(
                check(left(values), right(values)) for check, left, right in pairs
            )
    if isinstance(node, _LISTED):
        elements = [_compiled(part, text) for part in node.elts]
        return lambda values: [element(values) for element in elements]
    if isinstance(node, ast.Name) and node.id not in _TRUTH:
        name = node.id
        return lambda values: values.get(name)
    if isinstance(node, ast.Name) or (
        isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float | str)
    ):
        constant = _TRUTH[node.id] if isinstance(node, ast.Name) else node.value
        return lambda values: constant
    refused = ast.get_source_segment(text.strip(), node) or text
    raise InputError(f"the condition {text!r} cannot have {refused!r}: {_GRAMMAR}")


def names_in(text: str) -> frozenset[str]:
    """Return the names of the knobs that a condition reads."""
    return _parsed(text)[1]


def check_condition(text: str, allowed: Collection[str], where: str) -> None:
    """Check that a condition can be read and that the knobs it names exist."""
    try:
        names = names_in(text)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
    for name in sorted(names):
        if name not in allowed:
            raise UnknownName("knob", name, allowed, where=f" in {where}")


def holds(text: str, values: Values) -> bool:
    """Return the truth of a condition under these values of knobs.

    A knob without a value equals nothing and has no order, so `x != 1` holds and `x > 1` does not.
    """
    return bool(_parsed(text)[0](values))
