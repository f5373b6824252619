"""What a user is told of a command that was started once and did not train."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.results import failed
from tuner.search_spaces.errors import InputError
from tuner.workload.scripts.command import Script
from tuner.workload.scripts.inspection import (
    announce_endless,
    announce_optimizers,
    finite,
    require_steps,
)

TORCHRUN = """E1128 13:21:32 21862 torch/distributed/elastic/multiprocessing/api.py:1002] failed
Traceback (most recent call last):
  File "bin/torchrun", line 8, in <module>
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
train.py FAILED
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
"""
ACCELERATE = """Traceback (most recent call last):
  File "accelerate/commands/launch.py", line 1281, in launch_command
    simple_launcher(args)
    raise subprocess.CalledProcessError(returncode=process.returncode, cmd=cmd)
subprocess.CalledProcessError: Command '['python', 'train.py']' returned non-zero exit status 1.
"""
DEEPSPEED = """[2026-11-28 13:21:32,728] [INFO] [launch.py:325:sigkill_handler] Killing subprocess 7
[2026-11-28 13:21:32,729] [ERROR] [launch.py:331:sigkill_handler] exits with return code = 1
"""
SRUN = "srun: error: node1: task 0: Exited with exit code 1\n"
MAKE = "make: *** [Makefile:2: train] Error 1\n"


def sentence(kind: str, message: str, tail: str) -> str:
    with pytest.raises(InputError) as refused:
        require_steps(
            Script("torchrun train.py"), failed("inspection", kind, message, tail), Path()
        )
    return str(refused.value).partition("; its log is")[0]


@pytest.mark.parametrize("launcher", ["", TORCHRUN, ACCELERATE, DEEPSPEED, SRUN, MAKE, SRUN + MAKE])
def test_the_last_words_are_the_programs_and_not_its_launchers(launcher: str) -> None:
    said = sentence("crash", "rank 0 ended with exit code 1", f"loading\nno data: /d\n{launcher}")
    assert said.endswith('crash: rank 0 ended with exit code 1: "no data: /d"')
    assert sentence("crash", "rank 0 ended with exit code 1", launcher).endswith("exit code 1")


def test_a_refusal_that_the_log_ends_with_is_told_once() -> None:
    refused = "the script starts its own ranks; start them with torchrun"
    said = sentence(
        "refused", refused, f"  raise NotAsRequested\nstate.NotAsRequested: {refused}\n"
    )
    assert said.endswith(f"refused: {refused}")


def test_an_error_that_is_named_needs_no_last_words() -> None:
    said = sentence("crash", "KeyError: 'lost'", f"KeyError: 'lost'\n{TORCHRUN}")
    assert said.endswith("before its first optimizer step: crash: KeyError: 'lost'")


def test_a_program_that_ended_by_itself_is_told_so_once() -> None:
    said = sentence("ended", "the program ended by itself without an optimizer step", "no GPU\n")
    assert said == (
        "'train' was started once, and the program ended by itself without an optimizer step: "
        '"no GPU"'
    )


@pytest.mark.parametrize(
    ("stated", "length"),
    [(500, 500), (10**12, 10**12), (0, None), (-1, None), (10**12 + 1, None), (2**63 - 1, None)],
)
def test_a_number_of_steps_that_is_never_reached_is_no_length(
    stated: int, length: int | None
) -> None:
    assert finite(stated) == length


def test_of_several_optimizers_it_is_told_whose_steps_count() -> None:
    told: list[str] = []
    announce_optimizers({"steps_of": "Adam of 65 parameters"}, told.append)
    assert told == []
    others = {"1": "Adam of 576 parameters", "2": "SGD of 3 parameters"}
    announce_optimizers({"steps_of": "Adam of 65 parameters", "others": others}, told.append)
    assert told == [
        "3 optimizers step: a step is one of Adam of 65 parameters, which stepped first "
        "(the others: Adam of 576 parameters, SGD of 3 parameters)"
    ]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--max_steps -1", "--max_steps -1"),
        ("--max-iters=inf", "--max-iters inf"),
        ("--trainer.max_steps=-1 --trainer.max_epochs 3", "--trainer.max_steps -1"),
        ("trainer.max_steps=0", "trainer.max_steps 0"),
        ("--num_train_steps 1e18", "--num_train_steps 1e18"),
        ("-n_iters 999999999999999", "-n_iters 999999999999999"),
        # Lengths, and what is none.
        ("--max_steps 1000", ""),
        ("--max_steps=1e5", ""),
        ("--max_steps", ""),
        ("--warmup_steps 0 --eval_steps -1 --gradient_accumulation_steps -1", ""),
        ("--max_steps_per_epoch 0 --max_steps auto --max_steps ''", ""),
    ],
)
def test_a_length_without_an_end_is_named_before_anything_is_started(
    words: str, named: str
) -> None:
    said: list[str] = []
    announce_endless(Script(f"python train.py {words}"), said.append)
    if not named:
        assert said == []
        return
    assert len(said) == 1
    assert said[0].startswith(f"{named} names no end: ")
    assert "--steps N" in said[0]
    announce_endless(Script(f"python train.py {words}", steps=10), said.append)
    assert len(said) == 1
