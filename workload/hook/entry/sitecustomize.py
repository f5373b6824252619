"""Entry of the hook into the Python processes of a command that is started as it stands.

Python imports this module when it starts, because its folder stands first on PYTHONPATH. A
`sitecustomize` of the user's own, which it hides, is run as well. Python leaves it out with the
options -S, -E and -I.
"""

import importlib
import importlib.machinery
import importlib.util
import os
import sys
import types

_FOLDER = os.path.dirname(os.path.abspath(__file__))


def _attach(path: str) -> None:
    # A package of the modules that are used: the whole hook takes 40 ms of each Python process.
    package = types.ModuleType("_joulefront")
    package.__path__ = [os.path.dirname(_FOLDER)]
    sys.modules["_joulefront"] = package
    if os.path.isdir(path):  # a command that is only measured
        importlib.import_module("_joulefront.tally").begin(path)
    else:
        importlib.import_module("_joulefront.__main__").load().attach(path)


def _run_own() -> None:
    # Behind this folder: one of ours before it, of a launch around this one, has run.
    own = [os.path.abspath(path or ".") for path in sys.path].index(_FOLDER)
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path[own + 1 :])
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


#: Written beside the hook for good (`launch.sh`), or named for one launch.
_BESIDE = os.path.join(os.path.dirname(os.path.dirname(_FOLDER)), "attach.json")
if path := _BESIDE if os.path.isfile(_BESIDE) else os.environ.get("JOULEFRONT_ATTACH"):
    try:
        _attach(path)
    except Exception:  # a program that cannot be observed runs all the same
        sys.modules.pop("joulefront_hook", None)
_run_own()
