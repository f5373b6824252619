"""Declared knobs of a script without starting it: what a probe gets, and what is refused."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

import tuner
from tests.support.scripts import CPU, script_job
from tests.support.studies import problem_of_job
from tuner.answer.configuration_names import named_configurations
from tuner.cli.main import main
from tuner.deploy.launch_files import write_launch_files
from tuner.doctor.command import _changed
from tuner.problem.job_request import job_with_knobs
from tuner.problem.study_spec import parse_job
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.job import load_job
from tuner.search_spaces.knob_declarations import Knob, parse_knob
from tuner.workload.scripts.declared_knobs import export_words, program_knobs, read_at_start
from tuner.workload.scripts.deepspeed_config import render_deepspeed_config
from tuner.workload.scripts.script_facts import Launcher, ScriptFacts
from tuner.workload.scripts.script_job import ScriptJob

TORCH = ScriptFacts("torch", micro_batch=4, accumulation=1, reads=("fused",), own={"fused": False})
DEEPSPEED = ScriptFacts("deepspeed", config={"zero_optimization": {"overlap_comm": True}})


def job(
    folder: Path, command: str, *knobs: Knob | str, frame: ScriptFacts = TORCH, env: str = ""
) -> ScriptJob:
    return script_job(command, folder, frame, knobs)


def chosen(job: ScriptJob, **values: object) -> Configuration:
    launch = type(job.baseline.launch)({**job.baseline.launch, **values})
    return Configuration(launch)


def test_a_placeholder_has_todays_value(tmp_path: Path) -> None:
    made = job(tmp_path, "train.py --attn {attn=sdpa} {mode}", "attn=sdpa,eager", "mode=a,b")
    assert made.baseline.short == "dp2 mb4 zero0 attn=sdpa mode=a"
    start = made.start(chosen(made, attn="eager"), tmp_path / "p")
    assert start.words == ("train.py", "--attn", "eager", "a")
    assert start.options["configuration"]["attn"] == "eager"


def test_a_value_never_reaches_a_shell(tmp_path: Path) -> None:
    nasty = "$(touch${IFS}owned);`x`'"
    knobs = [Knob("attn", ("a", nasty.replace("{", "").replace("}", ""))), "env:FLAG=$(x),y"]
    made = job(tmp_path, "train.py {attn}", *knobs)
    value = made.knobs[0].values[1]
    configuration = chosen(made, attn=value, FLAG="$(x)")
    assert made.start(configuration, tmp_path / "p").words == ("train.py", value)
    out = tmp_path / "best"
    write_launch_files((configuration, made, CPU), out)
    text = (out / "launch.sh").read_text()
    assert "export FLAG='$(x)'" in text
    (out / "python").write_text('#!/bin/sh\nfor word; do last=$word; done; echo "$FLAG|$last"\n')
    (out / "python").chmod(0o755)
    printed = os.popen(f"PYTHON={out}/python bash {out}/launch.sh 2>&1").read()
    assert printed.strip() == f"$(x)|{value}"
    assert not (tmp_path / "owned").exists()


def test_the_environment_today_is_the_baseline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NCCL_ALGO", raising=False)
    made = job(tmp_path, "train.py", "env:NCCL_ALGO=Ring,Tree")
    assert made.baseline.get("NCCL_ALGO") is None
    assert "NCCL_ALGO" not in made.start(made.baseline, tmp_path / "a").env
    assert made.start(chosen(made, NCCL_ALGO="Tree"), tmp_path / "b").env["NCCL_ALGO"] == "Tree"
    monkeypatch.setenv("NCCL_ALGO", "CollNet")
    made = job(tmp_path, "train.py", "env:NCCL_ALGO=Ring,Tree")
    assert made.knobs[0].levels == ("CollNet", "Ring", "Tree")
    assert made.start(made.baseline, tmp_path / "a").env["NCCL_ALGO"] == "CollNet"
    launched = replace(made, launcher=Launcher("torchrun", env={"NCCL_ALGO": "Tree"}), knobs=())
    again = launched.declares([parse_knob("env:NCCL_ALGO=Ring,Tree")])
    assert again.knobs[0].levels == ("Tree", "Ring")


def test_variables_that_are_read_early_need_a_fresh_interpreter() -> None:
    late, early = Knob("a", (1,), how="env:NCCL_ALGO"), Knob("b", (1,), how="env:OMP_PLACES")
    assert read_at_start([late]) == ""
    assert read_at_start([late, early]) == "OMP_PLACES may be read when torch is imported"


@pytest.mark.parametrize("word", ["conf/f.yaml", "--config=conf/f.yaml"])
def test_a_key_of_a_file_is_set_in_a_copy(tmp_path: Path, word: str) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "f.yaml").write_text("data:\n  workers: 2 # few\n")
    made = job(tmp_path, f"train.py {word}", "conf/f.yaml:data.workers=0,8")
    assert made.baseline.get("workers") == 2
    start = made.start(chosen(made, workers=8), tmp_path / "run" / "p")
    copy = tmp_path / "run" / "p" / "f.yaml"
    assert start.words[1] == word.replace("conf/f.yaml", str(copy))
    assert copy.read_text() == "data:\n  workers: 8 # few\n"
    assert (tmp_path / "conf" / "f.yaml").read_text() == "data:\n  workers: 2 # few\n"


def test_a_key_of_the_deepspeed_file_is_merged_with_the_others(tmp_path: Path) -> None:
    config = {"train_batch_size": 8, "zero_optimization": {"stage": 1, "overlap_comm": True}}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    frame = replace(DEEPSPEED, config=config, micro_batch=4)
    knob = "ds.json:zero_optimization.overlap_comm=true,false"
    made = job(tmp_path, "train.py ds.json", knob, "deepspeed:a.b:int=1,2", frame=frame)
    start = made.start(chosen(made, overlap_comm="false", zero_stage=2), tmp_path / "p")
    assert start.config["zero_optimization"]["overlap_comm"] is False
    assert start.config["zero_optimization"]["stage"] == 2
    assert "a" not in start.config
    assert made.start(chosen(made, b=2), tmp_path / "p").config["a"] == {"b": 2}


def test_the_hook_gives_values_in_their_type(tmp_path: Path) -> None:
    made = job(tmp_path, "train.py", "fused=false,true")
    assert made.start(made.baseline, tmp_path).options["configuration"]["fused"] is False
    assert made.needs_hook


def test_a_knob_that_the_script_reads_is_today_what_the_script_names(tmp_path: Path) -> None:
    frame = replace(TORCH, reads=("p",), own={"p": 4})
    assert job(tmp_path, "train.py", "p=1,2,4", frame=frame).baseline.get("p") == 4
    assert ScriptJob.from_json(job(tmp_path, "train.py", "p=1,4", frame=frame).to_json()).frame.own
    # Never simply the first value.
    silent = replace(TORCH, reads=("p",), own={})
    with pytest.raises(InputError, match=r"'p' is today is not known; .*get\('p', VALUE\)"):
        job(tmp_path, "train.py", "p=1,2", frame=silent)
    told = job(tmp_path, "train.py", Knob("p", (1, 2), baseline=2), frame=silent)
    assert told.baseline.get("p") == 2


def test_a_live_knob_that_nothing_reads_is_not_taken_to_be_the_first_value(tmp_path: Path) -> None:
    unread = replace(TORCH, live={"p": None})
    with pytest.raises(InputError, match=r"'p' is today is not known; .*live\('p', FUNCTION, READ"):
        job(tmp_path, "train.py", "live:p=1,2", frame=unread)
    told = job(tmp_path, "train.py", Knob("p", (1, 2), live=True, baseline=2), frame=unread)
    assert told.baseline.live["p"] == 2
    read = replace(TORCH, live={"p": 4})
    assert job(tmp_path, "train.py", "live:p=1,2", frame=read).baseline.live["p"] == 4


def test_a_knob_whose_condition_does_not_hold_stays_at_its_baseline(tmp_path: Path) -> None:
    prefetch = Knob("prefetch", (2, 4), when="workers > 0")
    made = job(tmp_path, "train.py {workers=0} {prefetch=2}", "workers=0,1", prefetch)
    problem = problem_of_job(made, CPU, "default")
    found = {(c.get("workers"), c.get("prefetch")) for c in problem.candidates}
    assert found == {(0, None), (1, 2), (1, 4)}
    assert made.start(made.baseline, tmp_path).words == ("train.py", "0", "2")
    assert any("prefetch (2, 4) where workers > 0" in note for note in problem.notes)


@pytest.mark.parametrize(
    ("command", "knob", "reason"),
    [
        ("train.py", "attn=a,b", "takes no knob 'attn'.*nor reads it"),
        ("train.py {attn}", "atn=a,b", "unknown placeholder 'attn'.*did you mean 'atn'"),
        ("train.py", "env:RANK=0,1", "already exists|sets RANK"),
        ("train.py", "env:WORLD_SIZE=0,1", "WORLD_SIZE, which joulefront sets"),
        ("train.py", "f.yaml:a.c=1,2", "f.yaml has no key a.c"),
        ("train.py", "f.yaml:a.b=1,2", "which the command does not name"),
        ("train.py -", "stdin.yaml:a=1,2", "is not a file"),
        ("train.py", "deepspeed:a.b=1,2", "does not train under DeepSpeed"),
        ("train.py {attn=c}", Knob("attn", ("a",), baseline="b"), "said to be b today, but .* c"),
        ("train.py", Knob("x", ("a",), how="placeholder"), "has no placeholder {x}"),
    ],
)
def test_a_knob_that_cannot_be_applied(
    tmp_path: Path, command: str, knob: Knob | str, reason: str
) -> None:
    (tmp_path / "f.yaml").write_text("a: {b: 1}\n")
    with pytest.raises(InputError, match=reason) as error:
        job(tmp_path, command, knob)
    assert "\n" not in str(error.value)


def test_a_pack_leaves_out_what_the_script_does_not_take(tmp_path: Path) -> None:
    made = job(tmp_path, "train.py {num_workers=2}", "data-loading", "num_workers=0,2")
    assert [knob.name for knob in made.knobs] == ["num_workers"]
    assert made.knobs[0].levels == (2, 0)
    assert any("knob pin_memory is left out" in sentence for sentence in made.assumed)


def test_what_changes_the_training_is_searched_only_if_allowed(tmp_path: Path) -> None:
    precision = Knob("precision", ("fp32", "bf16"), changes_training=True)
    made = job(tmp_path, "train.py {precision=fp32} {attn=a}", precision, "attn=a,b")
    problem = problem_of_job(made, CPU, "default")
    assert {c.get("precision") for c in problem.candidates} == {"fp32"}
    assert {c.get("attn") for c in problem.candidates} == {"a", "b"}
    assert any("--allow-changed-training" in note for note in problem.notes)
    allowed = problem_of_job(made, CPU, "default", allow_changed_training=True)
    assert {c.get("precision") for c in allowed.candidates} == {"fp32", "bf16"}
    marks = {(c.get("precision"), c.get("training")) for c in allowed.candidates}
    assert marks == {("fp32", None), ("bf16", "changed")}
    assert "precision=bf16 training=changed" in allowed.candidates[-1].short
    names = [
        c.key for c in named_configurations(list(allowed.candidates), "attn=b precision=bf16", "")
    ]
    assert names == ["attn=b data_parallel=2 micro_batch=4 precision=bf16 training=changed"]


def test_a_study_keeps_its_knobs(tmp_path: Path) -> None:
    made = job(tmp_path, "train.py {attn=a}", "attn=a,b", "env:NCCL_ALGO=Ring,Tree")
    problem = problem_of_job(made, CPU, "default")
    assert parse_job(problem.identity) == problem.job
    assert problem.candidates.knobs == made.knobs


def test_the_baseline_may_name_declared_knobs(tmp_path: Path) -> None:
    made = job(tmp_path, "train.py {attn=a}", "attn=a,b")
    problem = problem_of_job(made, CPU, "default", baseline=["attn=b", "mb4", "dp2"])
    assert problem.baseline is not None
    assert problem.baseline.get("attn") == "b"
    with pytest.raises(InputError, match=r"attn is 'c'; it must be one of a, b"):
        problem_of_job(made, CPU, "default", baseline=["attn=c"])


def test_the_built_in_program_has_no_commands_of_its_own() -> None:
    with pytest.raises(InputError, match="is for a script of your own"):
        program_knobs([Knob("attn", ("a", "b"))])
    found = problem_of_job(
        job_with_knobs(load_job("tiny-gpt"), ["env:NCCL_ALGO=Ring,Tree"]), CPU, predicted=True
    )
    assert any("no model knows them: NCCL_ALGO" in note for note in found.notes)


@pytest.mark.parametrize(
    "words",
    [
        ["--knob", "compile"],
        ["--knob", "compile="],
        ["--knobs", "ncll"],
        ["--knob", "env:NCCL_ALGO=Ring,Tree", "--knob", "env:NCCL_ALGO=Ring"],
        ["--knob", "attn=a,b"],
    ],
)
def test_bad_input_is_one_sentence(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["optimize", "tiny-gpt", "--dry-run", *words]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_the_built_in_program_searches_a_pack() -> None:
    given = job_with_knobs(load_job("tiny-gpt"), ["deepspeed-buckets"])
    problem = problem_of_job(given, CPU)
    plain = problem_of_job("tiny-gpt", CPU)
    assert len(problem.candidates) > 10 * len(plain.candidates)
    sharded = next(c for c in problem.candidates if c.get("overlap_comm") == "true")
    assert problem.job is not None
    rendered = render_deepspeed_config(sharded, problem.job)
    assert rendered["zero_optimization"]["overlap_comm"] is True
    assert all(c.zero_stage for c in problem.candidates if c.get("overlap_comm"))


def test_a_job_file_has_no_placeholders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "job.toml"
    path.write_text(
        'sequence_length = 64\nglobal_batch = 2\nsteps = 10\n[model]\nconfig = "tiny-gpt"\n'
        '[knobs.attn]\nvalues = ["a", "b"]\n'
    )
    assert main(["optimize", str(path), "--dry-run"]) == 2
    assert "--script CMD --knobs FILE" in capsys.readouterr().err


def test_a_plan_says_that_it_knows_no_declared_knobs(tmp_path: Path) -> None:
    given = job_with_knobs(load_job("opt-350m"), ["env:NCCL_ALGO=Ring,Tree"])
    notes: list[str] = []
    planned = tuner.plan(
        given,
        cluster="a100-8",
        runs_dir=tmp_path,
        report=False,
        on_progress=lambda event: notes.append(str(event.message)),
    )
    assert {point.configuration.get("NCCL_ALGO") for point in planned.points} == {None}
    assert any("no model knows them: NCCL_ALGO" in note for note in notes)


def test_a_probe_names_declared_knobs(tmp_path: Path) -> None:
    size = Knob("p", (1, 2), changes_training=True)
    made = job(
        tmp_path,
        "train.py {attn=a}",
        "attn=a,b",
        size,
        frame=replace(TORCH, reads=("p",), own={"p": 1}),
    )
    assert _changed(made, ["attn=b", "mb4"]).short == "dp2 mb4 zero0 attn=b p=1"
    assert _changed(made, ["p=2"]).short == "dp2 mb4 zero0 attn=a p=2 training=changed"
    with pytest.raises(InputError, match="attn is 'c'"):
        _changed(made, ["attn=c"])


def test_a_variable_that_is_a_command_is_refused() -> None:
    assert export_words({"A_1": "$(id)"}) == ["A_1='$(id)'"]
    for name in ("X=1; touch x; Y", "a b", "1A", "", "A\n", "$(id)"):
        with pytest.raises(InputError, match="not a valid name of an environment variable"):
            export_words({name: "1"})
