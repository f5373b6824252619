"""The score of a look: what counts as right, wrong and unknown."""

from __future__ import annotations

import ast

import pytest

from benchmarks.today import Seen
from benchmarks.today_scripts import OWN, UNKNOWN, Truth


@pytest.mark.parametrize(
    ("truth", "found", "verdict"),
    [
        ((8, 4, 32), (8, 4, 32), "right"),
        ((8, 4, 32), (8, None, None), "unknown"),
        ((8, 4, 32), (8, 1, None), "wrong"),
        (UNKNOWN, UNKNOWN, "unknown"),
        (UNKNOWN, (7, 1, 7), "wrong"),  # a number where none is right
        ((8, 1, None), (8, 1, 16), "wrong"),
    ],
)
def test_the_worst_value_counts(truth: Truth, found: Truth, verdict: str) -> None:
    assert Seen("x", truth, found, 0.1, "").verdict == verdict


def test_every_script_of_its_own_is_python_with_a_truth() -> None:
    assert len(OWN) >= 8
    for case in OWN:
        ast.parse(case.source)
        micro, times, whole = case.truth
        assert None in case.truth or whole == micro * times * case.ranks  # type: ignore[operator]
