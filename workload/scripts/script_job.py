"""A user's own training script as a job: its knobs, and its start under a configuration."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.job import TrainingJob
from tuner.search_spaces.knob_declarations import Knob, check_knobs
from tuner.search_spaces.knobs import Value
from tuner.search_spaces.safe_files import write_text
from tuner.search_spaces.space import SearchSpace
from tuner.search_spaces.today_facts import TodayFacts
from tuner.workload.hook import merge, split_differently
from tuner.workload.scripts.command import Script, Start, imported_frameworks, names_a_rank
from tuner.workload.scripts.declared_knobs import resolved
from tuner.workload.scripts.job import LaunchableJob, UserCommand
from tuner.workload.scripts.knob_support import ScriptKnobs
from tuner.workload.scripts.launchers.secrets import require, shell_words
from tuner.workload.scripts.routes import (
    BATCH_SPLIT,
    FRAMEWORK_ARGUMENTS,
    MODEL_SWITCH,
    ROUTES,
    Draft,
    KnobSupport,
)
from tuner.workload.scripts.script_facts import LAUNCH, Launcher
from tuner.workload.scripts.script_training import ScriptTraining
from tuner.workload.scripts.today import facts_today

#: Knob that is added where nothing else of a command can be set (`tuner.workload.scripts.threads`).
THREADS = "threads"
#: Variables of a probe, of which nothing is logged.
_QUIET_ENV = {
    "WANDB_MODE": "disabled",
    "COMET_MODE": "disabled",
    "DISABLE_MLFLOW_INTEGRATION": "TRUE",
}


@dataclass(frozen=True)
class ScriptJob(ScriptTraining, LaunchableJob):
    """Job that a user's script trains: its knobs, and its start under a configuration."""

    def declares(self, knobs: Sequence[Knob]) -> ScriptJob:
        """Return this job with declared knobs at today's values; InputError if one cannot be."""
        made, left_out = [], []
        for knob in knobs:
            try:
                made.append(resolved(knob, self))
            except InputError as error:
                if not knob.optional:
                    raise
                left_out.append(f"knob {knob.name} is left out: {error}")
        kept = check_knobs(made)
        return replace(self, knobs=kept, assumed=tuple(dict.fromkeys([*self.assumed, *left_out])))

    @cached_property
    def _supported(self) -> ScriptKnobs:
        return ScriptKnobs(self)

    @property
    def baseline(self) -> Configuration:
        """The user's present configuration."""
        return self._supported.baseline

    @property
    def offers(self) -> Mapping[str, KnobSupport]:
        """The support of each launch knob."""
        return self._supported.offers

    @property
    def user_command(self) -> UserCommand:
        """The words of each rank, with the variables of the launcher's line."""
        env = self.launcher.env if self.launcher else {}
        driver = self.driver.driver if self.driver is not None else None
        return UserCommand(self.words, self.cwd, env, driver)

    # ---- how it starts

    def start(self, configuration: Configuration, folder: Path, *, probe: bool = True) -> Start:
        """Write the files of this configuration to `folder`, and return the start of its ranks.

        A probe leaves loggers and checkpoints out, and checks the batches' size. InvalidValue if
        micro-batch x replicas does not divide the global batch; OSError if it cannot write.
        """
        # A command that is started as it stands sets its own variables.
        env = dict(self.launcher.env) if self.launcher and not self.whole else {}
        env |= _QUIET_ENV if probe else {}
        sets_micro_batch = BATCH_SPLIT.sets_micro_batch(self)
        sized = sets_micro_batch or bool(self.frame.micro_batch)
        draft = Draft(
            folder,
            probe,
            self.baseline,
            self.offers,
            splits_batch=sized and BATCH_SPLIT.accumulates(self),
            checks_batch=sets_micro_batch and self.frame.measured,
            words=list(self.words),
            env=env,
            command=self.line if self.whole else "",
            typed=self.frame.given or self.words,
        )
        draft.options["quiet"] = probe
        if self.bare and configuration.world_size == 1:
            draft.options["bare"] = True
        for route in ROUTES:
            route.apply(self, configuration, draft)
        words, options = tuple(draft.words), draft.options
        if self.whole and words != draft.typed:
            options["words"] = {"typed": draft.typed, "set": words}
        cwd = self.folder or self.cwd if self.whole else self.cwd
        start = Start(words, cwd, options, draft.config, draft.env, self.secrets)
        return replace(start, command=draft.command)

    def inspection_start(self, configuration: Configuration, folder: Path, *, alter: bool) -> Start:
        """Return the start of a look at the script: under the hook, until its first steps.

        With `alter`, and if DeepSpeed's configuration allows it, the batch is split otherwise: the
        size of the first one shows if the script follows DeepSpeed or makes its batches itself.
        """
        start = self.start(configuration, folder)
        options = {**start.options, "inspect": True, "alter": False}
        if alter and "micro_batch" not in self.placeholders:
            other = split_differently(start.config, configuration.data_parallel)
            if other:  # in the file too: the script may read it by itself
                config = merge(start.config, other)
                write_text(folder / "ds_config.json", json.dumps(config))
                options["deepspeed"] = {**start.options["deepspeed"], **other}
            options["alter"] = not start.config
        return replace(start, options=options)

    @cached_property
    def bare(self) -> bool:
        """True if one process of the script is started without a rank, as its command does."""
        launched = self.launcher is not None and bool(self.launcher.words)
        return not launched and not self.whole and names_a_rank(self.words, self.cwd)

    @property
    def as_it_stands(self) -> bool:
        """True if each probe starts the user's whole command."""
        return self.whole

    @property
    def needs_hook(self) -> bool:
        """True if the script needs the hook outside a probe too, to read or set its values."""
        given = self.config_word is not None or "deepspeed_config" in self.placeholders
        switched = self.offers[MODEL_SWITCH.knob].route == MODEL_SWITCH
        return bool(
            self.frame.reads
            or {"rank", "local_rank"} & {*self.placeholders}
            or any(knob.live for knob in self.knobs)
            or self.bare
            or self.frame.owner == "lightning"  # which is told the ranks that were started
            or switched
            or FRAMEWORK_ARGUMENTS.set_by_hook(self)
            or (self.frame.on_deepspeed and not given)
        )

    # ---- what others ask of a job

    def started_by(self, built_in: Callable[[TrainingJob], Any]) -> ScriptJob:
        """Return this job, which starts itself."""
        return self

    @property
    def facts(self) -> ScriptJob:
        """The facts of the script: itself."""
        return self

    @property
    def splits_model(self) -> bool:
        """False: inspection shows the parts of its model that the script can divide."""
        return False

    @property
    def trains_synthetic_data(self) -> bool:
        """False: the script trains the user's data."""
        return False

    @property
    def counts_batches(self) -> bool:
        """True if its first steps show the size of its batches."""
        return self.frame.counted

    @property
    def first_step_s(self) -> float:
        """Seconds that the inspection took to its first step."""
        return self.frame.first_step_s

    @property
    def needed_folder(self) -> str:
        """The folder that the script starts in."""
        return self.cwd

    @property
    def stated(self) -> Mapping[str, Value]:
        """The knobs that the command states, with today's values."""
        return {**self.baseline.launch, **self.baseline.live}

    @property
    def shown(self) -> str:
        """The command of each rank."""
        return shlex.join(self.words)

    @property
    def ranks_today(self) -> int:
        """Number of ranks that the command starts today."""
        return self.devices

    def about(self, configuration: Configuration) -> tuple[str, ...]:
        """Return the content of the file that starts the script."""
        return ("Your own command, as it was probed: checkpoints and loggers are yours again.",)

    @property
    def hook_on_cores(self) -> bool:
        """True if DeepSpeed trains it, which the hook starts on cores."""
        return self.frame.on_deepspeed

    @property
    def threads_today(self) -> int:
        """Threads of a rank as it was observed."""
        return self.frame.threads or 1

    @property
    def needed_modules(self) -> tuple[str, ...]:
        """The modules that a node must have; the script may be plain torch."""
        return ("torch",)

    @property
    def imported_modules(self) -> tuple[str, ...]:
        """The frameworks that the script imports, worth importing once for all ranks."""
        return imported_frameworks(self.words, self.cwd)

    @property
    def imported_packages(self) -> Collection[str] | None:
        """Those that its ranks were seen to import; none if no rank is forked."""
        if self.whole:
            return ()
        return {"torch", "setuptools", *self.frame.imports} if self.line else None

    def narrowed(self, space: SearchSpace) -> SearchSpace:
        """Return the space with knobs that cannot be set fixed at present values."""
        return self._supported.restricted(space)

    def sentences(self, searched: Collection[str] = LAUNCH) -> tuple[str, ...]:
        """Return which knobs can be set and why not others."""
        return self._supported.sentences(searched)

    def why_nothing(self) -> tuple[str, ...]:
        """Return why none of the knobs that split the batch can be set, a sentence each."""
        return self._supported.why_nothing()

    def refused(self, configuration: Configuration) -> list[str]:
        """Return a phrase for each knob value that this script cannot take; empty if none."""
        return self._supported.refused(configuration)

    @property
    def searched_knobs(self) -> tuple[Knob, ...]:
        """The declared knobs, which were checked when they were declared."""
        return self.knobs

    def today(self) -> Configuration:
        """Return the configuration of the command."""
        return self.baseline

    @property
    def today_name(self) -> str:
        """Source of today's configuration."""
        return "the script as it is started today"

    def today_facts(self, today: Configuration | None = None) -> TodayFacts:
        """Return today's training, by default the command's."""
        return facts_today(self, self.baseline, today or self.baseline)

    def require_secrets(self) -> None:
        """Raise InputError if a variable whose value is not kept has none."""
        require(self.taken, self.secrets)

    def with_program(self, script: Script) -> ScriptJob:
        """Return this job with another command."""
        return replace(
            self,
            words=script.words,
            cwd=str(script.cwd),
            launcher=script.launcher,
            secrets=script.secrets,
        )

    def as_typed_line(self, configuration: Configuration, folder: Path) -> Start | None:
        """Return the start of the user's whole command, if it starts as many ranks."""
        if configuration.world_size != self.devices:
            return None
        whole = replace(self, whole=True)
        if self.line:
            return whole.start(configuration, folder, probe=False)
        if self.launcher is None or not self.launcher.words:
            return None
        line = shell_words([*self.launcher.words, *self.launcher.script])
        start = replace(whole, line=line).start(configuration, folder, probe=False)
        return replace(start, env={**self.launcher.assigned, **start.env})

    def observed_again(self, script: Script) -> ScriptJob | None:
        """Return this job for the same command, or None if another one must be observed."""
        folder = str(Path(script.cwd).resolve())
        if (self.line, self.folder) != (script.line, folder):
            return None
        added = [knob for knob in self.knobs if knob.name == THREADS and not script.knobs]
        declared = self.declares([*script.knobs, *added])
        if _ways(declared) != _ways(self):
            return None
        return replace(declared, steps=script.steps or self.steps, secrets=script.secrets)

    def inspected_again(
        self, script: Script, ranks: int, launcher: Launcher | None
    ) -> ScriptJob | None:
        """Return this job for the same command, or None if another one must be inspected."""
        same = (
            (self.frame.given or self.words, self.cwd)
            == (script.words, str(Path(script.cwd).resolve()))
            and (self.devices, self.launcher) == (ranks, launcher)
            and self.driver == script.framework_of_command
        )
        declared = self.declares(script.knobs) if same else self
        if not same or _ways(declared) != _ways(self):
            return None
        return replace(declared, steps=script.steps or self.steps, secrets=script.secrets)


def _ways(job: ScriptJob) -> set[tuple[str, str]]:
    return {(knob.name, knob.how) for knob in job.knobs}
