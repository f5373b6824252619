"""Values and imports that files put into the user's program, by knobs and drivers.

A key of a framework can be code as a command is: `trust_remote_code`, a checkpoint that is a
pickle, the name of a module. So everything is listed, a line each, and what can run code is marked.
Files that joulefront includes are not listed: they are its own code.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.fields import shown_word
from tuner.search_spaces.job import job_names, load_job
from tuner.search_spaces.knob_declarations import Knob, load_pack, pack_names
from tuner.search_spaces.knobs import Value
from tuner.workload.scripts import SOCKET
from tuner.workload.scripts.job import LaunchableJob

#: Words in a key whose value, if it is a text or true, names code or what may hold code.
_NAMES_CODE = re.compile(
    r"path|plugin|module|class|checkpoint|ckpt|pickle|pkl|weights|resume|url|uri|endpoint|hub|repo|"
    r"(?<![a-z])load(?!er|_in)|pretrained|init_from|entry|auto_map|"
    r"import|callback|hook|script|command|exec|(?<!pro)file|folder|(?<![a-z])dir|report_to|_target_"
)
#: Words in a key that permits code by any value but an "off", or by an "off".
_PERMITS_CODE = re.compile(r"trust|remote|unsafe|pickle|allow_code")
_FORBIDS_CODE = re.compile(r"weights_only|safe_?tensors|safe_mode|verify")
#: The last part of a key that names what is loaded from a hub.
_LOADED = re.compile(r"(.*[_-])?(model|tokenizer|processor|adapter|dataset|config)(_name.*|_id)?")
#: Recomputation of activations, which loads nothing.
_RECOMPUTED = re.compile(r"(activation|gradient|grad|act)[_.-]?checkpoint(s|ing)?")
#: Variables by which a loader, an interpreter, a shell or a compiler runs code.
_VARIABLE = re.compile(
    r"(LD|DYLD|PYTHON|PERL5|BASH)\w*|PATH|ENV|SHELL|CC|CXX|NODE_OPTIONS|JAVA_\w*OPTIONS|\w*_PLUGIN\w*"
)
#: Values that are paths, addresses, or names of an object or a file with code.
_VALUE = re.compile(r".*([/\\]|:\w|\.(py|so|pth?|bin|pkl|pickle|ckpt|npy|zip)$).*", re.DOTALL)
_NUMBER = re.compile(r"[-+]?[\d._]+(e[-+]?\d+)?", re.IGNORECASE)
_OFF = ("", "0", "0.0", "false", "no", "none", "null", "off", "<unset>", "never", "disabled")


@dataclass(frozen=True)
class FileStart:
    """One thing that a file starts or sets, as a line; `runs_code` if it can run code."""

    line: str
    runs_code: bool = False

    def __str__(self) -> str:
        return f"{self.line} (can run code)" if self.runs_code else self.line


def can_run_code(key: str, values: Iterable[Any]) -> bool:
    """Return True if a key, or a variable, with one of the values can make a program run code."""
    plain = _RECOMPUTED.sub("", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", key).lower())
    every = [str(value) for value in values]
    given = [text for text in every if text.lower() not in _OFF]
    if _PERMITS_CODE.search(plain) or _VARIABLE.fullmatch(key):
        return bool(given)
    if _FORBIDS_CODE.search(plain):
        return len(given) < len(every)
    names = _NAMES_CODE.search(plain) or _LOADED.fullmatch(plain.rpartition(".")[2])
    texts = [text for text in given if not _NUMBER.fullmatch(text)]
    return any(names or _VALUE.fullmatch(text) for text in texts)


def setting(owner: str, place: str, key: str, values: Sequence[Any]) -> FileStart:
    """Return that something of an owner sets a key or a variable to one of these values."""
    shown = ", ".join(map(shown_word, values))
    line = f"{owner}: {shown_word(place.removeprefix('env:'))}={shown}"
    return FileStart(line, can_run_code(key.removeprefix("env:"), values))


def of_knobs(knobs: Sequence[Knob]) -> Iterator[FileStart]:
    """Yield the effects of declared knobs: variables, keys, placeholders, values of the hook."""
    for knob in knobs:
        yield _of_knob(knob, [level for level in knob.levels if level is not None])


def _of_knob(knob: Knob, values: Sequence[Value]) -> FileStart:
    place = knob.how if ":" in knob.how else knob.name
    return setting(knob.name, place, knob.target[1] or knob.name, values)


def of_files(knobs: Sequence[str], framework: Path | None, job: str | None) -> list[FileStart]:
    """Return programs and settings of the files that a user names by --knobs and the like."""
    found: list[FileStart] = []
    for given in knobs:
        if given not in (*pack_names(), "framework"):
            found += of_knobs(load_pack(given).knobs)
    if framework is not None:
        frameworks = SOCKET.needed("framework", "--framework")
        for driver in frameworks.load_drivers(framework):
            found += frameworks.starts_of(driver)
    if job is not None and job not in job_names():
        found += of_knobs(load_job(job).knobs)
    return list(dict.fromkeys(found))


def of_run(job: LaunchableJob, configuration: Configuration) -> Iterator[FileStart]:
    """Yield the commands that training under a configuration of a run starts, and its knobs'
    effects.
    """
    if (command := job.user_command) is not None:
        words = " ".join(map(shown_word, command.words))
        yield FileStart(f"in {shown_word(command.cwd)}: {words}", True)
        for name, given in command.env.items():
            yield setting("the command", name, name, [given])
        if command.framework is not None:
            frameworks = SOCKET.needed("framework", "the framework of this command")
            yield from frameworks.starts_of(command.framework.driver)
    for knob in job.knobs:
        value = configuration.get(knob.name)
        if value is not None:
            yield _of_knob(knob, [value])
