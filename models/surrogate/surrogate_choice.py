"""Text of the surrogates' regressor, as study.toml keeps it and the command line takes it.

It is the name of this project's Gaussian process, or a scikit-learn class with the parameters that
differ from its defaults: `sklearn.ensemble.RandomForestRegressor(n_estimators=20)`. The text is
parsed, never evaluated. Importing this module imports neither NumPy nor scikit-learn.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from typing import Any

from tuner.search_spaces.errors import InputError, UnknownName

#: This project's own Gaussian process, `tuner.models.surrogate.gaussian_process.GaussianProcess`.
OURS = "gaussian-process"
#: Longest text that is read.
LONGEST = 10_000


def text_of(surrogate: Any) -> str:
    """Return the text by which study.toml keeps this choice."""
    if surrogate is None:
        return OURS
    return surrogate if isinstance(surrogate, str) else _text(surrogate)


def _text(value: Any) -> str:
    if isinstance(value, list | tuple):
        inside = ", ".join(map(_text, value))
        return f"[{inside}]" if isinstance(value, list) else f"({inside},)" if value else "()"
    if not hasattr(value, "get_params") or isinstance(value, type):
        plain = value is None or isinstance(value, bool | int | float | str)
        return repr(value) if plain else f"<{type(value).__qualname__}>"
    kind = type(value)
    path = [part for part in kind.__module__.split(".") if not part.startswith("_")]
    defaults = {name: _text(p.default) for name, p in inspect.signature(kind).parameters.items()}
    given = {name: _text(one) for name, one in value.get_params(deep=False).items()}
    changed = (f"{name}={text}" for name, text in given.items() if text != defaults.get(name))
    return f"{'.'.join([*path, kind.__qualname__])}({', '.join(sorted(changed))})"


def regressor_of(surrogate: Any) -> Any:
    """Return the regressor of this choice; None for this project's own.

    Raises:
        UnknownName: nothing has this name.
        InputError: the text is not that of a scikit-learn regressor.
    """
    if surrogate is None or surrogate == OURS:
        return None
    if not isinstance(surrogate, str):
        return surrogate
    known = [OURS, "or a scikit-learn regressor, as sklearn.MODULE.CLASS(NAME=VALUE)"]
    if not any(mark in surrogate for mark in ".(<"):
        raise UnknownName("surrogate", surrogate, known)
    try:
        if len(surrogate) > LONGEST:
            raise ValueError(f"it has {len(surrogate)} characters, and {LONGEST} are read")
        made = _made(ast.parse(surrogate, mode="eval").body)
        if not hasattr(made, "get_params"):
            raise ValueError("it is a value, not a regressor")
        return made
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        reason = error.msg if isinstance(error, SyntaxError) else error
        shown = surrogate if len(surrogate) <= 200 else f"{surrogate[:200]}..."
        raise InputError(
            f"the surrogate {shown!r} cannot be made from its text ({reason}); give "
            f"{', '.join(known)}, or, in Python, the regressor itself"
        ) from None


def _made(node: ast.expr) -> Any:
    if isinstance(node, ast.List | ast.Tuple):
        values = [_made(each) for each in node.elts]
        return values if isinstance(node, ast.List) else tuple(values)
    if isinstance(node, ast.Call) and not node.args and all(k.arg for k in node.keywords):
        parameters = {str(keyword.arg): _made(keyword.value) for keyword in node.keywords}
        return _class_named(ast.unparse(node.func))(**parameters)
    if isinstance(node, ast.Attribute):
        return _class_named(ast.unparse(node))()
    try:
        return ast.literal_eval(node)
    except ValueError:
        text = ast.unparse(node)
        raise ValueError(f"{text} is not a value or a class with named parameters") from None


def _class_named(path: str) -> Any:
    module, _, name = path.rpartition(".")
    if module.split(".")[0] != "sklearn" or "._" in path:
        raise ValueError(f"{path} is not of scikit-learn")
    from sklearn.base import BaseEstimator
    from sklearn.gaussian_process.kernels import Kernel

    try:
        found = getattr(importlib.import_module(module), name, None)
    except ImportError:
        found = None
    if not (isinstance(found, type) and issubclass(found, BaseEstimator | Kernel)):
        raise ValueError(f"scikit-learn has no estimator or kernel {path}")
    return found
