"""A study with another surrogate: replayed whole, recorded, resumed, reported, refused."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from sklearn.ensemble import ExtraTreesRegressor
from sklearn.linear_model import BayesianRidge, LinearRegression

from tuner.api import load_result
from tuner.cli.main import main
from tuner.search_spaces.errors import InputError
from tuner.testing.studies import TOML, run_replay, write_table

NOISY = TOML + "[noise]\ntime_cv = 0.002\npower_cv = 0.01\n"
NAME = "sklearn.ensemble.ExtraTreesRegressor(n_estimators=50)"


class Mine(BayesianRidge):
    """A regressor of the user's own, from outside of scikit-learn."""


@pytest.fixture
def table(tmp_path: Path) -> Path:
    return write_table(tmp_path / "table", toml=NOISY)


def replayed(table: Path, *more: str) -> int:
    runs = str(table.parent / "runs")
    return main(
        ["dev", "replay", str(table), "--runs-dir", runs, "--name", "one", "--quiet", *more]
    )


def recorded(table: Path) -> str:
    text = (table.parent / "runs" / "one" / "study.toml").read_text()
    surrogate: str = tomllib.loads(text)["settings"]["surrogate"]
    return surrogate


@pytest.mark.slow
def test_a_whole_replay_by_extra_trees_is_resumed_and_reported(table: Path, capsys) -> None:
    runs = table.parent / "runs"
    assert replayed(table, "--surrogate", NAME, "--max-probes", "6") == 0
    capsys.readouterr()
    assert main(["show", "one", "--runs-dir", str(runs)]) == 0
    assert "10-fold cross-validation: median error" in capsys.readouterr().out
    assert recorded(table) == NAME
    first = load_result("one", runs_dir=runs)
    assert first.leave_one_out is not None
    assert first.leave_one_out.folds == 10
    assert first.leave_one_out.time_error < 0.2
    # Without the option a resumed study keeps its surrogate; with it, it takes another one.
    assert replayed(table, "--max-probes", "7") == 0
    assert recorded(table) == NAME
    resumed = load_result("one", runs_dir=runs).spent.probes  # may end at once by its own rule
    assert first.spent.probes <= resumed <= 7
    assert replayed(table, "--max-probes", "7", "--surrogate", "gaussian-process") == 0
    assert recorded(table) == "gaussian-process"
    again = load_result("one", runs_dir=runs).leave_one_out
    assert again is not None
    assert again.folds is None


@pytest.mark.slow
def test_a_regressor_is_recorded_with_its_parameters_and_made_again(table: Path) -> None:
    runs = table.parent / "runs"
    regressor = ExtraTreesRegressor(n_estimators=20, min_samples_split=3)
    result = run_replay(table, surrogate=regressor, max_probes=8, runs_dir=runs, name="one")
    assert recorded(table) == (
        "sklearn.ensemble.ExtraTreesRegressor(min_samples_split=3, n_estimators=20)"
    )
    assert load_result("one", runs_dir=runs).to_json() == result.to_json()
    assert not hasattr(regressor, "estimators_")  # copies of it are fitted


def test_a_regressor_of_ones_own_answers_and_has_to_be_given_again(table: Path) -> None:
    runs = table.parent / "runs"
    result = run_replay(table, surrogate=Mine(), max_probes=8, runs_dir=runs, name="one")
    assert result.leave_one_out is not None
    assert result.report_path is not None
    assert recorded(table) == f"{Mine.__module__}.Mine()"
    sentence = r"Mine\(\)' cannot be made from its text \(.* is not of scikit-learn\)"
    with pytest.raises(InputError, match=sentence):
        load_result("one", runs_dir=runs)
    with pytest.raises(InputError, match=sentence):
        run_replay(table, max_probes=10, runs_dir=runs, name="one")
    more = run_replay(table, surrogate=Mine(), max_probes=10, runs_dir=runs, name="one")
    assert more.spent.probes > result.spent.probes


def test_what_is_no_surrogate_is_refused_before_anything_is_touched(table: Path, capsys) -> None:
    runs = table.parent / "runs"
    assert replayed(table, "--surrogate", "forest") == 2
    told = capsys.readouterr().err
    assert told.startswith("tuner: unknown surrogate 'forest'; known: gaussian-process, or a ")
    assert told.count("\n") == 1
    with pytest.raises(InputError, match="its predict must take return_std=True, or it must"):
        run_replay(table, surrogate=LinearRegression(), runs_dir=runs)
    assert not runs.exists()


@pytest.mark.parametrize(
    ("written", "sentence"),
    [
        ("7", "surrogate in study.toml is 7; it must be a text"),
        ('"os.system(command=1)"', "os.system is not of scikit-learn"),
        ('"forest"', "unknown surrogate 'forest'"),
    ],
)
def test_an_edited_study_is_refused_in_a_sentence(
    table: Path, capsys, written: str, sentence: str
) -> None:
    assert replayed(table, "--max-probes", "3") == 0
    study = table.parent / "runs" / "one" / "study.toml"
    text = study.read_text()
    assert 'surrogate = "gaussian-process"' in text
    study.write_text(text.replace('"gaussian-process"', written))
    capsys.readouterr()
    assert main(["show", "--html", "one", "--runs-dir", str(study.parent.parent)]) == 2
    told = capsys.readouterr().err
    assert sentence in told
    assert told.count("\n") == 1
