"""`tuner run -- COMMAND`: the command behaves as without tuner, and its receipt is right."""

from __future__ import annotations

import json
import os
import pty
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.receipt.conftest import HELD_TRAIN, TRAIN, UserFolder
from tests.support.commands import finished, write_program
from tests.waiting import is_running, wait_until
from tuner.receipt.measure import WRITE_S

PYTHON = sys.executable


def wait_for(path: Path) -> None:
    wait_until(lambda: path.exists() and path.stat().st_size, 60, path.name)


# ---- a training, and its figures


def test_a_training_is_counted_and_its_output_is_its_own(user: UserFolder) -> None:
    (user.path / "timed.py").write_text(f"{TRAIN}print(ends_s[-1] - ends_s[0])\n")
    done = user.measure(PYTHON, "timed.py", "40", "0.02")
    trained, took_s = done.out.splitlines()
    assert (done.code, trained) == (0, "trained")
    receipt = done.receipt
    assert receipt["state"] == "ended"
    assert receipt["exit_code"] == 0
    (training,) = receipt["trainings"]
    assert training["steps"] == receipt["steps"] == 40
    assert training["samples"] == 39 * 8
    assert training["step_time_s"] == pytest.approx(float(took_s) / 39, rel=0.3)
    assert training["step_energy_J"] == pytest.approx(training["energy_J"] / 39)
    assert training["sample_energy_J"] == pytest.approx(training["energy_J"] / 312)
    until = receipt["until_first_step"]
    assert 0 < until["time_s"] < receipt["time_s"]
    assert 0 <= until["energy_J"] < receipt["energy_J"]
    assert receipt["mean_power_W"] == pytest.approx(receipt["energy_J"] / receipt["time_s"])
    assert "a step" in done.err
    assert "a sample" in done.err
    assert str(user.file) in done.err


def test_nothing_is_written_into_the_users_folder(user: UserFolder) -> None:
    before = sorted(user.path.iterdir())
    user.measure(PYTHON, "-B", "train.py", "2")
    assert sorted(user.path.iterdir()) == sorted([*before, user.file])


def test_without_out_the_receipt_is_in_the_folder_of_the_runs(user: UserFolder) -> None:
    words = [PYTHON, "-m", "tuner.cli", "run", "--runs-dir", "elsewhere", "--", "true"]
    subprocess.run(words, cwd=user.path, env=user.environment, check=True, capture_output=True)
    (file,) = (user.path / "elsewhere" / "receipts").glob("*/energy.json")
    assert json.loads(file.read_text())["state"] == "ended"


def test_samples_a_step_may_be_given(user: UserFolder) -> None:
    done = user.measure(PYTHON, "train.py", "5", options=("--samples", "100"))
    assert done.receipt["trainings"][0]["samples"] == 400


def test_with_json_standard_output_is_the_receipt(user: UserFolder) -> None:
    done = user.measure(PYTHON, "train.py", "3", options=("--json",))
    assert json.loads(done.out)["steps"] == 3
    assert "trained\n" in done.err


EVALUATIONS = {
    "without gradients": "torch.grad = False; next(iter(evaluation)); torch.grad = True",
    "to its end": "[batch for batch in evaluation]",  # transformers' Trainer does so
}


@pytest.mark.parametrize("evaluation", EVALUATIONS.values(), ids=EVALUATIONS.keys())
def test_evaluation_draws_no_samples_of_the_training(user: UserFolder, evaluation: str) -> None:
    (user.path / "eval.py").write_text(
        "import torch\nLoader = torch._BaseDataLoaderIter\n"
        "optimizer, loader, evaluation = torch.Optimizer(), Loader([8, 8, 8]), Loader([64, 64])\n"
        "for _ in range(2):\n    next(loader); optimizer.step()\n"
        f"{evaluation}\n"
        "next(loader); optimizer.step()\n"
    )
    assert user.measure(PYTHON, "eval.py").receipt["trainings"][0]["samples"] == 16


def test_batches_of_an_accumulation_and_of_a_look_ahead_count(user: UserFolder) -> None:
    (user.path / "ahead.py").write_text(
        "import torch\noptimizer = torch.Optimizer()\n"
        "for epoch in range(2):\n"
        "    loader = torch._BaseDataLoaderIter([4] * 6)\n"
        "    ahead = next(loader)\n"
        "    while ahead:\n"
        "        batch, ahead = ahead, next(loader, None)\n"
        "        if ahead: ahead = next(loader, None)\n"
        "        optimizer.step()\n"
    )
    (training,) = user.measure(PYTHON, "ahead.py").receipt["trainings"]
    assert training["samples"] == 2 * 24 - 12  # the first step came after three batches


def test_one_training_of_two_ranks_is_one(user: UserFolder) -> None:
    line = " & ".join(f"RANK={rank} WORLD_SIZE=2 {PYTHON} train.py 6 0.05" for rank in (0, 1))
    done = user.measure("bash", "-c", f"{line} & wait")
    (training,) = done.receipt["trainings"]
    assert (training["ranks"], training["world"], training["steps"]) == (2, 2, 6)
    assert training["samples"] == 2 * 5 * 8


def test_ranks_on_other_nodes_are_named_as_such(user: UserFolder) -> None:
    env = {"RANK": "0", "WORLD_SIZE": "2"}
    done = user.measure(PYTHON, "train.py", "3", env=env, options=("--samples", "16"))
    assert done.note("Not all ranks were seen on this node")
    assert done.receipt["trainings"][0]["samples"] == 16  # half of 2 steps of 16


def test_trainings_one_after_the_other_stand_apart(user: UserFolder) -> None:
    done = user.measure("bash", "-c", f"{PYTHON} train.py 5 && {PYTHON} train.py 7")
    assert [each["steps"] for each in done.receipt["trainings"]] == [5, 7]
    assert done.receipt["steps"] == 12
    assert "12 in 2 trainings" in done.err
    assert not done.note("at the same time")


def test_trainings_at_the_same_time_share_their_energy(user: UserFolder) -> None:
    (user.path / "meets.py").write_text(
        "import pathlib, sys, time, torch\n"
        "own, other = map(pathlib.Path, sys.argv[1:])\n"
        "optimizer = torch.Optimizer()\noptimizer.step()\nown.touch()\n"
        "while not other.exists():\n    time.sleep(0.01)\n"
        "optimizer.step()\n"
    )
    done = user.measure("bash", "-c", f"{PYTHON} meets.py a b & {PYTHON} meets.py b a; wait")
    assert len(done.receipt["trainings"]) == 2
    assert done.note("at the same time")


def test_a_second_optimizer_counts_only_after_the_first(user: UserFolder) -> None:
    (user.path / "two.py").write_text(
        "import torch\na, b = torch.Optimizer(), torch.Optimizer()\n"
        "for _ in range(3):\n    a.step(); b.step()\n"
        "del a\n"
        "for _ in range(4):\n    b.step()\n"
    )
    assert user.measure(PYTHON, "two.py").receipt["steps"] == 7


def test_a_program_that_looks_for_modules_before_it_imports_them(user: UserFolder) -> None:
    (user.path / "looks.py").write_text(
        "import importlib.util\nimport sys\n"
        "assert importlib.util.find_spec('torch.optim.optimizer') is not None\n"
        "for name in [name for name in sys.modules if name.startswith('torch')]:\n"
        "    del sys.modules[name]\n"
        "import torch\ntorch.Optimizer().step()\n"
    )
    assert user.measure(PYTHON, "looks.py").receipt["steps"] == 1


def test_a_program_counts_its_own_steps(user: UserFolder) -> None:
    (user.path / "own.py").write_text(
        "import joulefront_hook\nfor _ in range(4):\n    joulefront_hook.step()\n"
    )
    assert user.measure(PYTHON, "own.py").receipt["steps"] == 4


def test_a_fork_that_trains_counts_for_itself(user: UserFolder) -> None:
    (user.path / "forks.py").write_text(
        "import os, torch\noptimizer = torch.Optimizer()\noptimizer.step(); optimizer.step()\n"
        "if os.fork() == 0:\n    [optimizer.step() for _ in range(5)]; os._exit(0)\n"
        "os.wait(); optimizer.step()\n"
    )
    trainings = user.measure(PYTHON, "forks.py").receipt["trainings"]
    assert sorted(each["steps"] for each in trainings) == [3, 5]


def test_a_program_that_closes_every_file_keeps_its_own(user: UserFolder) -> None:
    (user.path / "closes.py").write_text(
        "import os, torch\noptimizer = torch.Optimizer()\noptimizer.step()\n"
        "os.closerange(3, 100)\n"
        "files = [open(f'checkpoint{n}', 'w+') for n in range(20)]\n"
        "optimizer.step()\n"
        "print(sum(os.path.getsize(f'checkpoint{n}') for n in range(20)))\n"
    )
    done = user.measure(PYTHON, "closes.py")
    assert (done.out, done.receipt["steps"]) == ("0\n", 1)


def test_counts_that_are_removed_meanwhile_end_nothing(user: UserFolder) -> None:
    # A signal lets tuner look at the counts and write the file.
    counted = "kill -USR1 $PPID; until grep -q '\"steps\": 60' energy.json; do sleep 0.05; done"
    line = f"trap : USR1; {PYTHON} train.py 60; {counted}; rm -r $JOULEFRONT_ATTACH"
    done = user.measure("bash", "-c", f"{line}; kill -USR1 $PPID; sleep 0.3; exit 4")
    assert (done.code, done.receipt["steps"]) == (4, 60)


# ---- commands that train nothing that is seen


def test_a_command_without_python_has_energy_and_time(user: UserFolder) -> None:
    began_s = time.monotonic()
    done = user.measure("sleep", "1")
    assert 1.0 < done.receipt["time_s"] < time.monotonic() - began_s
    assert done.receipt["energy_J"] > 0
    assert done.receipt["trainings"] == []
    assert done.note("No optimizer step was seen")


def test_a_command_beside_others_has_an_energy_of_its_own(user: UserFolder) -> None:
    burn = "import time\nwhile time.process_time() < 0.8: pass"
    others = [subprocess.Popen([PYTHON, "-c", "while True: pass"]) for _ in range(1)]
    try:
        receipt = user.measure(PYTHON, "-c", burn).receipt
    finally:
        for other in others:
            other.kill()
            other.wait()
    if receipt["meter"]["name"] != "estimated":
        pytest.skip("what a core draws alone is known of the estimate only")
    cores = len(os.sched_getaffinity(0))
    assert receipt["core_share"] < 1 / 1.5
    assert receipt["own_energy_J"] == pytest.approx((2 * cores + 6) * 0.8, rel=0.25)


def test_an_isolated_python_is_not_seen_and_runs(user: UserFolder) -> None:
    done = user.measure(PYTHON, "-I", "-c", "print(2)")
    assert (done.code, done.out) == (0, "2\n")
    assert done.note("No optimizer step was seen")


def test_the_exit_code_is_the_commands(user: UserFolder) -> None:
    done = user.measure("sh", "-c", "exit 255")
    assert done.code == done.receipt["exit_code"] == 255


def test_a_crash_is_the_commands_own(user: UserFolder) -> None:
    done = user.measure(PYTHON, "-c", "import torch; torch.Optimizer().step(); 1 / 0")
    assert done.code == 1
    assert "ZeroDivisionError" in done.err
    assert done.receipt["steps"] == 1


@pytest.mark.parametrize("name", ["SIGKILL", "SIGINT"])
def test_a_command_that_a_signal_ends_ends_tuner_so(user: UserFolder, name: str) -> None:
    number = getattr(signal, name)
    done = user.measure("sh", "-c", f"kill -{int(number)} $$; sleep 5")
    assert done.code == -number
    assert done.receipt["signal"] == number
    assert f"ended by {name}" in done.err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("nowhere",), "there is no command 'nowhere'"),
        (("lib",), "lib is a folder"),
        (("./train.py",), "./train.py may not be executed; start it as: -- python ./train.py"),
    ],
)
def test_what_cannot_be_started_is_one_sentence(
    user: UserFolder, words: tuple[str, ...], sentence: str
) -> None:
    done = user.measure(*words)
    assert done.code == 2
    assert done.err.count("\n") == 1
    assert sentence in done.err
    assert not user.file.exists()


@pytest.mark.parametrize("out", [["--out", "energy.json"], []])
def test_a_command_that_the_system_refuses_leaves_no_file(user: UserFolder, out: list[str]) -> None:
    before = sorted(user.path.iterdir())
    text = (
        "import sys; from tuner.cli.main import main; "
        f"sys.exit(main(['run', *{out}, '--', 'true', 'x' * 200_000]))"
    )
    done = finished([PYTHON, "-c", text], cwd=user.path, env=user.environment)
    assert done.returncode == 2
    assert "true cannot be started: Argument list too long" in done.stderr
    assert [path for path in sorted(user.path.iterdir()) if path.name != "runs"] == before
    assert not list(user.path.rglob("energy.json"))


def test_a_line_in_quotes_is_a_shells(user: UserFolder) -> None:
    assert user.measure("cd / && pwd | tr / x").out == "x\n"


def test_a_script_without_an_interpreter_line_is_a_shells(user: UserFolder) -> None:
    write_program(user.path / "plain", "echo plain $1\n")
    assert user.measure("./plain", "words").out == "plain words\n"


def test_another_file_is_not_overwritten(user: UserFolder) -> None:
    user.file.write_text("my results")
    process = user.start("true")
    assert "holds no receipt" in process.communicate(timeout=60)[1]
    assert (process.returncode, user.file.read_text()) == (2, "my results")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--point", "1"), "name the run"),
        (("--samples", "0"), "a number above 0"),
        (("--tune",), "--out is for a command that is only measured"),
        (("--meter", "nowhere:Meter"), "cannot be imported"),
    ],
)
def test_options_of_something_else_are_one_sentence(
    user: UserFolder, options: tuple[str, ...], sentence: str
) -> None:
    done = user.measure("true", options=options)
    assert (done.code, done.receipt) == (2, {})
    assert sentence in done.err


# ---- streams and files


def test_standard_input_is_the_commands(user: UserFolder) -> None:
    process = user.start("cat", stdin=subprocess.PIPE)
    assert process.communicate("typed\n", timeout=60)[0] == "typed\n"


def test_open_files_are_handed_down(user: UserFolder) -> None:
    line = " ".join([*user.command("cat"), "<(echo handed down)"])
    done = finished(["bash", "-c", line], cwd=user.path, env=user.environment)
    assert done.stdout == "handed down\n"


def test_a_closed_pipe_ends_the_command_as_without_tuner(user: UserFolder) -> None:
    line = f"{' '.join(user.command('yes'))} | head -1; echo ${{PIPESTATUS[0]}}"
    done = finished(["bash", "-c", line], cwd=user.path, env=user.environment)
    assert done.stdout == f"y\n{128 + signal.SIGPIPE}\n"
    assert user.read()["signal"] == signal.SIGPIPE


#: What becomes of a command's streams: redirections, and what reads its output.
STREAMS = {
    "no reader of output": ("", "| true"),
    "no reader of errors": ("2>&1 >/dev/null", "| true"),
    "no reader": ("2>&1", "| true"),
    "no output": (">&-", ""),
    "no errors": ("2>&-", ""),
    "nothing open": ("<&- >&- 2>&-", ""),
    "output full": (">/dev/full", ""),
    "errors full": ("2>/dev/full", ""),
    "both full": (">/dev/full 2>&1", ""),
    "output full and no errors": (">/dev/full 2>&-", ""),
}
#: Other ends than exit code 3, and the exit codes that a shell gives them.
ENDS = {"exit 0": 0, "kill -9 $$": 137, "kill -15 $$": 143}


@pytest.mark.parametrize(
    ("streams", "end", "code", "options"),
    [
        *((streams, "exit 3", 3, ()) for streams in STREAMS),
        *((streams, "exit 3", 3, ("--json",)) for streams in STREAMS if streams != "no errors"),
        *((streams, *end, ()) for streams in ("no reader", "both full") for end in ENDS.items()),
    ],
)
def test_no_stream_changes_an_exit_code(
    user: UserFolder, streams: str, end: str, code: int, options: tuple[str, ...]
) -> None:
    env = {k: v for k, v in user.environment.items() if k != "PYTHONUNBUFFERED"}
    to, reader = STREAMS[streams]
    # The command outlives `true`, so that the receipt has no reader.
    outlives = "sleep 0.2; " if reader else ""
    words = shlex.join(user.command("sh", "-c", outlives + end, options=options))
    line = f"(exec 2>said; {words} {to}; echo $? >code) {reader}"
    subprocess.run(["bash", "-c", line], cwd=user.path, env=env, stdout=subprocess.DEVNULL)
    assert (user.path / "code").read_text() == f"{code}\n"
    said = (user.path / "said").read_text()
    assert "Traceback" not in said
    assert "Exception ignored" not in said
    assert user.read()["state"] == "ended"


def test_a_receipt_that_cannot_be_printed_is_said_to_be_in_its_file(user: UserFolder) -> None:
    words = shlex.join(user.command("sh", "-c", "exit 3", options=("--json",)))
    done = finished(["bash", "-c", f"{words} >/dev/full"], cwd=user.path, env=user.environment)
    assert done.returncode == 3
    assert "tuner: the output cannot be written: No space left on device" in done.stderr
    assert f"the receipt is in {user.file}" in done.stderr


@pytest.mark.parametrize("closed", [0, 1, 2])
def test_a_closed_stream_is_closed_for_the_command_and_no_other_file(
    user: UserFolder, closed: int
) -> None:
    text = f"try: os.fstat({closed})\nexcept OSError: sys.exit(7)"
    words = shlex.join(user.command(PYTHON, "-c", f"import os, sys\n{text}"))
    done = subprocess.run(
        ["bash", "-c", f"{words} {closed}>&-"], cwd=user.path, env=user.environment
    )
    assert done.returncode == 7


def test_standard_output_is_the_very_one_so_that_nothing_holds_up_a_fast_printer(
    user: UserFolder,
) -> None:
    process = user.start("readlink", "/proc/self/fd/1")
    pipe = os.fstat(process.stdout.fileno()).st_ino
    assert process.communicate(timeout=60)[0] == f"pipe:[{pipe}]\n"


def on_terminal(words: list[str], user: UserFolder, send: bytes = b"", after: Path | None = None):
    """Run words on a terminal of their own; return exit code or minus the signal, and output."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(user.path)
        os.execvpe(words[0], words, user.environment)
    if after is not None:
        wait_for(after)
    os.write(terminal, send)
    output = b""
    try:
        while chunk := os.read(terminal, 4096):
            output += chunk
    except OSError:
        pass  # the terminal is closed
    os.close(terminal)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), output.decode()


def test_a_terminal_is_a_terminal(user: UserFolder) -> None:
    text = "import os; print([os.isatty(n) for n in range(3)], os.tcgetpgrp(0) == os.getpgrp())"
    code, output = on_terminal(user.command(PYTHON, "-c", text), user)
    assert code == 0
    assert "[True, True, True] True" in output


HANDLES = """
import pathlib, signal, sys, time
seen = []
signal.signal(signal.SIGINT, lambda *_: seen.append("int"))
signal.signal(signal.SIGTERM, lambda *_: seen.append("term"))
pathlib.Path("ready").write_text("1")
until = time.monotonic() + 20
while not seen and time.monotonic() < until:
    time.sleep(0.01)
time.sleep(0.5)
print("got", seen)
"""


def test_ctrl_c_reaches_the_command_once(user: UserFolder) -> None:
    words = user.command(PYTHON, "-c", HANDLES)
    code, output = on_terminal(words, user, b"\x03", after=user.path / "ready")
    assert code == 0
    assert "got ['int']" in output
    assert "Receipt of" in output


def test_ctrl_c_ends_a_loop_of_a_shell(user: UserFolder) -> None:
    one = " ".join(user.command("sh", "-c", "'echo x >ready; exec sleep 20'"))
    line = f"for n in 1 2 3; do {one}; done; echo went on"
    code, output = on_terminal(["bash", "-c", line], user, b"\x03", after=user.path / "ready")
    assert code in (-signal.SIGINT, 130)
    assert "went on" not in output
    assert user.read()["signal"] == signal.SIGINT


def test_a_late_process_of_the_group_sends_the_command_no_signal_twice(user: UserFolder) -> None:
    """On a busy machine the one that tells what the group received has its turn after seconds."""
    process = user.start(PYTHON, "-c", HANDLES, start_new_session=True)
    wait_for(user.path / "ready")
    own = Path(f"/proc/{process.pid}/cmdline").read_bytes()
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    (late,) = (pid for pid in children if Path(f"/proc/{pid}/cmdline").read_bytes() == own)
    os.kill(int(late), signal.SIGSTOP)
    os.killpg(process.pid, signal.SIGTERM)
    time.sleep(0.3)
    os.kill(int(late), signal.SIGCONT)
    assert process.communicate(timeout=60)[0] == "got ['term']\n"


@pytest.mark.parametrize(
    ("whole_group", "name", "word"),
    [(False, "SIGTERM", "term"), (True, "SIGTERM", "term"), (False, "SIGINT", "int")],
)
def test_a_signal_reaches_the_command_once(
    user: UserFolder, whole_group: bool, name: str, word: str
) -> None:
    process = user.start(PYTHON, "-c", HANDLES, start_new_session=True)
    wait_for(user.path / "ready")
    (os.killpg if whole_group else os.kill)(process.pid, getattr(signal, name))
    out, err = process.communicate(timeout=60)
    assert out == f"got ['{word}']\n"
    assert "Receipt of" in err


def test_a_signal_that_was_ignored_stays_so(user: UserFolder) -> None:
    ignores = "import signal; print(signal.getsignal(signal.SIGINT) == signal.SIG_IGN)"
    line = f"trap '' INT; exec {' '.join(user.command(PYTHON, '-c', repr(ignores)))}"
    line = line.replace(repr(ignores), f'"{ignores}"')
    done = finished(["bash", "-c", line], cwd=user.path, env=user.environment)
    assert done.stdout == "True\n"


def test_signal_masks_are_those_without_tuner(user: UserFolder) -> None:
    text = "import signal; print(signal.pthread_sigmask(signal.SIG_BLOCK, []))"
    assert user.measure(PYTHON, "-c", text).out == "set()\n"


# ---- killed at any moment


def test_a_command_that_ignores_sigterm_goes_on_and_its_receipt_is_written(
    user: UserFolder,
) -> None:
    line = "trap '' TERM; echo x >ready; until [ -e go ]; do sleep 0.1; done; echo done"
    process = user.start("bash", "-c", line)
    wait_for(user.path / "ready")
    process.send_signal(signal.SIGTERM)
    wait_until(lambda: user.read()["time_s"] > 0)
    during = user.read()
    (user.path / "go").touch()
    out, _ = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "done\n")
    assert during["state"] == "running"
    assert during["time_s"] < WRITE_S  # the signal had it written
    assert user.read()["time_s"] > during["time_s"]


def test_what_was_used_until_tuner_is_killed_is_in_the_file(user: UserFolder) -> None:
    (user.path / "held.py").write_text(HELD_TRAIN)
    process = user.start(PYTHON, "held.py", "60")
    try:
        wait_until(lambda: user.read().get("steps") == 60, said=user.file)
        process.kill()
        process.wait()
        receipt = user.read()
        assert receipt["state"] == "running"
        assert receipt["exit_code"] is None
        assert receipt["time_s"] >= 4.0
        assert receipt["energy_J"] > 0
    finally:
        (user.path / "finish").touch()
        out, _ = process.communicate(timeout=60)  # the training goes on to its end
    assert out == "trained\n"


def test_every_state_of_the_file_is_whole(user: UserFolder) -> None:
    process = user.start(PYTHON, "train.py", "60", "0.02")
    while process.poll() is None:
        if user.file.exists():
            assert json.loads(user.file.read_text())["kind"] == "joulefront receipt"
    process.communicate(timeout=60)


# ---- what a command leaves running


DAEMON = """
import os, sys, time
if os.fork():
    while not os.path.exists("pid"):
        time.sleep(0.01)
    os._exit(0)
os.setsid()
if os.fork():
    os._exit(0)
for n in range(3):
    os.close(n)
with open("own", "w") as file:
    file.write(str(os.getpid()))
os.rename("own", "pid")
time.sleep(300)
"""


def test_a_command_that_daemonises_returns_at_once_and_is_named(user: UserFolder) -> None:
    done = user.measure(PYTHON, "-c", DAEMON)
    pid = int((user.path / "pid").read_text())
    try:
        assert done.code == 0
        assert is_running(pid)
        assert done.note(f"still run: {pid}")
    finally:
        os.kill(pid, signal.SIGKILL)


def test_a_training_in_the_background_of_a_script_is_named_and_goes_on(user: UserFolder) -> None:
    (user.path / "held.py").write_text(HELD_TRAIN)
    line = f"{PYTHON} held.py 15 >log 2>&1 & echo $! >pid"
    done = user.measure("bash", "-c", f"{line}; until [ -s stepped ]; do sleep 0.05; done")
    pid = int((user.path / "pid").read_text())
    assert done.note(f"still run: {pid}")
    assert done.receipt["steps"] == 15
    (user.path / "finish").touch()
    wait_for(user.path / "log")
    assert (user.path / "log").read_text() == "trained\n"


def test_a_background_that_is_waited_for_is_not_named(user: UserFolder) -> None:
    done = user.measure("bash", "-c", f"{PYTHON} train.py 5 & wait")
    assert done.receipt["notes"] == []
    assert done.receipt["steps"] == 5


def test_secrets_of_the_command_are_not_in_the_receipt(user: UserFolder) -> None:
    secret = "hf_" + "x" * 30
    done = user.measure(PYTHON, "train.py", "2", "0.0", "--hub-token", secret)
    assert secret not in done.err
    assert secret not in user.file.read_text()
