"""Recorded tables that stand beside the project on some machines."""

from __future__ import annotations

import os
from pathlib import Path

TRACES = Path(
    os.environ.get(
        "JOULEFRONT_TRACES", Path(__file__).resolve().parents[2].parent / "shared" / "traces"
    )
)
