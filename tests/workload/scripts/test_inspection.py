"""What a user is told of a command that was started once and did not train."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.results import failed
from tuner.search_spaces.errors import InputError
from tuner.workload.scripts.command import Script
from tuner.workload.scripts.evidence import explained_exit, last_words
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


STARS = "*" * 41
OMP = "Setting OMP_NUM_THREADS environment variable for each process to be 1 in default, to avoid"
#: Lines of a launcher that starts several ranks, above those of the program.
BANNERS = {
    "torchrun": "".join(
        f"W1130 03:57:38.880000 27740 torch/distributed/run.py:874] {line}\n"
        for line in ("", STARS, OMP, STARS)
    ),
    "torchrun of 2.2": "".join(
        f"[2024-02-05 10:00:00,123] torch.distributed.run: [WARNING] {line}\n"
        for line in ("", STARS, OMP, STARS)
    ),
    "torchrun of 1.13": f"WARNING:torch.distributed.run:\n{STARS}\n{OMP}\n{STARS}\n",
    "deepspeed": "[2026-11-28 13:21:30,1] [WARNING] [runner.py:212:fetch_hostfile] no hostfile\n"
    "[2026-11-28 13:21:32,5] [INFO] [launch.py:145:main] WORLD INFO DICT: {'localhost': [0, 1]}\n",
}
SIGTERM = (
    "W1130 13:21:31 21862 torch/distributed/elastic/multiprocessing/api.py:900] Sending process 7 "
    "closing signal SIGTERM\n"
)


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


@pytest.mark.parametrize("banner", BANNERS.values(), ids=list(BANNERS))
@pytest.mark.parametrize("after", ["", SIGTERM, SIGTERM + TORCHRUN, DEEPSPEED])
def test_what_a_launcher_writes_first_hides_no_words_of_the_program(
    banner: str, after: str
) -> None:
    assert last_words(f"{banner}loading\nneeds 2 GPUs. Exiting.\n{after}") == (
        "needs 2 GPUs. Exiting."
    )
    assert last_words(f"loading\n{banner}{after}") == "loading"
    assert last_words(f"{banner}{after}") == ""


def test_a_warning_of_the_programs_own_is_not_a_launchers() -> None:
    for line in (
        "WARNING:root:no data",
        "W1130 no data",
        "[2026-11-28 13:21:30,1] [WARNING] [data.py:7:read] no data",
        "Setting OMP_NUM_THREADS to 4 failed",
    ):
        assert last_words(f"loading\n{line}\n") == line


def test_an_error_of_the_hooks_own_is_not_told_as_the_scripts() -> None:
    said = sentence("hook", "AttributeError: 'Sharded' object has no attribute 'param_groups'", "")
    assert said == (
        "joulefront's own hook, not the script 'train', failed before its first optimizer step: "
        "AttributeError: 'Sharded' object has no attribute 'param_groups'; please report it"
    )


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


BASH_TIME = "\nreal\t0m0.013s\nuser\t0m0.001s\nsys\t0m0.002s\n"
POSIX_TIME = "real 0.01\nuser 0.00\nsys 0,00\n"
GNU_TIME = """Command exited with non-zero status 127
0.00user 0.00system 0:00.00elapsed 63%CPU (0avgtext+0avgdata 1136maxresident)k
0inputs+0outputs (0major+37minor)pagefaults 0swaps
"""
GNU_TIME_V = """Command exited with non-zero status 127
\tCommand being timed: "numactl -N0 python train.py"
\tUser time (seconds): 0.00
\tSystem time (seconds): 0.00
\tPercent of CPU this job got: 66%
\tElapsed (wall clock) time (h:mm:ss or m:ss): 0:00.00
\tAverage shared text size (kbytes): 0
\tAverage unshared data size (kbytes): 0
\tAverage stack size (kbytes): 0
\tAverage total size (kbytes): 0
\tMaximum resident set size (kbytes): 1136
\tAverage resident set size (kbytes): 0
\tMajor (requiring I/O) page faults: 0
\tMinor (reclaiming a frame) page faults: 37
\tVoluntary context switches: 1
\tInvoluntary context switches: 0
\tSwaps: 0
\tFile system inputs: 0
\tFile system outputs: 0
\tSocket messages sent: 0
\tSocket messages received: 0
\tSignals delivered: 0
\tPage size (bytes): 4096
\tExit status: 127
"""
ZSH_TIME = "python train.py  0.01s user 0.00s system 95% cpu 0.012 total\n"
TIMES = [BASH_TIME, POSIX_TIME, GNU_TIME, GNU_TIME_V, ZSH_TIME]

#: Lines by which programs say that another one is not there.
NOT_FOUND = [
    "bash: line 1: numactl: command not found",
    "/var/spool/slurm/job7/slurm_script: line 12: numactl: command not found",
    "bash: numactl: command not found...",  # Fedora's, which looks for a package
    "./train.sh: line 3: ./numactl: No such file or directory",
    "bash: line 1: ./train.py: cannot execute: required file not found",
    "bash: line 1: exec: numactl: not found",
    "sh: 1: numactl: not found",
    "sh: numactl: not found",  # busybox
    "zsh:1: command not found: numactl",
    "zsh:1: no such file or directory: ./numactl",
    "fish: Unknown command: numactl",
    "Command 'numactl' not found, but can be installed with:",  # Ubuntu's
    "env: \u2018numactl\u2019: No such file or directory",
    "/usr/bin/env: 'python': No such file or directory",
    "xargs: numactl: No such file or directory",
    "sudo: numactl: command not found",
    "slurmstepd: error: execve(): numactl: No such file or directory",
    "time: cannot run numactl: No such file or directory",
    "nohup: failed to run command 'numactl': No such file or directory",
    "taskset: failed to execute numactl: No such file or directory",
    'docker: exec: "numactl": executable file not found in $PATH: unknown.',
]
NOT_EXECUTED = [
    "bash: line 1: ./train.sh: Permission denied",
    "bash: line 1: /tmp: Is a directory",
    "bash: ./train.sh: /bin/bsh: bad interpreter: No such file or directory",
    "bash: line 1: ./train: cannot execute binary file: Exec format error",
    "sh: 1: ./train.sh: Permission denied",
    "zsh:1: permission denied: ./train.sh",
    "env: \u2018./train.sh\u2019: Permission denied",
    "nohup: failed to run command './train.sh': Permission denied",
    "bash: /usr/bin/python: Argument list too long",
]


@pytest.mark.parametrize("after", ["", *TIMES], ids=range(1 + len(TIMES)))
@pytest.mark.parametrize("line", NOT_FOUND)
def test_a_program_that_is_not_there_is_named(line: str, after: str) -> None:
    log = f"loading data\nWARNING: cache not found, starting fresh\n{line}\n{after}"
    said = f'a program of the command was not found (exit code 127): "{line}"'
    assert explained_exit(127, log) == said


@pytest.mark.parametrize("line", NOT_EXECUTED)
def test_a_program_that_cannot_be_executed_is_named(line: str) -> None:
    said = f'a program of the command could not be executed (exit code 126): "{line}"'
    assert explained_exit(126, f"loading\n{line}\n{BASH_TIME}") == said


def test_a_missing_library_is_no_missing_program() -> None:
    line = (
        "python: error while loading shared libraries: libx.so.1: cannot open shared object file: "
        "No such file or directory"
    )
    said = f'a program of the command could not be loaded (exit code 127): "{line}"'
    assert explained_exit(127, line) == said


def test_the_last_line_that_says_so_counts() -> None:
    log = "sh: 1: module: not found\nsh: 1: numactl: not found\nsh: 1: done: yes\n"
    assert explained_exit(127, log).endswith('"sh: 1: numactl: not found"')


#: Lines that say no such thing, after which the program ended with 127 by itself.
OTHERS = [
    "WARNING: checkpoint.pt not found, starting fresh",
    "FileNotFoundError: [Errno 2] No such file or directory",
    "bash: Zeile 1: numactl: Kommando nicht gefunden.",
    "HTTP 404: page not found at /v1",
    "",
]


@pytest.mark.parametrize("line", OTHERS)
def test_without_such_a_line_the_code_alone_is_explained(line: str) -> None:
    said = "the command ended with exit code 127, which shells use if a program was not found"
    assert explained_exit(127, f"{line}\n{BASH_TIME}") == said


@pytest.mark.parametrize("code", [0, 1, 2, 125, 128, -9, 255])
def test_other_codes_are_not_those_of_shells(code: int) -> None:
    assert explained_exit(code, NOT_FOUND[0]) == ""


STARTERS = ["dash -c", "bash -c", "zsh -c", "busybox sh -c", "env", "nohup", "taskset 1", "nice"]
STARTERS += ["timeout 9", "setsid", "stdbuf -o0", "echo | xargs", "time", "/usr/bin/time", "ionice"]


@pytest.mark.parametrize("starter", STARTERS)
def test_programs_of_this_machine_say_so(starter: str, tmp_path: Path) -> None:
    program = starter.replace("echo | ", "").split()[0]
    if program != "time" and shutil.which(program) is None:
        pytest.skip(f"no {program} here")
    plain = tmp_path / "plain"
    plain.write_text("no program\n")
    for missing, code, outcome in (
        ("surely-not-here", 127, "was not found"),
        (str(plain), 126, "could not be executed"),
    ):
        done = subprocess.run(
            ["bash", "-c", f"{starter} {missing}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
        )
        assert done.returncode == code
        said = explained_exit(code, done.stdout)
        assert said.startswith(f"a program of the command {outcome} (exit code {code}): ")
        assert missing in said


@pytest.mark.parametrize("after", TIMES, ids=range(len(TIMES)))
def test_what_time_reports_are_nobodys_last_words(after: str) -> None:
    assert last_words(f"loading\nno data: /d\n\n{after}") == "no data: /d"


@pytest.mark.parametrize("line", ["user 7 of 9 is unknown", "real data is missing", "sys.exit: 3"])
def test_words_like_those_of_time_are_the_programs(line: str) -> None:
    assert last_words(f"loading\n{line}\n{BASH_TIME}") == line


def test_a_failed_launch_names_the_program_once() -> None:
    log = f"numactl: No such file or directory\n{BASH_TIME}"
    record = failed("inspection", "crash", explained_exit(127, log), log)
    with pytest.raises(InputError) as refused:
        require_steps(Script("time numactl python train.py"), record, Path())
    said = str(refused.value)
    assert said.count('"numactl: No such file or directory"') == 1
    assert 'a program of the command was not found (exit code 127): "numactl: No' in said
    assert "0m0.002s" not in said
