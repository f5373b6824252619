"""Walk of one plain request: the files and functions that the driver passes, in their order.

`tuner optimize` really searches for a plain training loop on this machine. Named functions of the
import package are recorded when they are entered first, in all threads of the driver; those of
training processes, lambdas, comprehensions and templates are not. A file counts from the first
function or body of a class that runs in it. The first probe is the first start of the training
script, which learns what it is.

A function forwards if its only statement, after the docstring, consists of calls, names, attributes
and constants.
"""

from __future__ import annotations

import ast
import functools
import inspect
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from benchmarks.figures import ROOT
from benchmarks.ledger import FOLDERS

#: The function that runs one probe, and its file.
PROBE = ("workload/node/probe_run.py", "Probe.run")
OPTIONS = ("--executor", "inline", "--max-probes", "3", "--search-time", "60s", "--no-verify", "-q")
#: A plain loop, without a framework and without a launcher.
SCRIPT = """\
import argparse

import torch

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--batch", type=int, default=16)
options = parser.parse_args()
model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(options.steps):
    loss = model(torch.randn(options.batch, 256)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
COMMAND = ("train.py", "--steps", "200000")


@dataclass(frozen=True)
class Entered:
    """A function or the body of a class that ran.

    Attributes:
        file: path in the checkout.
        name: qualified name.
        line: its first line, of a decorator if it has one.
        is_function: False for the body of a class.
        calls: how often it was entered.
    """

    file: str
    name: str
    line: int
    is_function: bool
    calls: int


@dataclass(frozen=True)
class Walk:
    """What ran, in the order in which it was entered first.

    Attributes:
        entered: functions and bodies of classes.
        root: folder of the checkout.
    """

    entered: Sequence[Entered]
    root: Path = ROOT

    @functools.cached_property
    def functions(self) -> list[Entered]:
        return [each for each in self.entered if each.is_function]

    @functools.cached_property
    def files(self) -> list[str]:
        return list(dict.fromkeys(each.file for each in self.entered))

    def before(self, file: str, name: str) -> Walk:
        """Return the walk until a function is entered; ValueError if it is not."""
        for number, each in enumerate(self.entered):
            if (each.file, each.name) == (file, name):
                return Walk(self.entered[:number], self.root)
        raise ValueError(f"the request never entered {name} of {file}")

    def forwarding(self) -> list[Entered]:
        """Return the functions that only forward."""
        return [each for each in self.functions if forwards(self._definition(each))]

    def _definition(self, entered: Entered) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
        return _definitions(self.root / entered.file).get(entered.line)


@functools.cache
def _definitions(path: Path) -> dict[int, ast.FunctionDef | ast.AsyncFunctionDef]:
    found = {}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found[min(each.lineno for each in (*node.decorator_list, node))] = node
    return found


def forwards(node: ast.FunctionDef | ast.AsyncFunctionDef | None) -> bool:
    """Return if a function only forwards; False without a definition."""
    if node is None:
        return False
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    if len(body) != 1 or not isinstance(body[0], ast.Return | ast.Expr):
        return False
    value = body[0].value
    plain = (ast.Call, ast.Name, ast.Attribute, ast.Constant, ast.keyword, ast.Starred, ast.Load)
    return value is not None and all(isinstance(each, plain) for each in ast.walk(value))


class Recorder:
    """Recorder of what runs in this process, in the files of a checkout."""

    def __init__(self, root: Path, folders: Sequence[str] = FOLDERS) -> None:
        self._root, self._folders = root.resolve(), folders
        self._calls: dict[CodeType, int] = {}

    def start(self) -> None:
        """Record from here on, in threads that start later, too."""
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)

    def stop(self) -> Walk:
        """End and return what ran."""
        sys.setprofile(None)
        threading.setprofile(None)
        entered = [self._entered(code, calls) for code, calls in list(self._calls.items())]
        return Walk([each for each in entered if each is not None], self._root)

    def _profile(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            self._calls[frame.f_code] = self._calls.get(frame.f_code, 0) + 1

    def _entered(self, code: CodeType, calls: int) -> Entered | None:
        path = Path(code.co_filename)
        if code.co_name.startswith("<") or path.suffix != ".py" or not path.is_absolute():
            return None
        path = path.resolve()  # tuner/workload is a link
        if not path.is_relative_to(self._root):
            return None
        file = path.relative_to(self._root)
        if file.parts[0] not in self._folders:
            return None
        is_function = bool(code.co_flags & inspect.CO_OPTIMIZED)  # the body of a class is not
        return Entered(file.as_posix(), code.co_qualname, code.co_firstlineno, is_function, calls)


def record(file: str, words: Sequence[str]) -> None:
    """Run the command `tuner` with some words in this process and write what ran to a file."""
    recorder = Recorder(ROOT)
    recorder.start()
    from tuner.cli.main import main

    status = main(words)
    walk = recorder.stop()
    rows = [list(vars(each).values()) for each in walk.entered]
    Path(file).write_text(json.dumps(rows), encoding="utf-8")
    sys.exit(status)


def walk_of_a_request(options: Sequence[str] = OPTIONS) -> Walk:
    """Search for a plain training loop and return the walk of the driver."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "train.py").write_text(SCRIPT, encoding="utf-8")
        file = Path(folder) / "walk.json"
        words = ["optimize", *options, "--", sys.executable, *COMMAND]
        code = (
            f"import sys; sys.path.insert(0, {str(ROOT)!r}); from benchmarks.walk import record; "
            f"record({str(file)!r}, {words!r})"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"the request failed:\n{done.stdout}{done.stderr}")
        return Walk([Entered(*row) for row in json.loads(file.read_text(encoding="utf-8"))])


def figures_of_walk(walk: Walk) -> dict[str, int]:
    before = walk.before(*PROBE)
    return {
        "files_before_first_probe": len(before.files),
        "functions_before_first_probe": len(before.functions),
        "files_of_a_request": len(walk.files),
        "functions_of_a_request": len(walk.functions),
        "forwarding_functions": len(walk.forwarding()),
    }
