"""Clocks that a twin GPU delivered, as the governor measures them, beside the truth."""

import pytest

from benchmarks.twin.clocks import delivered_clock_error


@pytest.mark.needs("cc")
def test_delivered_clocks_are_near_the_truth() -> None:
    assert max(abs(delivered_clock_error(seed)) for seed in range(12)) < 0.02
