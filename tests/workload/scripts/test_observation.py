"""What the ranks of an observed command say of how it starts them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.scripts import CPU, OPTIMIZER, groups_of_steps
from tests.support.studies import record
from tuner.workload.records.probe import ProbeRecord, ProbeRequest
from tuner.workload.scripts.command import Observation, Script, program_words
from tuner.workload.scripts.observing import ObservedLaunch, job_of_observed, observe_script
from tuner.workload.scripts.script_job import ScriptJob


@pytest.mark.parametrize(
    ("options", "rest"),
    [
        ([], ["train.py", "--lr", "1"]),
        (["-u", "-W", "ignore"], ["train.py"]),
        (["-Wignore", "-X", "dev", "-OO"], ["train.py", "-m", "x"]),
        (["-bb", "-Ximporttime"], ["-m", "pkg.train", "a"]),
        (["--check-hash-based-pycs", "always"], ["train.py"]),
    ],
)
def test_the_interpreters_own_options_are_no_words_of_a_rank(
    options: list[str], rest: list[str]
) -> None:
    assert program_words(["python3", *options, *rest]) == tuple(rest)


def test_options_that_are_written_together_with_a_module_are_read_apart() -> None:
    assert program_words(["python", "-um", "pkg", "-m"]) == ("-m", "pkg", "-m")
    assert program_words(["python", "-mpkg", "a"]) == ("-m", "pkg", "a")
    assert program_words(["python"]) == ()


def process(words: list[str], folder: Path, **more: Any) -> dict[str, Any]:
    return {
        "words": ["python", *words],
        "cwd": str(folder),
        "prefix": sys.prefix,
        "variables": {},
        "threads": 1,
        "cores": 2,
        "imports": [],
        "program": {},
        **more,
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").touch()
    return tmp_path


def test_numbered_ranks_of_a_launcher_share_their_words(folder: Path) -> None:
    ranks = [
        process(
            ["-u", "train.py", f"--local_rank={rank}", "--bs", "4"],
            folder,
            variables={"RANK": str(rank), "LOCAL_RANK": str(rank), "NCCL_ALGO": "Ring"},
        )
        for rank in range(2)
    ]
    seen = Observation.of(ranks)
    assert seen.words == ("train.py", "--local_rank={local_rank}", "--bs", "4")
    assert (seen.ranks, seen.why_as_it_stands) == (2, "")
    assert seen.variables == {"NCCL_ALGO": "Ring"}  # ranks are numbered by the agent


@pytest.mark.parametrize(
    ("ranks", "why"),
    [
        ([["-c", "from multiprocessing.spawn import spawn_main"]] * 2, "multiprocessing"),
        ([["/site-packages/ray/_private/workers/default_worker.py", "--x"]], "Ray"),
        ([["-c", "import train; train.main()"]], "in no file"),
        ([["-"]], "in no file"),
        ([["gone.py"]], "there is no script gone.py"),
        ([["train.py"], ["train.py"]], "itself"),  # no RANK: by Lightning, or a fork
    ],
)
def test_ranks_that_cannot_be_started_alone_have_a_reason(
    folder: Path, ranks: list[list[str]], why: str
) -> None:
    seen = Observation.of([process(words, folder) for words in ranks])
    assert why in seen.why_as_it_stands


def test_ranks_with_other_arguments_or_another_python_are_not_started_alone(folder: Path) -> None:
    numbered = [{"variables": {"RANK": str(rank)}} for rank in range(2)]
    different = [process(["train.py", f"--id={n}"], folder, **numbered[n]) for n in range(2)]
    assert "different arguments" in Observation.of(different).why_as_it_stands
    other = process(["train.py"], folder, prefix="/opt/env")
    assert "/opt/env" in Observation.of([other]).why_as_it_stands


def test_placeholders_return_to_the_words_that_they_typed(folder: Path) -> None:
    command = "nice -n 4 python train.py --batch {micro_batch=4} --seed 4 > log.4 2>&1"
    script = Script(command, cwd=folder)
    words = ["train.py", "--batch", "4", "--seed", "4"]
    observed = script.observed(Observation.of([process(words, folder)]))
    assert script.filled == "nice -n 4 python train.py --batch 4 --seed 4 > log.4 2>&1"
    assert observed.words == ("train.py", "--batch", "{micro_batch=4}", "--seed", "4")


def test_braces_of_the_shell_are_no_placeholders(folder: Path) -> None:
    command = "N=4; for i in {1..2}; do echo ${N} | awk '{print}'; done; python train.py"
    script = Script(command, cwd=folder)
    script.require_startable()
    assert script.observable
    assert script.filled == command


def test_a_command_that_names_a_rank_is_not_started_as_it_stands(folder: Path) -> None:
    assert not Script("python train.py --rank {rank}", cwd=folder).observable
    assert not Script("python train.py --bs {micro_batch}", cwd=folder).observable


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("python -m scripts.base_train --depth 4", "scripts.base_train"),
        ("torchrun --nproc-per-node 2 -m pkg.train", "pkg.train"),
        ("python tools/train.v2.py", "train.v2"),
        ("python -m torch.distributed.run train.py", "train"),
    ],
)
def test_a_command_is_named_for_its_module_or_file(command: str, name: str) -> None:
    assert Script(command).name == name


def test_a_secret_that_the_command_sets_for_its_ranks_is_kept_by_name(folder: Path) -> None:
    variables = {"HF_TOKEN": "hf_abcdefghijklmnopqrst", "NCCL_DEBUG": "INFO"}
    script = Script("python train.py", cwd=folder).observed(
        Observation.of([process(["train.py"], folder, variables=variables)])
    )
    assert script.launcher is not None
    assert script.launcher.env == {"HF_TOKEN": "{env:HF_TOKEN}", "NCCL_DEBUG": "INFO"}
    assert script.secrets["HF_TOKEN"] == "hf_abcdefghijklmnopqrst"


@pytest.mark.parametrize(
    ("arguments", "named", "program", "found"),
    [
        ({}, {"batch_size": 6}, {}, {"batch_size": 6}),
        ({"lr": {}}, {"batch_size": 6}, {}, {"batch_size": 6}),
        ({}, {}, {"named": {"batch_size": 4}, "arguments": {"b": {}}}, {"batch_size": 4}),
        ({}, {"bs": 6}, {"named": {"batch_size": 4}}, {"bs": 6}),
    ],
)
def test_a_script_without_a_parser_keeps_the_batch_that_it_names(
    folder: Path, arguments: Any, named: Any, program: Any, found: Any
) -> None:
    """Of a rank that another process started, what that process has parsed counts."""
    rank = process(["train.py"], folder, program=program)
    facts = {"arguments": arguments, "named": named, "process": rank, "processes": [rank]}

    def run(job: ScriptJob, request: ProbeRequest) -> ProbeRecord:
        return record(request=request, environment={"facts": facts, "first_step_s": 1.0})

    seen = observe_script(
        Script("python train.py", cwd=folder), run, folder=folder, announce=lambda sentence: None
    )
    assert seen is not None
    assert seen.facts["named"] == found


def first_steps(rank: dict[str, Any], kernel: str = "loop") -> dict[str, Any]:
    """Return the facts of a program that Lightning drives, whose optimizer takes time."""
    facts = {
        "groups": groups_of_steps(waited=0.0, updated=0.3),
        "optimizer": {**OPTIMIZER, "kernel": kernel},
        "counts": "optimizer",
        "compiled": False,
    }
    owned = {"micro_batch": 4, "gradient_accumulation": 1}
    return {**facts, "process": rank, "processes": [rank], "owner": "lightning", "owned": owned}


@pytest.mark.parametrize(("kernel", "starts"), [("fused", 1), ("loop", 2)])
def test_a_launch_that_trains_the_same_with_another_kernel_shows_its_ranks_too(
    folder: Path, kernel: str, starts: int
) -> None:
    rank = process(["train.py"], folder)
    script = Script("python train.py", cwd=folder).observed(Observation.of([rank]))
    asked: list[str] = []

    def run(job: ScriptJob, request: ProbeRequest) -> ProbeRecord:
        asked.append(request.launch.get("optimizer_kernel", ""))
        facts = first_steps(rank, kernel if asked[-1] else "loop")
        return record(request=request, environment={"facts": facts, "first_step_s": 1.0})

    job = job_of_observed(
        ObservedLaunch(script, first_steps(rank), 1.0),
        run,
        cluster=CPU,
        folder=folder,
        announce=lambda sentence: None,
        adds_knobs=True,
    )
    assert (asked, job.as_it_stands) == (["fused", ""][:starts], False)
    assert [knob.name for knob in job.knobs] == ["optimizer_kernel"] * (kernel == "fused")


@pytest.mark.parametrize(
    ("command", "alone"),
    [
        ("python train.py --tag 'a | b'", True),
        ("SEED=3 python train.py", True),
        ("python train.py | tee log", False),
        ("python train.py > log", False),
        ("python train.py & wait", False),
        ("python other.py", False),
    ],
)
def test_a_line_with_work_for_the_shell_is_no_script_alone(
    command: str, alone: bool, tmp_path: Path
) -> None:
    (tmp_path / "train.py").touch()
    assert Script(command, cwd=tmp_path).is_script_alone == alone
