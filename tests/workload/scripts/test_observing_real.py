"""Commands that are started once exactly as they stand: what is seen, and what is said."""

from __future__ import annotations

import os
import shlex
import sys
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from textwrap import dedent

import pytest

from tuner.executors.local import ThisNode
from tuner.problem.run_folder import RunFolder
from tuner.search_spaces.errors import InputError
from tuner.study.request import job_of_script
from tuner.workload.node.platforms import detect_cluster
from tuner.workload.node.rank_launch import reserved_port
from tuner.workload.node.runner import LocalRunner
from tuner.workload.scripts.command import Script
from tuner.workload.scripts.observing import (
    NOTHING_TO_SET,
    ObservedLaunch,
    job_to_observe,
    observe_script,
)
from tuner.workload.scripts.script_job import ScriptJob

CLUSTER = replace(detect_cluster(), devices_per_node=2)
pytestmark = pytest.mark.real

TRAIN = """
import argparse, os, torch
p = argparse.ArgumentParser()
p.add_argument("--bs", type=int, default=16)
a = p.parse_args()
if "WORLD_SIZE" in os.environ:
    torch.distributed.init_process_group("gloo")
m = torch.nn.Linear(64, 64)
o = torch.optim.SGD(m.parameters(), 1e-3)
for i in range(100000):
    m(torch.randn(a.bs, 64)).square().mean().backward()
    o.step()
    o.zero_grad()
"""
SPLIT = """
import argparse, torch
p = argparse.ArgumentParser()
p.add_argument("--bs", type=int, default=16)
p.add_argument("--accum", type=int, default=2)
a = p.parse_args()
torch.manual_seed(0)
m = torch.nn.Linear(64, 64)
o = torch.optim.SGD(m.parameters(), 1e-3)
data = torch.utils.data.TensorDataset(torch.randn(4096, 64))
while True:
    for i, (x,) in enumerate(torch.utils.data.DataLoader(data, a.bs)):
        (m(x).square().mean() / a.accum).backward()
        if (i + 1) % a.accum == 0:
            o.step()
            o.zero_grad()
"""
SPAWN = """
import argparse, os, torch
def work(rank, n, port, bs):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=n)
    m = torch.nn.Linear(64, 64)
    o = torch.optim.SGD(m.parameters(), 1e-3)
    for i in range(100000):
        m(torch.randn(bs, 64)).sum().backward()
        o.step()
if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("port")
    p.add_argument("--batch-size", type=int, default=8)
    a = p.parse_args()
    torch.multiprocessing.spawn(work, (2, a.port, a.batch_size), nprocs=2)
"""


@pytest.fixture(autouse=True)
def _this_python(monkeypatch: pytest.MonkeyPatch) -> None:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    monkeypatch.setenv("PATH", path)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


def observe(folder: Path, command: str, program: str = TRAIN) -> ObservedLaunch:
    (folder / "train.py").write_text(dedent(program))
    script = Script(command, cwd=folder)
    script.require_startable()
    runs = folder / "run"
    with closing(LocalRunner(job_to_observe(script), CLUSTER, run_dir=runs)) as runner:
        seen = observe_script(
            script, runner.run_for_job, folder=runs, announce=lambda sentence: None
        )
    assert seen is not None
    return seen


def test_a_line_for_the_shell_shows_the_rank_below_it(tmp_path: Path) -> None:
    seen = observe(
        tmp_path,
        "N=8; export OMP_NUM_THREADS=1 TAG=b; nohup nice -n 3 python -W ignore train.py "
        "--bs $N > log 2>&1 | tee copy",
    )
    observation = seen.script.observation
    assert observation is not None
    assert observation.words == ("train.py", "--bs", "8")
    assert (observation.ranks, observation.threads, observation.why_as_it_stands) == (1, 1, "")
    assert observation.variables == {"OMP_NUM_THREADS": "1", "TAG": "b"}
    assert seen.facts["batch"][0] == 8
    assert (tmp_path / "log").exists()


@pytest.mark.slow
def test_a_launcher_in_a_shell_script_in_another_folder_shows_its_ranks(tmp_path: Path) -> None:
    (tmp_path / "job.sh").write_text(
        "cd below\ncat > notes <<X\nprepared\nX\npython -c 'print(1)'\n"
        'torchrun --standalone --nproc_per_node 2 ../train.py --bs 4 "$@"\n'
    )
    (tmp_path / "below").mkdir()
    seen = observe(tmp_path, "bash job.sh --bs 2")
    observation = seen.script.observation
    assert observation is not None
    assert observation.words == ("../train.py", "--bs", "4", "--bs", "2")
    assert (observation.ranks, observation.why_as_it_stands) == (2, "")
    assert observation.folder == str(tmp_path / "below")


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments", [pytest.param("", marks=pytest.mark.long), "--bs 16 --accum 2"]
)
def test_the_arguments_of_a_program_given_as_a_string_are_proven(
    tmp_path: Path, arguments: str
) -> None:
    (tmp_path / "train.py").write_text(SPLIT)
    code = "import runpy; runpy.run_path('train.py', run_name='__main__')"
    script = Script(f"{sys.executable} -c {shlex.quote(code)} {arguments}".strip(), cwd=tmp_path)
    run = RunFolder.named(tmp_path, "run")
    job = job_of_script(script, CLUSTER, run, address=None, announce=lambda sentence: None)
    assert (job.frame.micro_batch, job.frame.accumulation) == (16, 2)
    assert {"micro_batch", "gradient_accumulation"} <= {*job.placeholders}
    assert job.as_it_stands


def of_train(
    folder: Path, command: str, announced: list[str], program: str
) -> tuple[ScriptJob, int]:
    """Return the job of a command of `train.py`, and its launches."""
    (folder / "train.py").write_text(program)
    script, run = Script(command, cwd=folder), RunFolder.named(folder, "run")
    announce = announced.append
    with closing(ThisNode()) as node:
        job = job_of_script(script, CLUSTER, run, address=None, announce=announce, node=node)
        runner = node.runner(job, CLUSTER, run_dir=run.path, announce=announce)
        # What starts whole commands imports nothing for ranks.
        assert not (job.as_it_stands and runner.node.server.to_import)
    return job, len(list((run.path / "probes").iterdir()))


@pytest.mark.slow
def test_todays_training_is_told_after_the_first_start(tmp_path: Path) -> None:
    announced: list[str] = []
    job, launches = of_train(tmp_path, "python train.py", announced, SPLIT)
    assert launches > 1
    first = [line.partition(":")[0] for line in announced]
    told = first.index("today")
    assert first[told : told + 2] == ["today", "length"]
    assert told < next(n for n, line in enumerate(announced) if "what its arguments do" in line)
    assert first.count("today") == 1
    assert [line for line in announced if line.startswith("proven: micro-batch and accumulation")]
    assert {"micro_batch", "gradient_accumulation"} <= {*job.placeholders}


WITHOUT_ARGUMENTS = TRAIN.replace("--bs", "--width").replace("a.bs", "a.width")


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("python train.py", 1),
        pytest.param("SEED=3 python train.py --width 8", 1, marks=pytest.mark.long),
        pytest.param("OMP_NUM_THREADS=1 python train.py", 2, marks=pytest.mark.long),
        pytest.param("echo prepared > a && python train.py", 2, marks=pytest.mark.slow),
        pytest.param("python train.py | tee log", 2, marks=pytest.mark.long),
    ],
)
def test_a_program_of_which_nothing_can_be_set_is_started_once(
    tmp_path: Path, command: str, expected: int
) -> None:
    """A line that does more than start it, or sets threads itself, is not run for each probe."""
    announced: list[str] = []
    job, launches = of_train(tmp_path, command, announced, WITHOUT_ARGUMENTS)
    assert (launches, job.as_it_stands) == (expected, expected == 1)
    assert not [line for line in announced if "what its arguments do" in line]
    if expected == 1:
        assert not [line for line in announced if "importing" in line]
        assert NOTHING_TO_SET in announced[-1]
        assert job.frame.threads >= 1  # they can be searched


@pytest.mark.slow
def test_ranks_that_a_script_starts_itself_are_seen(tmp_path: Path) -> None:
    with reserved_port() as port:
        seen = observe(tmp_path, f"python train.py {port} --batch-size 4", SPAWN)
    observation = seen.script.observation
    assert observation is not None
    assert observation.ranks == 2
    assert "multiprocessing" in observation.why_as_it_stands
    # The words and arguments are those of the program that starts them.
    assert observation.words == ("train.py", str(port), "--batch-size", "4")
    assert seen.facts["arguments"]["batch_size"]["value"] == 4


@pytest.mark.parametrize(
    ("command", "program", "words"),
    [
        (
            "python train.py",
            "import nothing_of_that_name",
            "No module named 'nothing_of_that_name'",
        ),
        ("python gone.py", TRAIN, "can't open file"),
        ("no-such-launcher train.py", TRAIN, "no-such-launcher: command not found"),
        ("echo trained", TRAIN, "without an optimizer step"),
        ("python train.py", "input('go on? ')", "EOF when reading a line"),
        ("python train.py --bs x", TRAIN, "invalid int value"),
        ("python -c 'import os; os.kill(os.getpid(), 9)'", TRAIN, "killed by signal 9"),
    ],
)
def test_a_command_that_does_not_train_is_told_at_once(
    tmp_path: Path, command: str, program: str, words: str
) -> None:
    began = time.monotonic()
    with pytest.raises(InputError) as error:
        observe(tmp_path, command, program)
    assert words in str(error.value)
    assert "\n" not in str(error.value)
    assert time.monotonic() - began < 120  # not as long as a first step may take


@pytest.mark.slow
def test_a_script_alone_that_looks_for_a_rank_is_left_to_a_launcher(tmp_path: Path) -> None:
    grouped = TRAIN.replace('"WORLD_SIZE" in os.environ', "True")
    with pytest.raises(AssertionError):
        observe(tmp_path, "python train.py", grouped)
    with pytest.raises(InputError, match="needs a launcher"):
        observe(tmp_path, "nice python train.py", grouped)


#: As pytorch/examples' word_language_model updates its parameters.
BY_HAND = """
import itertools, torch
net = torch.nn.Linear(8, 8)
for i in itertools.count():
    net.zero_grad()
    net(torch.randn(4, 8)).square().mean().backward()
    for p in net.parameters():
        p.data.add_(p.grad, alpha=-0.01)
"""
#: 600 backward passes before the first step, and evaluations with gradients in between.
LONG = """
import torch
net, other = torch.nn.Linear(8, 8), torch.nn.Linear(2, 2)
o = torch.optim.SGD(net.parameters(), 0.1)
for i in range(10**9):
    other.zero_grad()
    other(torch.randn(2, 2)).sum().backward()
    net(torch.randn(4, 8)).square().mean().backward()
    if (i + 1) % 600 == 0:
        o.step()
        o.zero_grad()
"""


def test_a_loop_that_updates_its_parameters_by_hand_is_told_what_to_call(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"ran \d+ backward passes and no optimizer.step\(\)"
    ) as error:
        observe(tmp_path, "python train.py", BY_HAND)
    assert "joulefront_hook.step()" in str(error.value)


@pytest.mark.slow
def test_a_long_accumulation_is_no_update_by_hand(tmp_path: Path) -> None:
    assert observe(tmp_path, "python train.py", LONG).facts["groups"][1]["passes"] == 1200


FISHER = """
import sys, torch
net = torch.nn.Linear(8, 8)
o = torch.optim.SGD(net.parameters(), 0.1)
for i in range(10**9):
    net.zero_grad()
    net(torch.randn(4, 8)).square().mean().backward()
    if i >= 50:
        o.step()
"""


@pytest.mark.slow
def test_gradients_that_are_taken_before_the_training_are_no_updates(tmp_path: Path) -> None:
    assert observe(tmp_path, "python train.py", FISHER).facts["groups"][0]["passes"] == 51


@pytest.mark.parametrize(
    "reset",
    [
        pytest.param("net.zero_grad(set_to_none=False)", marks=pytest.mark.slow),
        pytest.param("net.zero_grad()", marks=pytest.mark.long),
    ],
)
def test_updates_by_hand_are_told_however_gradients_are_cleared(tmp_path: Path, reset: str) -> None:
    program = FISHER.replace("net.zero_grad()", reset).replace("o = torch.optim", "o = None\n#")
    program = program.replace("if i >= 50:", "for p in net.parameters():")
    program = program.replace("o.step()", "p.data.add_(p.grad, alpha=-1e-3)")
    with pytest.raises(InputError, match=r"ran 3 backward passes and no optimizer\.step"):
        observe(tmp_path, "python train.py", program)
