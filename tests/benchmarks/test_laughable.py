"""What the benchmark of answers laughs at, and what not."""

from __future__ import annotations

import pytest

from benchmarks.answers import laughable
from benchmarks.words import too_wide, unexplained

KEEP = "Keep what you run today"


@pytest.mark.parametrize(
    "line",
    [
        "  best in both  1,804 days -0 %   691 kWh -0 %  mb512 zero1 #1",
        "  today         4,804 days  692 kWh  dp2 mb2 zero0",
        "the least found is 3.36 h, 12,096 times the deadline of 0.000278 h",
        "Train with mb16: 0.8 % less energy and 0.3 % less time than today (96 % sure).",
        f"{KEEP} for now: mb16 probably saves 0.9 % energy (84 % sure).",
        f"{KEEP} for now: mb16 is predicted to save 5 % energy, which is within the models' error "
        "(probability 47 %).",
    ],
)
def test_it_laughs(line: str) -> None:
    assert laughable(line)


@pytest.mark.parametrize(
    "line",
    [
        "> recommended   3.84 h +14 %     8.67 kWh -15 %  mb16 zero1 1170MHz",
        "  fastest       3.36 h -10 %     10.1 kWh  0 %  mb16",
        "Train with mb16: 82 % less energy and 0.3 % less time than today (99.1 % sure).",
        f"{KEEP} for now: mb16 may save 6 % energy (probability 48 %): 2 more launches would tell.",
        f"{KEEP}: no difference worth a change was found among 5 others.",
    ],
)
def test_it_does_not_laugh(line: str) -> None:
    assert laughable(line) == ""


def test_short_names_need_an_explanation_of_their_knob() -> None:
    assert unexplained("Train with mb16 zero1: 5 % less energy") == {"micro_batch", "zero_stage"}
    explained = "mb16 zero1 beside mb4 zero0\n  (mb4 = micro-batch 4, zero0 = ZeRO stage 0)"
    assert unexplained(explained) == set()
    assert unexplained("batch=64 threads=1, with deepspeed at 300 W") == set()


def test_only_what_can_be_broken_is_too_wide() -> None:
    path = "/runs/" + 90 * "x"
    assert too_wide(f"short\n{path}\n{40 * 'ab '}") == [40 * "ab "]
