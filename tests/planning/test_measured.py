"""Plans by models that a few measured launches corrected."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tuner.cli.main import main
from tuner.models.analytic.constants import constants_of
from tuner.models.scale_out import predictor
from tuner.planning.measured import read_correction
from tuner.search_spaces.cluster import load_cluster
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.job import load_job

JOB, CLUSTER = load_job("opt-350m"), load_cluster("a100-8")
WORDS = "dp8 mb1 zero0"
HEAD = 'job = "opt-350m"\ndevice = "A100-SXM-80GB"\n'
#: A program that dispatches three times as slowly as the prior.
TRUE = replace(constants_of(CLUSTER.device), operator_s=3 * constants_of(CLUSTER.device).operator_s)


def truth(words: str) -> tuple[float, float]:
    """Return (step time s, power W) of the slow program."""
    logs = predictor(JOB, CLUSTER, [Configuration.parse(words)])(TRUE)[0]
    return float(np.exp(logs[0])), float(np.exp(logs[1]))


def written(folder: Path, launch: str, head: str = HEAD) -> Path:
    path = folder / "launches.toml"
    path.write_text(f"{head}[[launch]]\n{launch}\n")
    return path


def launch(words: str, *, power: bool = False) -> str:
    seconds, watts = truth(words)
    text = f'configuration = "{words}"\nstep_time_s = {seconds}\n'
    return text + (f"power_W = {watts}\n" if power else "")


@pytest.mark.parametrize("power", [False, True])
def test_one_launch_corrects_what_it_did_not_show(tmp_path: Path, power: bool) -> None:
    found = read_correction(written(tmp_path, launch(WORDS, power=power)), JOB, CLUSTER)
    assert (found.launches, found.with_power) == (1, power)
    for words in ("dp4 tp2 mb1 zero0", "dp8 mb2 zero0", "dp2 tp4 mb2 zero0"):
        here = [Configuration.parse(words)]
        said = predictor(JOB, CLUSTER, here)(found.constants)[0, 0] + found.log_time
        before = predictor(JOB, CLUSTER, here)(constants_of(CLUSTER.device))[0, 0]
        wanted = np.log(truth(words)[0])
        assert abs(said - wanted) < 0.12
        assert abs(said - wanted) < abs(before - wanted) / 3


def test_a_plan_is_made_by_the_corrected_models(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, launch(WORDS))
    words = ["plan", "opt-350m", "--cluster", "a100-8", "--today", *WORDS.split(), "--quiet"]
    words += ["--runs-dir", str(tmp_path / "runs"), "--json"]
    assert main([*words, "--name", "plain"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert main([*words, "--name", "corrected", "--measured", str(path)]) == 0
    corrected = json.loads(capsys.readouterr().out)
    seconds, _ = truth(WORDS)
    today = corrected["baseline"]["time_to_solution_s"]
    assert today == pytest.approx(JOB.steps * seconds, rel=0.05)
    assert plain["baseline"]["time_to_solution_s"] < 0.6 * today


@pytest.mark.parametrize(
    ("text", "head", "sentence"),
    [
        (launch(WORDS), HEAD.replace("opt-350m", "tiny-gpt"), "of job 'tiny-gpt'; the plan is for"),
        (launch(WORDS), HEAD.replace("80GB", "40GB"), "of device 'A100-SXM-40GB'; the"),
        (launch(WORDS), 'job = "opt-350m"\n', "state no device"),
        (launch(WORDS), "power = 3\n", "unknown key"),
        ("", HEAD, "configuration"),
        (f'configuration = "{WORDS}"', HEAD, "a number above 0"),
        (f'configuration = "{WORDS}"\nstep_time_s = -1', HEAD, "a number above 0"),
        (f'configuration = "{WORDS}"\nstep_time_s = inf', HEAD, "a number above 0"),
        (f'configuration = "{WORDS}"\nstep_time_s = true', HEAD, "a number above 0"),
        ('configuration = "dp16 mb1"\nstep_time_s = 1', HEAD, "needs 16 devices"),
        ('configuration = "fast"\nstep_time_s = 1', HEAD, "is no knob"),
    ],
)
def test_a_wrong_file_is_one_sentence(
    tmp_path: Path, text: str, head: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, text, head)
    words = ["plan", "opt-350m", "--cluster", "a100-8", "--quiet", "--measured", str(path)]
    assert main([*words, "--runs-dir", str(tmp_path / "runs")]) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert path.name in error
    assert error.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_no_launch_and_no_file_are_said(tmp_path: Path) -> None:
    path = tmp_path / "none.toml"
    with pytest.raises(InputError, match="cannot read"):
        read_correction(path, JOB, CLUSTER)
    path.write_text(HEAD)
    with pytest.raises(InputError, match=r"list no \[\[launch\]\]"):
        read_correction(path, JOB, CLUSTER)


def test_what_a_launch_leaves_out_is_as_without_tuning_on_all_gpus(tmp_path: Path) -> None:
    short = launch("dp8 mb4 zero0").replace("dp8 ", "")
    found = read_correction(written(tmp_path, short), JOB, CLUSTER)
    whole = read_correction(written(tmp_path, launch("dp8 mb4 zero0")), JOB, CLUSTER)
    assert found == whole


@pytest.mark.parametrize("stated", ['configuration = ""', "configuration = 3", ""])
def test_a_launch_without_a_configuration_is_refused(tmp_path: Path, stated: str) -> None:
    with pytest.raises(InputError, match="configuration in the measured launches"):
        read_correction(written(tmp_path, f"{stated}\nstep_time_s = 1.0"), JOB, CLUSTER)


def test_a_file_that_cannot_be_read_is_named_once(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^cannot read the measured launches"):
        read_correction(tmp_path / "none.toml", JOB, CLUSTER)
