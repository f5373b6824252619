"""The program as launch.sh starts it, with the files that it reads: built-in, or the user's script.

A command is started as the user typed it, and the hook in its environment gives its ranks what
differs. Another number of ranks is torchrun's, as is a script that was tuned alone; srun's tasks
get their new number by options behind the user's. The hook goes along only if the script's settings
cannot be passed to it in another way.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeGuard

from tuner.search_spaces.cluster import Cluster
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.fields import one_line
from tuner.search_spaces.safe_files import write_bytes
from tuner.workload.scripts.command import Start
from tuner.workload.scripts.declared_knobs import export_words
from tuner.workload.scripts.job import LaunchableJob
from tuner.workload.scripts.launchers import kind_of, with_tasks
from tuner.workload.scripts.secrets import is_srun, shell_line

#: Options and variables in which launchers take the number of the node that they are started on.
_RANKS = "--node-rank, --node_rank, --machine_rank or NODE_RANK, if the command has one"
#: Folder of the hook beside the launch files.
HOOK_FOLDER = "joulefront_hook"
#: Variables that torchrun itself gives its ranks.
_OF_TORCHRUN = re.compile("(GROUP|ROLE|TORCHELASTIC)_")


@dataclass(frozen=True)
class Program:
    """Program that launch.sh starts.

    Attributes:
        exports: `NAME=VALUE` words, already quoted.
        environment: variables of every rank that do not depend on the shell.
        steps: length of the training that it takes by `--steps`; None if it does not.
        command: the whole command with its own launcher; empty to start `words` by torchrun.
        line: the user's own command as typed, which is started instead of `words`.
        confirmed: file that the hook makes when a rank has taken the configuration, or "".
        once: that launcher is started on one node and reaches the others itself.
        taken: variables that must have a value, which is not kept.
    """

    words: Sequence[str]
    about: Sequence[str]
    folder: str = ""
    exports: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    steps: int | None = None
    command: Sequence[str] = ()
    line: str = ""
    confirmed: str = ""
    by_srun: bool = False
    once: bool = False
    taken: Sequence[str] = ()


def on_cores(cluster: Cluster | None) -> TypeGuard[Cluster]:
    """Return whether a job trains on processor cores, and not on GPUs, as on an unknown cluster."""
    return cluster is not None and not cluster.device.is_gpu


def program_of(
    configuration: Configuration, job: LaunchableJob, cluster: Cluster | None, folder: Path
) -> tuple[Program, dict[str, str]]:
    """Return the job's program as it was probed, and the files it reads."""
    start = job.start(configuration, folder, probe=False)
    files = {}
    if start.config:
        files["ds_config.json"] = json.dumps(start.config, indent=2) + "\n"
    always = on_cores(cluster) and job.hook_on_cores
    about = [f"# {one_line(sentence)}" for sentence in job.about(configuration)]
    if (whole := job.as_typed_line(configuration, folder)) is not None:
        return _typed_line(configuration, job, whole, about, folder, files), files
    words = list(start.words)
    env = {n: text for n, text in start.env.items() if not _OF_TORCHRUN.match(n)}
    environment = _of_every_rank(env)
    exports = export_words(environment)
    if job.needs_hook or always:
        words, option = _hooked(words, start, folder, files)
        exports.append(option)
        about.append("# joulefront_hook merges options.json into what the script sets by itself.")
    launcher = job.launcher
    command: list[str] = []
    if launcher is not None and launcher.kind == "srun":  # whose tasks read Slurm's variables
        command = [*with_tasks(launcher, configuration.world_size, job.ranks_today), *words]
    elif launcher is not None and launcher.kind:
        about.append(f"# torchrun starts what {launcher.kind} would, with the variables it sets.")
    return Program(
        words,
        about,
        folder="" if start.cwd == str(folder) else start.cwd,
        exports=exports,
        environment=environment,
        steps=start.steps,
        command=command,
        by_srun=bool(command),
        once=bool(command),
        taken=job.taken,
    ), files


def _typed_line(
    configuration: Configuration,
    job: LaunchableJob,
    start: Start,
    about: list[str],
    folder: Path,
    files: dict[str, str],
) -> Program:
    """Return the user's own command, with the hook for settings that differ from today's.

    The hook finds attach.json beside its own folder: launchers that reach other nodes pass on
    PYTHONPATH, and no variable of ours.
    """
    environment, confirmed = _of_every_rank(start.env), ""
    exports = export_words(environment)
    today = job.today()
    changed = any(value != today.get(name) for name, value in configuration.launch.items())
    hooked = "words" in start.options or job.needs_hook
    if (changed and hooked) or any(knob.live for knob in job.knobs):
        _write_hook(folder / HOOK_FOLDER)
        confirmed = str((folder / "attached").resolve())
        order = {"options": start.options, "confirm": confirmed}
        files["attach.json"] = json.dumps(order, indent=2) + "\n"
        entry = str((folder / HOOK_FOLDER / "entry").resolve())
        hook = shlex.quote(entry)
        environment["PYTHONPATH"] = entry  # of Ray's workers, which have none of a shell
        exports += [
            f'PYTHONPATH={hook}"${{PYTHONPATH:+:$PYTHONPATH}}"',
            'JOULEFRONT_BASH_ENV="${JOULEFRONT_BASH_ENV:-${BASH_ENV:-}}"',
            f"BASH_ENV={hook}/bash_env",  # a script that sets PYTHONPATH anew keeps the hook
        ]
        about.append("# joulefront_hook gives its ranks the settings of attach.json.")
    launcher, once = job.launcher, True
    if launcher is not None and launcher.nodes > 1:
        kind = kind_of(launcher)
        once = is_srun(launcher.words) or (kind is not None and kind.reaches_nodes(launcher))
    if not once:
        about.append(f"# Start it on each of its nodes, with the node's own rank: {_RANKS}.")
    return Program(
        start.words,
        about,
        folder=start.cwd,
        exports=exports,
        environment=environment,
        line=shell_line(start.command),
        confirmed=confirmed,
        by_srun=launcher is not None and launcher.kind == "srun",
        once=once,
        taken=job.taken,
    )


def _hooked(
    words: Sequence[str], start: Start, folder: Path, files: dict[str, str]
) -> tuple[list[str], str]:
    # The words with the hook before them, and the variable that it reads.
    hook = folder / HOOK_FOLDER
    _write_hook(hook)
    files["options.json"] = json.dumps(start.options, indent=2) + "\n"
    option = "JOULEFRONT_OPTIONS=" + shlex.quote(str((folder / "options.json").resolve()))
    return [str((hook / "__main__.py").resolve()), "run", *words], option


def _of_every_rank(env: Mapping[str, str]) -> dict[str, str]:
    # What differs from rank to rank is the launcher's to say.
    return {name: text for name, text in env.items() if "{" not in text}


def _write_hook(folder: Path) -> None:
    # A module or bytecode left in the hook's folder would be imported.
    import tuner.workload.hook

    if folder.is_symlink():
        folder.unlink()
    elif folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    (folder / "entry").mkdir()
    source = Path(tuner.workload.hook.__file__).parent
    for module in (
        *source.glob("*.py"),
        *(path for path in source.glob("entry/*") if path.is_file()),
    ):
        write_bytes(folder / module.relative_to(source), module.read_bytes())
