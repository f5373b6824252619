"""Training of a typed command, or of a file of a framework that is given alone."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from tuner.search_spaces.errors import InputError
from tuner.workload.scripts.command import assignments, read_words
from tuner.workload.scripts.frameworks.bound_driver import Bound
from tuner.workload.scripts.frameworks.driver import Driver, shipped_drivers
from tuner.workload.scripts.frameworks.keys import recognised
from tuner.workload.scripts.frameworks.settings import Command, Settings
from tuner.workload.scripts.frameworks.training import StatedTraining, read_training
from tuner.workload.scripts.job_script import JobScript
from tuner.workload.scripts.key_files import is_deepspeed_file, parsed_file
from tuner.workload.scripts.script_facts import Launcher

#: Endings of files that a framework trains by.
ENDINGS = (".yaml", ".yml")
_LAUNCHER = Command(option="--{key} {value}")
_NEXT = "give the command that trains: tuner fit -- COMMAND"
#: Schemas that are known and not read: a name, and keys of which a file has one each.
_NOT_READ = (("the schema of NeMo's Hydra files", ("trainer", "exp_manager")),)


def is_training_file(text: str) -> bool:
    """Return True if a word names YAML, or JSON and TOML other than a model's or job's."""
    path = Path(text)
    if path.suffix not in (".json", ".toml") or not path.is_file():
        return path.suffix in ENDINGS
    try:
        data = parsed_file(path)
    except InputError:
        return False
    if path.suffix == ".toml":
        return isinstance(data, Mapping) and _recognised(data) is not None
    named = path.name == "config.json" or not isinstance(data, Mapping)
    return not named and bool(data) and "model_type" not in data


def training_of_file(text: str, devices: int) -> StatedTraining:
    """Return the training of a framework's file on this number of devices.

    InputError if it is missing, of no known framework, or does not say what it trains.
    """
    path = Path(text)
    if not path.is_file():
        raise InputError(f"there is no file {text}; name one that is here, from {Path.cwd()}")
    driver = _driver_of(parsed_file(path), path)
    option = next((o for o in driver.command.file if o == "first"), driver.command.file[0])
    words = (str(path),) if option == "first" else (option, str(path))
    bound = Bound(driver)
    return read_training(bound, bound.settings(words, Path.cwd(), os.environ), 0, devices)


def _driver_of(data: Any, path: Path) -> Driver:
    if not isinstance(data, Mapping):
        raise InputError(f"{path} holds no keys, so it is not a training configuration")
    if {"apiVersion", "kind"} <= {*data}:
        raise InputError(
            f"{path} is a manifest of Kubernetes, whose command is not read; {_NEXT}, or name the "
            "file that the command trains by"
        )
    if {"compute_environment", "distributed_type"} & {*data}:
        raise InputError(
            f"{path} is a configuration of Accelerate, which names no model; {_NEXT}, e.g. "
            f"tuner fit -- accelerate launch --config_file {path} train.py"
        )
    if driver := _recognised(data):
        return driver
    _refuse_schema(data, path)
    if path.suffix == ".json" and is_deepspeed_file(path):
        raise InputError(f"{path} is DeepSpeed's configuration, which names no model; {_NEXT}")
    formats = ", ".join(d.name for d in shipped_drivers() if d.recognised.file)
    raise InputError(f"{path} has the keys of no framework that is read ({formats}); {_NEXT}")


def _refuse_schema(data: Mapping[str, Any], path: Path) -> None:
    """Raise InputError for a file of a schema that is known and not read."""
    for schema, keys in _NOT_READ:
        if all({*names.split("|")} & {*data} for names in keys):
            raise InputError(
                f"{path} follows {schema}, which is not read; describe what it trains in a job "
                "file (docs/planning.md), or give the model's config.json to tuner fit"
            )


def _recognised(data: Mapping[str, Any]) -> Driver | None:
    """Return the driver by whose keys a file is recognised; None without."""
    return next((d for d in shipped_drivers() if d.recognised.in_file(data)), None)


def training_of_command(
    command: Sequence[str], devices: int, *, gpus: int | None = None, cwd: Path | None = None
) -> StatedTraining:
    """Return the training that a command's words and files state; nothing is started.

    With `gpus`, as if it started so many ranks.

    InputError if its launcher, a file or a key cannot be read.
    """
    folder = cwd or Path.cwd()
    if JobScript.of(command, folder) is not None:
        raise InputError(
            f"{command[0]} is a script of the shell, which is not read; give the line in it that "
            "starts the training"
        )
    assigned, rest = assignments(command)
    visible = assigned.pop("CUDA_VISIBLE_DEVICES", None)
    words, launcher = read_words(rest, folder, {**os.environ, **assigned})
    if not words:
        raise InputError("there is no command after --; e.g. tuner fit -- axolotl train FILE.yml")
    bound = recognised(words, folder, launcher.kind if launcher else "", calls=False)
    if bound is None:
        _require_script(words, folder)
        raise InputError(
            f"no framework is recognised in {shlex.join(command)!r} (tuner list frameworks); "
            "describe what it trains in a job file (docs/planning.md)"
        )
    _require_files(bound, words, folder)
    ranks = _ranks(launcher)
    if visible and not ranks:
        ranks = len([each for each in visible.split(",") if each.strip()])
    if not ranks and (launcher is None or not launcher.words):
        ranks = 1
    env = {**assigned, **(launcher.env if launcher else {})}
    settings = bound.settings(tuple(words), folder, {**os.environ, **env})
    return read_training(bound, settings, gpus or ranks, devices)


def _ranks(launcher: Launcher | None) -> int:
    """Return the ranks that a launcher's words name; 0 for as many as there are devices."""
    if launcher is None:
        return 0
    # Accelerate starts one process where it sees no GPU, as on the node of a login.
    words = (*launcher.words, *launcher.script)
    stated = Settings(_LAUNCHER, words, Path(), {}).get("num_processes")
    if isinstance(stated, int):
        return stated
    by_accelerate = launcher.kind in ("accelerate", "axolotl", "trl")
    if by_accelerate and launcher.processes == 1 and not any("config_file" in w for w in words):
        return 0
    return launcher.processes * launcher.nodes


def _require_script(words: Sequence[str], folder: Path) -> None:
    if words[0] != "-m" and not (folder / words[0]).is_file():
        raise InputError(f"there is no script {words[0]!r} in {folder}; start tuner where it is")


def _require_files(bound: Bound, words: Sequence[str], folder: Path) -> None:
    """Raise InputError for a file of keys that the command names, if it is not there or of a
    schema that is not read."""
    for before, word in pairwise(words):
        value = word.rpartition("=")[2]
        named = Path(value).suffix in (*ENDINGS, ".toml") and not value.startswith("-")
        named |= before in bound.driver.command.file
        if not named or "://" in value:
            continue
        if not (folder / value).is_file():
            raise InputError(
                f"the command of {bound.driver.name} names {value}, and there is no such file in "
                f"{folder}; start tuner where the command is started"
            )
        try:
            data = parsed_file(folder / value)
        except InputError:  # it may be another's than the framework's, as a template of data
            continue
        if isinstance(data, Mapping):
            _refuse_schema(data, Path(value))
