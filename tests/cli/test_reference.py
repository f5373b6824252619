"""Reference page of the command, docs/cli.md."""

import argparse
from pathlib import Path

from tuner.cli import reference

PAGE = Path(__file__).parents[2] / "docs" / "cli.md"


def test_the_committed_page_is_that_of_the_parser() -> None:
    assert PAGE.read_text(encoding="utf-8") == reference.reference_page(), (
        "an option changed: run `make docs` and commit docs/cli.md"
    )


def test_arguments_are_shown_as_they_are_typed(monkeypatch) -> None:
    parser = argparse.ArgumentParser(prog="tuner")
    command = parser.add_subparsers().add_parser("bake", description="bake a cake")
    command.add_argument("shape", choices=("round", "square"), help="its shape")
    command.add_argument("toppings", nargs="*", metavar="TOPPING", help="any number of them")
    group = command.add_argument_group("the oven", "as it is set")
    group.add_argument("-t", "--heat-C", metavar="X", default=180, help="100 %% is %(default)s")
    group.add_argument("--fan", action="store_true", help="blow * hot air")
    monkeypatch.setattr(reference, "command_parser", lambda: parser)
    assert (
        reference.reference_page().partition("## ")[2]
        == """\
tuner bake

`tuner bake [OPTIONS] round,square [TOPPING ...]`

Bake a cake.

- `round,square`: its shape
- `[TOPPING ...]`: any number of them

### The oven

As it is set.

- `-t, --heat-C X`: 100 % is 180
- `--fan`: blow \\* hot air
"""
    )
