"""`tuner apply`, `run` and `explain`, and the choices that `replay` takes, as a user types them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import tuner
from tests.support.in_process import answered as answer
from tests.support.studies import modelled_study, write_table


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return Path(modelled_study(tmp_path_factory.mktemp("runs"), max_probes=4).run_dir)


def test_apply_writes_any_point(capsys, run: Path, tmp_path: Path) -> None:
    code, out, _ = answer(capsys, "apply", run)
    assert code == 0
    assert "no more were made: verification was switched off (--no-verify)." in out
    assert f"Start it with: cd {run / 'best'} && ./launch.sh" in out
    code, out, _ = answer(capsys, "apply", run, "--point", "1", "--out", tmp_path / "f", "--json")
    said = json.loads(out)
    fastest = tuner.load_result(run).front_points[0]
    assert said["point"]["configuration"] == fastest.configuration.to_json()
    assert {Path(file).name for file in said["files"]} >= {"launch.sh", "job.sbatch", "clocks.sh"}
    code, _, error = answer(capsys, "apply", run, "--point", "99")
    assert code == 2
    assert "today" in error


def test_explain_answers_for_people_and_for_scripts(capsys, run: Path) -> None:
    code, out, _ = answer(capsys, "explain", run, "--point", "baseline")
    assert code == 0
    assert "Where the energy of a step goes" in out
    code, out, _ = answer(capsys, "explain", run, "--json")
    said = json.loads(out)
    assert {"time_s", "energy_J", "knobs"} <= set(said)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--", "nowhere.py", "--lr", "1"], "there is no script 'nowhere.py'"),
        (["--", "mpirun", "train.py"], "starts ranks itself"),
        (["--point", "nothing"], "unknown measured point"),
        (["--steps", "0"], "steps"),
    ],
)
def test_run_refuses_in_a_sentence_before_anything_starts(capsys, run: Path, words, told) -> None:
    code, out, error = answer(capsys, "run", run, *words)
    assert code == 2
    assert out == ""
    assert told in error


@pytest.mark.usefixtures("next_candidates", "no_report")
def test_what_is_least_can_be_named(capsys, tmp_path: Path) -> None:
    table = write_table(tmp_path / "t")
    shared = ["--runs-dir", tmp_path / "runs", "--max-probes", "6", "--quiet", "--json"]
    code, out, _ = answer(capsys, "replay", table, "--minimize", "energy", *shared)
    assert code == 0
    said = json.loads(out)
    least = min(point["energy_to_solution_kJ"] for point in said["points"])
    assert said["best"]["energy_to_solution_kJ"] == least
    assert said["choice"]["objective"] == "energy"
    assert said["verification"] is None or not said["verification"]["probes"]
    again = tuner.load_result(said["run_dir"])
    assert again.choice.objective == "energy"
    for words, told in (
        (["--minimize", "cheapest"], "unknown objective"),
        (["--minimize", "cost"], "price_per_kWh"),
        (["--max-gpus", "0"], "--max-gpus"),
    ):
        code, _, error = answer(capsys, "replay", table, *words, *shared)
        assert code == 2
        assert told in error
