"""clocks.sh against a fake nvidia-smi: what it sets, and that the earlier settings come back."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from tests.support.commands import finished, write_program
from tests.support.sysfs import make_sysfs, settings_of
from tests.waiting import wait_until
from tuner.deploy.launch_files import clocks_sh
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.workload.node.clocks.cpu import CpuGovernor

#: Keeps each GPU's state in a file, as nvidia-smi would in the driver. Without persistence mode the
#: driver forgets all but what the GPU is when its last client, nvidia-smi itself, ends.
FAKE = f"""#!{sys.executable}
import os, pathlib, sys
here = pathlib.Path(os.environ["FAKE_SMI"])
words = sys.argv[1:]
if "--query-gpu=index" in words:
    print("\\n".join(sorted(p.name for p in here.glob("[0-9]*"))))
    sys.exit()
gpu = here / words[words.index("-i") + 1]
state = dict(line.split("=") for line in gpu.read_text().splitlines())
FIELDS = {{"power.limit": "pl", "persistence_mode": "pm", "clocks.sm": "sm"}}
for word in words:
    if word.startswith("--query-gpu="):
        print(state[FIELDS[word.partition("=")[2]]])
        sys.exit()
refused = (here / "refuse").read_text() if (here / "refuse").exists() else ""
if refused and refused in words:
    print("Insufficient Permissions", file=sys.stderr)
    sys.exit(4)
for word, value in zip(words, [*words[1:], ""]):
    if word in ("-lgc", "-lmc", "-pl") and "stuck" not in state:
        state[word[1:]] = value
    if word in ("-rgc", "-rmc"):
        state[{{"-rgc": "lgc", "-rmc": "lmc"}}[word]] = "none"
    if word == "-pm":
        state["pm"] = "Enabled" if value == "1" else "Disabled"
if state["pm"] == "Disabled" and "held" not in state:
    state |= {{"lgc": "none", "lmc": "none", "pl": "400.00"}}
gpu.write_text("".join(f"{{k}}={{v}}\\n" for k, v in state.items()))
with (here / "log").open("a") as log:
    log.write(" ".join(words) + "\\n")
"""

#: The long-term power limit of the cores' package.
CAP = "class/powercap/intel-rapl:0/constraint_0_power_limit_uw"
EARLIER = {"lgc": "none", "lmc": "none", "pl": "400.00", "pm": "Enabled", "sm": "1410"}


class Machine:
    """GPUs behind the fake, and clocks.sh of one configuration."""

    def __init__(self, folder: Path, configuration: Configuration, gpus: int = 2) -> None:
        self.state = folder / "state"
        self.state.mkdir()
        for number in range(gpus):
            text = "\n".join(f"{name}={value}" for name, value in EARLIER.items())
            (self.state / str(number)).write_text(text)
        write_program(folder / "nvidia-smi", FAKE)
        self.script = write_program(folder / "clocks.sh", clocks_sh(configuration, gpus))
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("CUDA_", "SLURM_"))}
        path = f"{folder}{os.pathsep}{os.environ['PATH']}"
        self.env = {**kept, "FAKE_SMI": str(self.state), "PATH": path}

    def is_at(self, gpu: int, **values: str) -> None:
        """Let a GPU be in another state before the script starts."""
        text = "\n".join(f"{name}={value}" for name, value in (EARLIER | values).items())
        (self.state / str(gpu)).write_text(text)

    def gpu(self, number: int) -> dict[str, str]:
        lines = (self.state / str(number)).read_text().splitlines()
        return dict(line.split("=") for line in lines)

    def start(self, *command: str, **more: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["bash", str(self.script), *command],
            env={**self.env, **more},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            # Under nohup it is ignored, and a shell cannot trap a signal that was ignored before.
            preexec_fn=partial(signal.signal, signal.SIGHUP, signal.SIG_DFL),
        )

    def run(self, *command: str, **more: str) -> subprocess.CompletedProcess[str]:
        process = self.start(*command, **more)
        out, error = process.communicate(timeout=60)
        return subprocess.CompletedProcess(command, process.returncode, out, error)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path, Configuration.of(data_parallel=2, clock_MHz=1200, power_limit_W=250))


def show(machine: Machine) -> tuple[str, ...]:
    return ("cat", str(machine.state / "0"), str(machine.state / "1"))


def test_the_command_runs_under_the_settings_and_they_go_back(machine: Machine) -> None:
    done = machine.run(*show(machine))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("lgc=1200,1200") == 2
    assert done.stdout.count("pl=250") == 2
    assert machine.gpu(0) == machine.gpu(1) == EARLIER


@pytest.mark.parametrize("killed", [False, True])
def test_a_limit_that_another_sets_meanwhile_stays(machine: Machine, killed: bool) -> None:
    """A site caps its GPUs in an emergency: the end of a training does not lift the cap."""
    mark = machine.state / "mark"
    smi = machine.script.parent / "nvidia-smi"
    process = machine.start("bash", "-c", f"{smi} -i 1 -pl 200; touch {mark}; sleep {20 * killed}")
    wait_until(mark.exists)
    if killed:
        os.killpg(process.pid, signal.SIGKILL)
    _, error = process.communicate(timeout=60)
    wait_until(lambda: machine.gpu(0) == EARLIER)
    wait_until(lambda: machine.gpu(1) == EARLIER | {"pl": "200"})
    said = "clocks.sh: GPU 1 keeps a power limit of 200 W, which another has set"
    assert killed or said in error


def test_the_commands_exit_code_is_its_own(machine: Machine) -> None:
    assert machine.run("bash", "-c", "exit 7").returncode == 7
    assert machine.gpu(0) == EARLIER


def test_gpus_without_persistence_mode_keep_their_settings(machine: Machine) -> None:
    """One of two forgets its lock and limit as soon as nvidia-smi ends."""
    machine.is_at(1, pm="Disabled")
    done = machine.run(*show(machine))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("lgc=1200,1200") == 2
    assert done.stdout.count("pl=250") == 2
    assert (machine.gpu(0), machine.gpu(1)) == (EARLIER, EARLIER | {"pm": "Disabled"})
    assert "-i 0 -pm" not in (machine.state / "log").read_text()


def test_the_guard_turns_persistence_mode_off_again(machine: Machine) -> None:
    machine.is_at(0, pm="Disabled")
    mark = machine.state / "mark"
    process = machine.start("bash", "-c", f"touch {mark}; exec sleep 20")
    wait_until(mark.exists)
    assert machine.gpu(0)["pm"] == "Enabled"
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(timeout=60)
    wait_until(lambda: machine.gpu(0) == EARLIER | {"pm": "Disabled"})


def test_persistence_mode_that_may_not_be_set_stops_no_job(machine: Machine) -> None:
    """A sudoers rule of the site permits clocks and limits alone, and a daemon holds the GPUs."""
    machine.is_at(0, pm="Disabled", held="yes")
    (machine.state / "refuse").write_text("-pm")
    done = machine.run(*show(machine))
    assert done.returncode == 0
    assert "clocks.sh" not in done.stderr
    assert done.stdout.count("lgc=1200,1200") == 2
    assert machine.gpu(0) == EARLIER | {"pm": "Disabled", "held": "yes"}


def test_nothing_is_read_back_once_the_script_was_killed(machine: Machine) -> None:
    """The guard has restored by then, so that every clock would be above its lock."""
    mark, error = machine.state / "mark", machine.state / "error"
    process = subprocess.Popen(
        ["bash", str(machine.script), "bash", "-c", f"touch {mark}; sleep 2"],
        env={**machine.env, "READ_BACK_S": "20"},  # longer than it takes to kill the script
        stderr=error.open("w"),
        start_new_session=True,
    )
    wait_until(mark.exists)
    process.kill()
    process.wait(timeout=60)
    wait_until(lambda: machine.gpu(0) == machine.gpu(1) == EARLIER)
    wait_until(lambda: not _left(machine.script))
    assert error.read_text() == ""


def _left(script: Path) -> list[str]:
    """Return the processes that still run a script."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode().split("\0")
        except OSError:
            continue
        if str(script) in words[:3]:
            found.append(path.parent.name)
    return found


def test_settings_that_are_not_in_force_are_said_while_it_trains(
    machine: Machine,
) -> None:
    """The command waits for the sentences: its settings are read back while it runs."""
    machine.is_at(1, stuck="yes")
    error = machine.state / "error"
    waits = f"until grep -q 'power limit' {error}; do sleep 0.1; done"
    process = subprocess.Popen(
        ["bash", str(machine.script), "bash", "-c", waits],
        env={**machine.env, "READ_BACK_S": "0.2"},
        stderr=error.open("w"),
        start_new_session=True,
    )
    assert process.wait(timeout=60) == 0
    said = error.read_text().splitlines()
    assert "clocks.sh: GPU 1 runs at 1410 MHz, above its lock at 1200 MHz" in said
    assert "clocks.sh: GPU 1 has a power limit of 400.00 W, not 250 W" in said


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_command_and_they_go_back(machine: Machine, how: int) -> None:
    mark = machine.state / "mark"
    process = machine.start("bash", "-c", f"touch {mark}; exec sleep 60")
    wait_until(mark.exists)
    assert machine.gpu(0)["lgc"] == "1200,1200"
    process.send_signal(how)
    assert process.wait(timeout=60) == 143
    assert machine.gpu(0) == machine.gpu(1) == EARLIER


def test_a_killed_script_is_put_back_by_its_guard(machine: Machine) -> None:
    mark = machine.state / "mark"
    process = machine.start("bash", "-c", f"touch {mark}; exec sleep 20")
    wait_until(mark.exists)
    os.killpg(process.pid, signal.SIGKILL)  # the command with it: the guard is in another session
    process.wait(timeout=60)
    wait_until(lambda: machine.gpu(0) == machine.gpu(1) == EARLIER)


def test_the_guard_does_not_wait_for_the_command(machine: Machine) -> None:
    """The script alone is killed; the command does not hold the pipe that the guard reads."""
    mark = machine.state / "mark"
    process = machine.start("bash", "-c", f"echo $$ > {mark}; exec sleep 60")
    try:
        wait_until(lambda: mark.exists() and mark.read_text().strip())
        process.kill()
        process.wait(timeout=60)
        wait_until(lambda: machine.gpu(0) == machine.gpu(1) == EARLIER)
        os.kill(int(mark.read_text()), 0)  # it still runs
    finally:
        os.killpg(process.pid, signal.SIGKILL)


def test_a_refusal_starts_nothing_and_says_what_to_do(machine: Machine) -> None:
    (machine.state / "refuse").write_text("-lgc")
    done = machine.run("touch", str(machine.state / "mark"))
    assert done.returncode == 3
    assert "SUDO=sudo" in done.stderr
    assert not (machine.state / "mark").exists()
    assert machine.gpu(0) == EARLIER


def test_an_earlier_lock_can_be_named(machine: Machine) -> None:
    assert machine.run("true", EARLIER_CLOCKS_MHZ="210,1005").returncode == 0
    assert machine.gpu(0)["lgc"] == "210,1005"


def test_one_clock_a_stage_goes_to_the_stages_gpus(tmp_path: Path) -> None:
    configuration = Configuration.of(
        data_parallel=2, pipeline_parallel=2, clock_MHz=(1410, 1200), memory_clock_MHz=1593
    )
    machine = Machine(tmp_path, configuration, gpus=4)
    done = machine.run("bash", "-c", f"cat {machine.state}/[0-3]")
    assert [line for line in done.stdout.split() if line.startswith("lgc")] == [
        "lgc=1410,1410",
        "lgc=1410,1410",
        "lgc=1200,1200",
        "lgc=1200,1200",
    ]
    assert done.stdout.count("lmc=1593,1593") == 4
    assert all(machine.gpu(number) == EARLIER for number in range(4))


def test_only_the_visible_gpus_are_touched(machine: Machine) -> None:
    configuration = Configuration.of(clock_MHz=1200)
    machine.script.write_text(clocks_sh(configuration, 1))
    assert machine.run("true", CUDA_VISIBLE_DEVICES="1").returncode == 0
    log = (machine.state / "log").read_text()
    assert "-i 1 -lgc 1200,1200" in log
    assert "-i 0" not in log


def test_without_live_settings_it_is_the_command_alone(tmp_path: Path) -> None:
    machine = Machine(tmp_path, Configuration.of(data_parallel=2))
    assert machine.run("echo", "trained").stdout == "trained\n"
    assert not (machine.state / "log").exists()


def test_too_few_gpus_are_said(machine: Machine) -> None:
    done = machine.run("true", CUDA_VISIBLE_DEVICES="0")
    assert done.returncode == 2
    assert "1 GPUs are visible and the job has 2 ranks" in done.stderr


class TestCores:
    """The script of a machine without GPUs, on a made-up sysfs."""

    def run(
        self, root: Path, *command: str, sudo: str = "", **live: int
    ) -> subprocess.CompletedProcess[str]:
        script = root.parent / "clocks.sh"
        script.write_text(clocks_sh(Configuration.of(data_parallel=2, **live), 2, cores=True))
        env = {**os.environ, "SYSFS": str(root), "SUDO": sudo}
        return finished(["bash", str(script), *command], env=env, timeout=60)

    def test_sets_what_the_governor_sets_and_restores_it(self, tmp_path: Path) -> None:
        root, other = make_sysfs(tmp_path / "sys"), make_sysfs(tmp_path / "other")
        before = settings_of(root)
        copy = ("cp", "-r", str(root), str(tmp_path / "during"))
        for live in ({"clock_MHz": 900}, {"power_limit_W": 17}):
            done = self.run(root, *copy, **live)
            assert done.returncode == 0, done.stderr
            governor = CpuGovernor(other, cpus=range(4), guarded=False)
            governor.apply(Settings(live))
            assert settings_of(tmp_path / "during") == settings_of(other)
            governor.close()
            shutil.rmtree(tmp_path / "during")
            assert settings_of(root) == before

    @pytest.mark.parametrize(
        ("live", "file", "number"),
        [
            ({"clock_MHz": 900}, "devices/system/cpu/cpufreq/policy1/scaling_max_freq", 2_000_000),
            ({"clock_MHz": 900}, "devices/system/cpu/cpufreq/policy1/scaling_max_freq", 800_000),
            ({"power_limit_W": 17}, CAP, 14_000_000),
        ],
    )
    def test_what_another_has_written_stays(
        self, tmp_path: Path, live: dict[str, int], file: str, number: int
    ) -> None:
        root = make_sysfs(tmp_path / "sys")
        before = settings_of(root)
        done = self.run(root, "bash", "-c", f"echo {number} > {root / file}", **live)
        said = f"clocks.sh: {root / file} stays at {number}, which another process has written\n"
        assert (done.returncode, done.stderr) == (0, said)
        assert settings_of(root) == before | {file: str(number)}

    def test_what_the_kernel_rounds_is_put_back(self, tmp_path: Path) -> None:
        """RAPL's unit is an eighth of a watt."""
        root = make_sysfs(tmp_path / "sys")
        before = settings_of(root)
        done = self.run(root, "bash", "-c", f"echo 16875000 > {root / CAP}", power_limit_W=17)
        assert (done.returncode, done.stderr) == (0, "")
        assert settings_of(root) == before

    def test_a_value_that_is_not_taken_starts_nothing(self, tmp_path: Path) -> None:
        """A file that reads back as it was, whatever is written, as a locked power cap does."""
        root = make_sysfs(tmp_path / "sys")
        before = settings_of(root)
        takes_none = write_program(tmp_path / "sudo", "#!/bin/sh\nexec cat\n")
        script = tmp_path / "clocks.sh"
        done = self.run(root, "echo", "started", power_limit_W=17, sudo=str(takes_none))
        assert (done.returncode, done.stdout) == (3, "")
        assert f"{script.name}: write" in done.stderr
        assert "nothing is started" in done.stderr
        assert settings_of(root) == before

    def test_a_machine_without_such_files_starts_nothing(self, tmp_path: Path) -> None:
        (tmp_path / "sys").mkdir()
        done = self.run(tmp_path / "sys", "echo", "started", power_limit_W=17)
        assert (done.returncode, done.stdout) == (3, "")
        assert "nothing is started" in done.stderr
