"""Counts of ways of writing that the architecture forbids, taken from the syntax tree.

Each function returns one line a case, "module:line what", so that the report can name them:

- `kind_tests`: code that tests whether a job is a script instead of calling the job: `isinstance`,
  `issubclass`, `match`, comparisons of `type(x)` or `x.__class__`, `singledispatch`, attributes
  such as `is_script`, and `hasattr` or `getattr` with a default of something named job or script.
  A job class is one whose name ends in Job or Script, one that derives from such a class, and any
  name bound to some of them.
- `trial_reads`: code that reads what was written to an Optuna trial or study as an attribute. The
  Optuna study is written for people and never read for a decision. Writing is allowed.
- `private_optuna`: names of Optuna that begin with an underscore, and its functions that write
  system attributes, which only Optuna may write.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

from benchmarks.source import Module

#: Modules that may read trial attributes, each with its reason.
MAY_READ_TRIALS: dict[str, str] = {
    "tuner.study.recorder": "a session that continues adds the trials that the study lacks",
}

_JOB_CLASS = re.compile(r"(Job|Script)$")
_JOB_VALUE = re.compile(r"(^|_)(job|script)$")
_KIND_FLAG = re.compile(r"^is_(\w+_)?(script|recording|recorded|job|built_?in)$")
_ATTRIBUTES = {
    *("user_attrs", "system_attrs", "trials_dataframe", "intermediate_values"),
    *(f"get_{of}_{kind}_attrs" for of in ("trial", "study") for kind in ("user", "system")),
}
_SYSTEM = {
    *("set_system_attr", "set_trial_system_attr", "set_study_system_attr"),
    *("_trial_id", "_study_id", "_storage", "_cached_frozen_trial"),
}


def _place(module: Module, node: ast.AST, text: str = "") -> str:
    line = getattr(node, "lineno", 0)
    return f"{module.name}:{line} {text or module.text.splitlines()[line - 1].strip()}"


def _names(node: ast.AST) -> set[str]:
    """Return the last parts of all names below a node, and the words of its strings."""
    found = set()
    for each in ast.walk(node):
        if isinstance(each, ast.Name):
            found.add(each.id)
        elif isinstance(each, ast.Attribute):
            found.add(each.attr)
        elif isinstance(each, ast.Constant) and isinstance(each.value, str):
            found |= set(re.findall(r"\w+", each.value))
    return found


def _last_name(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def job_classes(modules: Sequence[Module]) -> set[str]:
    """Return the names of the classes of jobs."""
    bases = {
        name.rpartition(".")[2]: {_last_name(base) for base in node.bases}
        for module in modules
        for name, node in module.definitions()
        if isinstance(node, ast.ClassDef)
    }
    found = {name for name in bases if _JOB_CLASS.search(name)}
    while more := {name for name, of in bases.items() if of & found} - found:
        found |= more
    return found


def _aliases(module: Module, classes: set[str]) -> set[str]:
    """Return the names by which a module calls some of the classes: imports and assignments."""
    found = set(classes)
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ImportFrom):
            found |= {each.asname for each in node.names if each.name in classes and each.asname}
        elif isinstance(node, ast.Assign) and not isinstance(node.value, ast.Call):
            parts = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
            if any(_is_class(part, found) for part in parts):
                found |= {_last_name(target) for target in node.targets} - {""}
    return found


def _is_class(node: ast.AST, classes: set[str]) -> bool:
    if isinstance(node, ast.BinOp):
        return _is_class(node.left, classes) or _is_class(node.right, classes)
    return _last_name(node) in classes


def _asks_type(node: ast.Compare) -> bool:
    return any(
        (isinstance(each, ast.Call) and _last_name(each.func) == "type")
        or (isinstance(each, ast.Attribute) and each.attr == "__class__")
        for each in ast.walk(node)
    )


def _tests_kind(node: ast.AST, classes: set[str]) -> bool:
    if isinstance(node, ast.Call):
        function = _last_name(node.func)
        if function in ("isinstance", "issubclass"):
            return bool(_names(node.args[1]) & classes)
        if function == "hasattr" or (function == "getattr" and len(node.args) == 3):
            return bool(_JOB_VALUE.search(_last_name(node.args[0])))
        return function == "register" and any(_is_class(each, classes) for each in node.args)
    if isinstance(node, ast.FunctionDef):
        registered = any("register" in _names(each) for each in node.decorator_list)
        first = node.args.args[0].annotation if node.args.args else None
        return registered and first is not None and bool(_names(first) & classes)
    if isinstance(node, ast.MatchClass):
        return bool(_names(node.cls) & classes)
    if isinstance(node, ast.Compare):
        return _asks_type(node) and bool(_names(node) & classes)
    return (
        isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Load)
        and bool(_KIND_FLAG.match(node.attr))
    )


def kind_tests(modules: Sequence[Module]) -> list[str]:
    """Return the places that test whether a job is a script.

    Raises:
        LookupError: there is no class of jobs, so that a renamed class would pass for progress.
    """
    classes = job_classes(modules)
    if not classes:
        raise LookupError("no class is named ...Job or ...Script; name the classes of jobs here")
    found = []
    for module in modules:
        names = _aliases(module, classes)
        found += [
            _place(module, node) for node in ast.walk(module.tree) if _tests_kind(node, names)
        ]
    return found


def _docstrings(tree: ast.Module) -> set[int]:
    """Return the ids of the nodes that are strings without use."""
    return {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}


def _strings(module: Module) -> Iterator[tuple[ast.Constant, str]]:
    unused = _docstrings(module.tree)
    for node in ast.walk(module.tree):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in unused
        ):
            yield node, node.value


def trial_reads(modules: Sequence[Module]) -> list[str]:
    """Return the places that read an attribute of a trial or of a study."""
    found = []
    for module in modules:
        if module.name in MAY_READ_TRIALS:
            continue
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                of_trial = node.attr == "attrs" and "trial" in _last_name(node.value).lower()
                if of_trial or node.attr in _ATTRIBUTES:
                    found.append(_place(module, node))
        # getattr(trial, "user_attrs"), attrgetter, vars(trial)["user_attrs"]
        found += [_place(module, node) for node, text in _strings(module) if text in _ATTRIBUTES]
    return found


def _imports_optuna(module: Module) -> bool:
    for node in ast.walk(module.tree):
        names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names.append(node.module or "")
        if any(name.partition(".")[0] == "optuna" for name in names):
            return True
    return False


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _own_private_names(modules: Sequence[Module]) -> set[str]:
    """Return the private names that production code defines."""
    found = set()
    for module in modules:
        found |= {name.rpartition(".")[2] for name, _ in module.definitions()}
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(_last_name(node))
    return {name for name in found if _is_private(name)}


def _private_imports(node: ast.AST) -> bool:
    if isinstance(node, ast.Import):
        names = [each.name for each in node.names]
    elif isinstance(node, ast.ImportFrom):
        names = [f"{node.module}.{each.name}" for each in node.names]
    else:
        return False
    parts = [name.split(".") for name in names]
    return any(each[0] == "optuna" and any(map(_is_private, each)) for each in parts)


def private_optuna(modules: Sequence[Module]) -> list[str]:
    """Return the uses of private names of Optuna.

    In a module that imports Optuna, a private attribute is Optuna's if no code of ours defines it.
    """
    own = _own_private_names(modules)
    found = []
    for module in modules:
        optuna = _imports_optuna(module)
        for node in ast.walk(module.tree):
            if _private_imports(node):
                found.append(_place(module, node))
            elif isinstance(node, ast.Attribute):
                mine = _last_name(node.value) in ("self", "cls") and node.attr in own
                foreign = optuna and _is_private(node.attr) and node.attr not in own
                if foreign or (node.attr in _SYSTEM and not mine):
                    found.append(_place(module, node))
        for node, text in _strings(module):
            parts = text.split(".")
            by_path = parts[0] == "optuna" and any(map(_is_private, parts))
            if by_path or text in _SYSTEM:
                found.append(_place(module, node))
    return found
