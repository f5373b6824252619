"""A user's folder with a small training, and `tuner run -- COMMAND` in it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.receipt.fake_torch import write_fake_torch

TRAIN = """
import sys, time, torch
steps, pause_s = int(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 0.0
optimizer, loader = torch.Optimizer(), torch._BaseDataLoaderIter([8] * steps)
ends_s = []
for _ in range(steps):
    next(loader)
    optimizer.step()
    ends_s.append(time.monotonic())
    time.sleep(pause_s)
print("trained")
"""
#: The same, which writes "stepped" after its steps and ends once there is "finish".
HELD_TRAIN = TRAIN.replace(
    'print("trained")',
    """import pathlib
pathlib.Path("stepped").write_text("1")
while not pathlib.Path("finish").exists():
    time.sleep(0.01)
print("trained")""",
)
ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Measured:
    """What a measured command printed, its exit code, and its receipt."""

    code: int
    out: str
    err: str
    receipt: dict[str, Any]

    def note(self, words: str) -> bool:
        """Return True if one of the receipt's sentences holds the words."""
        return any(words in note for note in self.receipt["notes"])


@dataclass
class UserFolder:
    """Folder of a user, with `train.py STEPS [PAUSE_S]` in it."""

    path: Path

    @property
    def environment(self) -> dict[str, str]:
        """Return the variables of a command: the tests' own torch in front."""
        path = [str(self.path / "lib"), str(ROOT)]
        return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}

    @property
    def file(self) -> Path:
        """Return the file of the receipt."""
        return self.path / "energy.json"

    def command(self, *words: str, options: tuple[str, ...] = ()) -> list[str]:
        """Return the command line that measures these words."""
        python = [sys.executable, "-m", "tuner.cli", "run", "--out", str(self.file)]
        return [*python, *options, "--", *words]

    def start(self, *words: str, **more: Any) -> subprocess.Popen[str]:
        """Start `tuner run -- WORDS`."""
        options = more.pop("options", ())
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        settings = {"cwd": self.path, "env": self.environment, **pipes, **more}
        return subprocess.Popen(self.command(*words, options=options), **settings)

    def measure(
        self, *words: str, options: tuple[str, ...] = (), env: Mapping[str, str] = {}
    ) -> Measured:
        """Run `tuner run -- WORDS` to its end."""
        process = self.start(*words, options=options, env={**self.environment, **env})
        out, err = process.communicate(timeout=240)
        return Measured(process.returncode, out, err, self.read())

    def read(self) -> dict[str, Any]:
        """Return the receipt in the file; empty without one."""
        return json.loads(self.file.read_text()) if self.file.exists() else {}


@pytest.fixture
def user(tmp_path: Path) -> UserFolder:
    write_fake_torch(tmp_path / "lib")
    (tmp_path / "train.py").write_text(TRAIN)
    return UserFolder(tmp_path)
