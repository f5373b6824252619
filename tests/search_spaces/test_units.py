"""Quantities with units."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuner.search_spaces.errors import InputError
from tuner.search_spaces.fields import EXAMPLES, UNITS, parse_quantity

#: Each base unit, and what others are of it in joules, seconds or watts, by their definitions.
DEFINED = {
    "s": (1, {"s": 1, "min": 60, "m": 60, "h": 60 * 60, "d": 24 * 60 * 60}),
    "kJ": (
        1000,
        {
            **{"J": 1, "kJ": 1000, "MJ": 1000**2, "GJ": 1000**3},
            **{"Wh": 3600, "kWh": 3600 * 1000, "MWh": 3600 * 1000**2, "GWh": 3600 * 1000**3},
        },
    ),
    "W": (1, {"W": 1, "kW": 1000, "MW": 1000**2}),
    "share": (1, {"%": 0.01}),
}


@settings(derandomize=True, deadline=None)
@given(
    st.sampled_from([(unit, name) for unit, (_, of) in DEFINED.items() for name in of]),
    st.floats(-1e15, 1e15, allow_subnormal=False),
    st.sampled_from(["", " "]),
    st.sampled_from(["r", "g", ".3f"]),
)
def test_a_quantity_is_as_many_of_its_unit(
    of: tuple[str, str], number: float, space: str, form: str
) -> None:
    unit, name = of
    base, sizes = DEFINED[unit]
    text = repr(number) if form == "r" else format(number, form)
    expected = pytest.approx(float(text) * sizes[name] / base, rel=1e-12)
    assert parse_quantity(f"{text}{space}{name}", unit) == expected


@pytest.mark.parametrize("text", ["", "h", "2 hours", "2H", "40mJ", "1.2.3s", "2h 3m", "7200"])
def test_another_text_is_refused_with_what_is_allowed(text):
    with pytest.raises(InputError, match=r"must be a number with a unit \(s, min, m, h, d\)"):
        parse_quantity(text, "s")


def test_every_unit_has_examples_that_can_be_read():
    for unit, examples in EXAMPLES.items():
        for example in examples.split(" or ")[0].split(", "):
            assert parse_quantity(example, unit) > 0
    assert EXAMPLES.keys() == UNITS.keys() == DEFINED.keys()
    assert all(UNITS[unit].keys() == sizes.keys() for unit, (_, sizes) in DEFINED.items())
