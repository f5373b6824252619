"""Error rates of verification: how a stated saving is compared with the truth."""

from __future__ import annotations

import math

import pytest

from benchmarks.verdicts import TRIED, saving_bias
from tuner.results.parts import Attempt
from tuner.results.significance import Difference


def difference(log: float, half: float, p_value: float) -> Difference:
    low, high = math.expm1(log - half), math.expm1(log + half)
    return Difference("energy_per_step", math.expm1(log), low, high, p_value, "drawn")


def test_the_bias_of_a_saving_counts_what_was_shown_in_half_widths() -> None:
    true = math.log1p(-0.02)
    shown, unclear = difference(true - 0.01, 0.02, 0.01), difference(true - 1.0, 2.0, 0.3)
    attempt = Attempt(TRIED[0], 3, unclear, shown, True, "", "")
    assert saving_bias([attempt], 0.02) == pytest.approx(0.5)
    assert math.isnan(saving_bias([Attempt(TRIED[0], 3, unclear, None, True, "", "")], 0.02))
