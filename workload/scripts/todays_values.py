"""Today's value of each placeholder: what the command must say, and the line that says it.

What a bare placeholder stands for today decides what every saving is compared with, so it is never
guessed. The line to write instead is filled in with the default that the script's own source gives
its option.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from tuner.search_spaces.declared import Knob
from tuner.search_spaces.errors import InputError
from tuner.workload.hook.named_values import ACCUMULATION, BATCH
from tuner.workload.scripts.knob_support import NO_BATCH
from tuner.workload.scripts.script_facts import LAUNCH, OFFLOADS, PLACEHOLDER
from tuner.workload.scripts.script_job import ScriptJob

#: Options of scripts that carry a part of the batch.
_NAMED = {"micro_batch": BATCH, "gradient_accumulation": ACCUMULATION}
#: Options of scripts that say how many processes load samples.
_WORKERS = re.compile(r"(\w+_)?(num_?)?workers|workers_per_\w+", re.I)


def require_todays_values(job: ScriptJob, declared: Sequence[Knob]) -> None:
    """Raise InputError, with the words to write, unless each placeholder's value today is known."""
    known = {name for name, value in job.told.items() if value}
    known |= {"micro_batch"} if job.frame.micro_batch else set()
    known |= {"gradient_accumulation"} if job.frame.accumulation else set()
    known |= {"zero_stage", *OFFLOADS} if job.file_config else set()
    named = {*LAUNCH, "gradient_accumulation"}
    named |= {knob.name for knob in declared if knob.baseline is None}
    lacking = [n for n in job.placeholders if n in named and n not in known]
    if not lacking:
        return
    defaults = _defaults(job)
    told = [_written(job, name, defaults.get(name, "VALUE")) for name in lacking]
    where = (
        "the value in braces is the default in your script; write your own if you give another"
        if all(name in defaults for name in lacking)
        else "with the value that you use today"
    )
    raise InputError(
        f"{', '.join(f'{{{name}}}' for name in lacking)} "
        f"{'does' if len(lacking) == 1 else 'do'} not say what you use today; write "
        f"{' '.join(told)} ({where})"
    )


def _place(job: ScriptJob, name: str) -> tuple[str, str]:
    for before, word in zip(("", *job.words), job.words, strict=False):
        found = next((f for f in PLACEHOLDER.finditer(word) if f[1] == name), None)
        if found:
            own = word[: found.start()]
            return own or before if (own or before).startswith("-") else "", own
    return "", ""


def _written(job: ScriptJob, name: str, value: str) -> str:
    option, own = _place(job, name)
    return f"{own or (option and option + ' ')}{{{name}={value}}}"


def _defaults(job: ScriptJob) -> Mapping[str, str]:
    """Return the defaults of the placeholders' options, as far as the script's source says them."""
    named = {_place(job, name)[0].rstrip("="): name for name in job.placeholders}
    return {named[option]: value for option, value in _options(job).items() if option in named}


def _options(job: ScriptJob) -> Mapping[str, str]:
    """Return the script's own options with the one constant default that its source has, unrun."""
    try:
        tree = ast.parse(Path(job.cwd, job.words[0]).read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError, RecursionError):
        return {}
    found: dict[str, set[str]] = {}
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call):
            continue
        words = [each.value for each in call.args if isinstance(each, ast.Constant)]
        default = next((each.value for each in call.keywords if each.arg == "default"), None)
        for word in words:
            if not isinstance(word, str) or not word.startswith("-"):
                continue
            if isinstance(default, ast.Constant) and type(default.value) in (int, float, str):
                found.setdefault(word, set()).add(str(default.value))
    return {option: values.pop() for option, values in found.items() if len(values) == 1}


def why_nothing(job: ScriptJob) -> tuple[str, ...]:
    """Return why none of the knobs that split the batch can be turned, a sentence each."""
    reasons: dict[str, list[str]] = {}
    for name in ("micro_batch", "data_parallel"):
        reasons.setdefault(job.offers[name].why, []).append(name)
    stay = [f"{' and '.join(names)}: {why}" for why, names in reasons.items() if why != NO_BATCH]
    return (*stay, *(note for note in job.assumed if "predicted before" not in note))


def proposed_command(command: str, job: ScriptJob) -> str:
    """Return a command that gives a search something to turn, filled in as far as it is known.

    Options that are named as the batch and the accumulation, and hold today's values, are proposed,
    but not what a launch has shown not to help.
    """
    if job.frame.micro_batch_stays or job.frame.given:
        return _any_knob(command, job)
    today = {"micro_batch": job.frame.micro_batch, "gradient_accumulation": job.frame.accumulation}
    made = command
    for name, value in today.items():
        if name in job.placeholders:
            continue
        if not value:
            return _any_knob(command, job)
        given = _given(made, name, value)
        if given == made:
            options = (o for o, default in _options(job).items() if default == str(value))
            option = next((o for o in options if _NAMED[name].fullmatch(_plain(o))), "")
            if not option:
                return _any_knob(command, job)
            given = f"{made} {option} {{{name}={value}}}"
        made = given
    return f"-- {made}" if made != command else _any_knob(command, job)


def _given(command: str, name: str, value: int, named: re.Pattern[str] | None = None) -> str:

    def placed(found: re.Match[str]) -> str:
        if not (named or _NAMED[name]).fullmatch(_plain(found[1])):
            return found[0]
        return f"{found[1]}{found[2]}{{{name}={value}}}"

    return re.sub(rf"(?<!\S)(-[\w-]+)([ =]){value}(?!\S)", placed, command)


def _plain(option: str) -> str:
    return option.lstrip("-").replace("-", "_")


def _any_knob(command: str, job: ScriptJob) -> str:
    """Return a command with the loader's workers as a knob if it takes them, or with any."""
    for option, default in _options(job).items():
        name = _plain(option)
        if not _WORKERS.fullmatch(name) or name in job.placeholders:
            continue
        words = re.search(rf"(?<!\S){re.escape(option)}[ =](\d+)(?!\S)", command)
        today = words[1] if words else default
        if not today.isdigit():
            continue
        made = _given(command, name, int(today), _WORKERS)
        made += f" {option} {{{name}={today}}}" * (made == command)
        values = ",".join(map(str, sorted({0, 2, 4, int(today)})))
        return f"--knob {name}={values} -- {made}"
    return f"--knob NAME=VALUE,VALUE -- {command} --option {{NAME=VALUE}}"
