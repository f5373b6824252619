"""A user's own training script as a job: its knobs, and its start under a configuration.

The *frame* that a script trains in (DeepSpeed, transformers' Trainer, Accelerate, Lightning, a
plain torch loop) decides: it may own the batches, the accumulation, the optimizer and the model.
A knob without evidence of one inspected launch is not offered, and the user gets the reason.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from tuner.search_spaces.cluster import Cluster
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.job import TodayFacts
from tuner.search_spaces.knob_declarations import CHANGED, Knob, check_knobs, with_baseline
from tuner.search_spaces.knobs import KNOBS, Value
from tuner.search_spaces.safe_files import write_text
from tuner.search_spaces.space import Auto, SearchSpace
from tuner.workload.hook import merge, split_differently
from tuner.workload.scripts.command import Script, Start, imported_frameworks, names_a_rank
from tuner.workload.scripts.declared_knobs import resolved
from tuner.workload.scripts.job import LaunchableJob, UserCommand
from tuner.workload.scripts.routes import (
    BATCH_SPLIT,
    FRAMEWORK_ARGUMENTS,
    MODEL_SWITCH,
    NO_BATCH,
    Draft,
    KnobSupport,
    routes,
    support_of,
    today_by,
)
from tuner.workload.scripts.script_facts import LAUNCH, Launcher, ScriptTraining
from tuner.workload.scripts.secrets import require, shell_words

#: Part of a configuration's name even at their defaults; of the others only what is not.
_ALWAYS_NAMED = ("data_parallel", "micro_batch", "zero_stage")


def _trainer(job: ScriptTraining) -> str:
    counted = {"torch": "a torch optimizer", "program": "steps of its own"}
    by = counted.get(job.frame.kind, "DeepSpeed")
    by = f"{job.frame.owner} over {by}" if job.frame.owner else by
    return f"{by}, recognised as {job.driver.title}" if job.driver else by


def _undeclared(job: ScriptTraining) -> str:
    if job.driver is None:
        return ""
    own = {knob.name for knob in job.knobs}
    others = [name for name in job.driver.declared if name not in own]
    return f"{job.driver.name} also has {', '.join(others)}" if others else ""


def _shards_otherwise(job: ScriptTraining, space: SearchSpace) -> bool:
    stages = space.choices.get("zero_stage")
    searched = isinstance(stages, tuple) and len(stages) > 1
    return searched and job.driven is not None and "sharding" in job.driven.today


#: Part of every configuration's name, and no fact of a program that shards nothing.
_NO_ZERO = ("zero_stage", 0)


def facts_today(job: ScriptTraining, own: Configuration, today: Configuration) -> TodayFacts:
    """Return the facts of a script under today's configuration; `own` is its command's."""
    launcher = job.launcher
    by_launcher = launcher is not None and launcher.words and launcher.processes
    by = "as your command starts them" if job.line else "no launcher says more"
    sources = {"ranks": launcher.kind if by_launcher and launcher else by}
    knobs = {**today.launch, **today.live}
    if not job.frame.on_deepspeed and "zero_stage" not in job.placeholders:
        knobs = {name: value for name, value in knobs.items() if (name, value) != _NO_ZERO}
    for name in knobs:
        if name in job.placeholders:
            sources[name] = "the command"
        elif job.stated_values.get(name) and job.driver is not None:
            sources[name] = job.driver.name
    replicas = today.data_parallel
    micro = today.micro_batch if job.frame.micro_batch else 0
    times = job.frame.accumulation
    if job.global_batch and micro:
        times = job.global_batch // (micro * replicas)
    sources |= job.frame.sources
    if (today.micro_batch, replicas) != (own.micro_batch, own.data_parallel):
        sources |= dict.fromkeys(("micro_batch", "accumulation"), "--today")
    return TodayFacts(
        ranks=today.world_size,
        replicas=replicas,
        global_batch=job.global_batch,
        micro_batch=micro,
        accumulation=times,
        steps=job.steps,
        knobs=knobs,
        sources=sources,
    )


#: Knob that is added where nothing else of a command can be set (`with_threads`).
THREADS = "threads"
#: Variables of a probe, of which nothing is logged.
_QUIET_ENV = {
    "WANDB_MODE": "disabled",
    "COMET_MODE": "disabled",
    "DISABLE_MLFLOW_INTEGRATION": "TRUE",
}


@dataclass(frozen=True)
class ScriptJob(ScriptTraining, LaunchableJob):
    """Job that a user's script trains: its knobs, and its start under a configuration.

    An inspection shows which parts of its model the script can divide, so it `splits_model` into
    none by itself.
    """

    splits_model = False
    trains_synthetic_data = False
    today_name = "the script as it is started today"

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

    @property
    def without_torch_knobs(self) -> ScriptJob:
        """The job without the knobs that the hook sets in any program of torch."""
        return replace(self, knobs=tuple(k for k in self.knobs if k.target[0] != "torch"))

    @property
    def user_command(self) -> UserCommand:
        """The words of each rank, with the variables of the launcher's line."""
        env = self.launcher.env if self.launcher else {}
        return UserCommand(self.words, self.cwd, env, self.driver)

    # ---- its knobs

    @cached_property
    def baseline(self) -> Configuration:
        """The user's present configuration."""
        values = {
            name: value
            for name, value in today_by(routes(), self).items()
            if name in _ALWAYS_NAMED or (name in KNOBS and value != KNOBS[name].default)
        }
        return with_baseline(Configuration.of(values), self.knobs)

    @cached_property
    def offers(self) -> Mapping[str, KnobSupport]:
        """The support of each launch knob."""
        return {name: support_of(self, name) for name in LAUNCH}

    def refused(self, configuration: Configuration) -> list[str]:
        """Return a phrase for each knob value that this script cannot take; empty if none."""
        phrases = []
        declared = {*(knob.name for knob in self.knobs), CHANGED}
        for name, value in configuration.launch.items():
            if name in declared:
                continue
            offer, today = self.offers.get(name), self.baseline.get(name)
            if offer is None:
                phrases.append(f"{name} is not a knob of a script")
            elif value != today and not offer.turned:
                phrases.append(f"{name} is {today} in this script and not {value}: {offer.why}")
            elif value != today and offer.values and value not in offer.values:
                phrases.append(f"{name} {value} is none of {', '.join(map(str, offer.values))}")
        if self.frame.keeps == "micro_batch" and not phrases:
            today = self.baseline.micro_batch * self.baseline.data_parallel
            if configuration.micro_batch * configuration.data_parallel != today:
                phrases.append(f"micro-batch x ranks stay {today}: the script does not accumulate")
        if phrases or self.driven is None or configuration.launch == self.baseline.launch:
            return phrases
        return self.driven.refused(configuration)

    def narrowed(self, space: SearchSpace) -> SearchSpace:
        """Return the space with knobs that a script cannot set fixed at present values."""
        choices: dict[str, tuple[Value, ...] | Auto] = {}
        for name in KNOBS:
            choice = space.choices.get(name)
            if name == "sharding" and choice is None and _shards_otherwise(self, space):
                choice = self.offers[name].values
            if name == "global_batch":
                continue
            kept = self._choice_of(name, choice) if name in self.offers else choice
            if kept is not None:
                choices[name] = kept
        return replace(space, choices=choices)

    def _choice_of(
        self, name: str, choice: tuple[Value, ...] | Auto | None
    ) -> tuple[Value, ...] | Auto | None:
        offer, today, default = self.offers[name], self.baseline.get(name), KNOBS[name].default
        assert today is not None  # every launch knob has a default
        if choice is None or not offer.turned or choice == Auto(kind="baseline"):
            if today == default or default is None:
                return None
            # A knob that the space does not name stands at its default, or as today.
            can = choice is None and offer.turned and default in (offer.values or (default,))
            return (default, today) if can else (today,)
        if isinstance(choice, tuple):
            kept = [value for value in choice if not offer.values or value in offer.values]
            return (*kept, today)
        return (*offer.values, today) if offer.values else choice

    def sentences(self, searched: Collection[str] = LAUNCH) -> tuple[str, ...]:
        """Describe the knobs in play and the reasons against the rest, one sentence each."""
        able = [name for name in LAUNCH if self.offers[name].turned]
        declared = [knob.name for knob in self.knobs]
        turned = [*(name for name in able if name in searched), *declared]
        left = [name for name in able if name not in searched]
        sentences = [
            f"the script {self.name!r} trains by {_trainer(self)}; in play: "
            f"{', '.join(turned) or 'no launch knob'}, and live settings where the machine lets "
            "them be set"
        ]
        if left:
            sentences.append(f"not in this search space: {', '.join(left)}")
        if others := _undeclared(self):
            sentences.append(f"{others} (--knobs framework)")
        for why, names in self._reasons(LAUNCH).items():
            sentences.append(f"not in play: {', '.join(names)}: {why}")
        return (*sentences, *self.assumed)

    def why_nothing(self) -> tuple[str, ...]:
        """Return why none of the knobs that split the batch can be turned, a sentence each."""
        reasons = self._reasons(("micro_batch", "data_parallel"))
        stay = [
            f"{' and '.join(names)}: {why}" for why, names in reasons.items() if why != NO_BATCH
        ]
        return (*stay, *(note for note in self.assumed if "predicted before" not in note))

    def _reasons(self, names: Collection[str]) -> dict[str, list[str]]:
        reasons: dict[str, list[str]] = {}
        for name in names:
            if not self.offers[name].turned:
                reasons.setdefault(self.offers[name].why, []).append(name)
        return reasons

    # ---- how it starts

    def start(self, configuration: Configuration, folder: Path, *, probe: bool = True) -> Start:
        """Write the files of this configuration to `folder`, and return the start of its ranks.

        A probe leaves loggers and checkpoints out, and checks the batches' size. InvalidValue if
        micro-batch x replicas does not divide the global batch; OSError if it cannot write.
        """
        # A command that is started as it stands sets its own variables.
        env = dict(self.launcher.env) if self.launcher and not self.as_it_stands else {}
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
            command=self.line if self.as_it_stands else "",
            typed=self.frame.given or self.words,
        )
        draft.options["quiet"] = probe
        if probe and self.compares(configuration):
            draft.options["compares"] = True
        if self.bare and configuration.world_size == 1:
            draft.options["bare"] = True
        for route in routes():
            route.apply(self, configuration, draft)
        words, options = tuple(draft.words), draft.options
        if self.as_it_stands and words != draft.typed:
            options["words"] = {"typed": draft.typed, "set": words}
        cwd = self.folder or self.cwd if self.as_it_stands else self.cwd
        start = Start(words, cwd, options, draft.config, draft.env, self.secrets)
        return replace(start, command=draft.command)

    def compares(self, configuration: Configuration) -> bool:
        """Return True if the first steps of a launch are compared with today's, as a proof."""
        return bool(self.frame.first_steps) and any(
            knob.name == COMPILE and configuration.get(COMPILE) != knob.baseline
            for knob in self.knobs
        )

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
        return not launched and not self.as_it_stands and names_a_rank(self.words, self.cwd)

    @property
    def needs_hook(self) -> bool:
        """True if the script needs the hook outside a probe too, to read or set its values."""
        given = self.config_word is not None or "deepspeed_config" in self.placeholders
        switched = self.offers[MODEL_SWITCH.knob].route == MODEL_SWITCH
        return bool(
            self.frame.reads
            or {"rank", "local_rank"} & {*self.placeholders}
            or any(knob.live or knob.target[0] == "torch" for knob in self.knobs)
            or self.bare
            or self.frame.owner == "lightning"  # which is told the ranks that were started
            or switched
            or FRAMEWORK_ARGUMENTS.set_by_hook(self)
            or (self.frame.on_deepspeed and not given)
        )

    # ---- what others ask of a job

    @property
    def facts(self) -> ScriptJob:
        """The facts of the script: itself."""
        return self

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
        if self.as_it_stands:
            return ()
        if not self.line:
            return None
        compiles = self.frame.compiled or any(knob.name == COMPILE for knob in self.knobs)
        compiles |= "deepspeed" in self.frame.imports
        return {"torch", "setuptools", *self.frame.imports, *["torch._inductor"] * compiles}

    @property
    def searched_knobs(self) -> tuple[Knob, ...]:
        """The declared knobs, which were checked when they were declared."""
        return self.knobs

    def today(self) -> Configuration:
        """Return the configuration of the command."""
        return self.baseline

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
        whole = replace(self, as_it_stands=True)
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
        added = [knob for knob in self.knobs if self._is_added(knob, script)]
        declared = self.declares([*script.knobs, *added])
        if _ways(declared) != _ways(self):
            return None
        return replace(declared, steps=script.steps or self.steps, secrets=script.secrets)

    def _is_added(self, knob: Knob, script: Script) -> bool:
        if knob.name in {own.name for own in script.knobs}:
            return False
        return knob.target[0] == "torch" or (knob.name == THREADS and not script.knobs)

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
        added = [knob for knob in self.knobs if self._is_added(knob, script)]
        declared = self.declares([*script.knobs, *added]) if same else self
        if not same or _ways(declared) != _ways(self):
            return None
        return replace(declared, steps=script.steps or self.steps, secrets=script.secrets)


def _ways(job: ScriptJob) -> set[tuple[str, str]]:
    return {(knob.name, knob.how) for knob in job.knobs}


_VARIABLE = "OMP_NUM_THREADS"
#: Knob that no launch before a search proves: compilation takes up to minutes.
COMPILE = "compile"


def with_threads(job: ScriptJob, cluster: Cluster) -> ScriptJob | None:
    """Return the job with the number of threads as a knob; None if there is none to choose.

    Numbers up to the cores that a rank has are halved down to 1; today's is the one observed.
    """
    today, most = job.frame.threads, cluster.devices_per_node // max(job.ranks_today, 1)
    taken = any(knob.name == THREADS or knob.how == f"env:{_VARIABLE}" for knob in job.knobs)
    # A program that computes with other threads than the variable says sets them itself.
    taken |= os.environ.get(_VARIABLE, str(today)) != str(today)
    if cluster.device.is_gpu or not today or taken:
        return None
    values = {today, *(most >> halvings for halvings in range(most.bit_length()))}
    if len(values) < 2:
        return None
    knob = Knob(THREADS, tuple(sorted(values)), baseline=today, how=f"env:{_VARIABLE}")
    return job.declares([*job.knobs, knob])
