"""Options declared once: validation, the command line and tables of values are made of a field."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import pytest

from tuner.cli.options import add_options, given_options, made_of_options
from tuner.problem.constraints import Constraints
from tuner.problem.settings import SearchSettings
from tuner.search_spaces.errors import InputError, UnknownName
from tuner.search_spaces.fields import check_options, declared_options, option, read_options
from tuner.workload.records.probe import WindowPolicy
from tuner.workload.scripts.command import Script


@dataclass(frozen=True)
class Shape:
    side_m: float | None = option(None, "length of a side", unit="m", above=0)
    sides: int = option(4, "number of sides", least=3)
    colour: str | None = option(None, "colour", choices=("red", "blue"), flag="paint")
    filled: bool = option(True, "fill it")
    hidden: float = option(0.5, "never on the command line", least=0, keyword_only=True)

    def __post_init__(self) -> None:
        check_options(self)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"side_m": 0}, "side_m is 0; it must be a number greater than 0"),
        ({"side_m": float("nan")}, "side_m is nan; it must be a number greater than 0"),
        ({"side_m": True}, "side_m is True; it must be a number greater than 0"),
        ({"side_m": "3"}, "side_m is '3'; it must be a number greater than 0"),
        ({"sides": 2}, "sides is 2; it must be an integer of at least 3"),
        ({"sides": 4.0}, "sides is 4.0; it must be an integer of at least 3"),
        ({"sides": None}, "sides is None; it must be an integer of at least 3"),
        ({"filled": 1}, "filled is 1; it must be true or false"),
        ({"hidden": -1}, "hidden is -1; it must be a number of at least 0"),
        ({"colour": "green"}, "unknown colour 'green'; known: blue, red"),
    ],
)
def test_a_value_outside_its_declaration_is_refused_in_a_sentence(given, sentence):
    with pytest.raises(InputError) as refused:
        Shape(**given)
    assert str(refused.value) == sentence


def parsed(*words):
    parser = argparse.ArgumentParser()
    add_options(parser, Shape)
    return parser.parse_args(words), parser.format_help()


def test_the_command_line_is_made_of_the_declaration():
    args, text = parsed("--side-m", "2.5", "--paint", "red", "--no-filled")
    assert made_of_options(args, Shape) == Shape(2.5, colour="red", filled=False)
    assert given_options(args, Shape) == ["--side-m", "--paint", "--filled"]
    for part in ("length of a side, in m", "number of sides (default: 4)", "do not fill it"):
        assert part in text
    assert "hidden" not in text
    assert made_of_options(parsed()[0], Shape) == Shape()


def test_a_table_is_read_by_the_declaration_and_names_its_place():
    assert read_options(Shape, {"sides": 5, "unknown": 1}, "shape.toml") == Shape(sides=5)
    with pytest.raises(InputError, match=r"sides in shape.toml is 2; it must be an integer"):
        read_options(Shape, {"sides": 2}, "shape.toml")
    with pytest.raises(UnknownName, match="colour"):
        read_options(Shape, {"colour": "green"}, "shape.toml")


@pytest.mark.parametrize("kind", [Constraints, SearchSettings, WindowPolicy, Script])
def test_every_option_says_what_it_does(kind):
    declared = list(declared_options(kind))
    assert len(declared) >= 4
    assert all(len(each.help) > 10 and not each.help.endswith(".") for _, each in declared)
    units = {"_kJ": "kJ", "_s": "s", "_W": "W"}
    for item, each in declared:
        for ending, unit in units.items():
            assert not item.name.endswith(ending) or each.unit == unit, item.name
