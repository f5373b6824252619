"""`tuner list frameworks` and `tuner dev frameworks check`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tuner.cli.main import main

GOOD = """
framework = "mine"
keys = ["mine.py"]
[recognise]
imports = ["mine"]
[command]
option = "--{key}={value}"
[knobs.micro_batch]
key = "batch"
"""


@pytest.mark.extra("tuner.doctor.catalog")
def test_the_drivers_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "frameworks", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["items"]
    assert {"torchtitan", "megatron-lm", "transformers-trainer"} <= {d["framework"] for d in listed}
    assert all(d["knobs"] for d in listed)


def test_a_driver_is_checked_against_what_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text(GOOD)
    assert main(["dev", "frameworks", "check", "mine.toml"]) == 0
    assert "no key is verified: mine is not installed here" in capsys.readouterr().out
    Path("mine.py").write_text("class Config:\n    batch: int = 1\n")
    assert main(["dev", "frameworks", "check", "mine.toml"]) == 0
    assert "1 keys stand in the sources of mine" in capsys.readouterr().out
    Path("mine.toml").write_text(GOOD.replace('"batch"', '"batches"'))
    assert main(["dev", "frameworks", "check", "mine.toml"]) == 1
    assert "mine has no batches" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "words", "sentence"),
    [
        (GOOD, ["list", "frameworks", "mine"], "unknown framework 'mine'; known: "),
        (
            GOOD,
            ["dev", "frameworks", "check", "other.toml"],
            "cannot read the framework 'other.toml'",
        ),
        (
            "x = ",
            ["dev", "frameworks", "check", "mine.toml"],
            "cannot read the framework 'mine.toml'",
        ),
        (GOOD + "name = 1\n", ["dev", "frameworks", "check", "mine.toml"], "unknown key 'name'"),
    ],
)
def test_a_mistake_is_one_sentence(
    text: str,
    words: list[str],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text(text)
    assert main(words) == 2
    assert sentence in capsys.readouterr().err
