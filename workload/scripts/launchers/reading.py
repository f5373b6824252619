"""Reading of a pasted command: its launcher, and the words of the script that each rank runs.

torchrun, deepspeed, accelerate and trl are read by their own parsers
(`tuner.workload.scripts.launchers.vendor`), in the folder and environment that they would be
started in. srun has a table (`tuner.workload.scripts.launchers.slurm`). LLaMA-Factory and Axolotl
start torchrun or accelerate with a module of theirs, which is written out here after their sources.
Any other command that a package installs is its module (`console_scripts`).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from tuner.search_spaces.errors import InputError
from tuner.workload.key_files import check_plain, read_text
from tuner.workload.scripts.launchers import vendor
from tuner.workload.scripts.launchers.console_scripts import as_module
from tuner.workload.scripts.launchers.launcher import Launcher
from tuner.workload.scripts.launchers.secrets import ASSIGNMENT, names_taken
from tuner.workload.scripts.launchers.slurm import read_srun, task_environment

_PYTHON = re.compile(r"python[\d.]*")
#: Modules that are launchers, by the name of the command they are installed as.
_MODULES = {
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "launch",
    "accelerate.commands.launch": "accelerate",
    "deepspeed.launcher.runner": "deepspeed",
    "deepspeed": "deepspeed",
}
#: The command of each launcher that its own parser reads, for sentences.
_NAMES = {
    "torchrun": "torchrun",
    "launch": "torch.distributed.launch",
    "deepspeed": "deepspeed",
    "accelerate": "accelerate launch",
    "trl": "trl",
}
#: Starters of ranks that are not read.
_UNREAD = ("mpirun", "mpiexec", "horovodrun", "jsrun", "aprun", "colossalai", "composer")
#: Commands of the launchers that are read; some have another name.
PROGRAMS = frozenset(
    ("torchrun", "deepspeed", "accelerate", "trl", "srun", "axolotl", "llamafactory", *_UNREAD)
)
_ALIASES = {
    "accelerate-launch": "accelerate",
    "deepspeed.pt": "deepspeed",
    "ds": "deepspeed",
    "llamafactory-cli": "llamafactory",
    "lmf": "llamafactory",
}
#: Words of launchers, which say nothing of a user.
LAUNCHER_WORDS = PROGRAMS | {*_MODULES, *_ALIASES, "env", "launch", "train"}
#: A vendor's parser imports torch, at most this long, seconds.
_LIMIT_S = 180.0


def read_command(words: Sequence[str], cwd: Path) -> tuple[tuple[str, ...], Launcher | None]:
    """Return the words that each rank runs, without the interpreter, and the launcher if any.

    Raises:
        InputError: the launcher refuses the command, or it cannot be honoured.
    """
    assigned, rest = _assignments(words)
    if "CUDA_VISIBLE_DEVICES" in assigned:
        raise InputError(
            "CUDA_VISIBLE_DEVICES goes before tuner, whose meter must see the same GPUs: "
            f"CUDA_VISIBLE_DEVICES={assigned['CUDA_VISIBLE_DEVICES']} tuner ..."
        )
    script, launcher = _read(rest, cwd, {**os.environ, **assigned})
    if launcher is None:
        if not assigned:
            return script, None
        launcher = Launcher("", (), script)
    return script, replace(launcher, env={**assigned, **launcher.env}, assigned=assigned)


def _assignments(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Split the variables off that are written in front of a command."""
    rest = list(words)
    if rest and Path(rest[0]).name == "env":
        rest = rest[1:]
        if rest and rest[0].startswith("-"):
            raise InputError(f"env {rest[0]} is not read; write NAME=VALUE before the command")
    assigned = {}
    while rest and (found := ASSIGNMENT.fullmatch(rest[0])):
        assigned[found[1]] = found[2]
        rest = rest[1:]
    return assigned, rest


def _read(
    words: Sequence[str], cwd: Path, environment: Mapping[str, str]
) -> tuple[tuple[str, ...], Launcher | None]:
    name, skip = _launcher_of(words)
    if name in _UNREAD:
        raise InputError(
            f"{name} starts ranks itself, which is joulefront's part here; give the script and its "
            'own arguments alone, e.g. --script "train.py --data DIR"'
        )
    if name == "srun":
        return _read_srun(words, cwd, environment)
    if name == "llamafactory":
        return _read_llamafactory(words, environment)
    if name == "axolotl":
        return _read_axolotl(words, cwd, environment)
    if name in vendor.READERS:
        return _ask(name, words, skip, cwd, environment)
    bare = _without_python(words)
    return (as_module(bare, cwd) if len(bare) == len(words) else bare), None


def _launcher_of(words: Sequence[str]) -> tuple[str, int]:
    """Return the name of the launcher that a command begins with, and its own words; ("", 0)."""
    bare = _without_python(words)
    pythons = len(words) - len(bare)
    if not bare:
        return "", 0
    if bare[0] == "-m" and len(bare) > 1:
        return _MODULES.get(bare[1], ""), pythons + 2
    name = Path(bare[0]).name
    if name == "accelerate":
        if bare[1:2] != ("launch",):
            raise InputError("of accelerate's commands only `accelerate launch` trains")
        return name, pythons + 2
    name = _ALIASES.get(name, name)
    return (name, pythons + 1) if name in PROGRAMS else ("", 0)


def _without_python(words: Sequence[str]) -> tuple[str, ...]:
    rest = list(words)
    while rest and _PYTHON.fullmatch(Path(rest[0]).name):
        rest = rest[1:]
        while rest and rest[0] in ("-u", "-B", "-O"):
            rest = rest[1:]
    return tuple(rest)


def _ask(
    name: str, words: Sequence[str], skip: int, cwd: Path, environment: Mapping[str, str]
) -> tuple[tuple[str, ...], Launcher]:
    """Let the launcher's own parser read its arguments."""
    shown, arguments = _NAMES[name], list(words[skip:])
    for option, file in pairwise(arguments):
        if option in ("--config_file", "--config-file", "--config", "--accelerate_config"):
            _check_config(f"{shown} {option}", file, cwd)
    read = _answer(name, arguments, cwd, environment)
    if "refuse" in read:
        raise InputError(f"{shown}: {' '.join(str(read['refuse']).split())}")
    if read["config"]:
        _check_config(f"{shown}'s configuration", read["config"], cwd)
    given = len(words) - int(read["given"])
    kind = {"launch": "torchrun"}.get(name, name)
    launcher = Launcher(
        kind,
        tuple(words[:given]),
        tuple(words[given:]),
        int(read["processes"]),
        read["env"],
        config=read["config"],
        notes=tuple(f"{shown}: {note}" for note in read["notes"]),
        nodes=int(read["nodes"]),
        binding=str(read.get("binding", "")),
    )
    return tuple(read["script"]), launcher


def _answer(
    name: str, arguments: Sequence[str], cwd: Path, environment: Mapping[str, str]
) -> dict[str, Any]:
    question = json.dumps({"launcher": name, "arguments": list(arguments)})
    try:
        done = subprocess.run(
            [sys.executable, "-P", vendor.__file__],
            input=question,
            capture_output=True,
            text=True,
            errors="replace",
            cwd=cwd,
            env={name: text for name, text in environment.items() if not names_taken([text])},
            timeout=_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"refuse": f"its parser did not answer within {_LIMIT_S:.0f} s"}
    for line in reversed(done.stdout.splitlines()):
        if line.startswith(vendor.MARK):
            answer: dict[str, Any] = json.loads(line.removeprefix(vendor.MARK))
            return answer
    # argparse says what is wrong in its last line and ends the process.
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    said = lines[-1].partition("error: ")[2] or lines[-1] if lines else ""
    return {"refuse": said or "it answered this command with its help"}


def _read_srun(
    words: Sequence[str], cwd: Path, environment: Mapping[str, str]
) -> tuple[tuple[str, ...], Launcher]:
    srun = read_srun(words, environment)
    if srun.chdir and (cwd / srun.chdir).resolve() != cwd.resolve():
        raise InputError(f"srun starts in {srun.chdir}; start tuner there, without --chdir")
    inner, rest = _assignments(srun.rest)
    if not _without_python(rest):
        raise InputError("srun must be followed by a command, e.g. srun -n 2 python train.py")
    script, launcher = _read(rest, cwd, {**environment, **srun.env, **inner})
    if launcher is None:
        installed = script[0] == "-m" and rest[0] != "-m" and tuple(rest[1:]) == script[2:]
        if installed:
            words = [*words[: len(words) - len(rest)], "python", *script]
        elif Path(rest[0]).suffix != ".py" and not _PYTHON.fullmatch(Path(rest[0]).name):
            raise InputError(
                f"srun starts {rest[0]!r}, whose ranks are not seen from here; paste the command "
                "of Python that is in it"
            )
        at = len(words) - len(script)
        launcher = Launcher("srun", tuple(words[:at]), script, srun.tasks or 1)
        env = {**srun.env, **inner, **task_environment()}
        return script, replace(launcher, env=env, notes=srun.notes, nodes=srun.nodes)
    if srun.tasks > 1:
        raise InputError(
            f"srun starts {srun.tasks} tasks on a node, and each would start the ranks of "
            f"{launcher.kind}; give --ntasks-per-node=1"
        )
    if srun.nodes != launcher.nodes:
        raise InputError(
            f"srun starts on {srun.nodes} nodes and {launcher.kind} asks for {launcher.nodes}; "
            "give both the same number"
        )
    ahead = tuple(words[: len(words) - len(rest)])
    return script, replace(
        launcher,
        words=(*ahead, *launcher.words),
        env={**srun.env, **inner, **task_environment(srun.nodes), **launcher.env},
        notes=(*srun.notes, *launcher.notes),
    )


def _read_llamafactory(
    words: Sequence[str], environment: Mapping[str, str]
) -> tuple[tuple[str, ...], Launcher]:
    """Read `llamafactory-cli train`, after llamafactory/cli.py and launcher.py (0.9.4).

    It starts its module launcher under torchrun on all devices, or NPROC_PER_NODE of them.
    """
    if len(words) < 3 or words[1] != "train":
        raise InputError("of llamafactory-cli's commands only `llamafactory-cli train FILE` trains")
    _check_config("llamafactory-cli train", words[2], None)
    nodes = environment.get("NNODES") or "1"
    if not nodes.isdigit() or not int(nodes):
        raise InputError(f"NNODES={nodes} is no number of nodes")
    env = {}
    if environment.get("OPTIM_TORCH", "1").lower() in ("true", "y", "1"):
        # What it sets for torch's DDP.
        allocator = "expandable_segments:True"
        env = {"PYTORCH_CUDA_ALLOC_CONF": allocator, "TORCH_NCCL_AVOID_RECORD_STREAMS": "1"}
    each = environment.get("NPROC_PER_NODE", "")
    script = ("-m", "llamafactory.launcher", *words[2:])
    launcher = Launcher(
        "llamafactory", tuple(words[:2]), tuple(words[2:]), int(each) if each.isdigit() else 0, env
    )
    return script, replace(launcher, config=words[2], nodes=int(nodes))


def _read_axolotl(
    words: Sequence[str], cwd: Path, environment: Mapping[str, str]
) -> tuple[tuple[str, ...], Launcher]:
    """Read `axolotl train`, after axolotl/cli/main.py and utils/train.py (0.12).

    It starts its module `axolotl.cli.train` by accelerate, torchrun or python (`--launcher`);
    what follows `--` is the launcher's.
    """
    if len(words) < 3 or words[1] != "train" or words[2].startswith("-"):
        raise InputError("of axolotl's commands only `axolotl train FILE` trains")
    _check_config("axolotl train", words[2], cwd)
    own, launcher_arguments = list(words[2:]), []
    if "--" in own:
        cut = own.index("--")
        own, launcher_arguments = own[:cut], own[cut + 1 :]
    by, kept = "accelerate", []
    for word in _pairs(own):
        name, _, value = word.partition("=")
        if name in ("--sweep", "--cloud"):
            raise InputError(f"axolotl train {name} starts other runs than one; leave it out")
        if name == "--launcher":
            by = value
        elif name in ("--num-processes", "--main-process-port"):
            launcher_arguments = [name.replace("-p", "_p"), value, *launcher_arguments]
        else:
            kept.append(word)
    ahead = {"accelerate": ["accelerate", "launch"], "torchrun": ["torchrun"], "python": ["python"]}
    if by not in ahead:
        raise InputError(f"axolotl's launcher is accelerate, torchrun or python, not {by!r}")
    command = [*ahead[by], *launcher_arguments, "-m", "axolotl.cli.train", *kept]
    script, launcher = _read(command, cwd, environment)
    launcher = launcher or Launcher("", processes=1)
    mine = replace(launcher, kind="axolotl", words=tuple(words[:2]), script=tuple(words[2:]))
    return script, replace(mine, config=words[2])


def _pairs(words: Sequence[str]) -> list[str]:
    """Join `--name value` to `--name=value`."""
    joined: list[str] = []
    for word in words:
        if joined and joined[-1].startswith("--") and "=" not in joined[-1] and word[:2] != "--":
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


def _check_config(option: str, file: str, cwd: Path | None) -> None:
    """Refuse a configuration file from which a changed one could not be written."""
    if file == "-" or file.startswith(("/dev/stdin", "/dev/fd/", "/proc/self/fd/")):
        raise InputError(
            f"{option} is read from standard input, which is there only once; write it to a file"
        )
    path = (cwd or Path.cwd()) / file
    if path.suffix not in (".yaml", ".yml") or not path.is_file():
        return  # of another format, or the launcher's own parser says that it is missing
    check_plain(read_text(path), path)
