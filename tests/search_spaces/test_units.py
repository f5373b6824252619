"""Quantities with units."""

import pytest

from tuner.search_spaces.errors import InputError
from tuner.search_spaces.options import EXAMPLES, UNITS, parse_quantity


@pytest.mark.parametrize(
    ("text", "unit", "value"),
    [
        ("2h", "s", 7200),
        ("90m", "s", 5400),
        ("90 min", "s", 5400),
        ("7200s", "s", 7200),
        ("1.5d", "s", 129_600),
        ("11kWh", "kJ", 39_600),
        ("40MJ", "kJ", 40_000),
        ("5e2J", "kJ", 0.5),
        ("2kW", "W", 2000),
        ("5%", "share", 0.05),
        ("-3kJ", "kJ", -3),
    ],
)
def test_a_quantity_is_converted(text, unit, value):
    assert parse_quantity(text, unit) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize("text", ["", "h", "2 hours", "2H", "40mJ", "1.2.3s", "2h 3m", "7200"])
def test_another_text_is_refused_with_what_is_allowed(text):
    with pytest.raises(InputError, match=r"must be a number with a unit \(s, min, m, h, d\)"):
        parse_quantity(text, "s")


def test_every_unit_has_examples_that_can_be_read():
    for unit, examples in EXAMPLES.items():
        for example in examples.split(" or ")[0].split(", "):
            assert parse_quantity(example, unit) > 0
    assert EXAMPLES.keys() == UNITS.keys()
