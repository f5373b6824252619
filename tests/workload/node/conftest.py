"""Nodes whose GPUs are all visible, whatever the shell hides that runs the tests."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _all_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
