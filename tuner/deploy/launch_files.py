"""Files that start the training job under one configuration, ready to run on this machine.

They start it as a probe did: the same DeepSpeed JSON, the same program, the same environment for
the ranks, but under `torchrun`, alone or under Slurm, and without the hook. A user's own script is
started as it was probed too, by the launcher that it came with (`tuner.deploy.script_program`). All
text from the user is quoted for the shell.

clocks.sh needs nvidia-smi, or the kernel's files where cores are the devices, and no joulefront.
A trap restores the earlier clocks when its command ends, and a guard in a session of its own when
the script is killed with SIGKILL. A GPU without persistence mode forgets its settings when no
process uses it, so that mode is on while the command runs (NVIDIA, "Driver Persistence").
"""

from __future__ import annotations

import json
import math
import re
import shlex
import sys
import tempfile
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

from tuner.answer.answer import Answer
from tuner.answer.views import AnswerExtra
from tuner.deploy.script_program import HOOK_FOLDER, Program, on_cores, program_of
from tuner.problem.run_folder import RunFolder
from tuner.search_spaces.cluster import Cluster
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.fields import one_line
from tuner.search_spaces.job import TrainingJob
from tuner.search_spaces.knobs import KNOBS, Value, knob_named, stage_values
from tuner.search_spaces.plugins import shipped_module
from tuner.search_spaces.safe_files import SCRIPT_MODE, make_folder, write_text
from tuner.workload.hook import loopback
from tuner.workload.program.built_in_job import OFFLOAD_RULE, OwnProgram
from tuner.workload.records.probe import ProbeRecord
from tuner.workload.scripts.installed import extensions_dir
from tuner.workload.scripts.job import launchable
from tuner.workload.scripts.launchers import ON_EACH_NODE
from tuner.workload.scripts.secrets import hidden, shell_words

# ray_train.json: the answer as Ray Train's TorchTrainer takes it.
#
# The fields of `scaling_config` and `run_config` are arguments of `ray.train.ScalingConfig` and
# `ray.train.RunConfig`; `train_loop_config` holds the values that the user's training function
# applies. Ray is not imported: the files may be written where it is not installed.


#: Name of the file for Ray Train.
RAY_TRAIN = "ray_train.json"


def ray_train_json(
    configuration: Configuration,
    job: TrainingJob,
    cluster: Cluster | None,
    nodes: int,
    environment: Mapping[str, str],
    deepspeed: str,
) -> str:
    """Return the text of the file.

    Args:
        nodes: number of nodes that the ranks need, with the same number of ranks on each.
        environment: variables of the workers.
        deepspeed: DeepSpeed's settings as JSON; "" if it does not train the job.

    Raises:
        InputError: Ray cannot be told to place the workers as the ranks were measured.
    """
    workers, each = configuration.world_size, configuration.world_size // nodes
    if nodes > 1 and cluster is not None and each < cluster.devices_per_node:
        raise InputError(
            f"Ray Train fills one node after the other, and {configuration.short!r} has {each} "
            f"ranks on each of {nodes} nodes of {cluster.devices_per_node} devices; choose a "
            "--point that needs one node, or every device of its nodes"
        )
    scaling: dict[str, Any] = {
        "num_workers": workers,
        "use_gpu": not on_cores(cluster),
        "placement_strategy": "STRICT_PACK" if nodes == 1 else "PACK",
    }
    variables = dict(environment)
    if on_cores(cluster):
        # Ray gives a worker as many threads as CPUs, as the ranks of a probe have.
        threads = min(launchable(job, cluster).threads_today, cluster.devices_per_node // each)
        scaling["resources_per_worker"] = {"CPU": max(1, threads)}
        variables["DS_ACCELERATOR"] = "cpu"
    loop: dict[str, Any] = configuration.launch.to_json()
    share = configuration.micro_batch * configuration.data_parallel
    if "micro_batch" in loop and job.global_batch % share == 0:
        loop["gradient_accumulation"] = job.global_batch // share
    if deepspeed:
        loop["deepspeed"] = json.loads(deepspeed)
    answer = {
        "scaling_config": scaling,
        "run_config": {"worker_runtime_env": {"env_vars": variables}},
        "train_loop_config": loop,
    }
    return json.dumps(answer, indent=2) + "\n"


#: Configuration, job, and cluster to start it on (None: all ranks on this machine).
Launch = tuple[Configuration, TrainingJob, Cluster | None]

_RENDEZVOUS_PORT = 29500  # torchrun's default
#: What starts a program whose store other machines do not reach, written beside launch.sh.
_LOOPBACK = "loopback.py"


def _filled(name: str, **parts: str | Sequence[str]) -> str:
    # The template with each @NAME@ replaced; a list takes the place of its whole line.
    def part(mark: re.Match[str]) -> str:
        found = parts.get(mark[1], f"@{mark[1]}@")
        return found + mark[2] if isinstance(found, str) else "".join(f"{x}\n" for x in found)

    text = (resources.files("tuner") / "templates" / name).read_text(encoding="utf-8")
    return re.sub(r"@([A-Z_]+)@(\n?)", part, text)


def _array(value: Value | None) -> str:
    return " ".join(
        f"{part:g}" if isinstance(part, float) else str(int(part)) for part in stage_values(value)
    )


def clock_settings(configuration: Configuration) -> Settings:
    """Return the live settings that clocks.sh sets, without the knobs that the user declares."""
    live = configuration.live
    return Settings({name: value for name, value in live.items() if name in KNOBS})


def clocks_sh(configuration: Configuration, ranks_per_node: int, *, cores: bool = False) -> str:
    """Return the script of one configuration; without live settings it only runs the command."""
    live = clock_settings(configuration)
    devices = _filled("clocks_of_cores.sh" if cores else "clocks_of_gpus.sh")
    setter, _, collect = devices.partition("@COLLECT@")
    return _filled(
        "clocks.sh",
        SETTER=setter.strip(),
        COLLECT=collect.strip(),
        ABOUT=one_line(live.short) if live else "left to the device",
        CLOCKS=_array(live.get("clock_MHz")),
        MEMORY=_array(live.get("memory_clock_MHz")),
        LIMITS=_array(live.get("power_limit_W")),
        RANKS=str(configuration.world_size),
        PER_NODE=str(ranks_per_node),
    )


def launch_of(result: Answer, point: str | Configuration = "recommended") -> Launch:
    """Return a configuration of a result with its job and cluster.

    Raises:
        InputError: nothing was chosen, or the study was of a recorded table, which has no job.
        UnknownName: there is no such point.
    """
    if result.best is None and point in ("recommended", "best"):
        raise InputError(f"study {result.name!r} chose no configuration, so nothing can be started")
    configuration = result.point(point).configuration
    if result.job is None:
        raise InputError(
            f"study {result.name!r} names no training job (a recorded table has none), so there "
            "are no files to start it"
        )
    return configuration, result.job, result.cluster


def write_launch_files(
    source: Answer | Launch,
    out_dir: Path | str,
    *,
    script: Sequence[str] = (),
    point: str | Configuration = "recommended",
    ray_train: bool = False,
    inside: Path | None = None,
) -> list[Path]:
    """Write the files that start the job, replacing earlier ones, and return their paths.

    launch.sh starts the launcher that the command came with, if it can be written back, else
    torchrun. A configuration that is refused leaves the folder as it was.

    Args:
        script: the user's own program and its arguments; the built-in one by default. It is given
            `--deepspeed_config ds_config.json` at the end.
        ray_train: also write what Ray Train's TorchTrainer takes (`ray_train_json`).
        inside: the run's folder, below which no link is followed; None if the user names a place.

    Raises:
        InputError: nothing can be started (see `launch_of`), or not at this configuration.
        OSError: a file cannot be written.
    """
    launch = launch_of(source, point) if isinstance(source, Answer) else source
    configuration, job, cluster = launch
    _check_live(configuration, job)
    job = job.at(configuration)  # at its own global batch, for the steps it takes there
    launch = configuration, job, cluster
    expected_s = source.point(point).time_interval_s[1] if isinstance(source, Answer) else None
    if expected_s is not None and not math.isfinite(expected_s):
        expected_s = None  # no time limit that Slurm accepts
    with tempfile.TemporaryDirectory() as elsewhere:  # a job writes files before another refuses
        _rendered(launch, Path(elsewhere), script, expected_s, ray_train=ray_train)
    folder = Path(out_dir)
    if inside is not None:
        make_folder(folder, inside=inside)
    texts = _rendered(launch, folder, script, expected_s, ray_train=ray_train)
    for name, text in texts.items():
        write_text(folder / name, text, mode=SCRIPT_MODE if name.endswith(".sh") else 0o600)
    return [folder / name for name in texts]


def _rendered(
    launch: Launch,
    folder: Path,
    script: Sequence[str],
    expected_s: float | None,
    *,
    ray_train: bool,
) -> dict[str, str]:
    # Texts of the files by name; the job and the hook write their own into the folder.
    configuration, job, cluster = launch
    each = configuration.world_size // _nodes_of(launch)
    started = launchable(job, cluster)
    if script and job.trains_synthetic_data:
        started = OwnProgram(job, cluster, words=tuple(hidden(script)[0]))
    folder.mkdir(parents=True, exist_ok=True)
    program, files = program_of(configuration, started, cluster, folder)
    texts = {
        **files,
        "job.json": json.dumps(job.to_json(), indent=2) + "\n",
        "launch.sh": (_launch_own if program.line else _launch_sh)(launch, program),
    }
    if not (program.command or program.line):  # which is started by its own launcher alone
        texts[_LOOPBACK] = Path(loopback.__file__).read_text(encoding="utf-8")
    cores = on_cores(cluster)
    texts |= {
        "job.sbatch": _sbatch(launch, folder.resolve(), expected_s, program),
        "clocks.sh": clocks_sh(configuration, each, cores=cores),
    }
    if ray_train:
        nodes, deepspeed = _nodes_of(launch), files.get("ds_config.json", "")
        environment = {} if job.trains_synthetic_data else program.environment
        texts[RAY_TRAIN] = ray_train_json(*launch, nodes, environment, deepspeed)
    texts["README.txt"] = _readme(launch, script, program, [*texts, *_hook_in(folder, texts)])
    return texts


def _check_live(configuration: Configuration, job: TrainingJob) -> None:
    # A record may contain live settings that cannot be set.
    declared = {knob.name: knob for knob in job.knobs if knob.live}
    for name, value in configuration.live.items():
        if name in declared:
            declared[name].check(value)
            continue
        knob = knob_named(name)
        if knob.kind != "live":
            raise InputError(f"{name} is a launch knob, so it cannot be set while the job runs")
        knob.check(value)


def _nodes_of(launch: Launch) -> int:
    # The least number of nodes that hold the ranks, the same number on each.
    configuration, _, cluster = launch
    world_size = configuration.world_size
    if cluster is None:
        return 1
    for nodes in range(1, cluster.nodes + 1):
        if world_size % nodes == 0 and world_size // nodes <= cluster.devices_per_node:
            return nodes
    raise InputError(
        f"the configuration has {world_size} ranks; cluster {cluster.name!r} has {cluster.nodes} "
        f"nodes of {cluster.devices_per_node} devices, and each node must have the same number of "
        "ranks"
    )


def _torchrun(nodes: int, each: int) -> tuple[str, str]:
    # torchrun's arguments, and a comment line that says where to start it.
    # Not c10d's rendezvous, which --standalone uses, too: whoever reaches its port runs code.
    where = [f"--nnodes={nodes}", "--rdzv-backend=static"]
    if nodes == 1:
        where += ["--node-rank=0", "--master-addr=127.0.0.1"]
        where += ['--master-port="${MASTER_PORT:-$((20000 + RANDOM % 10000))}"']
        how = "# Start it on the machine that has the devices."
    else:
        where += [
            '--node-rank="${NODE_RANK:-${SLURM_NODEID:?set NODE_RANK, 0 on the first node}}"',
            '--master-addr="${HEAD:?set HEAD to the address of the first node}"',
            f'--master-port="${{MASTER_PORT:-{_RENDEZVOUS_PORT}}}"',
        ]
        how = (
            f"# Start it on each of {nodes} nodes, HEAD=<address of the first> NODE_RANK=<its "
            "number> before it.\n"
            "# Whoever reaches the ranks' ports can disturb them: use a private network."
        )
    module = "-m torch.distributed.run"
    start = f'"$here"/{_LOOPBACK} {module}' if nodes == 1 else module
    return f"{start} {' '.join(where)} --nproc-per-node={each}", how


#: Steps on synthetic data that launch.sh trains without being asked twice.
SYNTHETIC_STEPS = 100

#: The folder of a launch script, which may be left for the program's.
_HERE = 'here="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"'


def _launch_sh(launch: Launch, program: Program) -> str:
    configuration, job, cluster = launch
    nodes = _nodes_of(launch)
    ranks = configuration.world_size // nodes
    start, how = _torchrun(nodes, ranks)
    words = list(program.words)
    clocks = clock_settings(configuration)
    live = f"{one_line(clocks.short)}; ./clocks.sh ./launch.sh sets them." if clocks else ""
    bind: list[str] = []
    if launchable(job, cluster).binding(configuration) == OFFLOAD_RULE:
        start += " $bind"
        mode = OFFLOAD_RULE.partition(":")[2]
        bind = _filled("bound_ranks.sh", RANKS=str(ranks), MODE=mode).splitlines()
    about, exec_ = list(program.about), f'exec "$python" {start} "${{program[@]}}"'
    if program.steps:
        about.append(f'steps="${{STEPS:-{program.steps}}}"')
    about += _require_values(program)
    if program.command:
        exec_ = f"exec {shell_words(program.command)}"
    else:
        steps = ' --steps "$steps"' if program.steps else ""
        about.append(f"program=({shell_words(words)}{steps})")
    if program.steps:  # a long run on synthetic data, as long as the built-in one is the program
        built_in, most = shlex.quote(words[0]), str(SYNTHETIC_STEPS)
        about += _filled(
            "refuse_long.sh", PROGRAM=built_in, MOST=most, FILE="launch.sh"
        ).splitlines()
    environment = _environment(cluster, nodes, ranks, launchable(job, cluster).threads_today)
    if program.exports:
        environment.append("export " + " ".join(program.exports))
    return _filled(
        "launch.sh",
        HOW=how,
        TRY=["# A short try: STEPS=20 ./launch.sh"] if program.steps else [],
        LIVE=live or "left to the device.",
        HERE=[] if program.command else [_HERE],
        FOLDER=shlex.quote(program.folder) if program.folder else '"$here"',
        PYTHON=shlex.quote(sys.executable),
        PROGRAM=about,
        ENVIRONMENT=environment,
        START=[*bind, exec_],
        **_named(launch),
    )


def _launch_own(launch: Launch, program: Program) -> str:
    # The file that starts the user's command as it is typed.
    clocks = clock_settings(launch[0])
    line = [program.line]
    if program.confirmed:  # a rank must have taken the configuration
        file = shlex.quote(program.confirmed)
        line = _filled("own_line.sh", LINE=program.line, FILE=file).splitlines()
    return _filled(
        "launch_own.sh",
        LIVE=f"{one_line(clocks.short)}; ./clocks.sh ./launch.sh sets them."
        if clocks
        else "left to the device.",
        FOLDER=shlex.quote(program.folder),
        PROGRAM=[*program.about, *_require_values(program)],
        ENVIRONMENT=[f"export {each}" for each in program.exports],
        START=line,
        **_named(launch),
    )


def _require_values(program: Program) -> list[str]:
    return [f': "${{{name}:?its value is not kept with the study}}"' for name in program.taken]


def _named(launch: Launch) -> dict[str, str]:
    return {"JOB": one_line(launch[1].name), "CONFIGURATION": one_line(launch[0].short)}


def _environment(cluster: Cluster | None, nodes: int, ranks: int, threads: int) -> list[str]:
    lines = [
        'export PATH="$(dirname -- "$python"):$PATH"  # ninja, where an op is compiled',
        # A folder that the user has set is kept: the probes used it too.
        "# The probes compiled DeepSpeed's ops here, so they need not be compiled again.",
        f"compiled_ops={shlex.quote(extensions_dir())}",
        'export TORCH_EXTENSIONS_DIR="${TORCH_EXTENSIONS_DIR:-$compiled_ops}"',
    ]
    if not on_cores(cluster):
        share = f"$(( cores > {ranks} ? cores / {ranks} : 1 ))"
        cores = _filled("usable_cores.sh").splitlines()
        return [*lines, *cores, f'export OMP_NUM_THREADS="${{OMP_NUM_THREADS:-{share}}}"']
    threads = max(1, min(threads, cluster.devices_per_node // ranks))  # as in the probes
    lines.append(f"export DS_ACCELERATOR=cpu OMP_NUM_THREADS={threads}")
    if nodes == 1:
        lines.append("export GLOO_SOCKET_IFNAME=lo")
    return lines


#: Margin of Slurm's time limit over the measured time: a share, and seconds to start and to save.
_SLURM_SHARE, _SLURM_SPARE_S = 0.25, 900.0


def _sbatch(launch: Launch, folder: Path, expected_s: float | None, program: Program) -> str:
    configuration, job, cluster = launch
    nodes = _nodes_of(launch)
    each = configuration.world_size // nodes
    on_cpu = on_cores(cluster)
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", job.name)[:60] or "train"
    options = [
        f"--job-name={name}",
        f"--nodes={nodes}",
        f"--ntasks-per-node={each if program.by_srun else 1}",
        f"--cpus-per-task={1 if program.by_srun else each}"
        if on_cpu
        else f"--gpus-per-node={each}",
        "--exclusive",
        "--output=%x-%j.out",
        "--signal=TERM@60",
    ]
    if expected_s is not None:
        minutes = math.ceil(((1 + _SLURM_SHARE) * expected_s + _SLURM_SPARE_S) / 60)
        options.append(f"--time={minutes // 60}:{minutes % 60:02d}:00")
    about_time = "# The time is the measured time to solution with a quarter and 15 minutes more."
    if expected_s is None:
        about_time = "# Add --time: how long this job takes was not measured here."
    start = [
        "# One task per node; clocks.sh restores the earlier clocks on each, also on scancel.",
        f"exec {ON_EACH_NODE} ./clocks.sh ./launch.sh",
    ]
    if program.once:
        start = [
            "# launch.sh starts all ranks itself; clocks.sh sets the clocks of this node, and "
            "restores them, also on scancel.",
            "exec ./clocks.sh ./launch.sh",
        ]
    return _filled(
        "job.sbatch",
        ABOUT_TIME=about_time,
        OPTIONS=[f"#SBATCH {option}" for option in options],
        # Slurm runs a copy of this file, so the folder cannot be found from the script itself.
        FOLDER=shlex.quote(str(folder)),
        START=start,
        **_named(launch),
    )


def synthetic_notice(job: TrainingJob) -> str:
    """Return the warning that the files of a job without a script train synthetic data, or ""."""
    if not job.trains_synthetic_data:
        return ""
    return (
        "These files train SYNTHETIC DATA, because no script was given. To train yours, put its "
        "command in program= of launch.sh, or tune it: tuner optimize --script '...'. "
        "A try of the settings: STEPS=20 ./clocks.sh ./launch.sh"
    )


#: What the files are for, in the order in which they are listed.
_FILES = {
    "launch.sh": "starts it by {starter}",
    "job.sbatch": "starts it under Slurm: sbatch job.sbatch",
    "clocks.sh": "runs a command under these clocks, and restores the earlier ones when it ends, "
    "in whatever way; to set any it needs root, CAP_SYS_ADMIN or zeusd",
    "ds_config.json": "DeepSpeed's settings",
    "options.json": "settings that joulefront_hook gives the script",
    "attach.json": "settings that joulefront_hook gives the ranks of the command",
    HOOK_FOLDER: "gives the ranks their settings; needs no joulefront",
    RAY_TRAIN: "ScalingConfig, RunConfig and train_loop_config of Ray Train's TorchTrainer",
    "job.json": "the job as joulefront knows it",
    _LOOPBACK: "starts torchrun so that other machines do not reach its port",
}


def _hook_in(folder: Path, files: Mapping[str, str]) -> list[str]:
    # The hook's folder, if these files need it: an earlier one may have been left.
    needs = {"options.json", "attach.json"} & files.keys()
    return [HOOK_FOLDER] if needs and (folder / HOOK_FOLDER).is_dir() else []


def _listed(names: Sequence[str], starter: str) -> list[str]:
    lines = []
    for name in sorted(names, key=[*_FILES, *names].index):
        about = _FILES.get(name, "read by the program, with these settings")
        wrapped = textwrap.wrap(about.format(starter=starter), 67)
        lines += [f"{name:<20} {wrapped[0]}", *(f"{'':<20} {line}" for line in wrapped[1:])]
    return lines


def _readme(launch: Launch, script: Sequence[str], program: Program, names: Sequence[str]) -> str:
    configuration, job, _ = launch
    clocks = clock_settings(configuration)
    notice = "" if script else synthetic_notice(job)
    own = program.command or program.line
    starter = "the command that it was tuned with" if own else "torchrun"
    return _filled(
        "launch_readme.txt",
        START="./clocks.sh ./launch.sh" if clocks else "./launch.sh",
        LENGTH=f" for {job.steps} optimizer steps" if job.steps else "",
        LIVE=clocks.short if clocks else "clocks left to the device",
        NOTICE=[f"{notice}.", ""] if notice else [],
        FILES=_listed(names, starter),
        **_named(launch),
    )


class FilesView(AnswerExtra):
    """AnswerExtra that writes the report and the launch files of the choice."""

    PROTOCOL = 1

    def write(self, run: RunFolder, answer: Answer, records: Sequence[ProbeRecord]) -> Answer:
        """Write report.html and the launch files; return the answer that names the report."""

        report: Any = shipped_module("tuner.display.report")
        if report is not None:
            answer = replace(answer, report_path=run.report)
            report.write_report(answer, run.report, records=records)
        if answer.best is not None and answer.about.get("job"):
            write_launch_files(answer, run.path / "best", inside=run.path)
        return answer


VIEW = FilesView()
