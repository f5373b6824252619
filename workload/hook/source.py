"""What the program says: the source of the frames that are up at a step, and its arguments.

Nothing of the program's is called: what is more than arithmetic on its values is `Unknown`. An
argument's name alone is no evidence. One whose value is seen as a dimension of the inputs is, where
no loader hands out samples that can be counted, and one that another launch proves.
"""

import argparse
import ast
import inspect
import linecache
import math
import operator
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache, partial
from types import FrameType
from typing import Any

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


def evaluate(node: ast.AST, frame: FrameType) -> Any:
    """Return the value of an expression in a frame; Unknown if it holds more than arithmetic."""
    inner = partial(evaluate, frame=frame)
    try:
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name):
            for names in (frame.f_locals, frame.f_globals):
                if node.id in names:
                    return names[node.id]
        elif isinstance(node, ast.Attribute):
            return _attribute(inner(node.value), node.attr)
        elif isinstance(node, ast.Subscript):
            held = inner(node.value)
            if type(held) in (dict, list, tuple) or is_parsed(held):
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


#: Names of a batch, and of an accumulation.
BATCH = re.compile(
    r"((per_device_|device_|local_|micro_|train_)*(micro_?)?batch(_?size)?|bsz?|samples_per_gpu"
    r"|ims_per_batch)",
    re.I,
)
ACCUMULATION = re.compile(r"((gradient|grad)_?)?(accum\w*|acc_steps)|update_freq", re.I)
#: What parsers returned, each with the options that set its values as they were parsed.
_parsed: list[tuple[Any, dict[str, dict[str, Any]]]] = []


def watch_arguments() -> None:
    """Note what the program's parsers return."""
    _parsed.clear()
    plain = argparse.ArgumentParser.parse_known_args  # `state` imports this module

    def parse_known_args(self: Any, *args: Any, **kwargs: Any) -> Any:
        told = plain(self, *args, **kwargs)
        values = getattr(told[0], "__dict__", {})
        options = {
            action.dest: {"options": list(action.option_strings), "value": values[action.dest]}
            for action in self._actions
            if type(values.get(action.dest)) is int and action.nargs in (None, "?")
        }
        _parsed.append((told[0], options))
        return told

    argparse.ArgumentParser.parse_known_args = parse_known_args  # type: ignore[method-assign]


def is_parsed(holder: Any) -> bool:
    """Return True if a parser returned this object, or it holds the same values."""
    return any(holder is told or holder is getattr(told, "__dict__", 0) for told, _ in _parsed)


def arguments() -> dict[str, dict[str, Any]]:
    """Return the integers that the program is told, by name: `options` that set it, `value`."""
    return {name: option for _, options in _parsed for name, option in options.items()}


def batches() -> dict[str, int]:
    """Return the integers that are named as a batch, by name."""
    told: list[Mapping[str, Any]] = [vars(sys.modules["__main__"])]
    told += [{name: each["value"] for name, each in options.items()} for _, options in _parsed]
    return {
        name: value
        for each in told
        for name, value in each.items()
        if type(value) is int and value > 0 and BATCH.fullmatch(name)
    }
