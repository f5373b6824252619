"""Clocks and energy of twin GPUs, as the governor and the receipt have them, beside the truth."""

import pytest

from benchmarks.receipt import receipt_error
from benchmarks.twin.clocks import delivered_clock_error

pytestmark = pytest.mark.needs("cc")


def test_delivered_clocks_are_near_the_truth() -> None:
    assert max(abs(delivered_clock_error(seed)) for seed in range(12)) < 0.02


@pytest.mark.slow
@pytest.mark.quiet
def test_a_receipt_is_close_to_the_exact_energy() -> None:
    assert abs(receipt_error(1, 3.0)) < 0.005
