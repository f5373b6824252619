"""Numbers in the words of users: what `int` refuses is no number, and no traceback."""

from __future__ import annotations

import pytest

from tuner.search_spaces.fields import whole_number


@pytest.mark.parametrize("text", ["\u00b2", "", "-1", "+1", "1_0", "1.0", " 1", "9" * 5000, "x"])
def test_what_is_no_number_of_digits_is_none(text: str) -> None:
    assert whole_number(text) is None


def test_digits_are_a_number() -> None:
    assert [whole_number(text) for text in ("0", "08", "9" * 18)] == [0, 8, 10**18 - 1]
