"""Defaults from the user's file: applied where nothing else is said, refused in a sentence."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest

from tuner.cli.main import main
from tuner.testing.studies import write_table


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("JOULEFRONT_RUNS", raising=False)
    path = tmp_path / "joulefront.toml"
    monkeypatch.setenv("JOULEFRONT_CONFIG", str(path))
    return path


def test_the_folder_and_the_prices_come_from_the_file(config, tmp_path, monkeypatch, capsys):
    config.write_text(f"runs_dir = '{tmp_path / 'mine'}'\nprice_per_kWh = 0.3\n")
    table = str(write_table(tmp_path / "table", shapes=(1, 4)))
    assert main(["dev", "replay", table, "--max-probes", "2", "--quiet", "--name", "one"]) == 0
    assert (tmp_path / "mine" / "one" / "study.toml").is_file()
    capsys.readouterr()
    assert main(["choose", "one", "--minimize", "cost", "--json"]) == 0
    choice = json.loads(capsys.readouterr().out)
    kWh = choice["point"]["energy_to_solution_kJ"] / 3600
    assert choice["choice"]["objective_value"] == pytest.approx(0.3 * kWh)
    assert main(["choose", "one", "--minimize", "energy"]) == 0  # no price is needed
    asked = ["choose", "one", "--minimize", "cost", "--price-per-kWh", "0.6", "--json"]
    capsys.readouterr()
    assert main(asked) == 0
    value = json.loads(capsys.readouterr().out)["choice"]["objective_value"]
    assert value == pytest.approx(0.6 * kWh)
    monkeypatch.setenv("JOULEFRONT_RUNS", str(tmp_path / "other"))
    assert main(["show", "one"]) == 2  # the environment wins over the file


def test_a_search_joins_the_cluster_of_the_file_and_doctor_looks_at_this_machine(config, capsys):
    config.write_text("ray = '127.0.0.1:1'\n")
    asked = ["optimize", "tiny-gpt", "--dry-run"]
    assert main(asked) == 2
    assert "127.0.0.1:1" in capsys.readouterr().err
    assert main([*asked, "--cluster", "a100-8", "--executor", "simulated"]) == 0
    assert main(["doctor", "--brief"]) in (0, 1)
    assert "127.0.0.1:1" not in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("price_kWh = 1", "unknown name 'price_kWh' in "),
        ("price_per_kWh = -1", "it must be a number greater than 0"),
        ("runs_dir = 3", "it must be text"),
        ("ray = ", "cannot read "),
    ],
)
def test_a_mistake_in_the_file_is_one_sentence(config, capsys, text, sentence):
    config.write_text(text)
    assert main(["runs"]) == 2
    err = capsys.readouterr().err
    assert sentence in err
    assert len(err.strip().splitlines()) == 1


def test_a_file_that_is_named_and_missing_is_told(config, capsys):
    assert main(["runs"]) == 2
    assert "which $JOULEFRONT_CONFIG names" in capsys.readouterr().err


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_names_of_runs_are_completed(config, tmp_path, capsys):
    pytest.importorskip("shtab")
    config.write_text("")
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
