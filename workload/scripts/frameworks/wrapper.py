"""A generated module for a framework that is configured by a function, as torchtitan 0.3 is.

The module imports the user's function, calls it, sets attributes of what it returns, and returns
it. The command names the module instead of the user's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from tuner.search_spaces.errors import InputError
from tuner.search_spaces.safe_files import write_text
from tuner.workload.node.rights import without_secrets
from tuner.workload.scripts.frameworks.parts import UNSET, Wrapper

MODULE = "joulefront_config"
#: Prints today's values of some keys; an object is named by its class, and None left out.
_READ = """
import importlib, json, sys

asked = json.load(sys.stdin)
sys.path[:0] = asked["path"]
config = None
for name in asked["search"]:
    try:
        config = getattr(importlib.import_module(name), asked["function"])()
        break
    except ModuleNotFoundError as error:
        if error.name is None or not name.startswith(error.name):
            raise
given = {}
for key in asked["keys"]:
    value = config
    for part in key.split("."):
        value = getattr(value, part, None)
    if value is not None and not isinstance(value, (bool, int, float, str)):
        value = f"call:{type(value).__module__}:{type(value).__qualname__}"
    if value is not None:
        given[key] = value
print("\\njoulefront-given " + json.dumps(given), flush=True)
"""
_LIMIT_S = 180.0


def read_function(
    wrapper: Wrapper, words: Sequence[str], keys: Sequence[str], path: Sequence[Path], cwd: Path
) -> dict[str, Any]:
    """Return the values that the user's function gives some keys, by an interpreter of its own.

    InputError if the command does not name the function, or it cannot be called.
    """
    named = _named(wrapper, words)
    module, function = named[wrapper.module][1], named[wrapper.function][1]
    asked = {
        "search": [name.format(module=module) for name in wrapper.search],
        "function": function,
        "keys": list(keys),
        "path": [str(folder) for folder in path],
    }
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", _READ],
            input=json.dumps(asked),
            capture_output=True,
            text=True,
            errors="replace",
            cwd=cwd,
            timeout=_LIMIT_S,
            check=False,
            env=without_secrets(os.environ),
        )
    except OSError as error:
        raise InputError(f"{function} of {module} cannot be read: {error}") from error
    except subprocess.TimeoutExpired as error:
        raise InputError(f"{function} did not return within {_LIMIT_S:.0f} s") from error
    for line in done.stdout.splitlines():
        if line.startswith("joulefront-given "):
            given: dict[str, Any] = json.loads(line.partition(" ")[2])
            return given
    said = [line for line in done.stderr.splitlines() if line.strip()]
    raise InputError(f"{function} of {module} cannot be read: {said[-1] if said else 'no answer'}")


def _named(wrapper: Wrapper, words: Sequence[str]) -> dict[str, tuple[int, str]]:
    named = {}
    for option in (wrapper.module, wrapper.function):
        for at, word in enumerate(words):
            name, equals, value = word.partition("=")
            if name == option and (equals or at + 1 < len(words)):
                named[option] = (at if equals else at + 1, value if equals else words[at + 1])
    if len(named) < 2 or not named[wrapper.function][1].isidentifier():
        raise InputError(f"the command must name {wrapper.module} and {wrapper.function}")
    return named


def wrapped(
    wrapper: Wrapper, settings: Mapping[str, Any], words: Sequence[str], folder: Path
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Write the module to a folder; return the command that names it, and PYTHONPATH."""
    changed, named = list(words), _named(wrapper, words)
    (at, module), (_, function) = named[wrapper.module], named[wrapper.function]
    changed[at] = f"{wrapper.module}={MODULE}" if "=" in words[at] else MODULE
    template = resources.files("tuner.workload.scripts.frameworks") / "function_config.txt"
    text = template.read_text(encoding="utf-8").format(
        function=function,
        search=[name.format(module=module) for name in wrapper.search],
        settings={key: None if value == UNSET else value for key, value in settings.items()},
    )
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / f"{MODULE}.py", text)
    return tuple(changed), {"PYTHONPATH": str(folder.resolve())}
