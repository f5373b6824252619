"""The error of the receipt on a twin node, by a short run of its benchmark."""

from __future__ import annotations

import pytest

from benchmarks.receipt import receipt_error


@pytest.mark.needs("cc")
@pytest.mark.slow
@pytest.mark.quiet
def test_a_receipt_is_close_to_the_exact_energy() -> None:
    assert abs(receipt_error(1, 3.0)) < 0.005
