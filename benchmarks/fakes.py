"""The tests' fake GPUs, for benchmarks whose truth must be known exactly."""

from __future__ import annotations

import sys
from pathlib import Path

__all__ = ["ROOT", "TESTS"]

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests"
sys.path.insert(0, str(TESTS))
