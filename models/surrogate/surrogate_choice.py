"""Choice of the surrogates' regressor: a name, or a scikit-learn regressor and its text.

study.toml keeps the regressor as text: a name of `SURROGATES`, or a scikit-learn class with the
parameters that differ from its defaults, as a call:

    sklearn.ensemble.RandomForestRegressor(n_estimators=20)

`regressor_of` reads such text without evaluating it, and makes nothing but scikit-learn's
estimators and kernels of it. Importing this module imports neither NumPy nor scikit-learn.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import math
from typing import Any

from tuner.search_spaces.errors import InputError, UnknownName

__all__ = ["OURS", "SURROGATES", "check_surrogate", "regressor_of", "text_of"]

#: This project's own Gaussian process, `tuner.models.surrogate.gaussian_process.GaussianProcess`.
OURS = "gaussian-process"
#: Names, and what each is. 50 trees are as good here as scikit-learn's 100, in half the time.
SURROGATES = {
    OURS: "",
    "gaussian-process-sklearn": (
        "sklearn.gaussian_process.GaussianProcessRegressor(kernel=sklearn.gaussian_process.kernels."
        "Sum(k1=sklearn.gaussian_process.kernels.Product(k1=sklearn.gaussian_process.kernels."
        "ConstantKernel(), k2=sklearn.gaussian_process.kernels.Matern(nu=2.5)), "
        "k2=sklearn.gaussian_process.kernels.WhiteKernel(noise_level=0.01)))"
    ),
    "extra-trees": "sklearn.ensemble.ExtraTreesRegressor(n_estimators=50)",
    "random-forest": "sklearn.ensemble.RandomForestRegressor(n_estimators=50)",
    "bayesian-ridge": "sklearn.linear_model.BayesianRidge()",
}
#: Longest text that is read.
LONGEST = 10_000
_NUMBERS = {"inf": math.inf, "nan": math.nan}


def text_of(surrogate: Any) -> str:
    """Return the text by which study.toml keeps this choice.

    Args:
        surrogate: None for this project's own, a name or such a text, or a regressor.
    """
    if surrogate is None:
        return OURS
    return surrogate if isinstance(surrogate, str) else _call_text(surrogate)


def _call_text(estimator: Any) -> str:
    kind = type(estimator)
    public = [part for part in kind.__module__.split(".") if not part.startswith("_")]
    defaults = {
        name: parameter.default for name, parameter in inspect.signature(kind).parameters.items()
    }
    given = {
        name: _value_text(value)
        for name, value in estimator.get_params(deep=False).items()
        if name not in defaults or _value_text(value) != _value_text(defaults[name])
    }
    arguments = ", ".join(f"{name}={text}" for name, text in sorted(given.items()))
    return f"{'.'.join([*public, kind.__qualname__])}({arguments})"


def _value_text(value: Any) -> str:
    if hasattr(value, "tolist"):  # NumPy's
        value = value.tolist()
    if isinstance(value, list | tuple):
        inside = ", ".join(map(_value_text, value))
        return f"[{inside}]" if isinstance(value, list) else f"({inside},)" if value else "()"
    if isinstance(value, dict):
        pairs = (f"{_value_text(key)}: {_value_text(each)}" for key, each in value.items())
        return f"{{{', '.join(pairs)}}}"
    if hasattr(value, "get_params") and not isinstance(value, type):
        return _call_text(value)
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    # Anything else, a function for example, cannot be read back; this is refused when it is read.
    return f"<{getattr(value, '__qualname__', type(value).__qualname__)}>"


def regressor_of(surrogate: Any) -> Any:
    """Return the regressor of this choice; None for this project's own.

    Args:
        surrogate: as for `text_of`.

    Raises:
        UnknownName: nothing has this name.
        InputError: the text is not that of a scikit-learn regressor.
    """
    if surrogate is None or surrogate == OURS:
        return None
    if not isinstance(surrogate, str):
        return surrogate
    text = SURROGATES.get(surrogate, surrogate)
    if not any(mark in text for mark in ".(<"):
        known = [*SURROGATES, "or a scikit-learn regressor, as sklearn.MODULE.CLASS(NAME=VALUE)"]
        raise UnknownName("surrogate", text, known)
    try:
        if len(text) > LONGEST:
            raise ValueError(f"it has {len(text)} characters, and {LONGEST} are read")
        made = _made(ast.parse(text, mode="eval").body)
        if not hasattr(made, "get_params"):
            raise ValueError("it is a value, not a regressor")
        return made
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        reason = error.msg if isinstance(error, SyntaxError) else error
        shown = text if len(text) <= 200 else f"{text[:200]}..."
        raise InputError(
            f"the surrogate {shown!r} cannot be made from its text ({reason}); give a name "
            f"({', '.join(SURROGATES)}), a scikit-learn regressor as "
            "sklearn.MODULE.CLASS(NAME=VALUE), or, in Python, the regressor itself"
        ) from None


def _made(node: ast.expr) -> Any:
    """Make the value of one expression: literals and calls of scikit-learn's classes alone."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_made(node.operand)
    if isinstance(node, ast.Name) and node.id in _NUMBERS:
        return _NUMBERS[node.id]
    if isinstance(node, ast.List):
        return [_made(each) for each in node.elts]
    if isinstance(node, ast.Tuple):
        return tuple(_made(each) for each in node.elts)
    if isinstance(node, ast.Dict) and None not in node.keys:
        return {_made(key): _made(value) for key, value in zip(node.keys, node.values, strict=True)}  # type: ignore[arg-type]
    if isinstance(node, ast.Attribute):
        return _class_named(ast.unparse(node))()
    if isinstance(node, ast.Call) and not node.args and all(k.arg for k in node.keywords):
        parameters = {str(keyword.arg): _made(keyword.value) for keyword in node.keywords}
        return _class_named(ast.unparse(node.func))(**parameters)
    raise ValueError(f"{ast.unparse(node)} is not a value or a class with named parameters")


def _class_named(path: str) -> Any:
    """Return the estimator or kernel of scikit-learn with this path.

    Raises:
        ValueError: there is none.
    """
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


def check_surrogate(surrogate: Any) -> None:
    """Refuse what no surrogate can be made of, by fitting it to a few made-up rows.

    Args:
        surrogate: as for `text_of`.

    Raises:
        InputError: it is not a regressor, or its predictions have no standard deviation.
    """
    regressor = regressor_of(surrogate)
    if regressor is None:
        return
    if isinstance(regressor, type) or not all(
        hasattr(regressor, name) for name in ("fit", "predict", "get_params")
    ):
        raise InputError(
            f"surrogate is {regressor!r}; it must be one of {', '.join(SURROGATES)} or a "
            "scikit-learn regressor"
        )
    import numpy as np

    from tuner.models.surrogate.regressors import ScikitRegressor, mean_and_std

    x = np.random.default_rng(0).random((12, 2))
    y = x[:, 0] - x[:, 1] ** 2
    model = ScikitRegressor(regressor, noise=0.01, amplitude=1.0, seed=0)
    model.update(x, y, np.zeros(12))
    fitted = model.fitted
    try:
        mean, std = mean_and_std(fitted, x)
        sound = np.isfinite(std).all() and np.allclose(mean, fitted.predict(x), atol=1e-5)
        reason = "" if sound else "its prediction is not the mean of its members'"
    except (TypeError, ValueError, AttributeError) as error:
        reason = " ".join(str(error).split())
    if reason:
        raise InputError(
            f"{text_of(surrogate)} cannot be a surrogate: {reason}; its predict must take "
            "return_std=True, or it must average its estimators_, as a random forest does"
        )
