"""The scripts for Slurm under a real one: its daemons in a folder, two nodes on this machine.

`docs/tune.sbatch` runs unmodified. What it starts, Ray and the study, are commands that write down
how they are called, because two nodes of one machine share /tmp and an address. The `job.sbatch`
that `tuner apply` writes trains for real, on both nodes.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.deploy.test_slurm import FAKES, SCRIPT, calls, write_fakes
from tests.support.commands import finished
from tests.support.scripts import CPU as CORES
from tests.waiting import wait_until
from tuner.deploy.launch_files import write_launch_files
from tuner.workload.scripts.command import Script
from tuner.workload.scripts.inspection import blank_job
from tuner.workload.scripts.script_facts import ScriptFacts

pytestmark = [
    pytest.mark.slow,
    pytest.mark.root,
    pytest.mark.needs("slurm"),
]
#: The second node's name sorts after this machine's, whose own is the one that resolves.
HOST = socket.gethostname().partition(".")[0]
NODES = (HOST, f"{HOST}-second")
CPU = replace(CORES, devices_per_node=1, nodes=2)

CORES_HERE = len(os.sched_getaffinity(0))

#: Trains for two steps, and tells how many ranks met.
TRAIN = """
import os, torch
torch.distributed.init_process_group("gloo")
total = torch.ones(1)
torch.distributed.all_reduce(total)
cores = len(os.sched_getaffinity(0))
print("met", int(total), "on", os.environ["SLURMD_NODENAME"], "with", cores, flush=True)
torch.distributed.destroy_process_group()
"""


def configuration(folder: Path) -> str:
    port = iter(_free_ports(4))
    lines = [
        "ClusterName=joulefront",
        f"SlurmctldHost={HOST}(127.0.0.1)",
        f"SlurmctldPort={next(port)}",
        f"SlurmdPort={next(port)}",
        "SlurmUser=root",
        "SlurmdUser=root",
        "AuthType=auth/munge",
        f"AuthInfo=socket={folder}/munge.socket",
        f"StateSaveLocation={folder}/state",
        f"SlurmdSpoolDir={folder}/spool-%n",
        f"SlurmctldPidFile={folder}/slurmctld.pid",
        f"SlurmdPidFile={folder}/slurmd-%n.pid",
        "ProctrackType=proctrack/linuxproc",
        # A task is bound to one core unless it asks for more, as on many sites.
        "TaskPlugin=task/affinity",
        "TaskPluginParam=autobind=threads",
        "SwitchType=switch/none",
        "MpiDefault=none",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_CPU",
        "GresTypes=gpu",
        "SlurmdParameters=config_overrides",
        *(
            f"NodeName={name} NodeHostname={HOST} NodeAddr=127.0.0.1 Port={next(port)} "
            f"CPUs={CORES_HERE} RealMemory=1000 Gres=gpu:8"
            for name in NODES
        ),
        f"PartitionName=all Nodes={','.join(NODES)} Default=YES MaxTime=INFINITE State=UP",
    ]
    return "\n".join(lines) + "\n"


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment in which commands reach a Slurm of two nodes."""
    folder = tmp_path_factory.mktemp("slurm")
    (folder / "state").mkdir()
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o600)
    (folder / "slurm.conf").write_text(configuration(folder))
    for number in range(8):
        (folder / f"gpu{number}").touch()  # Slurm counts GPUs by their files
    (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-7]\n")
    (folder / "cgroup.conf").write_text("CgroupAutomount=no\n")
    environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
    munge = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "log", "seed")]
    commands = [
        ["munged", "--foreground", "--force", *munge, f"--socket={folder}/munge.socket"],
        ["slurmctld", "-D", "-c"],
        *(["slurmd", "-D", "-c", "-N", name] for name in NODES),
    ]
    started = []
    with (folder / "log").open("w") as log:
        for command in commands:
            started.append(
                subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
            )
            if command[0] == "munged":
                wait_until((folder / "munge.socket").exists)

    def idle() -> bool:
        asked = ["sinfo", "--noheader", "--Node", "--format=%T"]
        told = finished(asked, env=environment)
        return told.stdout.split() == ["idle"] * 2

    try:
        try:
            wait_until(idle, said=folder / "log")
        except AssertionError as error:  # a container without its own host name, say
            pytest.skip(f"Slurm does not start here: {str(error)[-300:]}")
        yield environment
    finally:
        for process in reversed(started):
            process.terminate()
        for process in reversed(started):
            process.wait(timeout=20)


def submit(slurm: dict[str, str], *words: str, **more: str) -> str:
    done = finished(["sbatch", "--parsable", *words], env=slurm | more)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def is_over(slurm: dict[str, str], job: str) -> bool:
    told = finished(["squeue", "--noheader", "--jobs", job, "--format=%T"], env=slurm)
    return told.stdout.strip() in ("", "COMPLETED", "CANCELLED", "FAILED")


@pytest.fixture
def fakes(tmp_path: Path) -> dict[str, str]:
    """Commands in place of Ray and the study, which write down how they are called."""
    found = {name: body for name, body in FAKES.items() if name not in ("scontrol", "srun")}
    found["ray"] = 'grep Cpus_allowed: /proc/self/status >> "$CALLS"; ' + found["ray"]
    return write_fakes(tmp_path, found, RAY_WAIT_S="0.3")


def test_tune_sbatch_starts_ray_on_both_nodes(
    slurm: dict[str, str], fakes: dict[str, str], tmp_path: Path
) -> None:
    out = f"--output={tmp_path / 'out'}"
    words = ("--nodes=2", out, str(SCRIPT), "opt-125m", "--max-probes", "3")
    job = submit(slurm, *words, **fakes)
    wait_until(lambda: is_over(slurm, job), 120)
    made = calls(fakes)
    head = [call for call in made if call.startswith("ray start") and " --head " in call]
    port = 20000 + int(job) % 10000
    files = f"/tmp/ray-{job}-0"
    assert head == [
        f"ray start --temp-dir={files}/r --head --node-ip-address=10.0.0.7 --port={port} "
        "--include-dashboard=false --block"
    ], (tmp_path / "out").read_text()
    assert f"ray start --temp-dir={files}/r --address=10.0.0.7:{port} --block" in made
    assert made.count(f"mkdir -m 700 {files}") == 2
    study = f"tuner optimize --ray 10.0.0.7:{port} --name tune opt-125m --max-probes 3"
    assert study in made
    assert made.count(f"rm -rf {files}") == 2
    masks = [call.split()[1] for call in made if call.startswith("Cpus_allowed:")]
    masks = [mask.replace(",", "") for mask in masks]
    assert {int(mask, 16).bit_count() for mask in masks} == {CORES_HERE}


def test_scancel_interrupts_the_study(
    slurm: dict[str, str], fakes: dict[str, str], tmp_path: Path
) -> None:
    out = f"--output={tmp_path / 'out'}"
    job = submit(slurm, "--nodes=2", out, str(SCRIPT), **(fakes | {"TUNER_WAITS": "1"}))
    wait_until(lambda: "waits" in calls(fakes), 120)
    subprocess.run(["scancel", job], env=slurm, check=True)
    wait_until(lambda: is_over(slurm, job), 120)
    assert "interrupted" in calls(fakes)


def test_job_sbatch_trains_on_both_nodes(
    slurm: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    blank = blank_job(Script("train.py", cwd=tmp_path), CPU, nodes=2)
    frame = ScriptFacts("torch", micro_batch=4, accumulation=1)
    job = replace(blank, global_batch=8, steps=2, frame=frame)
    folder = tmp_path / "best"
    write_launch_files((job.baseline, job, CPU), folder)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    number = submit(slurm, f"--output={tmp_path / 'out'}", str(folder / "job.sbatch"), PATH=path)
    wait_until(lambda: is_over(slurm, number), 200)
    told = (tmp_path / "out").read_text()
    assert {line for line in told.splitlines() if line.startswith("met")} == {
        f"met 2 on {name} with {CORES_HERE}" for name in NODES
    }, told
