"""Mistakes that a new user made, and the sentence that answers each: what is wrong, what to do."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tuner.cli.main import main
from tuner.testing.studies import write_table


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Folder of one run, "opt", of four probes on a recorded table."""
    folder = tmp_path_factory.mktemp("study")
    words = ["--name", "opt", "--max-probes", "4", "--quiet", "--runs-dir", str(folder / "runs")]
    assert main(["replay", str(write_table(folder / "table")), *words]) == 0
    return folder / "runs"


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def run(capsys, *words):
    """(exit code, standard output, standard error) of a command in this process."""
    capsys.readouterr()
    try:
        code = main([str(word) for word in words])
    except SystemExit as ended:
        code = int(ended.code or 0)
    return code, *capsys.readouterr()


PLAN = ["optimize", "opt-350m", "--cluster", "a100-8"]


@pytest.mark.parametrize(
    ("words", "sentences"),
    [
        (["optimise"], ["unknown command 'optimise'; did you mean 'optimize'?", "and 1"]),
        (["optimize", "tinygpt"], ["unknown job 'tinygpt'; did you mean 'tiny-gpt'?"]),
        (["optimize", "--cluster", "h100-64"], ["unknown cluster 'h100-64'; did you mean 'h100-"]),
        ([*PLAN, "--deadline-s", "2x"], ["--deadline-s: '2x' must be a number with a unit (s, "]),
        ([*PLAN, "--deadline", "7200"], ["--deadline: '7200' must be", "such as 2h, 90m or 7200s"]),
        ([*PLAN, "--budget", "40"], ["--budget: '40' must be", "such as 11kWh or 40MJ"]),
        ([*PLAN, "--budget", "40mJ"], ["'40mJ' must be a number with a unit (J, kJ, MJ, "]),
        ([*PLAN, "--budget", "1.2.3kJ"], ["'1.2.3kJ' must be a number with a unit"]),
        ([*PLAN, "--budget-kJ", "-5"], ["budget_kJ is -5.0; it must be a number greater than 0"]),
        ([*PLAN, "--deadline-s", "nan"], ["deadline_s is nan; it must be a number greater"]),
        ([*PLAN, "--dead", "2h"], ["unknown arguments: --dead"]),
        (
            [*PLAN, "--deadlin-s=2"],
            ["unknown arguments: --deadlin-s=2; did you mean '--deadline-s"],
        ),
        ([*PLAN, "--max-probe", "3"], ["did you mean '--max-probes'"]),
        ([*PLAN, "--max-probes", "0"], ["max_probes is 0; it must be an integer of at least 1"]),
        ([*PLAN, "--choose", "cheapest"], ["unknown objective 'cheapest'", "least-cost"]),
        ([*PLAN, "--choose", "least-cost"], ["no price is assumed"]),
        ([*PLAN, "--space", "fulll"], ["unknown space 'fulll'; did you mean 'full'?"]),
        ([*PLAN, "--sampler", "tp"], ["unknown sampler 'tp'; did you mean 'tpe'?"]),
        ([*PLAN, "--baseline", "mine.json"], ["mine.json"]),
        (["optimize", "--script", "nowhere.py", "--cluster", "cpu-2"], ["nowhere.py"]),
        (
            ["optimize", "--script", "torchrun train.py", "--cluster", "cpu-2"],
            ["torchrun starts ranks itself", "give the script and its own arguments alone"],
        ),
        (
            ["predict", "opt-350m", "microbatch=4"],
            ["unknown knob 'microbatch'; did you mean 'micro_"],
        ),
        (
            ["optimize", "lmm-72b", "--cluster", "a100-8"],
            [
                "lmm-72b does not fit on a100-8: the smallest of 2,556 configurations of space "
                "'default' needs 89.9 GB of a GPU's 85.9 GB (4.0 GB too many); try ",
                "--space cpu-all or 16 GPUs or --cluster ",
            ],
        ),
        (["probe", "nosuch", "a=1"], ["unknown job 'nosuch'"]),
        (["probe", "--cluster", "cpu-2", "micro_batch=3"], ["divide"]),
        (["probe", "--cluster", "cpu-2", "zero_stage=5"], ["0, 1, 2, 3"]),
        (["probe", "--time-limit", "5"], ["--time-limit: '5' must be a number with a unit"]),
        (["completion", "bsh"], ["unknown shell 'bsh'; did you mean 'bash'?"]),
    ],
)
def test_a_mistake_is_answered_in_one_sentence(capsys, tmp_path, words, sentences):
    code, out, err = run(capsys, *words)
    assert (code, out) == (2, "")
    (line,) = err.strip().splitlines()
    for sentence in sentences:
        assert sentence in line
    assert len(line) < 420
    assert not list(tmp_path.rglob("probes.jsonl"))


def test_a_job_that_is_a_models_config_is_told_what_a_job_is(capsys, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "opt"}))
    code, _, err = run(capsys, "optimize", "config.json", "--cluster", "cpu-2")
    assert code == 2
    assert "job" in err
    assert "Traceback" not in err


def test_a_misspelt_key_of_a_job_is_answered_by_the_nearest(capsys, tmp_path):
    text = "sequence_length = 64\nglobal_batch = 8\nsteps = 10\nprecison = 'fp32'\n"
    (tmp_path / "job.toml").write_text(text + "[model]\nconfig = 'tiny-gpt'\n")
    code, _, err = run(capsys, "optimize", "job.toml", "--cluster", "cpu-2")
    assert code == 2
    assert "unknown key in job.toml 'precison'; did you mean 'precision'?" in err


@pytest.mark.parametrize(
    ("words", "sentences"),
    [
        (["front", "opts"], ["unknown run 'opts' in /", "did you mean 'opt'?"]),
        (["explain", "opt", "--point", "99"], ["unknown measured point '99'; known: 1 to "]),
        (["compare", "opt", "--from", "bets"], ["did you mean 'best'?"]),
        (["export", "opt", "--to", "xlsx"], ["unknown format 'xlsx'; known: csv, "]),
        (["export", "opt", "--to", "cvs"], ["did you mean 'csv'?"]),
    ],
)
def test_a_mistake_about_a_run_is_answered_shortly(capsys, runs, words, sentences):
    code, out, err = run(capsys, *words, "--runs-dir", runs)
    assert (code, out) == (2, "")
    (line,) = err.strip().splitlines()
    for sentence in sentences:
        assert sentence in line
    assert len(line.replace(str(runs), "")) < 260


def test_the_name_of_another_study_is_refused(capsys, runs):
    words = [*PLAN, "--name", "opt", "--runs-dir", runs]
    code, _, err = run(capsys, *words)
    assert code == 2
    assert "opt" in err


def test_a_measured_configuration_is_taken_in_any_order(capsys, runs):
    shown = json.loads(run(capsys, "front", "opt", "--json", "--runs-dir", runs)[1])["front"][0]
    halves = shown["configuration"].values()
    knobs = [f"{name}={value}" for half in halves for name, value in half.items()]
    assert len(knobs) > 1
    words = ["explain", "opt", "--json", "--runs-dir", runs, "--point"]
    first = run(capsys, *words, " ".join(knobs))
    assert first[0] == 0
    assert run(capsys, *words, " | ".join(reversed(knobs))) == first
    code, _, err = run(capsys, *words, " ".join(knobs[1:]))
    assert code == 2
    assert "leaves open shape, in which the measured points differ; add one of: shape=" in err


def test_options_and_knobs_come_in_any_order(capsys):
    knobs = ["data_parallel=8", "micro_batch=1"]
    asked = run(capsys, "predict", "opt-350m", *knobs, "--cluster", "a100-8", "--json")
    assert asked[0] == 0
    assert run(capsys, "predict", "--cluster", "a100-8", "opt-350m", "--json", *knobs) == asked
    for name in (["dp8", "mb1"], ["mb1 dp8"], ["DP8 | MB1"], ["micro_batch=1", "dp8"]):
        assert run(capsys, "predict", "opt-350m", *name, "--cluster=a100-8", "--json") == asked
    assert (
        run(capsys, "predict", knobs[0], "--cluster=a100-8", "opt-350m", knobs[1], "--json")
        == asked
    )


def test_a_dry_run_starts_and_writes_nothing(capsys, tmp_path):
    asked = ["optimize", "opt-350m", "--cluster", "cpu-2", "--dry-run", "--name", "dry"]
    code, out, err = run(capsys, *asked)
    assert (code, err) == (0, "")
    assert out.startswith("This search: about ")
    for words in (
        "Limits: until what is left would not repay a probe; at most 40 probes; at most 1 % of",
        "first the baseline, dp2 ",
        "ranks of python ",
        "runs/dry/: study.toml",
        "no clock, no power limit",
        "Nothing was started or written (--dry-run).",
    ):
        assert words in out
    code, out, _ = run(capsys, *asked, "--json", "--max-probes", "3")
    assert json.loads(out)["forecast"]["probes"] == 3
    gpus = [*PLAN, "--dry-run", "--executor", "inline"]
    assert "clock_MHz of each A100-SXM-80GB: " in run(capsys, *gpus)[1]
    assert "no clock, no power limit" in run(capsys, *gpus, "--no-clocks")[1]
    assert not list(tmp_path.iterdir())


def test_too_little_is_no_finding(capsys, tmp_path):
    code, out, _ = run(capsys, *PLAN, "--probe-budget", "300kJ", "--name", "few", "--quiet")
    assert code == 0
    first, second = [line for line in out.splitlines() if line][:2]
    assert re.fullmatch(
        r"Not enough was tried to say anything: \d of [\d,]+ configurations\.", first
    )
    assert re.match(
        r"A probe takes about [\d.]+ kJ .*there; allow about 16 of them: the same command with "
        r"--name few --probe-budget \d+kJ continues from here\.",
        second,
    )


def test_the_version_is_printed(capsys):
    code, out, _ = run(capsys, "--version")
    assert code == 0
    assert out.startswith("joulefront ")
    assert str(Path(__file__).parents[2] / "tuner") in out


def test_a_front_is_asked_again_by_choose(capsys, runs):
    code, out, err = run(capsys, "front", "opt", "--budget-kJ", "3", "--runs-dir", runs)
    assert (code, out) == (2, "")
    assert "to choose again on a run's front: tuner choose opt" in err
    probes = (runs / "opt" / "trace" / "probes.jsonl").read_bytes()
    code, out, _ = run(capsys, "choose", "opt", "--max-slowdown", "50%", "--runs-dir", runs)
    assert code == 0
    assert "Launch files: tuner apply opt --point " in out
    code, out, _ = run(capsys, "choose", "opt", "--deadline", "1s", "--json", "--runs-dir", runs)
    assert code == 3  # answered, and it cannot be met
    assert json.loads(out)["choice"]["met"] is False
    assert run(capsys, "choose", "opt", "--max-slowdown", "5", "--runs-dir", runs)[0] == 2
    assert (runs / "opt" / "trace" / "probes.jsonl").read_bytes() == probes


def test_a_request_that_cannot_be_met_is_exit_code_3(capsys, runs):
    words = ["--deadline", "0.001s", "--max-probes", "3", "--quiet", "--name", "tight"]
    table = runs.parent / "table"
    assert run(capsys, "replay", table, *words, "--runs-dir", runs)[0] == 3
