"""Conditions over knobs: their meaning, and everything else that is refused."""

import pytest

from tuner.search_spaces.errors import InputError, UnknownName
from tuner.search_spaces.knob_declarations import check_condition, holds, names_in

VALUES = {"zero_stage": 2, "offload": "cpu", "compile": True, "share": 0.5}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("zero_stage >= 1", True),
        ("1 <= zero_stage < 2", False),
        ("zero_stage in [1, 2]", True),
        ("zero_stage not in (1, 2)", False),
        ("offload == 'cpu' and not compile", False),
        ("offload != 'none' or compile == false", True),
        ("compile", True),
        ("share > -1", True),
        ("unset == 1", False),
        ("unset != 1", True),
        ("unset > 1 or unset <= 1", False),
        ("offload > 1", False),
    ],
)
def test_a_condition_holds_or_not(text: str, expected: bool) -> None:
    assert holds(text, VALUES) is expected


def test_a_condition_prints_no_warning(recwarn: pytest.WarningsRecorder) -> None:
    assert not holds("1and c", VALUES)
    assert not recwarn.list


def test_the_names_of_a_condition() -> None:
    assert names_in("a > 1 and b in ['x'] or not c == true") == {"a", "b", "c"}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a >",
        "a = 1",
        "__import__('os').system('true')",
        "a.b == 1",
        "a[0] == 1",
        "a + 1 == 2",
        "a is 1",
        "a == [1]",
        "a in 'text'",
        "[x for x in a]",
        "lambda: 1",
        "f'{a}'",
        "a == None",
        "a == b'x'",
        "-a == 1",
        "(a := 1)",
        "a ** 9 ** 9 > 1",
        "not " * 200 + "a",
        "(" * 240 + "a" + ")" * 240,
    ],
)
def test_nothing_else_is_a_condition(text: str) -> None:
    with pytest.raises(InputError, match="condition"):
        holds(text, VALUES)


def test_a_condition_over_an_unknown_knob() -> None:
    with pytest.raises(UnknownName, match=r"zero_stag.*condition of knob 'x'; did you mean"):
        check_condition("zero_stag > 1", ["zero_stage"], "the condition of knob 'x'")
