"""Application of declared knobs: to the environment, DeepSpeed's settings, files and commands.

A knob that is not set in a configuration, because its condition does not hold, is applied at its
baseline.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.knob_declarations import FILE_KINDS, Knob
from tuner.search_spaces.knobs import Value
from tuner.search_spaces.safe_files import write_text
from tuner.workload.hook import merge
from tuner.workload.scripts.key_files import changed_text, read_key, renamed, value_at
from tuner.workload.scripts.script_facts import ScriptTraining

#: Variables that joulefront sets for each rank.
_OWN = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "LOCAL_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
#: Variables that are read when a communicator is made, after the ranks were forked. Others may be
#: read when torch is imported, which a forked rank has behind it.
_READ_LATE = re.compile(r"(NCCL|RCCL|GLOO)_\w+|OMP_NUM_THREADS")


def _values(configuration: Configuration, knobs: Sequence[Knob]) -> list[tuple[Knob, Value]]:
    values = [(knob, configuration.get(knob.name)) for knob in knobs]
    values = [(knob, knob.baseline if value is None else value) for knob, value in values]
    return [(knob, value) for knob, value in values if value is not None]


def environment(configuration: Configuration, knobs: Sequence[Knob]) -> dict[str, str]:
    """Return the environment variables of the declared knobs."""
    values = _values(configuration, knobs)
    return {knob.target[1]: str(value) for knob, value in values if knob.target[0] == "env"}


def export_words(env: Mapping[str, str]) -> list[str]:
    """Return quoted words for the shell's `export`; InputError for a name that no shell takes."""
    for name in env:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise InputError(f"{name!r} is not a valid name of an environment variable")
    return [f"{name}={shlex.quote(value)}" for name, value in env.items()]


def read_at_start(knobs: Sequence[Knob]) -> str:
    """Return why ranks need an interpreter of their own; "" if the knobs do not need it."""
    names = [knob.target[1] for knob in knobs if knob.target[0] == "env"]
    early = [name for name in names if not _READ_LATE.fullmatch(name)]
    return f"{', '.join(early)} may be read when torch is imported" if early else ""


def deepspeed_settings(configuration: Configuration, knobs: Sequence[Knob]) -> dict[str, Any]:
    """Return the part of DeepSpeed's configuration that the declared knobs set."""
    settings: dict[str, Any] = {}
    for knob, value in _values(configuration, knobs):
        way, key = knob.target
        if way == "deepspeed":
            part: Any = knob.native(value)
            for name in reversed(key.split(".")):
                part = {name: part}
            settings = merge(settings, part)
    return settings


def framework_settings(configuration: Configuration, knobs: Sequence[Knob]) -> dict[str, Any]:
    """Return the settings of the recognised framework that differ from today's, by key."""
    return {
        knob.target[1]: knob.native(value)
        for knob, value in _values(configuration, knobs)
        if knob.target[0] == "framework" and value != knob.baseline
    }


def torch_settings(configuration: Configuration, knobs: Sequence[Knob]) -> dict[str, Any]:
    """Return the settings of torch that differ from today's, as the hook takes them."""
    return {
        knob.target[1]: knob.native(value)
        for knob, value in _values(configuration, knobs)
        if knob.target[0] == "torch" and value != knob.baseline
    }


def text_values(configuration: Configuration, knobs: Sequence[Knob]) -> dict[str, str]:
    """Return the knobs that are set as text, by name, for placeholders and the environment."""
    return {knob.name: str(value) for knob, value in _values(configuration, knobs)}


def native_values(configuration: Configuration, knobs: Sequence[Knob]) -> dict[str, Any]:
    """Return the knobs that are set, by name, as the script reads them through the hook."""
    return {knob.name: knob.native(value) for knob, value in _values(configuration, knobs)}


def with_files(
    words: Sequence[str],
    cwd: Path,
    configuration: Configuration,
    knobs: Sequence[Knob],
    folder: Path,
) -> tuple[str, ...]:
    """Write the files whose keys are knobs to a folder, and return a command that names them.

    InputError if a file cannot be read, or a key of it changed; OSError if it cannot be written.
    """
    changes: dict[str, dict[str, Any]] = {}
    for knob, value in _values(configuration, knobs):
        file, key = knob.target
        if file.endswith(FILE_KINDS):
            changes.setdefault(file, {})[key] = knob.native(value)
    made = list(words)
    for number, (file, values) in enumerate(changes.items()):
        folder.mkdir(parents=True, exist_ok=True)
        name = Path(file).name
        taken = name in (Path(other).name for other in list(changes)[:number])
        written = folder.resolve() / (f"{number}-{name}" if taken else name)
        write_text(written, changed_text(cwd / file, values))
        made = renamed(made, cwd, cwd / file, written)
    return tuple(made)


def program_knobs(knobs: Sequence[Knob]) -> tuple[Knob, ...]:
    """Return the built-in program's declared knobs; InputError for a script's."""
    for knob in knobs:
        if knob.target[0] not in ("env", "deepspeed"):
            raise InputError(
                f"knob {knob.name!r} is for a script of your own, --script CMD --knobs FILE; the "
                "built-in training program has knobs with how = env:NAME or deepspeed:KEY"
            )
    return tuple(_at_baseline(knob, _variable(knob, os.environ)) for knob in knobs)


def _variable(knob: Knob, env: Mapping[str, str]) -> str | None:
    way, name = knob.target
    if way != "env" or knob.live:
        return None
    if name in _OWN or name.startswith("JOULEFRONT_"):
        raise InputError(f"knob {knob.name!r} sets {name}, which joulefront sets for each rank")
    return env.get(name)


def resolved(declared: Knob, job: ScriptTraining) -> Knob:
    """Return a declared knob of a script with `how` and the baseline filled in.

    InputError if it cannot be applied, or its baseline contradicts what is found, in an inspection
    too if there was one. Keys of the DeepSpeed configuration that the command names are set there.
    """
    frame, inspected = job.frame, bool(job.frame.kind)
    if declared.live:  # an inspection tells the present value, if the script reads it
        return _set_by_script(declared, frame.live) if inspected else _at_baseline(declared, None)
    knob = _found(declared, job)
    if inspected and knob.how == "hook" and knob.name not in frame.reads:
        raise InputError(
            f"the script takes no knob {knob.name!r}: it neither has {{{knob.name}}} in its "
            "command nor reads it from joulefront_hook.configuration()"
        )
    if inspected and knob.how == "hook" and declared.baseline is None:
        return _read_by_script(replace(declared, how="hook"), frame.own)
    under = frame.on_deepspeed or "deepspeed_config" in job.placeholders or not inspected
    if knob.target[0] == "deepspeed" and not under:
        raise InputError(
            f"knob {knob.name!r} is a key of DeepSpeed's configuration, and the script does "
            "not train under DeepSpeed"
        )
    return knob


def _found(knob: Knob, job: ScriptTraining) -> Knob:
    (way, key), cwd, named = knob.target, Path(job.cwd), job.config_word
    if way.endswith(FILE_KINDS) and named and (cwd / way).resolve() == named[1].resolve():
        value_at(job.file_config, key, named[1].name)
        way = "deepspeed"
        knob = replace(knob, how=f"deepspeed:{key}")
    if way == "env":
        env = job.launcher.env if job.launcher else {}
        return _at_baseline(knob, _variable(knob, {**os.environ, **env}))
    if way == "deepspeed":
        return _at_baseline(knob, _setting(job.frame.config or job.file_config, key))
    if way == "framework":
        if job.driven is None:
            raise InputError(
                f"knob {knob.name!r} is a key of the script's framework, which is not recognised "
                "(tuner list frameworks)"
            )
        return _at_baseline(knob, job.driven.declared(knob))
    if way == "torch":
        if job.frame.kind and key not in job.frame.settings:
            raise InputError(f"knob {knob.name!r} sets what the script was not seen to use")
        return _at_baseline(knob, job.frame.settings.get(key))
    if way.endswith(FILE_KINDS):
        today = read_key(cwd / way, key)
        if renamed(job.words, cwd, cwd / way, Path()) == [*job.words]:
            raise InputError(
                f"knob {knob.name!r} is a key of {way}, which the command does not name, so no "
                "other file can be given to the script"
            )
        return _at_baseline(knob, today)
    if way == "placeholder" and knob.name not in job.placeholders:
        raise InputError(f"the command has no placeholder {{{knob.name}}} for its knob")
    way = way or ("placeholder" if knob.name in job.placeholders else "hook")
    return _at_baseline(replace(knob, how=way), job.placeholders.get(knob.name) or None)


def _at_baseline(knob: Knob, today: Any) -> Knob:
    found = None if today is None else replace(knob, baseline=today).baseline
    if found is not None and knob.baseline not in (None, found):
        raise InputError(
            f"knob {knob.name!r} is said to be {knob.baseline} today, but its value is {found}"
        )
    if found is None and knob.baseline is None and knob.how in ("placeholder", "hook"):
        found = knob.values[0]
    return knob if found is None else replace(knob, baseline=found)


def _read_by_script(knob: Knob, own: Mapping[str, Any]) -> Knob:
    if knob.name not in own:
        raise InputError(
            f"what knob {knob.name!r} is today is not known; read it in the script by "
            f"joulefront_hook.configuration().get({knob.name!r}, VALUE) with the value that you "
            f"use today, or write baseline = VALUE below [knobs.{knob.name}] of a --knobs file"
        )
    return _at_baseline(knob, own[knob.name])


def _set_by_script(knob: Knob, live: Mapping[str, Any]) -> Knob:
    if knob.name not in live:
        raise InputError(
            f"the script registers no live knob {knob.name!r} before its first step ends; it "
            f"must call joulefront_hook.live({knob.name!r}, FUNCTION)"
        )
    knob = _at_baseline(knob, live[knob.name])
    if knob.baseline is None:
        raise InputError(
            f"what live knob {knob.name!r} is today is not known; give "
            f"joulefront_hook.live({knob.name!r}, FUNCTION, READ) a third argument, which returns "
            f"the present value, or write baseline = VALUE below [knobs.{knob.name}] of a --knobs "
            "file"
        )
    return knob


def _setting(config: Mapping[str, Any], key: str) -> Any:
    value: Any = config
    for name in key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    plain = isinstance(value, bool | int | float | str) and value != "auto"
    return value if plain else None
