"""Entry of the hook into the Python processes of a command that is started as it stands.

Python imports this module when it starts, because its folder stands first on PYTHONPATH. A
`sitecustomize` of the user's own, which it hides, is run as well. Python leaves it out with the
options -S, -E and -I.
"""

import importlib.machinery
import importlib.util
import os
import sys

_FOLDER = os.path.dirname(os.path.abspath(__file__))


def _attach(path: str) -> None:
    if os.path.isdir(path):  # a command that is only measured
        _load("tally").begin(path)
    else:
        _load("__main__").load().attach(path)


def _load(name):  # type: ignore[no-untyped-def]
    # The one module alone: the whole hook takes 40 ms of each Python process.
    path = os.path.join(os.path.dirname(_FOLDER), f"{name}.py")
    spec = importlib.util.spec_from_file_location(f"_joulefront_{name.strip('_')}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
