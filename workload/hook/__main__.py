"""The hook started by its path: `python .../__main__.py rank SPEC` or `... run SCRIPT ...`.

Python puts a script's folder first on sys.path, where our modules would hide a user's of the same
name. So that folder makes way for the one it lies in, and the hook is loaded by its path, under the
one name that a user's program imports it by; the fork server takes `load` from here.
"""

import importlib.util
import os
import sys
from typing import Any

FOLDER = os.path.dirname(os.path.realpath(__file__))


def load() -> Any:
    """Load the package under the name by which a user's program may import it."""
    path = os.path.join(FOLDER, "__init__.py")
    spec = importlib.util.spec_from_file_location("joulefront_hook", path)
    assert spec is not None
    assert spec.loader is not None
    hook = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = hook
    spec.loader.exec_module(hook)
    return hook


if __name__ == "__main__":
    if FOLDER in sys.path:
        sys.path[sys.path.index(FOLDER)] = os.path.dirname(FOLDER)
    load().main(sys.argv[1:])
