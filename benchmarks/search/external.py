"""Samplers in Python environments of their own, which choose launches to sweep.

`benchmarks.search.environments` makes the virtual environments. A script of
`benchmarks/search/scripts` runs in one, which imports nothing of this project, and talks JSON
lines: first the problem, {"knobs": {name: levels}, "configurations": [{name: value}], "seed": n};
then it is told and asked, {"tell": [[i, energy_J, time_s]], "open": [i]}, and answers {"ask": i},
an open configuration whose launch is swept next.
"""

from __future__ import annotations

import gc
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.search.ask_tell import peer
from benchmarks.search.environments import PEERS_VARIABLE, python_of
from benchmarks.search.peers import Sweep
from tuner.problem.probe_cost import ProbeCost
from tuner.search.parameters import ParameterEncoding
from tuner.search_spaces.candidates import Candidates
from tuner.search_spaces.configuration import Configuration, Settings

SCRIPTS = Path(__file__).resolve().parent / "scripts"
#: Samplers by the environment that they run in, with the script and its arguments.
EXTERNAL: dict[str, dict[str, tuple[str, ...]]] = {
    "smac3": {"smac3-sweep": ("smac3_sampler.py",)},
    "hebo": {"hebo-sweep": ("hebo_sampler.py",)},
    "kernel_tuner": {
        f"kernel-tuner-{strategy.replace('_', '-')}-sweep": ("kernel_tuner_sampler.py", strategy)
        for strategy in ("nsga2", "greedy_ils", "bayes_opt")
    },
}


def missing(environment: str) -> str:
    """Return what is missing to run an environment's samplers; "" if nothing."""
    if python_of(environment).is_file():
        return ""
    return (
        f"there is no environment {environment!r} in the folder of {PEERS_VARIABLE}; "
        f"--peers {environment} makes one"
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
        gc.collect()  # samplers of ended runs lie in cycles, and hold a process each
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


def _enter(name: str, environment: str, script: Sequence[str]) -> None:
    def start(candidates: Candidates, cost: ProbeCost, seed: int) -> ExternalSweep:
        command = [str(python_of(environment)), str(SCRIPTS / script[0]), *script[1:]]
        return ExternalSweep(candidates, cost, seed, command)

    peer(name, missing=lambda: missing(environment))(start)


for _environment, _samplers in EXTERNAL.items():
    for _name, _script in _samplers.items():
        _enter(_name, _environment, _script)
