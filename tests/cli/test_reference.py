"""Reference page of the command, docs/cli.md."""

import argparse
import re
import subprocess
from pathlib import Path

import pytest

from benchmarks import reference
from tuner.cli.command_table import SHIPPED
from tuner.cli.main import command_parser, main

PAGE = Path(__file__).parents[2] / "docs" / "cli.md"


@pytest.mark.extra(*(each.module for each in SHIPPED if each.extra))
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
        reference.reference_page().partition("## ")[2].partition("\n## ")[0]
        == """\
tuner bake

Bake a cake.

- `round,square`: its shape
- `[TOPPING ...]`: any number of them

### The oven

- `-t, --heat-C X`: 100 % is 180
- `--fan`: blow \\* hot air
"""
    )


def test_every_option_is_explained_once() -> None:
    page = PAGE.read_text(encoding="utf-8")
    lines = re.findall(r"^- .*$", page, re.M)
    assert len(lines) == len(set(lines)) > 80
    every = {
        flag
        for command in reference.commands_of(command_parser())
        for action in command._actions
        if action.help != argparse.SUPPRESS
        for flag in action.option_strings
        if flag not in ("-h", "--help", "--help-all")
    }
    assert {"--deadline", "--today", "--device-kind"} < every
    for flag in every:
        assert re.search(rf"^- `[^`]*{flag}\b", page, re.M), flag


@pytest.mark.parametrize("columns", ["60", "80", "200"])
def test_help_fits_a_screen_and_help_all_has_the_rest(
    columns: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    for command in reference.commands_of(command_parser()):
        words = command.prog.split()[1:]
        texts = []
        for flag in (
            "--help",
            "--help-all" if "--help-all" in command._option_string_actions else "-h",
        ):
            with pytest.raises(SystemExit) as ended:
                main([*words, flag])
            assert ended.value.code == 0
            texts.append(capsys.readouterr().out)
        assert len(texts[0].splitlines()) <= 60, command.prog
        if "--help-all" in texts[0]:
            assert texts[0].index("examples:") < texts[0].index("options:")
            assert len(texts[1].splitlines()) > len(texts[0].splitlines())
    assert "--storage" not in command_text("optimize", "--help", capsys)
    assert "--storage" in command_text("optimize", "--help-all", capsys)


def command_text(command: str, flag: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit):
        main([command, flag])
    return capsys.readouterr().out


@pytest.mark.extra("tuner.doctor.catalog")
def test_names_of_runs_are_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("shtab")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("JOULEFRONT_RUNS", raising=False)
    for name in ("alpha", "alps", "beta"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "study.toml").write_text("")
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    done = subprocess.run(
        ["bash", "-c", f"{script}\n_tuner_runs al"], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["alpha", "alps"]
    assert "_show_pos_0_COMPGEN=_tuner_runs" in script
