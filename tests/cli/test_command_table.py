"""Socket of commands: what is shipped, what is left out, and plug-ins of other distributions."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tuner
from tests.support.entry_points import install_plugin, require_parts
from tuner.cli import command_table
from tuner.cli.command_table import SHIPPED, Provider
from tuner.cli.main import command_parser, main
from tuner.cli.options import made_of_options
from tuner.cli.parser import Commands, Parser
from tuner.problem.settings import SearchSettings
from tuner.search_spaces.errors import InputError

PLUGIN = """
PROTOCOL = 1

def add(commands):
    commands.command("weigh", lambda args: print("4 kJ") or 0, "weigh a job")
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Install a distribution with one plug-in of commands."""

    def install(source: str, name: str = "weigh") -> None:
        install_plugin(tmp_path, monkeypatch, "joulefront.commands", name, source)

    return install


@pytest.mark.parametrize("provider", SHIPPED, ids=lambda each: each.module)
def test_a_shipped_module_adds_the_commands_that_the_table_names(
    provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_parts(*([provider.module] if provider.extra else []))
    parser = Parser(prog="tuner")
    command_table.add_commands(Commands(parser), [provider])
    (added,) = (action.choices for action in parser._actions if action.dest == "command")
    assert tuple(added) == provider.commands


def test_an_extra_that_is_left_out_takes_only_its_commands_with_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for provider in SHIPPED:
        if provider.extra:
            monkeypatch.setitem(sys.modules, provider.module, None)
    assert main(["runs", "--runs-dir", str(tmp_path)]) == 0
    assert main([]) == 0
    out, err = capsys.readouterr()
    assert "optimize" in out
    assert "  plan" not in out
    assert "  apply" not in out
    assert err == ""
    assert main(["plan", "opt-350m", "--cluster", "a100-8"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("tuner: tuner plan needs a part of joulefront that is not installed here")
    assert "(planner); install all parts: pip install '" in err
    assert err.count("\n") == 1


def test_a_part_that_a_command_misses_as_it_runs_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "tuner.planner.plan", None)
    assert main(["plan", "opt-350m", "--cluster", "a100-8"]) == 2
    assert "tuner plan needs a part of joulefront" in capsys.readouterr().err


MEASURED = Path(__file__).resolve().parents[1] / "data" / "measured"


@pytest.mark.parametrize(
    ("module", "use", "what"),
    [
        ("tuner.planner", lambda run: tuner.plan, "tuner.plan"),
        ("tuner.planner", lambda run: tuner.fit, "tuner.fit"),
        ("tuner.online", lambda run: tuner.tuning, "tuner.tuning"),
        ("tuner.callbacks", lambda run: tuner.EnergyLog, "tuner.EnergyLog"),
        ("tuner.callbacks", lambda run: tuner.log_energy, "tuner.log_energy"),
        ("tuner.comparison", lambda run: run.explain(), "an explanation"),
        ("tuner.display.export", lambda run: run.front, "this view of a result"),
        ("tuner.display.export", lambda run: run.table, "this view of a result"),
        ("tuner.display.export", lambda run: run.to_csv("x.csv"), "this view of a result"),
        ("tuner.display.plots", lambda run: run.plot(), "this view of a result"),
        ("tuner.display.report", lambda run: run._repr_html_(), "this view of a result"),
    ],
)
def test_a_name_of_an_extra_that_is_left_out_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, module: str, use: Callable[[Any], Any], what: str
) -> None:
    result = tuner.load_result(MEASURED)
    leave_out(monkeypatch, module)
    with pytest.raises(InputError) as raised:
        use(result)
    text = str(raised.value)
    assert text.startswith(
        f"{what} needs a part of joulefront that is not installed here ({module}"
    )
    assert "install all parts: pip install '" in text
    assert result.choose(deadline="9d").point in result.points


def leave_out(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    """Make the imports of a package and of what is in it fail as if its folder were deleted."""
    for name in [each for each in sys.modules if each == package or each.startswith(f"{package}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    for name in ("plan", "fit", "tuning", "EnergyLog", "log_energy"):
        monkeypatch.delitem(vars(tuner), name, raising=False)


@pytest.fixture
def no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("report", "plots", "export", "figures", "html"):
        leave_out(monkeypatch, f"tuner.display.{name}")
    leave_out(monkeypatch, "tuner.comparison")


@pytest.mark.extra("tuner.recordings")
@pytest.mark.usefixtures("no_report")
def test_without_the_report_a_run_is_replayed(tmp_path: Path) -> None:
    assert main(["replay", str(MEASURED), "--name", "again", "--runs-dir", str(tmp_path)]) == 0


@pytest.mark.usefixtures("no_report")
def test_without_the_report_the_other_commands_of_a_run_work(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for words in (["show"], ["choose", "--minimize", "energy"]):
        command, *rest = words
        assert main([command, str(MEASURED), *rest]) == 0
    capsys.readouterr()
    assert main(["show", str(MEASURED), "--html", "--out", str(tmp_path / "x.html")]) == 2
    assert "tuner show --html needs a part of joulefront" in capsys.readouterr().err
    assert main(["compare", str(MEASURED)]) == 2
    assert "tuner compare needs a part of joulefront" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("package", "words", "what"),
    [
        *(
            pytest.param(package, words, what, marks=pytest.mark.extra("tuner.cli.run"))
            for package, words, what in (
                ("tuner.receipt", ("run", "--", "true"), "tuner run -- COMMAND"),
                ("tuner.online", ("run", "--tune", "--", "true"), "tuner run --tune"),
                ("tuner.online", ("run", "--follow-power", "x", "--", "true"), "tuner run --tune"),
                ("tuner.deploy", ("run", str(MEASURED)), "tuner run RUN"),
            )
        ),
        ("tuner.deploy", ("apply", str(MEASURED)), "tuner apply"),
        ("tuner.comparison", ("explain", str(MEASURED)), "tuner explain"),
        ("tuner.exchange", ("export", str(MEASURED), "--to", "csv"), "tuner export"),
        ("tuner.dashboard", ("dashboard", str(MEASURED)), "tuner dashboard"),
        ("tuner.planner", ("plan",), "tuner plan"),
        ("tuner.planner", ("fit",), "tuner fit"),
    ],
)
def test_without_the_package_of_an_extra_its_commands_are_one_sentence(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    package: str,
    words: tuple[str, ...],
    what: str,
) -> None:
    leave_out(monkeypatch, package)
    assert main([*words]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"tuner: {what} needs a part of joulefront that is not installed here (")
    assert err.count("\n") == 1
    of_its_command = [["run", "--help"]] if words[0] == "run" else []
    for kept in (["--help"], ["optimize", "--help"], *of_its_command):
        with pytest.raises(SystemExit) as ended:
            main(kept)
        assert ended.value.code == 0
    assert main(["show", str(MEASURED)]) == 0


def test_the_stub_of_the_package_names_what_it_exports() -> None:
    stub = ast.parse((Path(tuner.__file__).with_suffix(".pyi")).read_text(encoding="utf-8"))
    named = {
        alias.name: node.module
        for node in stub.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert set(named) == set(tuner.__all__)
    assert named == tuner._MODULES


@pytest.mark.parametrize(
    "command",
    [
        ["optimize"],
        pytest.param(["replay", "run"], marks=pytest.mark.extra("tuner.recordings.command")),
    ],
)
def test_what_is_not_typed_has_its_declared_default(command: list[str]) -> None:
    args = command_parser().parse_args(command)
    assert made_of_options(args, SearchSettings) == SearchSettings()


def test_a_core_module_that_is_missing_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tuner.cli.optimize", None)
    with pytest.raises(ModuleNotFoundError):
        command_parser()


def test_a_command_imports_its_own_module_alone(tmp_path: Path) -> None:
    code = (
        "import sys; from tuner.cli.main import main; from tuner.cli.command_table import SHIPPED; "
        "main(['runs', '--runs-dir', sys.argv[1]]); "
        "print([each.module for each in SHIPPED if each.module in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "['tuner.cli.runs']"


@pytest.mark.extra("tuner.exchange")
def test_a_word_that_is_no_command_is_compared_with_every_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for word, meant in (("exprot", "export"), ("optimise", "optimize")):
        with pytest.raises(SystemExit) as ended:
            main([word])
        assert ended.value.code == 2
        assert f"did you mean {meant}" in capsys.readouterr().err.replace("'", "")


def test_a_command_of_another_distribution_is_added(installed, capsys) -> None:
    installed(PLUGIN)
    assert main(["weigh"]) == 0
    assert main([]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("4 kJ\n")
    assert "plug-ins:\n  weigh       weigh a job\n" in out
    assert err == ""


@pytest.mark.extra("tuner.doctor.catalog")
@pytest.mark.parametrize(
    ("source", "name", "fault"),
    [
        ("raise OSError('no disk')", "weigh", "it cannot be loaded (OSError: no disk)"),
        ("import nothing_of_this_name", "weigh", "it cannot be loaded (ModuleNotFoundError: No"),
        (PLUGIN.replace("= 1", "= 2"), "weigh", "it must have PROTOCOL = 1, not 2"),
        ("def add(commands): pass", "weigh", "it must have PROTOCOL = 1, not None"),
        ("PROTOCOL = 1", "weigh", "it must have add()"),
        (PLUGIN, "plan", "the name 'plan' is taken; a plug-in needs a name of its own"),
        ("PROTOCOL = 1\ndef add(commands): 1 / 0", "weigh", "its add() failed (ZeroDivisionError"),
        (PLUGIN.replace('"weigh"', '"plan"'), "weigh", "its add() failed ("),
    ],
)
def test_a_plugin_that_cannot_be_used_is_named_and_left_out(
    installed, capsys, source: str, name: str, fault: str
) -> None:
    installed(source, name)
    assert main(["list", "clusters"]) == 0
    err = capsys.readouterr().err
    assert err.startswith(f"tuner: the command {name!r} ")
    assert fault in err
    assert err.count("\n") == 1
