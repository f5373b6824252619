"""The files that start the training job under one configuration, ready to run on this machine.

They start it as a probe did: the same DeepSpeed JSON, the same program, the same environment for
the ranks, but under `torchrun` or the `deepspeed` launcher, alone or under Slurm, and without the
hook. Clocks are set by a script of their own (`tuner.clock_script`), which puts the earlier ones
back. A user's own script is started as it was probed too; the hook goes with it only where the
script cannot be told its settings otherwise. Everything that came from a user is quoted for the
shell.
"""

from __future__ import annotations

import json
import math
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from search_spaces.cluster import Cluster
from search_spaces.configuration import Configuration
from search_spaces.errors import InputError
from search_spaces.job import TrainingJob
from tuner.clock_script import clocks_sh
from tuner.result import Result
from tuner.runs import write_toml
from tuner.wording import knob_text, knobs
from workload.ranks import extensions_dir
from workload.script import ScriptJob

__all__ = ["Launch", "launch_of", "write_launch_files"]

#: What starts: the configuration, the job, and the machines (None: all ranks on this one).
Launch = tuple[Configuration, TrainingJob, Cluster | None]

_RENDEZVOUS_PORT = 29500  # torchrun's default


def launch_of(result: Result, point: str | Configuration = "best") -> Launch:
    """A configuration of a result with its job and cluster, as `result.about` tells them.

    Args:
        result: of a study.
        point: which (`tuner.result.Result.point`).

    Raises:
        InputError: nothing was chosen, or the study was of a recorded table, which has no job.
        UnknownName: there is no such point.
    """
    from tuner.asked import known_cluster, known_job

    if result.best is None and point == "best":
        raise InputError(f"study {result.name!r} chose no configuration, so nothing can be started")
    configuration = result.point(point).configuration
    job = known_job(result.about)
    if job is None:
        raise InputError(
            f"study {result.name!r} names no training job (a recorded table has none), so there "
            "are no files to start it"
        )
    return configuration, job, known_cluster(result.about)


def write_launch_files(
    what: Result | Launch,
    out_dir: Path | str,
    *,
    script: Sequence[str] = (),
    point: str | Configuration = "best",
) -> list[Path]:
    """Write what starts the job, replacing what stood there.

    Writes ds_config.json, job.json, launch.sh (torchrun), launch_deepspeed.sh, job.sbatch (Slurm),
    clocks.sh and clocks.toml (the live settings) and README.txt; for a job that is a user's script,
    and where it needs them, the folder joulefront_hook and options.json.

    Args:
        what: a result, or a configuration with its job and cluster.
        out_dir: the folder, made where it is missing.
        script: the user's own program and its arguments; the built-in one by default. It is given
            `--deepspeed_config ds_config.json` at the end.
        point: of a result, which point is written (`tuner.result.Result.point`).

    Returns:
        The files written.

    Raises:
        InputError: nothing to start (see `launch_of`), or more ranks than the cluster has devices.
        InvalidValue: micro-batch x data parallelism does not divide the global batch.
        UnknownName: the result has no such point.
        OSError: a file cannot be written.
    """
    launch = launch_of(what, point) if isinstance(what, Result) else what
    configuration, job, cluster = launch
    job = job.at(configuration)  # at its own global batch, for the steps it takes there
    launch = configuration, job, cluster
    expected_s = what.point(point).time_interval_s[1] if isinstance(what, Result) else None
    if expected_s is not None and not math.isfinite(expected_s):
        expected_s = None  # nothing that could be asked of Slurm
    folder = Path(out_dir)
    if isinstance(job, ScriptJob):
        program, files = _program_of_script(configuration, job, cluster, folder)
    else:
        program, files = _built_in(launch, script)
    texts = {
        **files,
        "job.json": json.dumps(job.to_json(), indent=2) + "\n",
        "launch.sh": _launch_sh(launch, program, "torchrun"),
        "launch_deepspeed.sh": _launch_sh(launch, program, "deepspeed"),
        "job.sbatch": _sbatch(launch, folder.resolve(), expected_s),
        "clocks.sh": clocks_sh(configuration, configuration.world_size // _nodes_of(launch)),
        "clocks.toml": _clocks_toml(configuration),
        "README.txt": _readme(configuration, job),
    }
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, text in texts.items():
        path = folder / name
        path.write_text(text, encoding="utf-8")
        paths.append(path)
    for name in ("launch.sh", "launch_deepspeed.sh", "clocks.sh"):
        (folder / name).chmod(0o755)
    return paths


def _nodes_of(launch: Launch) -> int:
    configuration, _, cluster = launch
    return _nodes(configuration.world_size, cluster)


def _nodes(world_size: int, cluster: Cluster | None) -> int:
    """The fewest nodes that hold the ranks, the same number on each."""
    if cluster is None:
        return 1
    for nodes in range(1, cluster.nodes + 1):
        if world_size % nodes == 0 and world_size // nodes <= cluster.devices_per_node:
            return nodes
    raise InputError(
        f"the configuration has {world_size} ranks; cluster {cluster.name!r} has {cluster.nodes} "
        f"nodes of {cluster.devices_per_node} devices, and each node must carry as many ranks"
    )


def _one_line(text: str) -> str:
    """Text for a comment: no line break can end it."""
    return " ".join(text.split())


@dataclass(frozen=True)
class _Program:
    """What launch.sh starts.

    Attributes:
        words: the program and its arguments.
        about: comment lines before it.
        folder: where it starts; "" for the folder of launch.sh.
        exports: `NAME=VALUE` words, already quoted.
        steps: it takes `--steps`.
    """

    words: Sequence[str]
    about: Sequence[str]
    folder: str = ""
    exports: Sequence[str] = ()
    steps: bool = False


def _built_in(launch: Launch, script: Sequence[str]) -> tuple[_Program, dict[str, str]]:
    """The built-in program, or one that is given the DeepSpeed JSON, and the files it reads."""
    from workload.agent import training_program
    from workload.deepspeed_config import render_deepspeed_config, training_arguments

    configuration, job, cluster = launch
    rendered = render_deepspeed_config(
        configuration, job, nvme_path=cluster.nvme_path if cluster else ""
    )
    config = json.dumps(rendered, indent=2) + "\n"
    files = {"ds_config.json": config}
    if script:
        about = ["# Your own program. joulefront gives it the DeepSpeed JSON and nothing else."]
        return _Program([*script, "--deepspeed_config", "ds_config.json"], about), files
    words = [str(training_program()), "--job", "job.json", "--deepspeed_config", "ds_config.json"]
    about = [
        "# PUT YOUR OWN PROGRAM HERE: this is joulefront's built-in one (synthetic tokens).",
        "# Yours must read ds_config.json, and heed what DeepSpeed's JSON cannot say:",
        "#   " + _one_line(" ".join(knobs(configuration))),
    ]
    exports = ["HF_HUB_OFFLINE=1", "TOKENIZERS_PARALLELISM=false"]
    arguments = training_arguments(configuration)
    return _Program([*words, *arguments], about, exports=exports, steps=True), files


def _program_of_script(
    configuration: Configuration, job: ScriptJob, cluster: Cluster | None, folder: Path
) -> tuple[_Program, dict[str, str]]:
    """The user's script as it was probed, and the files it reads."""
    import workload.hook

    start = job.start(configuration, folder, probe=False)
    files = {}
    if start.config:
        files["ds_config.json"] = json.dumps(start.config, indent=2) + "\n"
    words, exports = list(start.words), []
    on_cpu = cluster is not None and cluster.device.type == "cpu"
    about = ["# Your own script, as it was probed: checkpoints and loggers are yours again."]
    if job.needs_hook or (on_cpu and job.frame.on_deepspeed):
        folder.mkdir(parents=True, exist_ok=True)
        hook = folder / "joulefront_hook"
        caches = shutil.ignore_patterns("__pycache__")
        package = Path(workload.hook.__file__).parent
        shutil.copytree(package, hook, ignore=caches, dirs_exist_ok=True)
        files["options.json"] = json.dumps(start.options, indent=2) + "\n"
        words = [str((hook / "__main__.py").resolve()), "run", *words]
        exports = ["JOULEFRONT_OPTIONS=" + shlex.quote(str((folder / "options.json").resolve()))]
        about.append("# joulefront_hook lays options.json over what it passes to DeepSpeed.")
    return _Program(words, about, folder=start.cwd, exports=exports), files


def _torchrun(nodes: int, each: int, program: _Program) -> tuple[str, str]:
    """How torchrun starts the ranks, and what a user must do on several nodes."""
    if nodes == 1:
        where = ["--standalone", "--nnodes=1"]
        how = "# Start it on the machine that has the devices."
    else:
        where = [
            f"--nnodes={nodes}",
            "--rdzv-backend=c10d",
            "--rdzv-id=joulefront",
            '--rdzv-endpoint="${HEAD:?set HEAD to the address of the first node}'
            f':{_RENDEZVOUS_PORT}"',
        ]
        how = f"# Start it on each of {nodes} nodes, HEAD=<address of the first> before it."
    module = "torch.distributed.run"
    return f"-m {module} {' '.join(where)} --nproc-per-node={each}", how


def _deepspeed(nodes: int, each: int, program: _Program) -> tuple[str, str]:
    """How DeepSpeed's own launcher starts them; on several nodes it reaches the others by pdsh."""
    words = [f"--num_nodes={nodes}", f"--num_gpus={each}", "--no_local_rank"]
    if nodes == 1:
        # A file that is not there: the default one could name other machines.
        words += ["--hostfile=/dev/null", '--master_port="${MASTER_PORT:-29500}"']
        how = "# Start it on the machine that has the devices."
    else:
        words += ['--hostfile="${HOSTFILE:?set HOSTFILE to a file of lines NODE slots=N}"']
        how = f"# Start it on the first of {nodes} nodes, HOSTFILE=<file> before it."
    if program.words[0] == "-m":
        words += ["--module"]
    return f"-m deepspeed.launcher.runner {' '.join(words)}", how


_STARTERS = {"torchrun": _torchrun, "deepspeed": _deepspeed}


def _launch_sh(launch: Launch, program: _Program, starter: str) -> str:
    configuration, job, cluster = launch
    world = configuration.world_size
    nodes = _nodes(world, cluster)
    on_cpu = cluster is not None and cluster.device.type == "cpu"
    steps = f' --steps "${{STEPS:-{job.steps}}}"' if program.steps else ""
    compiled = _shell_default(extensions_dir())
    environment = [
        'export PATH="$(dirname "$python"):$PATH"  # ninja, where an op is compiled',
        # A folder of the user's own stays: it is what the probes used too.
        "# Where the probes compiled DeepSpeed's ops, so that they need not be compiled again.",
        f'export TORCH_EXTENSIONS_DIR="${{TORCH_EXTENSIONS_DIR:-{compiled}}}"',
    ]
    if on_cpu:
        environment += ["export DS_ACCELERATOR=cpu OMP_NUM_THREADS=1"]
        if starter == "deepspeed":  # how many "devices" its launcher finds on a CPU
            environment += [f"export LOCAL_SIZE={world // nodes}"]
        if nodes == 1:
            environment += ["export GLOO_SOCKET_IFNAME=lo"]
    else:
        share = f"$(( $(nproc) > {world // nodes} ? $(nproc) / {world // nodes} : 1 ))"
        environment += [f'export OMP_NUM_THREADS="${{OMP_NUM_THREADS:-{share}}}"']
    if program.exports:
        environment += ["export " + " ".join(program.exports)]
    start, how = _STARTERS[starter](nodes, world // nodes, program)
    words = list(program.words)
    if starter == "deepspeed" and words[0] == "-m":  # its launcher takes the module's name alone
        words = words[1:]
    live = " ".join(knobs(Configuration(configuration.live)))
    return "\n".join(
        [
            "#!/usr/bin/env bash",
            f"# Trains {_one_line(job.name)} under {_one_line(configuration.key)}",
            how,
            *([f"# A short try: STEPS=20 ./{_file(starter)}"] if program.steps else []),
            f"# Live settings: {_one_line(live) or 'left to the device'}"
            + (f"; ./clocks.sh ./{_file(starter)} sets them." if live else "."),
            "set -euo pipefail",
            f"cd {shlex.quote(program.folder)}"
            if program.folder
            else 'cd "$(dirname "${BASH_SOURCE[0]}")"',
            "",
            *program.about,
            f"program=({shlex.join(words)}{steps})",
            "",
            f"installed_python={shlex.quote(sys.executable)}",
            'python="${PYTHON:-$installed_python}"',
            *environment,
            "",
            f'exec "$python" {start} "${{program[@]}}"',
            "",
        ]
    )


def _shell_default(text: str) -> str:
    """Text for the inside of "${NAME:-...}": nothing in it means anything to the shell."""
    return re.sub(r'([\\"$`}])', r"\\\1", text)


def _file(starter: str) -> str:
    return "launch.sh" if starter == "torchrun" else f"launch_{starter}.sh"


#: What is added to the time that Slurm is asked for: a share, and seconds to start and to save.
_SLURM_SHARE, _SLURM_SPARE_S = 0.25, 900.0


def _sbatch(launch: Launch, folder: Path, expected_s: float | None) -> str:
    """The job as `sbatch job.sbatch` takes it."""
    configuration, job, cluster = launch
    nodes = _nodes_of(launch)
    each = configuration.world_size // nodes
    on_cpu = cluster is not None and cluster.device.type == "cpu"
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", job.name)[:60] or "train"
    options = [
        f"--job-name={name}",
        f"--nodes={nodes}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={each}" if on_cpu else f"--gpus-per-node={each}",
        "--exclusive",
        "--output=%x-%j.out",
        "--signal=TERM@60",
    ]
    if expected_s is not None:
        minutes = math.ceil(((1 + _SLURM_SHARE) * expected_s + _SLURM_SPARE_S) / 60)
        options.append(f"--time={minutes // 60}:{minutes % 60:02d}:00")
    return "\n".join(
        [
            "#!/usr/bin/env bash",
            f"# Trains {_one_line(job.name)} under {_one_line(configuration.key)}",
            "# Submit it with: sbatch job.sbatch   (add your partition and account)",
            *(
                ["# The time is the measured time to solution with a quarter and 15 minutes more."]
                if expected_s is not None
                else ["# Add --time: how long this job takes was not measured here."]
            ),
            *(f"#SBATCH {option}" for option in options),
            "set -euo pipefail",
            # Slurm runs a copy of this file, so it cannot be asked where it stands.
            f"cd {shlex.quote(str(folder))}",
            'HEAD="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)"',
            "export HEAD",
            "# One task a node; clocks.sh puts the earlier clocks back on each, also on scancel.",
            "exec srun --ntasks-per-node=1 --kill-on-bad-exit=1 ./clocks.sh ./launch.sh",
            "",
        ]
    )


def _clocks_toml(configuration: Configuration) -> str:
    live = dict(configuration.live)
    head = (
        "# The live settings at which this configuration was measured, for every device of the "
        "job.\n# ./clocks.sh ./launch.sh sets them and puts the earlier ones back; launch.sh alone "
        "sets none.\n"
    )
    return head + write_toml({"left_to_the_device": not live, "live": live})


def _readme(configuration: Configuration, job: TrainingJob) -> str:
    live = ", ".join(knob_text(name, value) for name, value in configuration.live.items())
    start = "./clocks.sh ./launch.sh" if live else "./launch.sh"
    return (
        f"{start} trains {_one_line(job.name)} for {job.steps} optimizer steps under "
        f"{_one_line(configuration.key)}, with {live or 'clocks left to the device'}.\n\n"
        "launch.sh            starts it by torchrun\n"
        "launch_deepspeed.sh  starts it by DeepSpeed's own launcher\n"
        "job.sbatch           starts it under Slurm: sbatch job.sbatch\n"
        "clocks.sh            runs a command under the settings of clocks.toml, and puts the\n"
        "                     earlier ones back when it ends, however it ends\n"
        "ds_config.json       DeepSpeed's settings\n"
    )
