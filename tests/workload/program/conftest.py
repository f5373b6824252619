"""The built-in program's own modules, for tests of its parts in this process."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tuner.workload.program.built_in_job import training_program


@pytest.fixture
def beside_the_program(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the program's modules find each other by its folder, as when it is run."""
    folder = training_program().parent
    monkeypatch.syspath_prepend(str(folder))
    yield
    for path in folder.glob("*.py"):
        sys.modules.pop(path.stem, None)


@pytest.fixture
def causal_lm(beside_the_program: None) -> Any:
    return importlib.import_module("causal_lm")


@pytest.fixture
def host_activations(beside_the_program: None) -> Any:
    return importlib.import_module("host_activations")


@pytest.fixture
def multimodal(beside_the_program: None) -> Any:
    return importlib.import_module("multimodal")
