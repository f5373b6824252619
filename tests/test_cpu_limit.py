"""A test that takes more CPU seconds than an everyday test may is named, unless it is marked."""

from __future__ import annotations

import pytest

from tests.cpu_limit import LIMIT_S, MARGIN, REFERENCE_S, excess, slowness


def test_a_busy_or_slower_machine_has_a_higher_limit_and_a_faster_one_no_lower() -> None:
    assert slowness([REFERENCE_S / 2] * 9) == 1
    assert slowness([3 * REFERENCE_S] * 9) == pytest.approx(3)
    assert excess(LIMIT_S * MARGIN + 0.1, 1.0, LIMIT_S)
    assert not excess(LIMIT_S * MARGIN + 0.1, 1.3, LIMIT_S)
    assert not excess(1000.0, 1.0, 0.0)
