"""The commands that read a run folder print what they printed before (`tests.golden`)."""

from __future__ import annotations

import difflib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.golden import NAMES, OUTPUTS

NUMBER = re.compile(r"-?\d+\.?\d*(?:e[-+]\d+)?")


def same(reviewed: str, now: str) -> bool:
    """Return True if the lines differ in the last digits alone, which CPUs round differently."""
    numbers = [[float(number) for number in NUMBER.findall(line)] for line in (reviewed, now)]
    return NUMBER.sub("0", reviewed) == NUMBER.sub("0", now) and numbers[0] == pytest.approx(
        numbers[1], rel=1e-5, abs=1e-12
    )


def test_only_last_digits_may_differ() -> None:
    assert same("time [-8.98183e-07, 7.48766] s", "time [-8.98184e-07, 7.48765] s")
    assert not same("time 7.4876 s", "time 7.4886 s")
    assert not same("12 kJ", "12 kWh")
    assert not same("3 launches", "4 launches")


@pytest.mark.parametrize("name", NAMES)
def test_outputs_are_those_that_were_reviewed(name: str, tmp_path: Path) -> None:
    words = ["-m", "tests.golden", "--write", "--out", str(tmp_path), name]
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, *words], cwd=root, check=True)
    texts = [(folder / f"{name}.txt").read_text("utf-8") for folder in (OUTPUTS, tmp_path)]
    reviewed, lines = (text.splitlines() for text in texts)
    if len(reviewed) == len(lines):
        pairs = zip(reviewed, lines, strict=True)
        lines = [old if same(old, new) else new for old, new in pairs]
    difference = difflib.unified_diff(reviewed, lines, "reviewed", name, lineterm="", n=2)
    wrong = list(difference)[:200]
    assert not wrong, "\n".join([*wrong, "review, then: python -m tests.golden --write NAME"])
