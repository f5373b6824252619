"""Socket of views: what is shipped, what is left out, and plug-ins of other distributions."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.conftest import FinishedStudy
from tests.support.entry_points import install_plugin
from tuner.answer.views import SOCKET, AnswerExtra, views
from tuner.api import load_result
from tuner.cli.main import main
from tuner.display.text import answer_lines
from tuner.planner.plan import plan
from tuner.search_spaces.errors import InputError

PLUGIN = """
from tuner.answer.views import AnswerExtra

class Carbon(AnswerExtra):
    PROTOCOL = 1

    def answer_lines(self, answer):
        return [f"Carbon: {len(answer.points)} points were weighed."]

VIEW = Carbon()
"""


@pytest.fixture
def study(finished_study: FinishedStudy) -> Path:
    return finished_study.result.run_dir


@pytest.mark.parametrize("name", SOCKET.shipped)
def test_a_shipped_view_follows_the_protocol(name: str) -> None:
    found = SOCKET.part(name)
    assert isinstance(found, AnswerExtra)
    assert SOCKET.check(found) == ""


def test_a_study_is_read_without_any_view(study: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = answer_lines(load_result(study))
    for part in SOCKET.shipped.values():
        monkeypatch.setitem(sys.modules, part.partition(":")[0], None)
    assert views() == []
    assert answer_lines(load_result(study)) == whole


def test_a_plan_without_the_planner_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"cluster": "a100-8", "runs_dir": tmp_path, "name": "p"}
    plan("opt-350m", report=False, progress=False, **options)
    monkeypatch.setitem(sys.modules, "tuner.planner.text", None)
    with pytest.raises(InputError, match="a plan needs a part of joulefront that is not installed"):
        load_result("p", runs_dir=tmp_path)
    capsys.readouterr()
    assert main(["show", "p", "--runs-dir", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_view_of_another_distribution_adds_its_lines(
    study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_plugin(tmp_path, monkeypatch, SOCKET.group, "carbon", PLUGIN, attribute="VIEW")
    result = load_result(study)
    assert f"Carbon: {len(result.points)} points were weighed." in answer_lines(result)


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("raise OSError('no table')", "it cannot be loaded (OSError: no table)"),
        (PLUGIN.replace("PROTOCOL = 1", "PROTOCOL = 7"), "it must have PROTOCOL = 1, not 7"),
        (PLUGIN.replace("PROTOCOL = 1", ""), "it must have PROTOCOL = 1, not None"),
        ("VIEW = None", "it must have PROTOCOL = 1, not None"),
    ],
)
def test_a_view_that_cannot_be_used_is_said_below_the_answer(
    study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, fault: str
) -> None:
    install_plugin(tmp_path, monkeypatch, SOCKET.group, "carbon", source, attribute="VIEW")
    (line,) = (each for each in answer_lines(load_result(study)) if "left out" in each)
    assert line.startswith("The view 'carbon' (")
    assert fault in line


def test_a_view_that_raises_does_not_take_the_answer_with_it(
    study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = PLUGIN.replace("return [f", "raise ValueError('no scale')\n        return [f")
    install_plugin(tmp_path, monkeypatch, SOCKET.group, "carbon", source, attribute="VIEW")
    lines = answer_lines(load_result(study))
    (line,) = (each for each in lines if "carbon" in each)
    assert line == "The view 'carbon' adds nothing: answer_lines() failed (ValueError: no scale)."
    assert len(lines) > 3
