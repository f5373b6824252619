"""Commands that tests and benchmarks run to their end."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def finished(words: Sequence[str | Path], **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command; return its exit status with what it printed."""
    return subprocess.run(words, capture_output=True, text=True, check=False, **options)


def write_program(path: Path, text: str) -> Path:
    """Write a program that stands for another one; return its path."""
    path.write_text(text)
    path.chmod(0o755)
    return path
