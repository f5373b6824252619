"""Samplers in Python environments of their own, which choose launches to sweep.

The folder in `JOULEFRONT_PEERS` holds one virtual environment for each of them, by name. A script
of `benchmarks/search/scripts` runs in it, which imports nothing of this project, and talks JSON
lines: first the problem, {"knobs": {name: levels}, "configurations": [{name: value}], "seed": n};
then it is told and asked, {"tell": [[i, energy_J, time_s]], "open": [i]}, and answers {"ask": i},
an open configuration whose launch is swept next.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.search.ask_tell import peer
from benchmarks.search.peers import Sweep
from tuner.problem.probe_cost import ProbeCost
from tuner.search.parameters import ParameterEncoding
from tuner.search_spaces.candidates import Candidates
from tuner.search_spaces.configuration import Configuration, Settings

__all__ = ["PEERS_VARIABLE", "ExternalSweep", "environment", "missing"]

#: Environment variable with the folder of the virtual environments.
PEERS_VARIABLE = "JOULEFRONT_PEERS"
SCRIPTS = Path(__file__).resolve().parent / "scripts"


def environment(name: str) -> Path:
    """Return the Python of a sampler's environment, whether it exists or not."""
    return Path(os.environ.get(PEERS_VARIABLE, "")) / name / "bin" / "python"


def missing(name: str, package: str) -> str:
    """Return what is missing to run a sampler; "" if nothing."""
    if os.environ.get(PEERS_VARIABLE) and environment(name).is_file():
        return ""
    return (
        f"{PEERS_VARIABLE} names no folder with the virtual environment {name!r}; make one with "
        f"python -m venv FOLDER/{name} && FOLDER/{name}/bin/pip install {package}"
    )


class ExternalSweep(Sweep):
    """Sweeps the launches that a script in another environment chooses.

    Args:
        candidates, cost, seed: as of `Sweep`.
        command: starts the script.
    """

    def __init__(
        self, candidates: Candidates, cost: ProbeCost, seed: int, command: Sequence[str]
    ) -> None:
        super().__init__(candidates, cost, seed)
        self._encoding = ParameterEncoding(candidates)
        self._numbers = {c: i for i, c in enumerate(self._encoding.configurations)}
        self._told: set[Configuration] = set()
        self._process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        rows = [self._encoding.params_of(c) for c in self._encoding.configurations]
        levels = {name: sorted({row[name] for row in rows}, key=_order) for name in rows[0]}
        self._send({"knobs": levels, "configurations": rows, "seed": seed})

    def choose(self, still_open: Sequence[Configuration]) -> Settings:
        """Return the launch to sweep next.

        Raises:
            RuntimeError: the script ended, or its answer is not open.
        """
        told = [c for c in self.measured if c not in self._told]
        self._told.update(told)
        numbers = [self._numbers[c] for c in still_open]
        self._send({"tell": [[self._numbers[c], *self.measured[c]] for c in told], "open": numbers})
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._process.args} ended without an answer")
        chosen = json.loads(line)["ask"]
        if chosen not in numbers:
            raise RuntimeError(f"{self._process.args} asks for {chosen!r}, which is not open")
        return self._encoding.configurations[chosen].launch

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()

    def __del__(self) -> None:
        process = getattr(self, "_process", None)
        if process is not None:
            process.kill()
            process.communicate()


def _order(value: Any) -> tuple[bool, float, str]:
    number = isinstance(value, int | float)
    return (not number, float(value) if number else 0.0, str(value))


def _external(name: str, folder: str, script: str, package: str) -> Callable[..., ExternalSweep]:
    def start(candidates: Candidates, cost: ProbeCost, seed: int) -> ExternalSweep:
        command = [str(environment(folder)), str(SCRIPTS / script)]
        return ExternalSweep(candidates, cost, seed, command)

    peer(name, missing=lambda: missing(folder, package))(start)
    return start


_external("smac-sweep", "smac", "smac_sampler.py", "smac")
