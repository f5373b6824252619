"""Training by a user's script: its command, its launcher and the findings of an inspection."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from tuner.search_spaces.errors import InputError, check_integer
from tuner.search_spaces.job import Program, TrainingJob
from tuner.search_spaces.knob_declarations import read_knobs
from tuner.workload.scripts import SOCKET
from tuner.workload.scripts.deepspeed_file import is_deepspeed_file, read_deepspeed
from tuner.workload.scripts.script_facts import (
    PLACEHOLDER,
    Framework,
    FrameworkKeys,
    Launcher,
    ScriptFacts,
    names_taken,
)


@dataclass(frozen=True)
class ScriptTraining(TrainingJob):
    """Facts about a job that a user's script trains.

    `model` may be empty, and `sequence_length` and `global_batch` 0, if unknown. What
    needs them is then left out: the analytic prediction and parallelism inside the model, the knobs
    that split the batch, and figures of the whole training.

    Attributes:
        devices: ranks that it starts on today.
        assumed: what was not told and is taken, one sentence each.
        line: the whole command, as typed for the shell; "" if it was not observed.
        folder: that the line was typed in; "" if it is `cwd`.
        whole: each probe starts the line as it stands, and its ranks report by themselves;
            otherwise ranks are started one by one from `words`.
        secrets: values that words and launcher name as `{env:NAME}`; they are not written down.
    """

    words: tuple[str, ...] = ()
    cwd: str = "."
    devices: int = 1
    frame: ScriptFacts = field(default_factory=ScriptFacts, hash=False)
    assumed: tuple[str, ...] = ()
    launcher: Launcher | None = None
    driver: Framework | None = None
    line: str = ""
    folder: str = ""
    whole: bool = False
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, least in (("global_batch", 0), ("devices", 1)):
            check_integer(f"{name} of script {self.name!r}", getattr(self, name), least=least)
        if self.steps is not None:
            check_integer(f"steps of script {self.name!r}", self.steps)

    # ---- what is written down

    def to_json(self) -> dict[str, Any]:
        listed = {"words": list(self.words), "assumed": list(self.assumed)}
        data = {**super().to_json(), **listed, "frame": self.frame.to_json()}
        del data["launcher"], data["driver"], data["secrets"]
        if not self.line:  # it was not observed
            del data["line"], data["folder"], data["whole"]
        if self.launcher is not None:
            data["launcher"] = json.dumps(self.launcher.to_json(), sort_keys=True)
        return data | ({"driver": self.driver.to_json()} if self.driver else {})

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Read the output of `to_json`; InputError if invalid."""
        if "driver" in data:
            frameworks = SOCKET.needed("framework", "a run of a recognised framework")
        try:
            frame = ScriptFacts.from_json(data["frame"])
            listed = {name: tuple(data.get(name, ())) for name in ("words", "assumed")}
            names = ({item.name for item in fields(cls)} - {"secrets"}) & set(data)
            given = {name: data[name] for name in names} | {**listed, "frame": frame}
            if "launcher" in data:
                given["launcher"] = Launcher.from_json(json.loads(data["launcher"]))
            if "driver" in data:
                given["driver"] = frameworks.Bound.from_json(data["driver"])
            if "knobs" in data:
                given["knobs"] = read_knobs(data["knobs"], "the job")
            if "program" in data:
                given["program"] = Program.from_table(data["program"], "the job")
            return cls(**given)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise InputError(f"this is not the job of a script: {error}") from error

    # ---- what can be turned

    @cached_property
    def placeholders(self) -> Mapping[str, str]:
        """The names of the command's placeholders, each with today's value or ""."""
        return {name: value for word in self.words for name, value in PLACEHOLDER.findall(word)}

    @cached_property
    def driven(self) -> FrameworkKeys | None:
        """The driver of the recognised framework, applied to this command."""
        if self.driver is None:
            return None
        env = {**os.environ, **(self.launcher.env if self.launcher else {})}
        return self.driver.applied(
            *(self.words, Path(self.cwd), env),
            devices=self.devices,
            sequence_length=self.sequence_length,
            taken=self.placeholders,
        )

    @cached_property
    def stated_values(self) -> Mapping[str, str]:
        """Knobs that the command takes by a placeholder or its framework, with today's value."""
        framework = self.driven.today if self.driven else {}
        return {**{name: str(value) for name, value in framework.items()}, **self.placeholders}

    @cached_property
    def config_word(self) -> tuple[int, Path] | None:
        """Index of the word that names a DeepSpeed configuration, and the file, or None."""
        for position, word in enumerate(self.words):
            path = Path(self.cwd) / word.rpartition("=")[2]
            if path.suffix == ".json" and path.is_file() and is_deepspeed_file(path):
                return position, path
        return None

    @cached_property
    def file_config(self) -> Mapping[str, Any]:
        """The DeepSpeed configuration that the command names; empty if it names none."""
        named = self.placeholders.get("deepspeed_config")
        path = Path(self.cwd) / named if named else self.config_word and self.config_word[1]
        return read_deepspeed(path) if path else {}

    @property
    def under_deepspeed(self) -> bool:
        """True if DeepSpeed trains the script, or the command gives it a configuration."""
        return self.frame.on_deepspeed or "deepspeed_config" in self.placeholders

    @property
    def taken(self) -> tuple[str, ...]:
        """The variables whose values are not written down, but needed where ranks start."""
        return names_taken(
            [*self.words, self.line, *(self.launcher.env.values() if self.launcher else ())]
        )

    @property
    def compiled(self) -> bool:
        """True if the inspected launch showed a compiled model."""
        return self.frame.compiled

    @property
    def on_deepspeed(self) -> bool:
        """False if the script has another framework, whose driver names the refused knobs."""
        return self.driver is None or self.frame.on_deepspeed
