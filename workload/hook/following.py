"""Values followed back through the live frames, to the arguments that they come from.

From a call or an expression the walk goes backwards in the source of the frames that are up: a
local to its assignments, a parameter to the caller's call, `**kwargs` to the dictionary, arithmetic
to its parts; an attribute of what a parser returned is an argument. Nothing of the program's is
called, and what cannot be followed is no evidence.
"""

import ast
import inspect
import linecache
import math
import operator
import os
from collections.abc import Callable, Iterator
from functools import lru_cache
from types import FrameType
from typing import Any

from . import named_values

_HOPS = 8
_HERE = os.path.dirname(os.path.abspath(__file__))
_STANDARD = os.path.dirname(os.path.abspath(ast.__file__))
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_ARITHMETIC: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: lambda a, b: a**b if 0 <= b < 64 else math.nan,
}
_COMPARED: dict[type, Callable[[Any, Any], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
}
_CALLED: dict[str, Callable[..., Any]] = {
    **{"len": len, "int": int, "min": min, "max": max, "abs": abs, "round": round},
    **{"ceil": math.ceil, "floor": math.floor},
}
Function = ast.FunctionDef | ast.AsyncFunctionDef


class Unknown(Exception):
    """An expression that cannot be evaluated without the program."""


def is_users(frame: FrameType) -> bool:
    """Return True for the program's own code."""
    name = frame.f_code.co_filename
    return not name.startswith((_HERE, _STANDARD, "<")) and not any(p in name for p in _INSTALLED)


def callers(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame and those of the program that it was called from, the innermost first."""
    while frame is not None:
        code = frame.f_code
        if code.co_name == "run_program" and code.co_filename.startswith(_HERE):
            return  # the hook's own start of the program, and what forked it
        yield frame
        frame = frame.f_back


@lru_cache(maxsize=64)
def _tree(filename: str) -> ast.Module:
    return ast.parse("".join(linecache.getlines(filename)))


def body_of(frame: FrameType) -> ast.AST:
    """Return the part of the source that a frame runs."""
    whole, code = _tree(frame.f_code.co_filename), frame.f_code
    if code.co_name == "<module>":
        return whole
    for node in ast.walk(whole):
        if isinstance(node, Function) and node.name == code.co_name:
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            if first == code.co_firstlineno:
                return node
    raise Unknown


def own_nodes(body: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes below one, without those of functions defined inside."""
    for node in ast.iter_child_nodes(body):
        yield node
        if not isinstance(node, Function | ast.Lambda | ast.ClassDef):
            yield from own_nodes(node)


def _call_at(frame: FrameType) -> ast.Call:
    place = list(frame.f_code.co_positions())[frame.f_lasti // 2]
    for node in ast.walk(body_of(frame)):
        if isinstance(node, ast.Call) and place == (
            *(node.lineno, node.end_lineno),
            *(node.col_offset, node.end_col_offset),
        ):
            return node
    raise Unknown


def evaluate(node: ast.AST, frame: FrameType, instead: dict[str, Any] | None = None) -> Any:
    """Return the value of an expression in a frame; Unknown if it holds more than arithmetic."""
    inner = lambda part: evaluate(part, frame, instead)  # noqa: E731
    try:
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name):
            for names in (instead or {}, frame.f_locals, frame.f_globals):
                if node.id in names:
                    return names[node.id]
        elif isinstance(node, ast.Attribute):
            return _attribute(inner(node.value), node.attr)
        elif isinstance(node, ast.Subscript):
            held = inner(node.value)
            if type(held) in (dict, list, tuple) or named_values.is_parsed(held):
                return held[inner(node.slice)]
        elif isinstance(node, ast.UnaryOp):
            signs = {ast.USub: operator.neg, ast.Not: operator.not_}
            return signs[type(node.op)](inner(node.operand))
        elif isinstance(node, ast.BinOp):
            return _ARITHMETIC[type(node.op)](inner(node.left), inner(node.right))
        elif isinstance(node, ast.BoolOp):
            values = [inner(part) for part in node.values]
            return all(values) if isinstance(node.op, ast.And) else any(values)
        elif isinstance(node, ast.Compare) and len(node.ops) == 1:
            return _COMPARED[type(node.ops[0])](inner(node.left), inner(node.comparators[0]))
        elif isinstance(node, ast.Call) and not node.keywords:
            return _called(node, inner)
    except Unknown:
        raise
    except Exception as error:  # of the program's own kinds
        raise Unknown from error
    raise Unknown


def _attribute(holder: Any, name: str) -> Any:
    if isinstance(inspect.getattr_static(holder, name, None), property):
        raise Unknown  # the program's own code
    return getattr(holder, name)


def _called(node: ast.Call, inner: Callable[[ast.AST], Any]) -> Any:
    if isinstance(node.func, ast.Attribute) and node.func.attr == "size" and node.args:
        return int(_attribute(inner(node.func.value), "shape")[inner(node.args[0])])
    name = getattr(node.func, "id", getattr(node.func, "attr", ""))
    values = [inner(argument) for argument in node.args]
    if name == "len" or all(type(value) in (int, float) for value in values):
        return _CALLED[name](*values)
    raise Unknown


class Follower:
    """Walk from a value back to the arguments that it comes from."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def argument(self, frame: FrameType, names: tuple[str, ...], index: int, hops: int = 0) -> None:
        """Follow an argument of the call that `frame` is in."""
        call = _call_at(frame)
        for name in names:
            for keyword in call.keywords:
                if keyword.arg == name:
                    return self.value(keyword.value, frame, hops)
        for keyword in call.keywords:
            if keyword.arg is None:
                return self._entry(keyword.value, names, frame, hops)
        if index < len(call.args) and not any(isinstance(a, ast.Starred) for a in call.args):
            self.value(call.args[index], frame, hops)
        return None

    def _entry(self, node: ast.AST, names: tuple[str, ...], frame: FrameType, hops: int) -> None:
        code = frame.f_code
        last = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & 4)
        if isinstance(node, ast.Name) and code.co_flags & 8 and code.co_varnames[last] == node.id:
            if frame.f_back is not None and hops < _HOPS:  # handed on from the caller
                self.argument(frame.f_back, names, 99, hops + 1)
            return
        for made in self._assigned(node.id, frame) if isinstance(node, ast.Name) else [node]:
            pairs: list[tuple[Any, ast.AST]] = []
            if isinstance(made, ast.Dict):
                pairs = [
                    (getattr(k, "value", 0), v) for k, v in zip(made.keys, made.values, strict=True)
                ]
            elif isinstance(made, ast.Call):  # dict(batch_size=...)
                pairs = [(keyword.arg, keyword.value) for keyword in made.keywords]
            for key, value in pairs:
                if key in names:
                    self.value(value, frame, hops + 1)

    def _assigned(self, name: str, frame: FrameType) -> list[ast.AST]:
        found: list[ast.AST] = []
        targets: list[ast.expr]
        for node in own_nodes(body_of(frame)):
            if isinstance(node, ast.AugAssign | ast.AnnAssign | ast.NamedExpr):
                targets, value = [node.target], node.value
            elif isinstance(node, ast.Assign):
                targets, value = node.targets, node.value
            else:
                continue
            for target in targets:
                if getattr(target, "id", "") == name and value is not None:
                    found.append(value)
                elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                    pairs = zip(target.elts, value.elts, strict=False)
                    found += [v for t, v in pairs if getattr(t, "id", "") == name]
        return found

    def value(self, node: ast.AST, frame: FrameType, hops: int = 0) -> None:
        """Follow the value of an expression."""
        if hops > _HOPS:
            return
        if isinstance(node, ast.Attribute | ast.Subscript):
            self._member(node, frame)
        elif isinstance(node, ast.Name):
            self._name(node.id, frame, hops)
        elif isinstance(node, ast.Call):
            for part in [*node.args, *(keyword.value for keyword in node.keywords)]:
                self.value(part, frame, hops + 1)
        else:
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.expr):
                    self.value(child, frame, hops + 1)

    def _member(self, node: ast.Attribute | ast.Subscript, frame: FrameType) -> None:
        """Take an attribute for an argument: of what a parser returned, or by its name."""
        if isinstance(node, ast.Attribute):
            name = node.attr
        else:
            name = str(getattr(node.slice, "value", ""))
        try:
            held = named_values.is_parsed(evaluate(node.value, frame))
        except Unknown:
            held = False
        if held or name in named_values.arguments():
            self.names.add(name)

    def _name(self, name: str, frame: FrameType, hops: int) -> None:
        for place in callers(frame):
            if place.f_code.co_filename != frame.f_code.co_filename:
                continue
            if assigned := self._assigned(name, place):
                for node in assigned:
                    self.value(node, place, hops + 1)
                break
            code = place.f_code
            parameters = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            if name in parameters and place.f_back is not None:
                index = parameters.index(name) - (parameters[0] in ("self", "cls"))
                if not is_users(place.f_back):  # click's, typer's: by its name
                    break
                return self.argument(place.f_back, (name,), index, hops + 1)
        if not self.names and name in named_values.arguments():
            self.names.add(name)
        return None


def followed_loader(frame: FrameType | None) -> list[str]:
    """Return the arguments that carry the batch size of the loader that a frame makes."""
    follower = Follower()
    try:
        if frame is not None and is_users(frame):
            follower.argument(frame, ("batch_size", "batch_sampler"), 1)
    except Exception:  # no evidence
        return []
    return sorted(follower.names)


def followed_accumulation(frame: FrameType | None) -> list[dict[str, Any]]:
    """Return the numbers that decide when a step is due, each with what carries it."""
    found: dict[str, dict[str, Any]] = {}
    for place in callers(frame):
        if not is_users(place):
            continue
        try:
            for node in own_nodes(body_of(place)):
                for number in _deciding(node):
                    entry = _carried(number, place)
                    found.setdefault(repr(entry), entry)
        except Exception:  # no evidence
            continue
    return [entry for entry in found.values() if entry["names"]]


def _deciding(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(
        node.op, ast.Mod | ast.Div | ast.FloorDiv
    ):
        return [node.right if isinstance(node, ast.BinOp) else node.value]
    if isinstance(node, ast.Compare):
        return node.comparators
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("range", "islice"):
        return node.args[-1:]
    return []


def _carried(node: ast.expr, frame: FrameType) -> dict[str, Any]:
    try:
        value = evaluate(node, frame)
    except Unknown:
        return {"value": 0, "names": []}
    if type(value) is not int or value < 1:
        return {"value": 0, "names": []}
    follower = Follower()
    follower.value(node, frame)
    return {"value": value, "names": sorted(follower.names)}
