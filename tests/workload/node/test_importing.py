"""What is installed is imported before it is called ready."""

from __future__ import annotations

from pathlib import Path

import pytest

from tuner.doctor.command import node_lines
from tuner.workload.node import facts
from tuner.workload.node.facts import import_errors
from tuner.workload.node.platforms.base import NEEDED

MODULES = {
    "sound": "print('a banner')",
    "torn": "from json import ResolvedRevision",
    "wordless": "raise RuntimeError()",
    "leaving": "raise SystemExit(3)",
    "dying": "import os; print('x', flush=True); os._exit(7)",
    "waiting": "import time; time.sleep(60)",
}


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in MODULES.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def test_errors_of_imports_are_told_by_package() -> None:
    found = import_errors(["torn", "sound", "wordless", "leaving"])
    assert found.keys() == {"torn", "wordless", "leaving"}
    assert "cannot import name 'ResolvedRevision'" in found["torn"]
    assert found["wordless"].startswith("RuntimeError")
    assert found["leaving"] == "SystemExit: 3"


def test_a_package_that_ends_the_interpreter_is_named() -> None:
    assert import_errors(["sound", "dying", "torn"]) == {
        "dying": "the interpreter ended with code 7"
    }


def test_what_takes_too_long_stays_unknown() -> None:
    assert import_errors(["torn", "waiting"], limit_s=8.0).keys() == {"torn"}
    assert import_errors([]) == {}


def test_a_machine_that_cannot_import_is_not_called_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    why = "ImportError: cannot import name 'ResolvedRevision' from 'huggingface_hub'"
    asked = []

    def errors(packages: list[str]) -> dict[str, str]:
        asked.extend(packages)
        return {"transformers": why}

    monkeypatch.setattr(facts, "import_errors", errors)
    monkeypatch.setattr(facts, "installed_version", lambda name: "5.24.0")
    found = facts.inspect_node(imports=True)
    assert asked == [*NEEDED]
    assert not found.ready
    text = "\n".join(node_lines(found))
    assert "cannot train: transformers cannot be imported" in text
    assert f"transformers 5.24.0 that can be imported: {why}" in text
    assert facts.inspect_node().import_errors == {}
