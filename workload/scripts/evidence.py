"""Today's batches of an inspected script, and where each value comes from.

The order of trust: what the command says, what an engine or framework was told, what the counts of
the first steps show (`tuner.workload.hook.batch_counts`). What they leave open, or contradict, is
unknown; where the user is one of the sources, a contradiction is refused. Nothing is guessed. Two
launches train the same if their samples, losses and optimizer settings do (`differs`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tuner.search_spaces.errors import InputError
from tuner.workload.hook import micro_batches
from tuner.workload.scripts.command import Script
from tuner.workload.scripts.script_facts import ScriptFacts
from tuner.workload.scripts.script_job import ScriptJob

#: Optimizer settings that differ by less are equal.
_SAME = 0.02
#: Mean losses of the same samples that differ by less are equal, and by more are not, however much
#: they scatter from step to step. A loss over the negatives of a batch changes by ln 2 / ln N.
_SAME_LOSS, _OTHER_LOSS = 0.05, 0.15
#: The same on other ranks, whose samples are others: a sum for a mean doubles it.
_SAME_LOSS_OF_OTHERS = 0.3


@dataclass(frozen=True)
class BatchCount:
    """Batches of the first optimizer steps, 0 if unknown, and how that is known, a phrase."""

    micro_batch: int = 0
    accumulation: int = 0
    how: str = ""
    steps: int = 0


@dataclass(frozen=True)
class _Group:
    """Counts of one step: batches of the training loader, backward passes, first inputs."""

    samples: tuple[int | None, ...]
    passes: int
    shapes: tuple[tuple[int, ...], ...]
    ends_epoch: bool


def batches_seen(facts: Mapping[str, Any]) -> BatchCount:
    """Return the batches that the hook's counts of the first steps show."""
    groups = list(facts.get("groups", ()))[1:]  # the first step may be special
    if not groups:
        return BatchCount(how="no second optimizer step was seen")
    loaders = [{entry[0] for entry in group["drawn"]} for group in groups]
    always = set.intersection(*loaders)
    if all(len(each) == 1 for each in loaders):  # one that is made anew for each epoch, too
        always = set.union(*loaders)
        loaders = [always]
    if len(always) > 1 and loaders != [always]:
        return BatchCount(how="each step draws from several loaders")
    if any(loaders) and not always:
        return BatchCount(how="not every step draws a batch")
    kept = [_group_of(group, always) for group in groups]
    whole = [group for group in kept if not group.ends_epoch] or kept
    if not always:
        return _without_loader(whole, facts)
    digests = facts.get("first_batches", [0])
    if facts.get("first_batch") is not None and None in digests:
        return BatchCount(how="one rank reads the batches of all")
    return _of_loader(whole)


def _group_of(group: Mapping[str, Any], loaders: set[int]) -> _Group:
    drawn = [entry for entry in group["drawn"] if entry[0] in loaders]
    return _Group(
        tuple(samples for _, samples, _ in drawn),
        int(group["passes"]),
        tuple(tuple(shape) for shape in group["shapes"]),
        any(last for _, _, last in drawn),
    )


#: How batches are seen of which there is no more to say: each pass takes one from its loader.
DRAWN = "drawn"


def _of_loader(groups: Sequence[_Group]) -> BatchCount:
    sizes = {size for group in groups for size in group.samples}
    if None in sizes:
        return BatchCount(how="the loader does not tell how many samples a batch holds")
    if len(sizes) > 1:
        stated = sorted(size for size in sizes if size is not None)
        return BatchCount(how=f"batches hold {stated[0]} to {stated[-1]} samples")
    counts = {(len(group.samples), group.passes) for group in groups}
    if len(counts) > 1:
        stated = sorted({passes for _, passes in counts})
        return BatchCount(how=f"steps take {stated[0]} to {stated[-1]} backward passes")
    ((fetches, passes),), size = counts, next(iter(sizes))
    assert size is not None
    seen = len(groups)
    if passes == 0:
        return BatchCount(how="no backward pass was seen")
    if fetches % passes == 0:
        rows = _rows(groups)
        if fetches > passes and sum(rows or ()) != fetches * size * seen:
            return BatchCount(how=f"{fetches} batches are drawn for {passes} backward passes")
        how = f"{fetches // passes} batches in one pass" if fetches > passes else DRAWN
        return BatchCount(size * fetches // passes, passes, how, seen)
    rows = _rows(groups)
    if fetches == 1 and rows is not None and len(set(rows)) == 1:
        if rows[0] * passes == size:
            return BatchCount(rows[0], passes, f"{size} drawn and split by the script", seen)
        if rows[0] == size:
            return BatchCount(size, 1, f"one batch in {passes} passes", seen)
    return BatchCount(how=f"{fetches} batches are drawn for {passes} backward passes")


def _rows(groups: Sequence[_Group]) -> tuple[int, ...] | None:
    # None if unknown: a model may be called with a number first, as with the time of a diffusion.
    shapes = [shape for group in groups for shape in group.shapes]
    return tuple(shape[0] for shape in shapes) if shapes and all(shapes) else None


def _without_loader(groups: Sequence[_Group], facts: Mapping[str, Any]) -> BatchCount:
    # Return the batches where a dimension of the inputs is the one named batch.
    passes = {group.passes for group in groups}
    shapes = Counter(shape for group in groups for shape in group.shapes)
    if len(passes) > 1 or not shapes or 0 in passes:
        return BatchCount(how="no loader of torch was seen")
    shape = max(shapes, key=lambda each: (shapes[each], len(each)))
    found = {name: n for name, n in facts.get("named", {}).items() if n in shape}
    shown = " x ".join(map(str, shape))
    if len(set(found.values())) != 1:
        return BatchCount(how=f"no loader of torch was seen; inputs are {shown}")
    name, value = next(iter(found.items()))
    return BatchCount(
        value, passes.pop(), f"inputs are {shown}, and {name} is {value}", len(groups)
    )


@dataclass(frozen=True)
class Today:
    """Today's training of a script, 0 if unknown; `driver_holds` if its driver agrees."""

    global_batch: int
    frame: ScriptFacts
    driver_holds: bool = True
    notes: tuple[str, ...] = ()


def seen_today(script: Script, blank: ScriptJob, facts: Mapping[str, Any]) -> Today:
    """Return today's training of a script; InputError if the user's options contradict it."""
    placed = "deepspeed_config" in blank.placeholders
    config = blank.file_config or ({} if placed else facts.get("config", {}))
    if "micro_batch" in facts:
        return _of_engine(script, blank, facts, config)
    return _of_steps(script, blank, facts, config)


def _of_engine(
    script: Script, blank: ScriptJob, facts: Mapping[str, Any], config: Mapping[str, Any]
) -> Today:
    replicas = max(1, blank.devices // facts.get("stages", 1))
    micro, times = micro_batches(config, replicas)
    if not micro:
        micro, times = facts["micro_batch"], facts["accumulation"]
    whole, batch = int(facts["global_batch"]), facts.get("batch") or []
    if script.global_batch not in (None, whole):
        raise InputError(
            f"--global-batch is {script.global_batch}, but DeepSpeed runs the script "
            f"{script.name!r} at {whole}"
        )
    altered = facts["micro_batch"] != micro
    follows = altered and bool(batch) and batch[0] == facts["micro_batch"]
    follows = (follows or bool(facts.get("training_data"))) and not facts.get("owner")
    sources = dict.fromkeys(("micro_batch", "accumulation"), "DeepSpeed's engine")
    frame = ScriptFacts(
        config=config, micro_batch=micro, accumulation=times, follows=follows, sources=sources
    )
    return Today(whole, frame)


def _of_steps(
    script: Script, blank: ScriptJob, facts: Mapping[str, Any], config: Mapping[str, Any]
) -> Today:
    counted, owned = batches_seen(facts), facts.get("owned", {})
    notes, driven = [], blank.driven
    holds = driven is None or not _contradicts(driven.batches, owned, counted)
    if not holds:
        assert blank.driver is not None
        notes.append(f"{blank.driver.title} trains other batches than its keys say, so they stay")
    stated = _stated_by_command(blank, holds=holds)
    _require_agreement(stated, counted)
    by_owner = {
        "micro_batch": int(owned.get("micro_batch") or 0),
        "accumulation": int(owned.get("gradient_accumulation") or 0),
    }
    by_steps = {"micro_batch": counted.micro_batch, "accumulation": counted.accumulation}
    showed = f"counted in {counted.steps} step{'s' * (counted.steps != 1)}"
    showed += f": {counted.how}" * (counted.how != DRAWN)
    values, sources = dict[str, int](), dict[str, str]()
    for name, seen in by_steps.items():
        if stated.get(name):
            values[name], sources[name] = stated[name], "the command"
        elif by_owner[name] and seen and by_owner[name] != seen:
            notes.append(
                f"{facts.get('owner') or 'the framework'} was told {name.replace('_', ' ')} "
                f"{by_owner[name]}, and the first steps took {seen}"
            )
        elif by_owner[name]:
            values[name], sources[name] = by_owner[name], f"{facts.get('owner')}'s arguments"
        elif seen:
            values[name], sources[name] = seen, showed
    micro, times = values.get("micro_batch", 0), values.get("accumulation", 0)
    whole = micro * times * blank.baseline.data_parallel
    if script.global_batch is not None:
        whole = _require_global(script, blank, micro, times)
        share = whole // blank.baseline.data_parallel
        if micro and not times:
            times, sources["accumulation"] = share // micro, "--global-batch"
        elif times and not micro:
            micro, sources["micro_batch"] = share // times, "--global-batch"
    elif whole and _all_read_the_same(blank, facts):
        whole = 0
        notes.append(
            f"all {blank.devices} ranks drew the same samples first (no DistributedSampler?), so "
            "the global batch is not known (--global-batch N tells it)"
        )
    elif not whole:
        notes.append(
            f"the global batch is not known (--global-batch N tells it): {counted.how or 'unseen'}"
        )
    agree = bool(counted.steps) and (micro, times) == (counted.micro_batch, counted.accumulation)
    frame = ScriptFacts(
        config=config, micro_batch=micro, accumulation=times, counted=agree, sources=sources
    )
    return Today(whole, frame, holds, tuple(notes))


def _stated_by_command(blank: ScriptJob, *, holds: bool) -> dict[str, int]:
    named = {"micro_batch": "micro_batch", "accumulation": "gradient_accumulation"}
    values = {"micro_batch": blank.frame.micro_batch, "accumulation": blank.frame.accumulation}
    if holds and blank.driven is not None and all(blank.driven.batches):
        return values
    return {name: values[name] for name, placed in named.items() if placed in blank.placeholders}


def _contradicts(keys: tuple[int, int], owned: Mapping[str, Any], counted: BatchCount) -> bool:
    found = (
        int(owned.get("micro_batch") or counted.micro_batch),
        int(owned.get("gradient_accumulation") or counted.accumulation),
    )
    return any(key and seen and key != seen for key, seen in zip(keys, found, strict=True))


def _require_agreement(stated: Mapping[str, int], counted: BatchCount) -> None:
    seen = {"micro_batch": counted.micro_batch, "accumulation": counted.accumulation}
    for name, value in stated.items():
        if value and seen[name] and value != seen[name]:
            placed = {"micro_batch": name, "accumulation": "gradient_accumulation"}[name]
            raise InputError(
                f"the command says {placed} {value}, but {counted.steps} steps showed "
                f"{counted.micro_batch} samples x {counted.accumulation} backward passes on each "
                f"rank ({counted.how}); write {{{placed}={seen[name]}}}, or leave the placeholder "
                "out if the argument means something else"
            )


def _require_global(script: Script, blank: ScriptJob, micro: int, times: int) -> int:
    whole, replicas = script.global_batch, blank.baseline.data_parallel
    assert whole is not None
    seen = replicas * micro * times
    if (seen and seen != whole) or whole % (replicas * (micro or 1) * (times or 1)):
        stated = f"{replicas} x {micro or '?'} x {times or '?'}"
        raise InputError(
            f"--global-batch is {whole}, but the script {script.name!r} trains {stated}"
            f"{f' = {seen}' if seen else ''} samples a step"
        )
    return whole


def _all_read_the_same(blank: ScriptJob, facts: Mapping[str, Any]) -> bool:
    digests = facts.get("first_batches", ())
    complete = None not in digests and len(digests) == blank.devices
    return complete and blank.baseline.data_parallel > 1 and len({*digests}) == 1


def difference(job: ScriptJob, facts: Mapping[str, Any], again: Mapping[str, Any]) -> str:
    """Return how a launch trained otherwise than another one with the same words, or ""."""
    counted, seen = batches_seen(facts), batches_seen(again)
    parts = (counted.micro_batch, seen.micro_batch), (counted.accumulation, seen.accumulation)
    if any(one and other and one != other for one, other in parts):  # 0 is not known
        return (
            f"train {seen.micro_batch} samples x {seen.accumulation} backward passes and not "
            f"{counted.micro_batch} x {counted.accumulation}"
        )
    split = job.frame.micro_batch, job.frame.accumulation
    if not _losses(facts) or not _losses(again):
        return ""
    why = differs(facts, split, again, seen, same_samples=True)
    return f"train something else: {why}" if why else ""


def differs(
    facts: Mapping[str, Any],
    split: tuple[int, int],
    seen: Mapping[str, Any],
    counted: BatchCount,
    *,
    same_samples: bool,
) -> str:
    """Return how a launch with another split trained otherwise than one with `split`, or "".

    Args:
        split: micro-batch and accumulation of the launch with the facts.
        seen: facts of the other launch, whose batches were `counted`.
        same_samples: it read the same samples.
    """
    before, after = _settings(facts), _settings(seen)
    for old, new in zip(before, after, strict=False):
        if abs(old - new) > _SAME * max(abs(old), abs(new)):
            return f"a setting of the optimizer is {new:g} and not {old:g}"
    for was, now in zip(facts.get("samples", ()), seen.get("samples", ()), strict=False):
        if was is not None and now is not None and was != now:
            return f"a dataset holds {now:,} samples and not {was:,}"
    old_losses, new_losses = _losses(facts), _losses(seen)
    if not old_losses or not new_losses:
        return "the loss cannot be read, so it is not known if it stays the same"
    old, new = (sum(each) / len(each) for each in (old_losses, new_losses))
    scatter = (max(old_losses) - min(old_losses)) / (abs(old) or 1.0)
    allowed = min(_OTHER_LOSS, max(_SAME_LOSS, scatter)) if same_samples else _SAME_LOSS_OF_OTHERS
    if counted.micro_batch != split[0] and not same_samples:
        allowed = min(allowed, max(_OTHER_LOSS, scatter))
    if abs(old - new) <= allowed * abs(old):
        return ""
    change = f"the losses of a step add up to {new:.4g} and not {old:.4g}"
    micro_batch, accumulation = split
    same_split = (counted.micro_batch, counted.accumulation) == (micro_batch, accumulation)
    if same_split or not accumulation or not counted.accumulation:  # 0 is not known
        return f"{change} (does it set no seed?)"
    ratio = new / old if old else 0.0
    passes = counted.accumulation / accumulation
    if passes != 1 and abs(ratio / passes - 1) < _OTHER_LOSS:
        return f"{change}: the script does not divide them by the accumulation"
    return (
        f"{change}, so they depend on the split "
        "(the batch's own negatives? a sum that is not divided by the accumulation?)"
    )


def _settings(facts: Mapping[str, Any]) -> list[float]:
    return [number for step in facts.get("rates", ()) for number in step]


def _losses(facts: Mapping[str, Any]) -> list[float]:
    found_text = [(g.get("loss"), g.get("scale", 1.0)) for g in facts.get("groups", ())[1:]]
    return (
        []
        if any(loss is None for loss, _ in found_text)
        else [loss / scale for loss, scale in found_text]
    )


# The words of a program's log that explain its end.
#
# A shell, and each program that starts another one, ends with 127 if there is no such program and
# with 126 if it cannot be executed, and says which in a line of its own (POSIX, Shell Command
# Language, 2.8.2). That line need not be the last: `time` reports after it.


#: Longest line that is quoted.
_LONGEST = 200
#: Lines by which shells and starters say that there is no such program: bash, dash, busybox, sudo,
#: env, xargs, nohup, time, taskset, timeout and nice; zsh; container runtimes; fish; Ubuntu's bash.
_NOT_FOUND = re.compile(
    r": (?:command )?not found\.*$"
    r"|: No such file or directory$"
    r"|: (?:command not found|no such file or directory): \S"
    r"|executable file not found in \$PATH"
    r"|: required file not found$"
    r"|\bUnknown command: \S"
    r"|^Command '.+' not found",
    re.I,
)
#: The same of a program that is there.
_NOT_EXECUTED = re.compile(
    r": (?:permission denied|is a directory|exec format error|text file busy"
    r"|argument list too long)(?:: \S.*)?$"
    r"|: cannot execute\b"
    r"|: bad interpreter: ",
    re.I,
)
#: What the loader says of a program whose library is missing, also with 127.
_NOT_LOADED = re.compile(r": error while loading shared libraries: ")
_OF_CODES = {
    127: ((_NOT_LOADED, "could not be loaded"), (_NOT_FOUND, "was not found")),
    126: ((_NOT_EXECUTED, "could not be executed"),),
}
#: What `time` reports: bash's and POSIX's, GNU's in short and with -v, and zsh's.
_OF_TIME = re.compile(
    r"(?:real|user|sys)\s+(?:\d+m)?[\d.,]+s?$"
    r"|[\d.,]+user [\d.,]+system [\d:.,]+elapsed |\d+inputs\+\d+outputs "
    r"|Command (?:exited with non-zero status|terminated by signal) \d+$"
    r"|Command being timed: |(?:User|System) time \(seconds\): |Percent of CPU this job got: "
    r"|Elapsed \(wall clock\) time |Average (?:shared text|unshared data|stack|total|resident set) "
    r"|(?:Average resident|Maximum resident) set size |(?:Major|Minor) \(.*\) page faults: "
    r"|(?:Voluntary|Involuntary) context switches: |Swaps: |File system (?:inputs|outputs): "
    r"|Socket messages (?:sent|received): |Signals delivered: |Page size \(bytes\): |Exit status: "
    r"|.*\s[\d.,]+s user [\d.,]+s system \d+% cpu [\d:.,]+ total$"
)
#: What launchers write of a rank that ended: torchrun, accelerate, deepspeed, srun and make.
_OF_LAUNCHER = re.compile(
    r"^(?:.*torch[./]distributed[./](?:elastic|run|launcher)|.*CalledProcessError|"
    r"\[.*launch\.py:\d+:|srun: error: |make(?:\[\d+\])?: \*\*\* )",
    re.M,
)
#: A line that they write while all is well. Those of torchrun stand above the program's own.
_NOTE_OF_LAUNCHER = re.compile(
    r"^(?:[IW]\d{4} .*torch/distributed/|\[.*torch\.distributed\.\S+ \[(?:INFO|WARNING)\]"
    r"|(?:INFO|WARNING):torch\.distributed\.|\[.*\[(?:INFO|WARNING)\] \[(?:launch|runner)\.py:\d+:"
    r"|Setting OMP_NUM_THREADS environment variable for each process ).*",
    re.M,
)


def explained_exit(code: int, log: str) -> str:
    """Return the end of a command by an exit code of shells, a clause; empty for another code."""
    if code not in _OF_CODES:
        return ""
    lines = [line.strip() for line in log.splitlines()]
    for line in reversed(lines):
        for says_so, outcome in _OF_CODES[code]:
            if says_so.search(line) and "[Errno " not in line:
                return f'a program of the command {outcome} (exit code {code}): "{quoted(line)}"'
    how = "was not found" if code == 127 else "could not be executed"
    return f"the command ended with exit code {code}, which shells use if a program {how}"


def last_words(log: str) -> str:
    """Return a program's own last line, without those of launchers and of `time`; "" if none."""
    own, *launchers = _OF_LAUNCHER.split(_NOTE_OF_LAUNCHER.sub("", log), maxsplit=1)
    if launchers:  # a traceback of the launcher has begun above its first words
        own = own.partition("Traceback (most recent call last):")[0]
    lines = [line.strip() for line in own.splitlines()]
    own_lines = (line for line in reversed(lines) if re.search(r"\w", line))
    return next((line for line in own_lines if not _OF_TIME.match(line)), "")


def quoted(line: str) -> str:
    """Return a line as far as it is quoted."""
    return line[:_LONGEST]
