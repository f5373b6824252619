"""Launchers' parsers called in this process, which imports torch and DeepSpeed once."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from tuner.workload.scripts.launchers import vendor


def answer_here(
    name: str, arguments: Sequence[str], cwd: Path, environment: Mapping[str, str]
) -> dict[str, Any]:
    """Answer as `tuner.workload.scripts.launchers.vendor` does in an interpreter of its own."""
    with mock.patch.dict(os.environ, environment, clear=True), contextlib.chdir(cwd):
        try:
            return vendor.READERS[name](arguments)
        except (vendor.Refused, ValueError, FileNotFoundError) as error:
            return {"refuse": str(error)}
        except SystemExit:
            return {"refuse": "its parser ended"}
