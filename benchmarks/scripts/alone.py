"""A program by itself, without tuner: when its first step ends, when it dies, how fast it steps.

A `sitecustomize` of the benchmark's own, first on PYTHONPATH, appends the time of each optimizer
step to one file per process, through torch's global hook. None of it is the code under test.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

#: The hook is set once torch.optim is complete; only the first optimizer of a process counts.
_SITE = '''"""Append the time of every optimizer step to a file of this process."""
import importlib.abc, importlib.util, os, sys, time

class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name != "torch.optim.optimizer":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module
        def exec_module(module):
            execute(module)
            module.register_optimizer_step_post_hook(_note)
        spec.loader.exec_module = exec_module
        return spec

_first = []
def _note(optimizer, args, kwargs):
    _first[:] = _first or [id(optimizer)]
    if id(optimizer) == _first[0]:
        with open(os.path.join(os.environ["STEPS_FOLDER"], str(os.getpid())), "a") as file:
            file.write(f"{time.monotonic()}\\n")

sys.meta_path.insert(0, _Finder())
'''


@dataclass(frozen=True)
class Alone:
    """One start of a command.

    Attributes:
        first_step_s: from the start to the end of the first optimizer step; None if there was none.
        died_s: from the start to its end; None if it was ended.
        code: exit status; None if it was ended.
        ranks: processes that made a step.
        step_s: median time of a step after the first two; None if there were too few.
        last_words: the end of its output.
    """

    first_step_s: float | None
    died_s: float | None
    code: int | None
    ranks: int
    step_s: float | None
    last_words: str


def start_alone(
    words: Sequence[str],
    folder: Path,
    environment: Mapping[str, str],
    *,
    steps: int = 1,
    limit_s: float = 120.0,
    settle_s: float = 0.0,
) -> Alone:
    """Start a command, and end it after a number of steps or a time; `settle_s` awaits ranks."""
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / "sitecustomize.py").write_text(_SITE)
        moments = Path(place) / "steps"
        moments.mkdir()
        paths = [place, environment.get("PYTHONPATH", "")]
        own = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "STEPS_FOLDER": str(moments)}
        log = Path(place) / "log"
        began = time.monotonic()
        with log.open("wb") as output:
            child = subprocess.Popen(
                words,
                cwd=folder,
                env={**environment, **own},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        died_s = code = None
        try:
            while time.monotonic() - began < limit_s:
                if child.poll() is not None:
                    died_s = time.monotonic() - began
                    break
                if any(len(found) >= steps for found in _read(moments)):
                    time.sleep(settle_s)
                    break
                time.sleep(0.02)
            code = child.poll()
        finally:  # it leads a session of its own, which no signal to this process reaches
            end_group(child)
        return _outcome(_read(moments), began, log, Alone(None, died_s, code, 0, None, ""))


def _outcome(found: list[list[float]], began: float, log: Path, ended: Alone) -> Alone:
    gaps = [later - earlier for times in found for earlier, later in pairwise(times[2:])]
    text = log.read_text(errors="replace").strip()
    return replace(
        ended,
        first_step_s=min(times[0] for times in found) - began if found else None,
        ranks=len(found),
        step_s=statistics.median(gaps) if len(gaps) >= 3 else None,
        last_words=text[-2000:],
    )


def _read(folder: Path) -> list[list[float]]:
    lines = [file.read_text().splitlines() for file in folder.iterdir()]
    return [[float(line) for line in times if line] for times in lines if times]


def end_group(child: subprocess.Popen[bytes]) -> None:
    """End a child that leads a session, with everything in its process group."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(child.pid, number)
        except ProcessLookupError:
            break
        try:
            child.wait(10)
        except subprocess.TimeoutExpired:
            continue
    child.wait()
