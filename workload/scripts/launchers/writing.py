"""A pasted command written back: the same launcher, with what the configuration changes alone.

The number of processes, and the batches and ZeRO settings where the launcher or its framework takes
them, are changed where they stand: in an option, in a variable, or in a copy of the configuration
file beside the launch files. What each launcher takes, its class says (`kinds`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.errors import InputError
from tuner.workload.key_files import changed_text, parsed_file
from tuner.workload.scripts.frameworks import shipped_drivers
from tuner.workload.scripts.knob_support import SupportedScript
from tuner.workload.scripts.script_facts import Launcher

#: Keys of Accelerate's file, below its section `deepspeed_config`, by the section or key of
#: DeepSpeed's own configuration.
_ACCELERATE_OFFLOAD = {
    "offload_optimizer_device": "offload_optimizer",
    "offload_param_device": "offload_param",
}


class Rewriting:
    """One command as it is written back."""

    def __init__(
        self,
        launcher: Launcher,
        configuration: Configuration,
        job: SupportedScript,
        folder: Path,
        deepspeed: Mapping[str, Any],
    ) -> None:
        self.launcher, self.job, self.configuration = launcher, job, configuration
        self.folder, self.deepspeed = folder.resolve(), deepspeed
        self.files: dict[str, str] = {}
        self.env: dict[str, str] = {}
        self.changes: list[str] = []

    @property
    def world(self) -> int:
        """Number of processes."""
        return self.configuration.world_size

    @property
    def other_world(self) -> bool:
        """True if it is not today's."""
        return self.world != self.job.baseline.world_size

    @property
    def nodes(self) -> int:
        """The least number of nodes with as many processes on each as today at most."""
        each = self.job.baseline.world_size // self.launcher.nodes
        return -(-self.world // max(each, 1))

    def wanted(self, framework: str) -> Iterator[tuple[str, Any, Any]]:
        """Yield what the hook would set beside DeepSpeed's JSON: key, today's and the new value."""
        driver = next(d for d in shipped_drivers() if framework in d.recognised.launchers)
        job, today, new = self.job, self.job.baseline, self.configuration
        values: dict[str, tuple[Any, Any]] = {}
        if "micro_batch" in job.hook_turns:
            values["micro_batch"] = today.micro_batch, new.micro_batch
        if "gradient_accumulation" in job.hook_turns:
            times = (each.accumulation(job.global_batch) for each in (today, new))
            values["gradient_accumulation"] = next(times), next(times)
        knob = "activation_checkpointing"
        if job.by_switch and new.get(knob) != today.get(knob):
            values[knob] = today.get(knob) != "none", new.get(knob) != "none"
        for name, (before, after) in values.items():
            key = driver.knobs[name].keys[0]
            if before != after:
                turned = key.startswith("disable_")
                yield (
                    key,
                    before is not turned if turned else before,
                    (after is not turned if turned else after),
                )

    def deepspeed_keys(self, path: Path) -> dict[str, Any]:
        """Return the changed keys of an Accelerate file's section for DeepSpeed, if it has one."""
        if self.configuration.launch == self.job.baseline.launch:
            return {}
        section = load(path).get("deepspeed_config") or {}
        new = self.deepspeed
        if not isinstance(section, Mapping) or not section or not new:
            return {}
        if "deepspeed_config_file" in section:
            file = str(self.folder / "ds_config.json")
            return {"deepspeed_config.deepspeed_config_file": file}
        zero = new.get("zero_optimization") or {}
        values = {"zero_stage": zero.get("stage", 0)}
        for key, name in _ACCELERATE_OFFLOAD.items():
            values[key] = (zero.get(name) or {}).get("device", "none")
        if "gradient_accumulation_steps" in section:
            times = self.configuration.accumulation(self.job.global_batch)
            values["gradient_accumulation_steps"] = times
        return {
            f"deepspeed_config.{key}": value
            for key, value in values.items()
            if str(section.get(key, "none")) != str(value)
        }

    def copy(self, path: Path, keys: Mapping[str, Any]) -> str:
        """Add a copy of a configuration file with changed keys; return its path."""
        text = changed_text(path, keys, may_add=True)
        name = path.name
        while name in ("ds_config.json", "job.json", "options.json", *self.files):
            name = f"launcher-{name}"
        self.files[name] = text
        return str(self.folder / name)


def load(path: Path) -> dict[str, Any]:
    """Return the keys of a configuration file; InputError if it holds none."""
    data = parsed_file(path)
    if not isinstance(data, dict):
        raise InputError(f"{path} holds no keys")
    return data


def place(words: Sequence[str], names: Sequence[str], *, short: bool = False) -> int | None:
    """Return the place of an option among words, or None; with `short` an abbreviation counts."""
    for at, word in enumerate(words):
        given = word.partition("=")[0]
        abbreviated = short and len(given) > 3 and given.startswith("--")
        if given in names or (abbreviated and any(name.startswith(given) for name in names)):
            return at
        if len(names[0]) == 2 and word.startswith(names[0]) and word[2:].isdigit():
            return at
    return None


def with_value(words: Sequence[str], at: int, value: Any) -> list[str]:
    """Return the words with the value of the option at a place replaced."""
    changed = list(words)
    name, equals, _ = changed[at].partition("=")
    if equals:
        changed[at] = f"{name}={text_of(value)}"
    elif not name.startswith("--") and name[2:].isdigit():  # -n8
        changed[at] = f"{name[:2]}{text_of(value)}"
    elif at + 1 < len(changed) and not changed[at + 1].startswith("--"):
        changed[at + 1] = text_of(value)
    else:  # a flag that stands for true
        changed.insert(at + 1, text_of(value))
    return changed


def value_at(words: Sequence[str], at: int) -> str:
    """Return the value of the option at a place; a flag alone stands for true."""
    _, equals, value = words[at].partition("=")
    if equals:
        return value
    following = words[at + 1 : at + 2]
    return following[0] if following and not following[0].startswith("--") else "true"


def text_of(value: Any) -> str:
    """Return a value as commands have it."""
    return str(value).lower() if isinstance(value, bool) else str(value)
