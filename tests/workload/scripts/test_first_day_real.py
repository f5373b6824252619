"""Mistakes of a first day: each gets its sentence, before anything is searched."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from textwrap import dedent

import pytest

from tuner.cli.main import main
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.errors import InputError
from tuner.workload.node.platforms import detect_cluster
from tuner.workload.node.runner import LocalRunner
from tuner.workload.records.probe import ProbeRequest, WindowPolicy
from tuner.workload.scripts.command import Script
from tuner.workload.scripts.inspection import blank_job, inspect_script
from tuner.workload.scripts.script_job import ScriptJob

CLUSTER = replace(detect_cluster(), devices_per_node=1)
pytestmark = [pytest.mark.real, pytest.mark.usefixtures("one_fork_server")]

HEAD = """
import argparse, torch
from torch.utils.data import DataLoader, TensorDataset
p = argparse.ArgumentParser()
p.add_argument("--batch-size", type=int, default=8)
p.add_argument("--max-steps", type=int, default=40)
args = p.parse_args()
data = TensorDataset(torch.rand(4000, 4))
net = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.001)
def train(batches):
    for step, x in enumerate(batches):
        net(x[0] if isinstance(x, list) else x).square().mean().backward()
        optimizer.step()
        if step + 1 >= args.max_steps:
            break
"""
PLAIN = "train(DataLoader(data, args.batch_size))"


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalRunner]:
    folder = tmp_path_factory.mktemp("runs")
    (folder / "train.py").touch()
    blank = blank_job(Script("train.py", cwd=folder), CLUSTER)
    with closing(LocalRunner(blank, CLUSTER, run_dir=folder / "run")) as made:
        yield made


def look(runner: LocalRunner, folder: Path, body: str, words: str = "", **told: int) -> ScriptJob:
    (folder / "train.py").write_text(HEAD + dedent(body))
    script = Script(f"train.py {words}".strip(), cwd=folder, **told)
    blank = blank_job(script, CLUSTER)
    return inspect_script(
        script, blank, runner.run_for_job, cluster=CLUSTER, folder=runner.node.run_dir
    )


@pytest.mark.parametrize(
    ("body", "words", "told", "sentence"),
    [
        (
            PLAIN,
            "",
            {"global_batch": 64},
            "--global-batch is 64, but the script 'train' trains 1 x 8",
        ),
        (PLAIN, "--bs {micro_batch=8}", {}, "unrecognized arguments: --bs 8"),
        (PLAIN, "--batch-size {micro_batch=16}", {}, None),  # as the command says
        (
            "import torch.multiprocessing as mp\nmp.spawn(train, nprocs=2)",
            *("", {}, "starts its own ranks"),
        ),
        (
            "import multiprocessing\n"
            "mp = multiprocessing.get_context('fork')\n"  # else from Python 3.14 on: forkserver
            "batches = [torch.rand(8, 4)] * 40\n"
            "ranks = [mp.Process(target=train, args=(batches,)) for _ in range(2)]\n"
            "[each.start() for each in ranks]\n[each.join() for each in ranks]",
            *("", {}, "the script trains in processes that it starts itself"),
        ),
    ],
)
def test_a_contradiction_is_refused(
    runner: LocalRunner,
    tmp_path: Path,
    body: str,
    words: str,
    told: dict[str, int],
    sentence: str | None,
) -> None:
    if sentence is None:
        assert look(runner, tmp_path, body, words, **told).frame.micro_batch == 16
        return
    with pytest.raises(InputError) as refused:
        look(runner, tmp_path, body, words, **told)
    assert str(refused.value).count(sentence) == 1


#: Trains two steps, of which the second is followed by a statement.
TWO_STEPS = "args.max_steps = 2\ntrain(DataLoader(data, args.batch_size))\n"
FULL = "raise OSError(errno.ENOSPC, 'No space left on device')"


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("raise SystemExit('no data')", "before its first optimizer step: crash: rank 0 ended"),
        ("import no_such_module", "before its first optimizer step: crash: ModuleNotFoundError"),
        (f"import errno\n{FULL}", "before its first optimizer step: no space left: OSError"),
        (
            f"import errno\nargs.max_steps = 1\n{PLAIN}\n{FULL}",
            "after 1 optimizer step: no space left: OSError: [Errno 28]",
        ),
        (
            f"import errno\n{TWO_STEPS}{FULL}",
            "after 2 optimizer steps: no space left: OSError: [Errno 28]",
        ),
        (
            f"{TWO_STEPS}torch.save(net.state_dict(), open('/dev/full', 'wb'))",
            "after 2 optimizer steps: no space left: OSError",
        ),
        (
            "print('usage')",
            "was started once, and the program ended by itself without an optimizer step",
        ),
        (
            "raise PermissionError(13, 'Permission denied', '/data')",
            "before its first optimizer step: crash: PermissionError: [Errno 13]",
        ),
        (f"{TWO_STEPS}import os\nos.kill(os.getpid(), 9)", "crash: rank 0 was killed by signal 9"),
        (f"{TWO_STEPS}raise MemoryError('2 GiB')", "after 2 optimizer steps: out of memory: "),
        (f"{TWO_STEPS}import os\nos.kill(os.getpid(), 7)", "crash: rank 0 was killed by signal 7"),
        (
            f"{TWO_STEPS}raise RuntimeError('DataLoader worker (pid 9) is killed by signal: Bus "
            "error. Workers are out of shared memory.')",
            "after 2 optimizer steps: crash: RuntimeError: DataLoader worker (pid 9) is killed",
        ),
    ],
)
def test_a_failing_script_is_told_its_steps_and_the_kind_of_failure(
    runner: LocalRunner, tmp_path: Path, body: str, sentence: str
) -> None:
    with pytest.raises(InputError) as refused:
        look(runner, tmp_path, body)
    assert sentence in str(refused.value)


def test_a_script_that_ends_by_itself_after_two_steps_is_a_job(
    runner: LocalRunner, tmp_path: Path
) -> None:
    assert look(runner, tmp_path, TWO_STEPS).frame.kind == "torch"


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (
            "train(torch.rand(6, 4) for _ in range(99))",
            "no loader of torch was seen; inputs are 6 x 4",
        ),
        (
            "sizes = [[*range(n)] for n in (7, 3, 9, 5, 6)] * 9\n"
            "train(DataLoader(data, batch_sampler=sizes))",
            "batches hold 3 to 9 samples",
        ),
    ],
)
def test_what_cannot_be_counted_is_unknown_and_nothing_rests_on_it(
    runner: LocalRunner, tmp_path: Path, body: str, sentence: str
) -> None:
    job = look(runner, tmp_path, body)
    assert (job.global_batch, job.frame.micro_batch) == (0, 0)
    assert any(sentence in note for note in job.assumed)
    assert not any(offer.turned for offer in job.offers.values())


def test_a_child_that_trains_beside_the_script_is_not_counted(
    runner: LocalRunner, tmp_path: Path
) -> None:
    beside = (
        "import multiprocessing\nmp = multiprocessing.get_context('fork')\n"
        "def follow():\n    train([torch.rand(3, 4)] * 40)\n"
        "for step, (x,) in enumerate(DataLoader(data, args.batch_size)):\n"
        "    net(x).square().mean().backward()\n    optimizer.step()\n"
        "    if step == 0:\n"
        "        child = mp.Process(target=follow)\n        child.start()\n        child.join()\n"
    )
    assert look(runner, tmp_path, beside).frame.micro_batch == 8


def test_without_a_launcher_a_script_has_no_rank(runner: LocalRunner, tmp_path: Path) -> None:
    body = (
        "import os\n"
        "told = [name for name in os.environ if name.endswith(('RANK', 'WORLD_SIZE'))]\n"
        "assert 'RANK' not in os.environ and not told, told\n" + PLAIN
    )
    job = look(runner, tmp_path, body)
    assert job.frame.micro_batch == 8
    assert job.needs_hook  # launch.sh starts it by torchrun
    alone = job.start(job.baseline, tmp_path / "alone").options
    more = {**job.baseline.launch, "data_parallel": 2, "micro_batch": 4}
    assert alone["bare"]
    assert "bare" not in job.start(Configuration.of(more), tmp_path / "two").options


def test_the_length_of_a_plain_loop_is_unknown_until_the_user_states_it(
    runner: LocalRunner, tmp_path: Path
) -> None:
    job = look(runner, tmp_path, PLAIN)
    assert job.steps is None
    assert "per optimizer step (--steps N gives the total)" in job.today_facts().lines[1]
    assert look(runner, tmp_path, PLAIN, steps=41).steps == 41


def test_a_script_that_ends_too_early_is_told_how_many_steps_it_needs(
    runner: LocalRunner, tmp_path: Path
) -> None:
    job = look(runner, tmp_path, PLAIN, "--max-steps 30")
    runner.set_job(job)
    policy = WindowPolicy(min_s=2.0, max_s=4.0)
    request = ProbeRequest("first", job.baseline.launch, window=policy, time_limit_s=60.0)
    failure = runner.run(request).failure
    assert failure is not None
    assert failure.kind == "ended"  # which ends the search
    assert "ended by itself after" in failure.message
    needed = re.search(r"give it at least ([\d,]+) steps", failure.message)
    assert needed is not None
    assert int(needed[1].replace(",", "")) > 30


def test_no_steps_are_no_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").touch()
    command = ["optimize", "--steps", "0", "--runs-dir", str(tmp_path), "--"]
    assert main([*command, str(tmp_path / "train.py")]) == 2
    assert "steps" in capsys.readouterr().err
