"""Public names: what `import tuner` brings, and the keywords of `optimize` and `replay`."""

import inspect
import sys
import textwrap
from dataclasses import fields

import pytest

import tuner
from tests.support.commands import finished
from tests.support.studies import write_table
from tuner.planner.plan import PlanRequest
from tuner.problem.constraints import Limits
from tuner.problem.run_folder import RunFolder
from tuner.study.request import StudyOptions, StudyRequest

pytestmark = pytest.mark.usefixtures("next_candidates")


def test_every_public_name_is_there():
    for name in tuner.__all__:
        assert getattr(tuner, name).__name__ == name
    assert set(tuner.__all__) <= set(dir(tuner))
    with pytest.raises(AttributeError, match="no attribute 'frobnicate'"):
        tuner.frobnicate  # noqa: B018


def test_importing_it_imports_only_what_is_used():
    code = (
        "import sys, tuner; before = {n for n in sys.modules if n.startswith('tuner')};"
        "tuner.Constraints; tuner.optimize;"
        "assert before == {'tuner'}, before;"
        "assert not {'torch', 'numpy', 'optuna', 'ray'} & set(sys.modules)"
    )
    ended = finished([sys.executable, "-c", code])
    assert ended.returncode == 0, ended.stderr


def test_limits_may_be_given_as_keywords_or_in_the_object_and_not_against_each_other(tmp_path):
    table = write_table(tmp_path / "table")
    options = {"runs_dir": tmp_path / "runs", "report": False}
    search = tuner.SearchSettings(max_probes=4)
    plain = tuner.replay(table, budget_kJ=5.0, search=search, **options)
    limits = tuner.Constraints(budget_kJ=5.0, max_gpus=1)
    both = tuner.replay(table, budget_kJ=5.0, constraints=limits, search=search, **options)
    assert plain.limits == Limits(budget_kJ=5.0)
    assert both.limits == Limits(budget_kJ=5.0, max_gpus=1)
    written = both.to_json()
    assert written["limits"] == {"budget_kJ": 5.0, "max_gpus": 1}
    assert written["request"] == {"max_probes": 4}
    for other in ({"budget_kJ": 6.0}, {"budget": "6kJ"}):
        with pytest.raises(tuner.InputError, match=r"budget_kJ is 6.0 and 5.0; give it once"):
            tuner.replay(table, **other, constraints=limits, **options)
    with pytest.raises(TypeError, match=r"no argument 'dedline'; limits are .* deadline,"):
        tuner.replay(table, dedline="2h", **options)


def test_a_replay_follows_the_recorded_order_and_repeats_itself(tmp_path):
    table = write_table(tmp_path / "table", shapes=(2, 1))
    options = {"runs_dir": tmp_path / "runs", "report": False, "progress": False}
    once, again = (tuner.replay(table, recorded_order=True, **options) for _ in range(2))
    assert once.front_points == again.front_points
    assert once.headline == again.headline
    rows = [(shape, speed) for shape in (2, 1) for speed in range(1, 6)]
    today = (2, 5)  # the first launch at its highest setting, which comes first
    expected = [today, *(row for row in rows if row != today)]
    # A replay is a recording, too: it is followed in the order of its own probes.
    for result in (once, tuner.replay(once.run_dir, recorded_order=True, **options)):
        records = RunFolder(result.run_dir).records()
        asked = [c for record in records for c in record.request.configurations()]
        assert [(c.get("shape"), c.get("speed")) for c in asked] == expected
    with pytest.raises(tuner.InputError, match="recorded_order gives the order"):
        tuner.replay(table, recorded_order=True, try_first=["shape=1"], **options)
    with pytest.raises(ValueError, match="nowhere"):
        tuner.replay(tmp_path / "nowhere", **options)


@pytest.mark.parametrize(
    ("keyword", "text", "value"),
    [
        ("deadline", "2h", {"deadline_s": 7200.0}),
        ("budget", "11kWh", {"budget_kJ": 39600.0}),
        ("power_cap", "2kW", {"power_cap_W": 2000.0}),
        ("max_slowdown", "5%", {"max_slowdown": 0.05}),
        ("max_slowdown", 0.05, {"max_slowdown": 0.05}),
    ],
)
def test_limits_are_numbers_or_quantities_with_a_unit(keyword, text, value):
    assert tuner.Constraints().limited(**{keyword: text}).given == value


def test_a_quantity_without_its_unit_or_with_another_is_refused():
    for text in ("2", "2kJ", "soon"):
        with pytest.raises(tuner.InputError, match=r"must be a number with a unit \(s, min"):
            tuner.Constraints().limited(deadline=text)


def test_a_search_in_python_shows_itself_unless_told_not_to(tmp_path, capsys):
    table, options = write_table(tmp_path / "table"), {"runs_dir": tmp_path, "report": False}
    search = tuner.SearchSettings(max_probes=3)
    seen = []
    tuner.replay(table, search=search, on_progress=seen.append, **options)
    shown = capsys.readouterr()
    assert "p0000" in shown.err
    assert "3/3" in shown.err
    assert not shown.out
    assert seen
    tuner.replay(table, search=search, progress=False, **options)
    assert capsys.readouterr() == ("", "")


def test_in_a_notebook_a_search_is_a_bar_that_moves(tmp_path):
    pytest.importorskip("IPython")
    code = f"""
        import tuner
        from IPython.core.interactiveshell import InteractiveShell
        from IPython.utils.capture import capture_output
        InteractiveShell.instance().kernel = object()  # what tells a notebook from a terminal
        with capture_output() as shown:
            tuner.replay({str(write_table(tmp_path / "table"))!r}, runs_dir={str(tmp_path)!r},
                search=tuner.SearchSettings(max_probes=3), report=False)
        print(shown.outputs[-1].data, shown.stderr)
    """
    ended = finished([sys.executable, "-c", textwrap.dedent(code)])
    assert 'max="3" value="3"' in ended.stdout, ended.stderr
    assert "p0002" in ended.stdout


def test_every_field_of_a_request_is_an_argument():
    # A script is the job of a request until it is inspected; an executor says if models answer.
    optimize = {"job", "script", "limits", "predicted", *StudyOptions.__annotations__}
    plan = inspect.signature(tuner.plan).parameters.keys()
    assert {item.name for item in fields(StudyRequest)} <= optimize
    assert plan - optimize == {item.name for item in fields(PlanRequest)} - optimize


def test_both_functions_take_the_same_headline_keywords():
    replay = inspect.signature(tuner.replay).parameters
    for name in ("constraints", "search", "on_progress"):
        assert name in StudyOptions.__annotations__
        assert replay[name].default is None


def test_an_argument_that_optimize_does_not_have_is_refused():
    with pytest.raises(TypeError, match="stoarge"):
        tuner.optimize("tiny-gpt", stoarge="sqlite:///x")
