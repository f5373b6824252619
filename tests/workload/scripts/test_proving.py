"""Arguments that carry a batch: what a second launch proves, and what it does not."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.scripts import CPU, script_job
from tests.support.studies import problem_of_job
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.knob_declarations import parse_knob
from tuner.workload.hook.batch_counts import GROUPS
from tuner.workload.scripts.command import Script
from tuner.workload.scripts.evidence import difference
from tuner.workload.scripts.inspection import blank_job, job_of_facts
from tuner.workload.scripts.proving import Argument, _with_placeholder, proven, typed_arguments
from tuner.workload.scripts.script_facts import ScriptFacts
from tuner.workload.scripts.script_job import ScriptJob

ARGUMENTS = {
    "batch_size": {"options": ["-b", "--batch-size"], "value": 8},
    "accum": {"options": ["--accum"], "value": 4},
}


def facts(micro: int, times: int, ranks: int = 1, **more: Any) -> dict[str, Any]:
    """What a launch of a loop shows that divides its losses."""
    group = {"drawn": [[0, micro, False]] * times, "passes": times, "shapes": [], "loss": 2.0}
    return {
        "groups": [group] * GROUPS,
        "first_batches": [*range(ranks)],
        "arguments": ARGUMENTS,
        "rates": [[0.1]] * GROUPS,
        "samples": [800],
        **more,
    }


class Program:
    """A script that takes its arguments literally, but for what a test changes of it."""

    def __init__(self, *, accumulates: bool = True, divides: str = "", **seen: Any) -> None:
        self.accumulates, self.divides, self.seen = accumulates, divides, seen
        self.started: list[str] = []

    def look(self, job: ScriptJob, configuration: Configuration) -> Mapping[str, Any] | str:
        words = job.start(configuration, Path(job.cwd) / "probe").words
        self.started.append(" ".join(words))
        told = dict(re.findall(r"(\S+)[ =](\d+)", " ".join(words)))
        ranks = configuration.data_parallel
        micro = int(next((told[n] for n in told if re.search(r"batch[-_]size$|^-b$", n)), 8))
        times = int(told.get("--accum", 4)) if self.accumulates else 1
        if self.divides == "batch":
            micro //= ranks
        if self.divides == "accumulation":
            times //= ranks
        changes = {name: made(micro, times) for name, made in self.seen.items()}
        return facts(micro, times, ranks, **changes)


def job_of(folder: Path, words: str = "", ranks: int = 1, times: int = 4, **more: Any) -> ScriptJob:
    frame = ScriptFacts(kind="torch", micro_batch=8, accumulation=times, counted=True)
    named = {"devices": ranks, "global_batch": 8 * times * ranks, **more}
    return script_job(f"train.py {words}".strip(), folder, frame, **named)


def turned(job: ScriptJob) -> set[str]:
    return {name for name, offer in job.offers.items() if offer.turned}


def test_two_arguments_become_placeholders(tmp_path: Path) -> None:
    program = Program()
    job = proven(job_of(tmp_path, "-b 8"), facts(8, 4), program.look, devices=2)
    assert program.started == ["train.py -b 2 --accum 8"]  # on two ranks: proves all at once
    assert job.words == (
        "train.py",
        "-b",
        "{micro_batch=8}",
        "--accum",
        "{gradient_accumulation=4}",
    )
    assert turned(job) == {"micro_batch", "data_parallel"}
    assert job.frame.given == ("train.py", "-b", "8")
    assert "at 2 x 8 on 2 ranks the same global batch" in job.frame.sources["micro_batch"]
    assert ScriptJob.from_json(job.to_json()).frame == job.frame
    # What the words said today they say again.
    start = job.start(job.baseline, tmp_path / "today")
    assert start.words == ("train.py", "-b", "8", "--accum", "4")


@pytest.mark.extra("tuner.workload.scripts.frameworks")
def test_a_framework_whose_keys_set_no_batch_leaves_the_arguments_to_be_found(
    tmp_path: Path,
) -> None:
    """Accelerate's keys do not: its batch is the script's, as in notebook_launcher."""
    (tmp_path / "train.py").write_text("import accelerate\n")
    script = Script("train.py -b 8", cwd=tmp_path)
    frame = ScriptFacts(kind="torch", micro_batch=8, accumulation=4, counted=True)
    today = replace(job_of(tmp_path, "-b 8"), driver=script.framework_of_command)
    assert today.driver is not None
    job = proven(replace(today, frame=frame), facts(8, 4), Program().look, devices=2)
    assert {"{micro_batch=8}", "{gradient_accumulation=4}"} <= {*job.words}


@pytest.mark.parametrize(
    ("words", "started"),
    [
        ("--batch-size {micro_batch=8}", "train.py --batch-size 4 --accum 8"),
        ("--accum {gradient_accumulation=4}", "train.py --accum 8 --batch-size 4"),
    ],
)
def test_a_placeholder_of_the_user_leaves_the_other_to_be_found(
    tmp_path: Path, words: str, started: str
) -> None:
    program = Program()
    job = proven(job_of(tmp_path, words), facts(8, 4), program.look, devices=1)
    assert program.started == [started]
    assert turned(job) == {"micro_batch", "data_parallel"}
    assert set(job.placeholders) == {"micro_batch", "gradient_accumulation"}


def test_a_placeholder_that_another_launch_does_not_confirm_is_left_as_today(
    tmp_path: Path,
) -> None:
    sizes = iter((8, 8))  # whatever the command says
    program = Program(groups=lambda micro, times: facts(next(sizes), times)["groups"])
    today = job_of(tmp_path, "--batch-size {micro_batch=8}")
    job = proven(today, facts(8, 4), program.look, devices=1)
    assert "micro_batch" not in turned(job)
    assert any("is left as today" in note for note in job.assumed)


def test_declared_knobs_stay_at_todays_values_in_a_proof(tmp_path: Path) -> None:
    today = job_of(tmp_path, "-b 8").declares([parse_knob("env:OMP_NUM_THREADS=1,2")])
    job = proven(today, facts(8, 4), Program().look, devices=2)
    assert turned(job) == {"micro_batch", "data_parallel"}
    assert [knob.name for knob in job.knobs] == ["OMP_NUM_THREADS"]


def test_ranks_that_divide_an_argument_are_counted_with_it(tmp_path: Path) -> None:
    program = Program(divides="accumulation")
    job = proven(job_of(tmp_path), facts(8, 4), program.look, devices=2)
    assert job.frame.carries == {"gradient_accumulation": "ranks"}
    on_two = Configuration.of({**job.baseline.launch, "data_parallel": 2})
    assert job.start(on_two, tmp_path / "two").words[-1] == "4"  # the script divides it
    assert "data_parallel" in turned(job)


def test_without_an_accumulation_ranks_and_micro_batch_move_together(tmp_path: Path) -> None:
    program = Program(accumulates=False)
    today = job_of(tmp_path, "--batch-size 8", ranks=2, times=1)
    shown = facts(8, 1, 2, arguments={"batch_size": ARGUMENTS["batch_size"]})
    job = proven(today, shown, program.look, devices=2)
    assert program.started == ["train.py --batch-size 4", "train.py --batch-size 16"]
    assert turned(job) == {"micro_batch", "data_parallel"}
    # Of the accumulation that the script has not, nothing was proven.
    assert job.frame.sources["micro_batch"] == "--batch-size 8: at 4 each pass took 4 samples"
    assert "accumulation" not in job.frame.sources
    problem = problem_of_job(job, CPU, clocks=False)
    sizes = {(c.data_parallel, c.micro_batch) for c in problem.candidates}
    assert sizes == {(2, 8), (1, 16)}


@pytest.mark.parametrize(
    ("seen", "why"),
    [
        (
            {"rates": lambda micro, times: [[0.1 * micro / 8]] * GROUPS},
            "a setting of the optimizer",
        ),
        ({"samples": lambda micro, times: [100 * micro]}, "400 samples and not 800"),
        (  # the losses are not divided by the accumulation
            {"groups": lambda m, a: [{**facts(m, a)["groups"][0], "loss": 2.0 * a}] * GROUPS},
            "does not divide them",
        ),
        (  # ln N: the batch's own negatives
            {"groups": lambda m, a: [{**facts(m, a)["groups"][0], "loss": 1.39}] * GROUPS},
            "negatives",
        ),
        (
            {"groups": lambda m, a: [{**facts(m, a)["groups"][0], "loss": None}] * GROUPS},
            "the loss cannot be read",
        ),
        ({"groups": lambda m, a: facts(8, 4)["groups"]}, "8 samples x 4 passes were seen"),
        ({"groups": lambda m, a: []}, "? samples x ? passes"),
    ],
)
def test_what_does_not_stay_the_same_is_left_alone(
    tmp_path: Path, seen: dict[str, Any], why: str
) -> None:
    first = facts(8, 4)
    if "does not divide" in why:
        first = facts(8, 4, groups=[{**first["groups"][0], "loss": 8.0}] * GROUPS)
    today = job_of(tmp_path)
    job = proven(today, first, Program(**seen).look, devices=1)
    assert job.words == today.words
    assert turned(job) == set()
    assert why in job.assumed[-1]
    assert job.assumed[-1].startswith("--batch-size 8 and --accum 4 are left as today: ")


@pytest.mark.parametrize(
    ("micro", "times", "words"),
    [
        (15, 1, "--batch-size 5 --accum 3"),
        (25, 3, "--batch-size 5 --accum 15"),
        (7, 1, "--batch-size 1 --accum 7"),  # a prime number of samples
        (1, 3, "--batch-size 3 --accum 1"),
        (5, 4, "--batch-size 10 --accum 2"),
    ],
)
def test_a_batch_of_odd_size_is_split_too(
    tmp_path: Path, micro: int, times: int, words: str
) -> None:
    program = Program()
    named = {"batch_size": ("--batch-size", micro), "accum": ("--accum", times)}
    given = {name: {"options": [o], "value": value} for name, (o, value) in named.items()}
    frame = ScriptFacts(kind="torch", micro_batch=micro, accumulation=times, counted=True)
    today = script_job("train.py", tmp_path, frame, devices=1, global_batch=micro * times)
    job = proven(today, facts(micro, times, 1, arguments=given), program.look, devices=1)
    assert program.started == [f"train.py {words}"]
    assert "micro_batch" in turned(job)


def test_one_sample_in_one_pass_is_told_as_that(tmp_path: Path) -> None:
    program = Program(accumulates=False)
    given = {"batch_size": {"options": ["--batch-size"], "value": 1}}
    frame = ScriptFacts(kind="torch", micro_batch=1, accumulation=1, counted=True)
    today = script_job("train.py", tmp_path, frame, devices=1, global_batch=1)
    job = proven(today, facts(1, 1, 1, arguments=given), program.look, devices=1)
    assert program.started == []
    assert job.frame.unproven == "--batch-size 1 is left as today: one sample cannot be split"


def test_a_launch_that_fails_leaves_today(tmp_path: Path) -> None:
    job = proven(job_of(tmp_path), facts(8, 4), lambda *_: "AssertionError: 8", devices=2)
    assert "split otherwise, the script does not start (AssertionError: 8)" in job.assumed[-1]
    # With one argument more ranks are no way out either: they are what they were.
    assert turned(job) == set()


@pytest.mark.parametrize(
    ("times", "owner", "told"), [(1, "", True), (4, "", False), (1, "accelerate", False)]
)
def test_a_loop_without_accumulation_is_told_what_would_open_its_micro_batch(
    tmp_path: Path, times: int, owner: str, told: bool
) -> None:
    job = job_of(tmp_path, "-b {micro_batch=8}", times=times)
    job = replace(job, frame=replace(job.frame, owner=owner))
    why = job.offers["micro_batch"].why
    assert "the accumulation does not follow it" in why
    assert ("docs/your-script.md#accumulation" in why) is told


def test_ranks_that_cannot_meet_here_are_not_started(tmp_path: Path) -> None:
    program, why = Program(), "its process group is NCCL's, which needs GPUs"
    today = job_of(tmp_path, "-b 8")
    today = replace(today, frame=replace(today.frame, ranks_stay=why))
    job = proven(today, facts(8, 4), program.look, devices=2)
    assert program.started == ["train.py -b 4 --accum 8"]  # on one rank
    assert turned(job) == {"micro_batch"}
    assert job.offers["data_parallel"].why == why


@pytest.mark.parametrize(
    ("source", "words", "gpus", "stay"),
    [
        ("backend = 'nccl'  # 'nccl', 'gloo', etc.", "", False, True),
        ("backend = 'nccl'", "", True, False),
        ("backend = 'nccl'", "--backend=gloo", False, False),
        ("b = 'nccl' if torch.cuda.is_available() else 'gloo'", "", False, False),
        ("init_process_group('cpu:gloo,cuda:nccl')", "", False, False),
        ("init_process_group()", "", False, False),
        ("this is no Python", "", False, False),
    ],
)
def test_a_process_group_of_gpus_alone_keeps_one_rank_on_cores(
    tmp_path: Path, source: str, words: str, gpus: bool, stay: bool
) -> None:
    (tmp_path / "train.py").write_text(source)
    device = replace(CPU.device, type="cuda") if gpus else CPU.device
    job = blank_job(Script(f"python train.py {words}", cwd=tmp_path), replace(CPU, device=device))
    assert bool(job.frame.ranks_stay) is stay
    seen = job_of_facts(Script("train.py", cwd=tmp_path), job, facts(8, 4), 1.0)
    assert seen.frame.ranks_stay == job.frame.ranks_stay


@pytest.mark.usefixtures("launchers_here")
@pytest.mark.parametrize(
    ("source", "beside", "stay"),
    [
        ("import torch, argparse\nfrom net import Net", "import torch.nn as nn", True),
        ("import torch\nfrom net import Net", "import torch.distributed as d", False),
        ("import torch\nfrom net import Net", "from deep import er", False),  # somebody's package
        ("import torch\nfrom torch.nn.parallel import DistributedDataParallel", "", False),
        ("import torch, accelerate", "", False),
        ("import torch, somebodys_package", "", False),
        ("import torch, importlib\nimportlib.import_module('helper')", "", False),
        ("import torch\nprint 'old'", "", False),
        ("", "", False),
    ],
)
def test_a_second_rank_is_not_tried_where_nothing_makes_a_process_group(
    tmp_path: Path, source: str, beside: str, stay: bool
) -> None:
    (tmp_path / "train.py").write_text(source)
    (tmp_path / "net.py").write_text(beside)
    job = blank_job(Script("python train.py", cwd=tmp_path), CPU)
    assert ("it makes no process group" in job.frame.ranks_stay) is stay
    two = Script("torchrun --nproc_per_node=2 train.py", cwd=tmp_path)
    assert not blank_job(two, CPU).frame.ranks_stay  # who starts two has two


def test_of_what_cannot_be_read_beside_a_script_nothing_is_said(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import torch\nfrom net import Net")
    (tmp_path / "net").mkdir()
    (tmp_path / "net" / "__init__.py").write_text("import torch.nn as nn")
    script = Script("python train.py", cwd=tmp_path)
    assert "it makes no process group" in blank_job(script, CPU).frame.ranks_stay
    odd = tmp_path / "net" / "odd.py"
    for make, remove in (
        (odd.mkdir, odd.rmdir),
        (lambda: odd.symlink_to(tmp_path / "nowhere"), odd.unlink),
        (lambda: os.mkfifo(odd), odd.unlink),
    ):
        make()
        assert not blank_job(script, CPU).frame.ranks_stay
        remove()


def test_a_failure_on_other_ranks_leaves_the_split_that_one_rank_shows(tmp_path: Path) -> None:
    class Alone(Program):
        def look(self, job: ScriptJob, configuration: Configuration) -> Mapping[str, Any] | str:
            seen = super().look(job, configuration)
            return "it makes no process group" if configuration.data_parallel > 1 else seen

    program = Alone()
    job = proven(job_of(tmp_path), facts(8, 4), program.look, devices=2)
    assert len(program.started) == 2
    assert turned(job) == {"micro_batch"}
    assert "it makes no process group" in job.offers["data_parallel"].why


def test_the_loss_of_other_samples_on_other_ranks_is_no_proof_at_once(tmp_path: Path) -> None:
    class NvmlProxy(Program):
        """A loader that draws other samples on each number of ranks."""

        def look(self, job: ScriptJob, configuration: Configuration) -> Mapping[str, Any] | str:
            self.seen = {}
            if configuration.data_parallel > 1:
                self.seen = {"groups": lambda m, a: [facts(m, a)["groups"][0] | {"loss": 2.2}] * 4}
            return super().look(job, configuration)

    program = NvmlProxy()
    job = proven(job_of(tmp_path), facts(8, 4), program.look, devices=2)
    assert [words.split()[-3] for words in program.started] == ["2", "4"]
    assert turned(job) == {"micro_batch", "data_parallel"}


@pytest.mark.parametrize(
    ("micro", "times", "ranks", "devices", "first"),
    [
        (8, 4, 2, 2, "4 16"),  # one rank: both parts differ
        (8, 4, 1, 1, "4 8"),  # no other number of ranks
        (1, 4, 1, 2, "2 1"),  # not smaller
        (8, 1, 1, 2, "2 2"),
        (1, 1, 1, 2, ""),
        (3, 2, 1, 2, "1 3"),
        (2, 1, 1, 2, "1 2"),  # no split of both parts: the batch first, then the ranks
    ],
)
def test_the_launch_that_proves_all_at_once_changes_both_parts(
    tmp_path: Path, micro: int, times: int, ranks: int, devices: int, first: str
) -> None:
    program = Program()
    frame = ScriptFacts(kind="torch", micro_batch=micro, accumulation=times, counted=True)
    words = f"train.py --batch-size {micro} --accum {times}"
    job = script_job(words, tmp_path, frame, devices=ranks, global_batch=micro * times * ranks)
    named = {"batch_size": (micro, "--batch-size"), "accum": (times, "--accum")}
    arguments = {name: {"options": [o], "value": v} for name, (v, o) in named.items()}
    proven(job, facts(micro, times, ranks, arguments=arguments), program.look, devices=devices)
    shown = " ".join(program.started[0].split()[2::2]) if program.started else ""
    assert shown == first


def test_ranks_that_read_the_same_samples_stay_as_they_are(tmp_path: Path) -> None:
    program = Program(first_batches=lambda micro, times: [5, 5])
    job = proven(job_of(tmp_path), facts(8, 4), program.look, devices=2)
    assert turned(job) == {"micro_batch"}
    assert job.offers["data_parallel"].why == "on 2 ranks all read the same samples"


def test_batch_norm_leaves_the_micro_batch_alone(tmp_path: Path) -> None:
    program = Program()
    job = proven(job_of(tmp_path), facts(8, 4, batch_norm=True), program.look, devices=2)
    assert turned(job) == {"data_parallel"}  # by the accumulation
    assert "BatchNorm takes its statistics" in job.offers["micro_batch"].why
    assert program.started == ["train.py --accum 2"]


@pytest.mark.parametrize(
    "frame",
    [
        {"owner": "transformers", "turns": ("micro_batch", "gradient_accumulation")},
        {"kind": "deepspeed", "follows": True},
    ],
)
def test_batch_norm_leaves_it_alone_where_a_framework_would_turn_it(
    tmp_path: Path, frame: dict[str, Any]
) -> None:
    program, today = Program(), job_of(tmp_path)
    today = replace(today, frame=replace(today.frame, **frame))
    assert "micro_batch" in turned(proven(today, facts(8, 4), program.look, devices=2))
    job = proven(today, facts(8, 4, batch_norm=True), program.look, devices=2)
    assert "micro_batch" not in turned(job)
    assert "data_parallel" in turned(job)
    assert program.started == []


@pytest.mark.parametrize(
    "changes",
    [
        {"global_batch": 0},
        {"frame": ScriptFacts(kind="deepspeed", micro_batch=8, accumulation=4, counted=True)},
        {"frame": ScriptFacts(kind="torch", micro_batch=8, accumulation=4)},  # not counted
    ],
)
def test_what_is_not_known_is_not_split(tmp_path: Path, changes: dict[str, Any]) -> None:
    today, program = replace(job_of(tmp_path), **changes), Program()
    found = proven(today, facts(8, 4), program.look, devices=2)
    assert replace(found, frame=replace(found.frame, unproven="")) == today
    assert program.started == []
    if today.frame.kind == "torch":
        why = "--batch-size 8 is left as today: the first steps do not show what it sets"
        assert found.frame.unproven == why
        assert why in found.offers["micro_batch"].why or not found.global_batch


def test_an_argument_that_is_another_number_than_the_steps_took_is_told_as_that(
    tmp_path: Path,
) -> None:
    """It was found: "no argument was found" is what nobody could make sense of."""
    arguments = {"batch_size": {"options": ["--batch-size"], "value": 64}}
    found = proven(job_of(tmp_path), facts(8, 4, arguments=arguments), Program().look, devices=1)
    why = found.offers["micro_batch"].why
    assert "--batch-size 64 is left as today: the first steps took 8 samples x 4 backward" in why
    assert "write {micro_batch=8} for its value" in why
    assert "no argument" not in why


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("train.py --batch_size 16 --accumulate_every 2", ["batch_size 16", "accumulate_every 2"]),
        ("train.py --batch-size=16", ["batch_size 16"]),  # a name as in Python
        ("train.py -batch_size 16", ["batch_size 16"]),  # absl
        ("train.py data.batch_size=16 optim.lr=3", ["batch_size 16", "lr 3"]),  # Hydra
        ("train.py --data.batch-size 16", ["batch_size 16"]),  # tyro
        ("train.py +trainer/accum=2", []),  # Hydra's additions are no names
        ("train.py eval.batch_size=16 --val-batch-size 8 --test.batch_size=4", []),
        ("train.py --batch_size -1 --epochs 0 --rate 1e-3 --name b16", []),
        ("train.py --batch_size", []),
        ("train.py --bs 4 --bs 8", ["bs 8"]),  # the last one counts
        ("-m pkg.batch_size --bs 4", ["bs 4"]),
        ("-c --bs=3 --bs 4", ["bs 4"]),  # the first is code
        ("train.py 16 2", []),
        ("train.py --flag train.py 16", []),
    ],
)
def test_arguments_that_no_known_parser_reads(words: str, expected: list[str]) -> None:
    found = typed_arguments(words.split())
    assert [f"{each.name} {each.value}" for each in found] == expected


def test_words_of_the_command_are_proven_as_arguments_are(tmp_path: Path) -> None:
    program = Program()
    seen = facts(8, 4, arguments={})
    job = proven(job_of(tmp_path, "--batch-size 8 --accum 4"), seen, program.look, devices=1)
    assert program.started == ["train.py --batch-size 4 --accum 8"]
    assert {"micro_batch", "gradient_accumulation"} <= {*job.placeholders}


@pytest.mark.parametrize(
    ("part", "words", "option", "started"),
    [
        ("data.", "", "--data.batch-size", "train.py --data.batch-size 4"),  # tyro, jsonargparse
        ("data.", "", "data.batch_size=", "train.py data.batch_size=4"),  # Hydra
        ("data.", "data.batch_size=8", "data.batch_size=", "train.py data.batch_size=4"),
        ("config.", "", "--batch_size", "train.py --batch_size 4"),  # simple_parsing
        ("val.", "", "--val.batch_size", ""),
        ("config.test.", "", "--config.test.batch_size", ""),
    ],
)
def test_an_argument_of_a_part_of_the_command_is_proven_by_its_own_name(
    tmp_path: Path, part: str, words: str, option: str, started: str
) -> None:
    program = Program()
    seen = facts(8, 4, arguments={f"{part}batch_size": {"options": [option], "value": 8}})
    job = proven(job_of(tmp_path, words), seen, program.look, devices=1)
    assert program.started == ([started] if started else [])
    assert ("micro_batch" in turned(job)) == bool(started)


def test_a_word_of_the_batch_that_does_something_else_is_left(tmp_path: Path) -> None:
    ignores = Program(groups=lambda m, a: facts(8, 4)["groups"])
    seen = facts(8, 4, arguments={})
    today = job_of(tmp_path, "--batch-size 8 --accum 4")
    job = proven(today, seen, ignores.look, devices=1)
    assert job.words == today.words
    assert "8 samples x 4 passes were seen" in job.offers["micro_batch"].why


@pytest.mark.parametrize(
    ("accumulation", "passes"),
    [
        pytest.param(0, 0, id="batches that are counted in neither launch"),
        pytest.param(0, 4, id="in the second alone"),
        pytest.param(4, 0, id="in the first alone"),
        pytest.param(4, 4, id="in both"),
    ],
)
def test_another_loss_by_the_same_words_is_the_chance_of_a_script_without_a_seed(
    tmp_path: Path, accumulation: int, passes: int
) -> None:
    def launch(times: int, loss: float) -> dict[str, Any]:
        seen = facts(8, times)
        # Without a loader and inputs, as of a loop over one table of numbers, nothing is counted.
        return seen | {"groups": [group | {"loss": loss} for group in seen["groups"]]}

    job = job_of(tmp_path, times=accumulation)
    told = difference(job, launch(accumulation, 1.9), launch(passes, 2.6))
    assert told.endswith("the losses of a step add up to 2.6 and not 1.9 (does it set no seed?)")
    assert difference(job, launch(accumulation, 2.6), launch(passes, 2.6)) == ""


def test_placeholders_of_the_user_are_not_looked_behind(tmp_path: Path) -> None:
    today = job_of(tmp_path, "-b {micro_batch=8} --accum {gradient_accumulation=4}")
    assert proven(today, facts(8, 4), Program().look, devices=1) is today
    program = Program()
    assert turned(proven(today, facts(8, 4), program.look, devices=2)) == turned(today)
    assert len(program.started) == 1  # on two ranks, which no placeholder speaks of


@pytest.mark.parametrize("grouped", [False, True])
def test_placeholders_of_the_user_prove_no_second_rank(tmp_path: Path, grouped: bool) -> None:
    today = job_of(tmp_path, "-b {micro_batch=8} --accum {gradient_accumulation=4}")
    told = facts(8, 4, grouped=grouped)
    job = proven(today, told, lambda *_: "it makes no process group", devices=2)
    assert turned(today) - turned(job) == {"data_parallel"}
    assert "it makes no process group" in job.offers["data_parallel"].why


@pytest.mark.parametrize(
    ("command", "options", "made"),
    [
        ("train.py", ["-b", "--batch-size"], "train.py --batch-size {x}"),
        ("train.py -b 8", ["-b", "--batch-size"], "train.py -b {x}"),
        ("train.py -b8 c", ["-b"], "train.py -b{x} c"),
        ("train.py --batch-size=8", ["--batch-size"], "train.py --batch-size={x}"),
        ("train.py --batch-size 4 --batch-size 8", ["--batch-size"], 2),
        ("train.py --eval-batch-size 8", ["--batch-size"], "{x}"),
        ("-m pkg.train", ["--bs"], "-m pkg.train --bs {x}"),
        ("train.py", ["--batch_size="], "train.py --batch_size={x}"),
        ("train.py 8 3", [], "train.py {x} 3"),
        ("train.py 8 8", [], None),  # which of the two?
        ("-m 8 8", [], "-m 8 {x}"),  # a module may be named anything
        ("-c 8 8 3", [], "-c 8 {x} 3"),  # so may code
        ("-c code -b 8", ["-b"], "-c code -b {x}"),
        ("train.py", [], None),
    ],
)
def test_the_place_of_an_argument(command: str, options: list[str], made: str | int | None) -> None:
    argument = Argument("micro_batch", tuple(options), 8)
    found = _with_placeholder(tuple(command.split()), argument, "{x}")
    shown = " ".join(found) if found else None
    if isinstance(made, int):  # argparse takes the last
        assert shown is not None
        assert shown.endswith("{x}")
    elif made == "{x}":
        assert shown == f"{command} --batch-size {{x}}"
    else:
        assert shown == made
