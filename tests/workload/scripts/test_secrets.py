"""Secrets of a pasted command: kept by name, filled in where a rank starts, asked for again."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.commands import finished
from tests.support.scripts import GPU as TWO_NODES
from tuner.deploy.launch_files import write_launch_files
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.knob_declarations import Knob
from tuner.workload.scripts.command import Script
from tuner.workload.scripts.inspection import blank_job
from tuner.workload.scripts.script_job import ScriptJob
from tuner.workload.scripts.secrets import hidden, require, revealed

GPU = replace(TWO_NODES, nodes=1)
COMMAND = "PGPASSWORD=zebra1 RUN=zebra2 NCCL_ALGO=Ring torchrun --nproc-per-node 2 train.py"
COMMAND += " --wandb-key zebra3 --hf_token=zebra4 --lr 0.1"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, launchers_here: None) -> Path:
    (tmp_path / "train.py").touch()
    return tmp_path


@pytest.mark.parametrize(
    ("command", "kept"),
    [
        ("HF_TOKEN=abc torchrun t.py", "HF_TOKEN={env:HF_TOKEN} torchrun t.py"),
        ("env lower=abc python t.py", "env lower={env:lower} python t.py"),
        ("DS_API_KEY=abc deepspeed t.py", "DS_API_KEY={env:DS_API_KEY} deepspeed t.py"),
        ("NCCL_X=http://a:b@c t.py", "NCCL_X={env:NCCL_X} t.py"),
        ("srun --export=ALL,A=abc,NCCL_B=c t.py", "srun --export=ALL,A={env:A},NCCL_B=c t.py"),
        ("srun -n 2 --export A=abc t.py", "srun -n 2 --export A={env:A} t.py"),
        ("srun -n 2 env A=abc python t.py", "srun -n 2 env A={env:A} python t.py"),
        ("t.py --pwd abc", "t.py --pwd {env:ARG_PWD}"),
        ("t.py --password=12345678", "t.py --password={env:ARG_PASSWORD}"),
        ("t.py --api_key abc", "t.py --api_key {env:ARG_API_KEY}"),
        ("t.py ++a.openai-key=abc1", "t.py ++a.openai-key={env:ARG_A_OPENAI_KEY}"),
        ("t.py hf_abcdefghijklmnopqrst", "t.py {env:ARG_SECRET}"),
        ("t.py --db x://u:abc@h/d", "t.py --db {env:ARG_DB}"),
        ("t.py --header 'Authorization: Bearer abcdefgh'", "t.py --header {env:ARG_HEADER}"),
        ("t.py --token ab1 --x --token ab2", "t.py --token {env:ARG_TOKEN} --x --token "
         "{env:ARG_TOKEN_2}"),
        ("TOKEN=ab1 t.py --token ab2", "TOKEN={env:TOKEN} t.py --token {env:ARG_TOKEN}"),
    ],
)  # fmt: skip
def test_what_is_kept_of_a_command(command: str, kept: str) -> None:
    words = shlex.split(command)
    made, values = hidden(words)
    assert made == shlex.split(kept)
    assert values
    assert [revealed(word, values) for word in made] == words


@pytest.mark.parametrize(
    "command",
    [
        "OMP_NUM_THREADS=4 USE_FLASH=1 DEBUG=true torchrun t.py",
        "t.py --tokenizer gpt2 --max_tokens 4096 --max_token 4096 --pad_token <pad> --num_pass 3",
        "t.py --eos_token EOS --label_key label --input_key question --special_token_ids 3",
        "t.py --energy_key=REF_energy --forces_key DFT_forces",
        "t.py --sort-key length --use_auth_token true --password '' --apply_chat_template x",
        "t.py --url https://host:8080/path --mail a@b.c --ratio 1:2 --key_frames abc --token",
        "t.py --token {token=abc1} a=${env:USER_TOKEN} --out out/{env:RUN} monkey=3",
    ],
)
def test_what_is_no_secret_stays(command: str) -> None:
    words = shlex.split(command)
    assert hidden(words) == (words, {})


@pytest.mark.parametrize(
    "command",
    [
        "t.py --wandb_key=ABCDEFG_h1jk",
        "t.py --data_key=ZEBRAZEBRA_abc",
        "t.py --api_key=REF_energy",
        "t.py --access-key REF_energy",
    ],
)
def test_a_key_that_only_resembles_a_column_is_a_secret(command: str) -> None:
    made, values = hidden(shlex.split(command))
    assert len(values) == 1
    assert "{env:ARG_" in " ".join(made)


def job_of(folder: Path, command: str = COMMAND) -> ScriptJob:
    job = blank_job(Script(command, cwd=folder), GPU)
    return replace(job, global_batch=16, steps=100)


def test_a_rank_gets_the_values_and_nothing_that_is_written_does(folder: Path) -> None:
    job = job_of(folder)
    start = job.start(job.baseline, folder / "probe")
    assert start.argv(0, 2)[1:] == ("--wandb-key", "zebra3", "--hf_token=zebra4", "--lr", "0.1")
    given = start.environment(0, 2)
    assert (given["PGPASSWORD"], given["RUN"], given["NCCL_ALGO"]) == ("zebra1", "zebra2", "Ring")
    for text in (repr(job), repr(start), json.dumps(job.to_json()), Script(COMMAND, folder).shown):
        assert "zebra" not in text
    write_launch_files((job.baseline, job, GPU), folder / "files")
    for file in (folder / "files").rglob("*.*"):
        assert "zebra" not in file.read_text(), file


def test_a_study_asks_for_the_values_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of(folder)
    again = ScriptJob.from_json(json.loads(json.dumps(job.to_json())))
    assert again == job
    with pytest.raises(InputError, match=r"ARG_WANDB_KEY.*PGPASSWORD=\.\.\. RUN=\.\.\. tuner"):
        require(sorted(again.taken), again.secrets)
    start = again.start(again.baseline, folder / "probe")
    with pytest.raises(InputError, match="keeps no values of ARG_WANDB_KEY"):
        start.argv(0, 2)
    for name in again.taken:
        monkeypatch.setenv(name, f"of the environment: {name}")
    assert start.argv(0, 2)[2] == "of the environment: ARG_WANDB_KEY"
    assert start.environment(0, 2)["RUN"] == "of the environment: RUN"


def test_launch_sh_asks_for_the_values(folder: Path) -> None:
    job = job_of(folder, COMMAND.replace("torchrun", str(folder / "torchrun")))
    (folder / "torchrun").write_text('#!/bin/bash\nprintf "%s\\n" "$RUN" "$NCCL_ALGO" "$@"\n')
    (folder / "torchrun").chmod(0o700)
    write_launch_files((job.baseline, job, GPU), folder / "files")
    launch = [str(folder / "files/launch.sh")]
    done = finished(launch, env={"PATH": "/usr/bin:/bin"})
    assert done.returncode == 1
    assert "its value is not kept with the study" in done.stderr
    values = {name: f"a '\"$(x) {name}" for name in job.taken}
    done = finished(launch, env={"PATH": "/usr/bin:/bin", **values})
    lines = done.stdout.splitlines()
    assert lines[:2] == [values["RUN"], "Ring"]
    assert values["ARG_WANDB_KEY"] in lines
    assert f"--hf_token={values['ARG_HF_TOKEN']}" in lines


def test_a_knobs_variable_keeps_its_value(folder: Path) -> None:
    knob = Knob("level", ("low", "high"), how="env:RUN_LEVEL")
    script = Script("RUN_LEVEL=high python train.py", cwd=folder, knobs=(knob,))
    job = blank_job(script, GPU)
    assert not job.secrets
    assert job.knobs[0].baseline == "high"
