"""Mistakes that a new user made, and the sentence that answers each: what is wrong, what to do.

The numbers are those of the 35 mistakes that a review of the command line provoked. Number 35, a
script that raises, has its sentence in tests/workload/scripts/test_script_real.py
(`test_a_script_that_fails_says_why_and_where`), because it has to be started.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.in_process import answered as run
from tests.support.studies import write_table
from tuner.cli.main import main
from tuner.planner.plan import read_plan
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.errors import InputError


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


SIMULATED = ["--executor", "simulated"]
PLAN = ["optimize", "opt-350m", "--cluster", "a100-8", *SIMULATED]


#: Of the review: number, command, parts of the sentence that answers it.
REVIEWED = [
    (1, ["optimise"], ["unknown command 'optimise'; did you mean 'optimize'?", " more; see tuner"]),
    (2, ["optimize", "tinygpt"], ["unknown job 'tinygpt'; did you mean 'tiny-gpt'?"]),
    (
        3,
        ["optimize", "tiny-gpt", "--cluster", "h100-64"],
        ["there is no cluster 'h100-64'", "--cluster 64xH100", "2x8xH100"],
    ),
    (
        3,
        ["optimize", "tiny-gpt", "--cluster", "gh200-3Z"],
        [
            "unknown cluster 'gh200-3Z'; did you mean 'gh200-32'?",
            "or a node such as 8xH100",
            "or the path of a toml file",
        ],
    ),
    (4, [*PLAN, "--deadline", "2x"], ["--deadline: '2x' must be a number with a unit (s, "]),
    (5, [*PLAN, "--deadline", "7200"], ["--deadline: '7200' must be", "such as 2h, 90m or 7200s"]),
    (6, [*PLAN, "--budget", "-5kJ"], ["--budget is -5.0; it must be a number greater than 0"]),
    (6, [*PLAN, "--max-slowdown", "-1%"], ["--max-slowdown is -0.01; it must be"]),
    (10, [*PLAN, "--minimize", "cheapest"], ["unknown objective 'cheapest'", "knee", "cost"]),
    (11, [*PLAN, "--minimize", "cost"], ["needs price_per_kWh", "no price is assumed"]),
    (
        16,
        ["fit", "opt-350m", "--cluster", "a100-8", "microbatch=4"],
        ["unknown knob 'microbatch'; did you mean 'micro_batch'?"],
    ),
    (
        17,
        ["fit", "tiny-gpt", "--cluster", "cpu-2", "micro_batch=3"],
        ["= 6 does not divide the global batch 8; near it, micro_batch can be 2 or 4"],
    ),
    (
        17,
        ["fit", "opt-350m", "--cluster", "a100-8", "data_parallel=3", "micro_batch=2"],
        ["6 does not divide the global batch 1024, and data_parallel 3 alone does not either"],
    ),
    (
        18,
        ["dev", "probe", "--cluster", "cpu-2", "zero_stage=5"],
        ["zero_stage is 5; it must be one of 0, 1, 2, 3"],
    ),
    (
        20,
        ["optimize", "--script", "nowhere.py", "--cluster", "cpu-2"],
        ["there is no script 'nowhere.py' in /"],
    ),
    (25, [*PLAN, "--max-probes", "0"], ["--max-probes is 0; it must be an integer of at least 1"]),
    (
        26,
        [*PLAN, "--space", "nosuch"],
        ["unknown space 'nosuch'; known: clocks, ", "or the path of a toml file"],
    ),
    (
        27,
        ["optimize", "lmm-72b", "--cluster", "a100-40gb-8", "--space", "default", *SIMULATED],
        [
            "lmm-72b does not fit on a100-40gb-8: the smallest of 2,556 configurations of space "
            "'default' needs 69.4 GB of a GPU's 42.9 GB (26.4 GB too many); `tuner fit` ",
            "names what would make it fit",
        ],
    ),
    (28, ["runs", "rm", "nosuch"], ["unknown run 'nosuch' in /"]),
    (
        32,
        [*PLAN, "--today", "mine.json"],
        ["cannot read mine.json of --today: No such file"],
    ),
    (
        34,
        [*PLAN, "--max-probe", "3"],
        ["unknown arguments: --max-probe 3; did you mean '--max-probes'"],
    ),
]
#: Others: command, parts of the sentence.
OTHERS = [
    ([*PLAN, "--budget", "40"], ["--budget: '40' must be", "such as 11kWh or 40MJ"]),
    ([*PLAN, "--budget", "40mJ"], ["'40mJ' must be a number with a unit (J, kJ, MJ, "]),
    ([*PLAN, "--budget", "1.2.3kJ"], ["'1.2.3kJ' must be a number with a unit"]),
    ([*PLAN, "--deadline", "nans"], ["--deadline is nan; it must be a number greater"]),
    ([*PLAN, "--dead", "2h"], ["unknown arguments: --dead"]),
    ([*PLAN, "--deadlin=2h"], ["unknown arguments: --deadlin=2h; did you mean '--deadline"]),
    ([*PLAN, "--space", "fulll"], ["unknown space 'fulll'; did you mean 'full'?"]),
    (["dev", "probe", "nosuch", "a=1"], ["unknown job 'nosuch'"]),
    (["dev", "probe", "--time-limit", "5"], ["--time-limit: '5' must be a number with a unit"]),
    (["optimize"], ["name what to tune: tuner optimize --steps N -- torchrun ... train.py"]),
    (["optimize", "--name", "a", "--max-probes", "3"], ["name what to tune"]),
    (["plan"], ["name what to plan: tuner plan opt-350m --cluster a100-8"]),
    (["plan", "--cluster", "a100-8"], ["name what to plan"]),
    (["plan", "opt-350m"], ["this machine has no GPU to predict for; describe a node"]),
    (["plan", "opt-350n"], ["unknown job 'opt-350n'; did you mean 'opt-350m'?"]),
    (["fit", "opt-350m"], ["this machine has no GPU to predict for; describe a node"]),
    (["plan", "meta-llama/Llama-3-8B"], ["named in a job file by its config.json"]),
    (
        ["optimize", "python", "plain.py", "--steps", "100"],
        ["put -- before your command: tuner optimize [OPTIONS] -- python plain.py"],
    ),
    (
        ["optimize", "python", "plain.py", "--lr", "3"],
        ["put -- before your command: tuner optimize [OPTIONS] -- python plain.py --lr 3"],
    ),
    (["optimize", "tiny-gpt", "--steps", "20k"], ["--steps: '20k' must be a whole number"]),
    (["dashboard", "--port", "x"], ["--port: 'x' must be a whole number"]),
    (["export", "a", "--to", "pts.csv"], ["--to takes the format: --to csv --out pts.csv"]),
    (["completion", "bsh"], ["unknown shell 'bsh'; did you mean 'bash'?"]),
]


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("bash train.sh", "train.sh: No such file or directory"),
        ("nosuchrun -n 2 train.py", "nosuchrun: command not found"),
    ],
)
def test_a_command_that_does_not_start_is_answered_in_its_own_words(capsys, command, sentence):
    code, out, err = run(capsys, "optimize", "--script", command, "--cluster", "cpu-2")
    assert (code, out) == (2, "")
    started, line = err.strip().splitlines()
    assert "starting your command once, as it stands" in started
    assert sentence in line
    assert len(line) < 420


@pytest.mark.parametrize(
    ("words", "sentences"),
    [
        *(pytest.param(*mistake, id=f"{n}-{mistake[0][-1]}") for n, *mistake in REVIEWED),
        *OTHERS,
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


JOB = "sequence_length = 64\nglobal_batch = 8\nsteps = 10\n"


@pytest.mark.parametrize(
    ("file", "text", "sentence"),
    [
        pytest.param(
            "job.toml",
            JOB + "[model]\nconfig = 'nowhere.json'\n",
            "model config 'nowhere.json' is neither a file nor one of lmm-32b, ",
            id="7",
        ),
        pytest.param(
            "job.toml",
            JOB + "precison = 'fp32'\n[model]\nconfig = 'tiny-gpt'\n",
            "unknown key in job.toml 'precison'; did you mean 'precision'?",
            id="8",
        ),
        pytest.param(
            "config.json",
            json.dumps({"model_type": "opt"}),
            "config.json is not a job: a job is a TOML file that gives the batch and the steps, "
            'and names the model by [model] config = "config.json"',
            id="9",
        ),
    ],
)
def test_a_file_that_is_no_job_is_answered_by_what_one_holds(
    capsys, tmp_path, file, text, sentence
):
    (tmp_path / file).write_text(text)
    code, out, err = run(capsys, "optimize", file, "--cluster", "cpu-2")
    assert (code, out) == (2, "")
    assert err.startswith(f"tuner: {sentence}")
    assert len(err.splitlines()) == 1


def test_a_script_is_not_searched_on_predictions(capsys, tmp_path):  # 21
    (tmp_path / "train.py").write_text("print('trains')\n")
    code, _, err = run(capsys, "optimize", "--script", "train.py", "--cluster", "h100-32")
    assert code == 2
    assert (
        "h100-32 has H100-SXM-80GB, and this machine does not: tune the script on a machine that"
        in err
    )
    assert "or predict a job: tuner plan JOB --cluster h100-32" in err


@pytest.mark.usefixtures("no_report")
@pytest.mark.parametrize("more", [[], ["--dry-run"]])
def test_a_cluster_that_is_not_here_gets_the_command_that_plans_it(capsys, tmp_path, more):
    words = ["opt-350m", "--cluster", "a100-8", "--space", "parallelism"]
    words += ["--deadline", "500h", "--max-gpus", "8", "--today", "dp8", "zero1"]
    code, out, err = run(capsys, "optimize", *words, *more)
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert "a100-8 has A100-SXM-80GB, and this machine does not" in err
    assert not list(tmp_path.iterdir())
    command = re.search("`tuner (plan [^`]*)`", err)[1]
    assert command == "plan opt-350m --cluster a100-8"
    if not more:
        assert run(capsys, *shlex.split(command), "--runs-dir", str(tmp_path), "--quiet")[0] == 0


def test_fewer_gpus_than_the_default_needs_are_taken(capsys):  # 33
    code, out, _ = run(capsys, *PLAN, "--max-gpus", "3", "--dry-run")
    assert code == 0
    assert "left out: they need more GPUs than max_gpus=3 allows; today's needs 8" in out


@pytest.mark.parametrize(
    ("number", "words", "sentences"),
    [
        (13, ["show", "opts"], ["unknown run 'opts' in /", "did you mean 'opt'?"]),
        (15, ["apply", "opt", "--point", "99"], ["unknown measured point '99'; known: 1 to "]),
        (15, ["compare", "opt", "bets"], ["did you mean 'best'?"]),
        (22, ["export", "opt", "--to", "xlsx"], ["unknown format 'xlsx'; known: csv, zip"]),
        (22, ["export", "opt", "--to", "cvs"], ["did you mean 'csv'?"]),
    ],
)
def test_a_mistake_about_a_run_is_answered_shortly(capsys, runs, number, words, sentences):
    code, out, err = run(capsys, *words, "--runs-dir", runs)
    assert (code, out) == (2, "")
    (line,) = err.strip().splitlines()
    for sentence in sentences:
        assert sentence in line
    assert len(line.replace(str(runs), "")) < 260


@pytest.fixture(scope="module")
def simulated(tmp_path_factory):
    """Folder of one run, "sim", whose limits no configuration meets."""
    folder = tmp_path_factory.mktemp("simulated")
    limits = ["--max-probes", "2", "--deadline", "1s"]
    assert main([*PLAN, *limits, "--name", "sim", "--quiet", "--runs-dir", str(folder)]) == 3
    return folder


def test_the_name_of_another_study_is_refused(capsys, simulated):  # 12
    files = sorted(path.stat().st_mtime_ns for path in simulated.rglob("*"))
    words = ["optimize", "tiny-gpt", "--cluster", "a100-8", "--name", "sim", *SIMULATED]
    code, _, err = run(capsys, *words, "--runs-dir", simulated)
    assert code == 2
    assert "'sim' is about another question (job.name was opt-350m and is tiny-gpt); give" in err
    assert sorted(path.stat().st_mtime_ns for path in simulated.rglob("*")) == files


def test_a_study_of_other_devices_is_not_trained_here(capsys, simulated):  # 31
    code, _, err = run(capsys, "run", "sim", "--runs-dir", simulated)
    assert code == 2
    assert "the study was of A100-SXM-80GB and this machine has " in err
    assert "`tuner apply` writes the files to start it elsewhere" in err


def test_files_under_unmet_limits_are_written_and_said_to_be_unmet(capsys, simulated):
    words = ["apply", "sim", "--runs-dir", simulated]
    code, out, _ = run(capsys, *words)
    assert code == 3
    assert re.search("Nothing predicted meets the deadline: .*the least found is ", out)
    assert "No predicted configuration meets the limits; these files start the nearest:\n" in out
    assert (simulated / "sim" / "best" / "launch.sh").is_file()
    code, out, _ = run(capsys, *words, "--json")
    assert (code, json.loads(out)["met"]) == (3, False)
    assert run(capsys, *words, "--point", "1")[0] == 0  # the user chose it


def test_the_run_that_is_meant_is_named_where_none_is(capsys, runs, tmp_path):  # 14, 28
    code, out, err = run(capsys, "show", "--json", "--runs-dir", runs)
    assert code == 0
    assert json.loads(out)["name"] == "opt"
    assert err == f"tuner: no run is named; the latest in {runs} is 'opt'\n"
    assert run(capsys, "show", "opt", "--runs-dir", runs)[2] == ""
    for words in (["explain", "--point", "zzz"], ["compare", "zzz"]):
        code, _, err = run(capsys, *words, "--runs-dir", runs)
        assert code == 2
        assert len(err.splitlines()) == 1  # one sentence, which names the run, too
        assert "zzz" in err
        assert f"the latest in {runs} is 'opt'" in err
    code, _, err = run(capsys, "show", "--runs-dir", tmp_path)
    assert (code, err) == (2, f"tuner: there is no run in {tmp_path}; `tuner optimize` makes one\n")
    code, out, _ = run(capsys, "runs", "--runs-dir", runs)
    assert code == 0
    assert out.splitlines()[1].startswith("opt ")


def test_a_search_on_predictions_says_so_first(capsys):
    _, _, err = run(capsys, *PLAN, "--max-probes", "1", "--plain")
    before = err[: err.index(" p0000 ")].splitlines()[:-1]
    assert len(before) == 2  # what it is, and what is tuned; what is left out comes with -v
    _, _, err = run(capsys, *PLAN, "--max-probes", "1", "--plain", "-v")
    first, *others = err.splitlines()
    assert re.fullmatch(
        r"[\d:]{8} nothing is measured: this search tries its probes on predictions of the models; "
        r"`tuner plan` predicts all [\d,]+ configurations at once",
        first,
    )
    (absent,) = [line for line in others if "not in space 'default'" in line]
    assert "tensor_parallel" in absent
    assert re.search(r" \(`tuner list spaces` lists others\)$", absent)
    assert len(absent) < 190
    out = run(capsys, *PLAN, "--dry-run")[1]
    assert out.startswith("Nothing is measured: every probe is a prediction")
    assert "no clock, no power limit" in out
    assert "ranks of python" not in out


def test_a_measured_configuration_is_taken_in_any_order(capsys, runs):
    shown = json.loads(run(capsys, "show", "opt", "--json", "--runs-dir", runs)[1])["front"][0]
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


def test_a_run_is_replayed_and_its_point_explained_by_what_was_printed(capsys, runs):
    folder = ("--runs-dir", runs)
    code, out, _ = run(capsys, "replay", "opt", "--name", "again", "--quiet", *folder)
    assert (code, "Report: " in out) == (0, True)
    by_option = run(capsys, "explain", "opt", "--point", "1", *folder)
    assert run(capsys, "explain", "opt", "1", *folder) == by_option
    assert by_option[0] == 0
    code, _, error = run(capsys, "replay", "opt2", *folder)
    assert code == 2
    assert "opt2 is nothing to replay" in error


def test_options_and_knobs_come_in_any_order(capsys):
    knobs = ["data_parallel=2", "micro_batch=1"]
    asked = run(capsys, "fit", "tiny-gpt", *knobs, "--cluster", "cpu-2", "--json")
    assert asked[0] == 0
    assert run(capsys, "fit", "--cluster", "cpu-2", "tiny-gpt", "--json", *knobs) == asked
    for name in ("mb1 dp2", "DP2 | MB1", "micro_batch=1 dp2"):
        assert Configuration.parse(name) == Configuration.parse("data_parallel=2 micro_batch=1")
    assert run(capsys, "fit", "tiny-gpt", "DP2 | MB1", "--cluster=cpu-2", "--json") == asked
    assert run(capsys, "fit", knobs[0], "--cluster=cpu-2", "tiny-gpt", knobs[1], "--json") == asked


@pytest.mark.extra("tuner.doctor.dry_run")
def test_a_dry_run_starts_and_writes_nothing(capsys, tmp_path):
    asked = ["optimize", "opt-350m", "--cluster", "cpu-2", "--dry-run", "--name", "dry"]
    code, out, err = run(capsys, *asked)
    assert (code, err) == (0, "")
    assert out.startswith("This search: about ")
    for words in (
        "Limits: until what is left would not repay a probe; at most 40 probes; at most 1 % of",
        "first today's, dp2 ",
        "ranks of python ",
        "runs/dry/",
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
    code, out, _ = run(capsys, *PLAN, "--probe-budget", "250kJ", "--name", "few", "--quiet")
    assert code == 0
    first, *others = [line for line in out.splitlines() if line]
    assert any("predicted by the analytic models" in line for line in others)
    assert re.fullmatch(
        r"Keep what you run today: only \d of [\d,]+ configurations were tried\.", first
    )
    assert "Next: the same command with --name few and higher limits" in others


def test_the_version_is_printed(capsys):  # 30
    code, out, _ = run(capsys, "--version")
    assert code == 0
    assert out.startswith("joulefront ")
    assert str(Path(__file__).parents[2] / "tuner") in out


def test_a_front_is_asked_again_by_choose(capsys, runs):
    code, out, err = run(capsys, "show", "opt", "--budget", "3kJ", "--runs-dir", runs)
    assert (code, out) == (2, "")
    assert "unknown arguments: --budget 3kJ; limits are for tuner choose" in err
    probes = (runs / "opt" / "trace" / "probes.jsonl").read_bytes()
    code, out, _ = run(capsys, "choose", "opt", "--max-slowdown", "50%", "--runs-dir", runs)
    assert code == 0
    assert "Launch files: tuner apply opt --point " in out
    code, out, _ = run(capsys, "choose", "opt", "--deadline", "1s", "--json", "--runs-dir", runs)
    assert code == 3  # answered, and nothing measured meets it
    assert json.loads(out)["choice"]["met"] is False
    assert run(capsys, "choose", "opt", "--max-slowdown", "5", "--runs-dir", runs)[0] == 2
    assert (runs / "opt" / "trace" / "probes.jsonl").read_bytes() == probes


def test_a_request_that_cannot_be_met_is_exit_code_3(capsys, runs):
    words = ["--deadline", "0.001s", "--max-probes", "3", "--quiet", "--name", "tight"]
    table = runs.parent / "table"
    assert run(capsys, "replay", table, *words, "--runs-dir", runs)[0] == 3


@pytest.fixture
def waits_no_longer_than_10_s() -> Iterator[None]:
    """A read of a pipe that nobody writes to would wait for ever."""

    def end(*_: object) -> None:
        raise AssertionError("it waits for a writer of the pipe")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(10)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("waits_no_longer_than_10_s")
@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("import PIPE --time-column a", "is not a regular file"),
        ("optimize tiny-gpt --today PIPE.json --dry-run", "of --today: it is not a regular file"),
        ("optimize --framework PIPE.toml --dry-run -- python x.py", "is not a regular file"),
        ("dev frameworks check PIPE.toml", "is not a regular file"),
        ("fit PIPE.yaml", "there is no file"),
        ("fit PIPE.toml", "unknown job"),
        ("fit tiny-gpt --cluster PIPE.toml", "unknown cluster"),
        ("show odd", "odd/study.toml is not a regular file, so the run odd is not read"),
        ("show runs/odd", "odd/study.toml is not a regular file, so the run odd is not read"),
        ("show gone", "gone/study.toml is not a regular file"),
        ("show folder", "folder/study.toml is not a regular file"),
        ("show od", "unknown run 'od'"),
    ],
)
def test_a_pipe_in_the_place_of_a_file_is_refused(
    words: str,
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("odd", "gone", "folder"):
        Path("runs", name).mkdir(parents=True)
    for pipe in ("PIPE", "PIPE.json", "PIPE.toml", "PIPE.yaml", "runs/odd/study.toml"):
        os.mkfifo(pipe)
    Path("runs/gone/study.toml").symlink_to("nowhere")
    Path("runs/folder/study.toml").mkdir()
    assert main(words.split()) == 2
    printed = capsys.readouterr().err
    assert sentence in printed
    assert printed.count("\n") == 1
    assert "Errno" not in printed
    assert "Error(" not in printed


@pytest.mark.usefixtures("waits_no_longer_than_10_s")
def test_a_plan_that_cannot_be_read_is_told_without_an_error_of_python(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "plan.json")
    with pytest.raises(InputError, match=r"plan\.json: it is not a regular file$"):
        read_plan(tmp_path)
    (tmp_path / "plan.json").unlink()
    (tmp_path / "plan.json").write_text("{}")
    with pytest.raises(InputError, match=r"plan\.json: there is no 'schema'$"):
        read_plan(tmp_path)
