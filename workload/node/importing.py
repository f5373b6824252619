"""Imports of installed packages, tried in an interpreter of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence

#: Time after which it stays unknown whether packages can be imported, seconds.
IMPORT_LIMIT_S = 180.0
#: Program that prints the error of each import as JSON; what the imports print goes elsewhere.
_TRY = """
import importlib, json, os, sys
out = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
for name in sys.argv[1:]:
    error = None
    try:
        importlib.import_module(name)
    except BaseException as raised:
        lines = f"{type(raised).__name__}: {raised}".splitlines()
        error = next(filter(None, lines), type(raised).__name__)
    print(json.dumps([name, error]), file=out, flush=True)
os._exit(0)
"""


def import_errors(
    packages: Sequence[str], *, python: str = sys.executable, limit_s: float = IMPORT_LIMIT_S
) -> Mapping[str, str]:
    """Return the first line of the error of each package that cannot be imported.

    The packages are imported in this order in one interpreter. One that ends the interpreter is
    named with its exit code; what was not tried by the limit is left out.
    """
    words = [python, "-c", _TRY, *packages]
    try:
        done = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        return {name: text for name, text in _responds(error.stdout or b"") if text}
    found = _responds(done.stdout)
    errors = {name: text for name, text in found if text}
    if len(found) < len(packages):
        errors[packages[len(found)]] = f"the interpreter ended with code {done.returncode}"
    return errors


def _responds(output: bytes) -> list[tuple[str, str | None]]:
    lines = [line for line in output.decode(errors="replace").split("\n") if line.endswith("]")]
    return [(name, error) for name, error in map(json.loads, lines)]
