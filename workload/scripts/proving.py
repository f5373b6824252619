"""Arguments that carry a script's batch, proven by launches that split it otherwise.

An argument that is named as a batch or an accumulation is no proof: the script is started once more
at half the micro-batch and twice the accumulation, and on another number of ranks. What then moves
as predicted, with the same samples, losses and optimizer settings, becomes a placeholder of the
command. What does not is left alone, and said.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from tuner.search_spaces.configuration import Configuration, Settings
from tuner.workload.hook import other_split
from tuner.workload.hook.attachment import first_argument
from tuner.workload.hook.source import ACCUMULATION, BATCH
from tuner.workload.scripts.evidence import batches_seen, differs
from tuner.workload.scripts.inspection import Inspect
from tuner.workload.scripts.script_job import ScriptJob

#: What a command may say of a batch by placeholders.
_PARTS = {"micro_batch", "gradient_accumulation"}


@dataclass(frozen=True)
class Argument:
    """Argument of a script that may carry the part `name` of its batch.

    `options` are the words that set it; `carries` is what else its value holds.
    """

    name: str
    options: tuple[str, ...]
    value: int
    carries: str = ""

    @property
    def shown(self) -> str:
        """The option and today's value."""
        option = max(self.options, key=len)
        return f"{option}{self.value}" if option.endswith("=") else f"{option} {self.value}"


@dataclass(frozen=True)
class _Today:
    """Facts of the unchanged launch: the job, its facts and its batches."""

    job: ScriptJob
    facts: Mapping[str, Any]

    @property
    def split(self) -> tuple[int, int]:
        return self.job.frame.micro_batch, self.job.frame.accumulation


def proven(
    job: ScriptJob, facts: Mapping[str, Any], inspect: Inspect, *, devices: int
) -> ScriptJob:
    """Return the job with the arguments as placeholders that are proven to carry its batch."""
    if facts.get("batch_norm"):
        why = (
            "BatchNorm takes its statistics from each micro-batch, so another one is another "
            "training ({micro_batch=N} in the command sets it all the same)"
        )
        job = replace(job, frame=replace(job.frame, micro_batch_stays=why))
    today = _Today(job, facts)
    if unproven := _unproven(today):
        job = _framed(job, unproven=unproven)
    if not _applies(today):
        # What placeholders say of the batch is the user's word; a second rank needs a proof.
        stated = {*job.placeholders} >= _PARTS and _counts(today)
        return _on_other_ranks(today, job, inspect, devices) if stated else job
    given = _PARTS & {*job.placeholders}
    found = {n: each for n, each in _arguments(today).items() if n not in given}
    if ("micro_batch" in found or "micro_batch" in given) and not job.frame.micro_batch_stays:
        both = _at_once(today, found, inspect, devices)
        if both is not None and (shown := both.shown(today)):
            return _with_sources(both.job, f"{_options(found) or 'the command'}: {shown}")
        job, why = _by_split(today, found, inspect)
        if why:
            options = _options(found) or "{micro_batch}"
            note = f"{options} {'are' if len(found) > 1 else 'is'} left as today: {why}"
            return _framed(replace(job, assumed=(*job.assumed, note)), unproven=note)
        return _on_other_ranks(today, job, inspect, devices, both)
    elif "gradient_accumulation" in found:
        job = _placed(job, [found["gradient_accumulation"]])
    return _on_other_ranks(today, job, inspect, devices)


def _applies(today: _Today) -> bool:
    free = not _PARTS & {*today.job.frame.reads}
    free = (
        free and not {*today.job.placeholders} >= _PARTS
    )  # of two one leaves the other to be found
    return _counts(today) and free


def _unproven(today: _Today) -> str:
    """Return why the named arguments of a batch cannot be proven to carry it; "" if they may be."""
    job, (micro, times) = today.job, today.split
    if job.frame.micro_batch_stays or _PARTS & {*job.placeholders, *job.frame.turns}:
        return ""
    named = [each for each in _named(today).values() if BATCH.fullmatch(each.name)]
    if not named or _is_driven(job) or job.frame.kind != "torch":
        return ""
    shown = " and ".join(each.shown for each in named)
    if not job.frame.counted or not job.global_batch:
        return f"{shown} {_is(named)} left as today: the first steps do not show what it sets"
    if not _counts(today) or "micro_batch" in _arguments(today):
        return ""
    seen = f"{micro} samples x {times} backward passes"
    return f"{shown} {_is(named)} left as today: the first steps took {seen}"


def _is(arguments: Sequence[Argument]) -> str:
    return "are" if len(arguments) > 1 else "is"


def _counts(today: _Today) -> bool:
    job, facts = today.job, today.facts
    countable = job.frame.counted and bool(job.global_batch) and job.frame.kind == "torch"
    single = all(group.get("passes") == today.split[1] for group in facts.get("groups", ())[1:])
    return countable and single and not _is_driven(job) and job.frame.owner in ("", "accelerate")


def _is_driven(job: ScriptJob) -> bool:
    """Return True if the keys of a framework set the batch: those of Accelerate do not."""
    return job.driven is not None and (any(job.driven.batches) or job.offers["micro_batch"].turned)


def _arguments(today: _Today) -> dict[str, Argument]:
    (micro, times), every = today.split, _named(today)
    ranks = today.job.baseline.data_parallel
    of_both = {"": 1, "ranks": ranks}
    found: dict[str, Argument] = {}
    for name, pattern, part, factors in (
        ("micro_batch", BATCH, micro, {**of_both, "gradient_accumulation": times}),
        ("gradient_accumulation", ACCUMULATION, times, of_both),
    ):
        for argument in every.values():
            for carries, factor in factors.items():
                if pattern.fullmatch(argument.name) and argument.value == part * factor:
                    each = replace(argument, name=name, carries=carries)
                    found.setdefault(name, each)
    if today.job.frame.turns:  # the framework takes it by itself
        found.pop("gradient_accumulation", None)
    return found


def _named(today: _Today) -> dict[str, Argument]:
    """Return the integer arguments that are named as a part of a batch, by their options.

    Those that the program's parser returned, and words of the command that no known parser reads.
    """
    parsed: Mapping[str, Any] = today.facts.get("arguments", {})
    named = [
        Argument(_last_part(name), tuple(each["options"]), each["value"])
        for name, each in parsed.items()
        if not _EVALUATION.search(name)
    ]
    read = {option.rstrip("=") for each in named for option in each.options}
    named += [each for each in typed_arguments(today.job.words) if each.options[0] not in read]
    return {
        each.options[-1] if each.options else each.name: each
        for each in named
        if BATCH.fullmatch(each.name) or ACCUMULATION.fullmatch(each.name)
    }


#: Parts of a dotted name that say that it is not of the training.
_EVALUATION = re.compile(
    r"(^|[._/-])(e?val(uation)?|valid(ation)?|test|dev|predict)([._/-]|$)", re.I
)
_TYPED = re.compile(r"(?P<option>-{0,2}[A-Za-z][\w./-]*?)(?:=(?P<value>\d+))?")


def typed_arguments(words: Sequence[str]) -> list[Argument]:
    """Return the integers that a command names: `--name 8`, `-name=8`, `name=8`, `part.name=8`."""
    found: dict[str, Argument] = {}
    rest = list(words[first_argument(words) :]) if words else []
    for word, after in pairwise([*rest, ""]):
        match = _TYPED.fullmatch(word)
        if match is None or _EVALUATION.search(match["option"]):
            continue
        value = match["value"]
        if value is None and word.startswith("-") and after.isdecimal():
            value = after
        if value is not None and int(value) > 0:
            name = _last_part(match["option"].lstrip("-")).replace("-", "_")
            found[match["option"]] = Argument(name, (match["option"],), int(value))
    return list(found.values())


def _last_part(name: str) -> str:
    return re.split(r"[./]", name)[-1]


@dataclass(frozen=True)
class _BatchTrial:
    """A launch on other ranks in which both parts of the batch differ from today's.

    `expected` is the split that it should show, and `seen` its facts or why there are none.
    """

    job: ScriptJob
    ranks: int
    expected: tuple[int, int]
    seen: Mapping[str, Any] | str

    def shown(self, today: _Today) -> str:
        """Return the proof of both arguments and the ranks, a phrase; "" if incomplete."""
        if isinstance(self.seen, str):
            return ""
        counted = batches_seen(self.seen)
        if (counted.micro_batch, counted.accumulation) != self.expected:
            return ""
        digests = self.seen.get("first_batches", ())
        if None not in digests and len({*digests}) < self.ranks:
            return ""
        if differs(today.facts, today.split, self.seen, counted, same_samples=True):
            return ""
        micro, times = self.expected
        return f"at {micro} x {times} on {_ranks(self.ranks)} the same global batch"

    def is_of(self, job: ScriptJob) -> bool:
        """Return True if it launched the same as another job."""
        return (self.job.words, self.job.frame.carries) == (job.words, job.frame.carries)


def _at_once(
    today: _Today, found: Mapping[str, Argument], inspect: Inspect, devices: int
) -> _BatchTrial | None:
    # Launch on other ranks with another micro-batch and another accumulation, if there are any.
    job, (micro, times) = today.job, today.split
    both, ranks = _placed(job, found.values()), _other_ranks(job, devices)
    accumulates = "gradient_accumulation" in {*found, *job.placeholders, *job.frame.turns}
    if not ranks or not accumulates or (both is job and found):
        return None
    share = micro * times * job.baseline.data_parallel
    for other in (micro // 2, micro // 4, 2 * micro):
        number, rest = divmod(share, max(1, other) * ranks)
        if other and not rest and other != micro and number not in (0, times):
            changed = _at(job, data_parallel=ranks, micro_batch=other)
            return _BatchTrial(both, ranks, (other, number), inspect(both, changed))
    return None


def _other_ranks(job: ScriptJob, devices: int) -> int:
    if job.as_it_stands or job.frame.ranks_stay:
        return 0
    ranks = job.baseline.data_parallel
    if job.baseline.world_size != ranks:
        return 0
    return ranks // 2 if ranks % 2 == 0 else 2 if ranks == 1 and devices > 1 else 0


def _with_sources(
    job: ScriptJob, how: str, parts: Sequence[str] = ("micro_batch", "accumulation")
) -> ScriptJob:
    return _framed(job, sources={**job.frame.sources, **dict.fromkeys(parts, how)})


def _by_split(
    today: _Today, found: Mapping[str, Argument], inspect: Inspect
) -> tuple[ScriptJob, str]:
    job, (micro, times) = today.job, today.split
    both = _placed(job, found.values())
    if both is job:
        return job, "the command does not show where they stand"
    other = other_split(micro, times)
    if other is None:
        return job, "one sample cannot be split"
    changed = _at(job, micro_batch=other[0])
    accumulates = "gradient_accumulation" in {*found, *job.placeholders, *job.frame.turns}
    seen = inspect(both if accumulates else _framed(both, keeps="accumulation"), changed)
    if isinstance(seen, str):
        return job, f"split otherwise, the script does not start ({seen})"
    counted = batches_seen(seen)
    shown = f"at {other[0]} x {other[1]}"
    if (counted.micro_batch, counted.accumulation) == other:
        why = differs(today.facts, today.split, seen, counted, same_samples=True)
        same = f"{shown} the same {micro * times} samples a step and rank"
        how = f"{_options(found) or 'the command'}: {same}"
        kept = both if accumulates else _framed(both, keeps="accumulation")
        parts = ["micro_batch", "accumulation"]
    elif (counted.micro_batch, counted.accumulation) == (other[0], times):
        why = differs(today.facts, today.split, seen, counted, same_samples=False)
        alone = {name: each for name, each in found.items() if name == "micro_batch"}
        how = f"{_options(alone) or 'the command'}: at {other[0]} each pass took {other[0]} samples"
        kept, parts = _framed(_placed(job, alone.values()), keeps="micro_batch"), ["micro_batch"]
    elif (
        counted.micro_batch * other[1] == other[0]
        and "micro_batch" in found
        and not found["micro_batch"].carries
    ):
        divided = replace(found["micro_batch"], carries="gradient_accumulation")
        return _by_split(today, {**found, "micro_batch": divided}, inspect)
    else:
        return job, (
            f"{shown}, {counted.micro_batch or '?'} samples x {counted.accumulation or '?'} passes "
            f"were seen ({counted.how})"
        )
    if why:
        return job, f"{shown}, {why}"
    return _with_sources(kept, how, parts), ""


def _on_other_ranks(
    today: _Today, job: ScriptJob, inspect: Inspect, devices: int, both: _BatchTrial | None = None
) -> ScriptJob:
    ranks, (micro, times) = job.baseline.data_parallel, today.split
    other = _other_ranks(job, devices)
    placed = _PARTS & {*job.placeholders}
    unchanged = job.words == today.job.words and not job.frame.turns and not placed
    if not other or (unchanged and not today.facts.get("grouped")):
        return job
    expected: tuple[int, int] | None
    if both is not None and both.is_of(job):
        expected, seen = both.expected, both.seen
    else:
        expected = _expected(job, (micro, times), ranks, other)
        if expected is None:
            stay = f"{micro} x {times} cannot be split over {_ranks(other)}"
            return _framed(job, ranks_stay=stay)
        # Where nothing is set, the configuration only says on how many ranks to start.
        split = micro * ranks // other if unchanged else expected[0]
        seen = inspect(job, _at(job, data_parallel=other, micro_batch=split))
    if isinstance(seen, str):
        return _framed(job, ranks_stay=f"on {_ranks(other)} it does not train ({seen})")
    counted = batches_seen(seen)
    digests = seen.get("first_batches", ())
    if other > 1 and None not in digests and len({*digests}) < other:
        return _framed(job, ranks_stay=f"on {_ranks(other)} all read the same samples")
    found = (counted.micro_batch, counted.accumulation)
    why = differs(today.facts, today.split, seen, counted, same_samples=False)
    if unchanged:
        alone = {
            (micro * ranks, times * other): "micro_batch",
            (micro * other, times * ranks): "accumulation",
        }
        keeps = alone.get((found[0] * other, found[1] * other), "") if not why else ""
        return _framed(job, keeps=keeps) if keeps else job
    if found == expected and not why:
        return job
    if not why and (again := _with_ranks(job, expected, found, other)):
        return again
    found_text = (
        why or f"{found[0] or '?'} samples x {found[1] or '?'} passes were seen ({counted.how})"
    )
    return _framed(job, ranks_stay=f"on {_ranks(other)}, {found_text}")


def _ranks(number: int) -> str:
    return f"{number} rank{'s' * (number != 1)}"


def _expected(
    job: ScriptJob, split: tuple[int, int], ranks: int, other: int
) -> tuple[int, int] | None:
    micro, times = split
    if job.frame.keeps == "micro_batch":
        return (micro * ranks // other, times) if micro * ranks % other == 0 else None
    if times * ranks % other == 0:
        return micro, times * ranks // other
    if "micro_batch" in job.placeholders and micro * ranks % other == 0:
        return micro * ranks // other, times
    return (micro, times) if job.words == job.frame.given else None


def _with_ranks(
    job: ScriptJob, expected: tuple[int, int], found: tuple[int, int], other: int
) -> ScriptJob | None:
    for number, name in enumerate(("micro_batch", "gradient_accumulation")):
        others_as_expected = found[1 - number] == expected[1 - number]
        if others_as_expected and found[number] * other == expected[number]:
            if name not in job.placeholders or job.frame.carries.get(name):
                return None
            return _framed(job, carries={**job.frame.carries, name: "ranks"})
    return None


def _at(job: ScriptJob, **knobs: int) -> Configuration:
    return Configuration(Settings({**job.baseline.launch, **knobs}), job.baseline.live)


def _framed(job: ScriptJob, **changes: Any) -> ScriptJob:
    return replace(job, frame=replace(job.frame, **changes))


def _options(found: Mapping[str, Argument]) -> str:
    return " and ".join(each.shown for each in found.values())


def _placed(job: ScriptJob, arguments: Iterable[Argument]) -> ScriptJob:
    words, values = job.words, {"micro_batch": job.frame.micro_batch}
    values["gradient_accumulation"] = job.frame.accumulation
    carries = dict(job.frame.carries)
    for argument in arguments:
        made = _with_placeholder(words, argument, f"{{{argument.name}={values[argument.name]}}}")
        if made is None:
            return job
        words = made
        if argument.carries:
            carries[argument.name] = argument.carries
    frame = replace(job.frame, carries=carries, given=job.frame.given or job.words)
    return replace(job, words=words, frame=frame)


def _with_placeholder(
    words: tuple[str, ...], argument: Argument, placeholder: str
) -> tuple[str, ...] | None:
    made, first = list(words), first_argument(words)
    if not argument.options:  # positional: the one word that is its value
        if made[first:].count(str(argument.value)) != 1:
            return None
        made[made.index(str(argument.value), first)] = placeholder
        return tuple(made)
    bare = sorted((option.rstrip("=") for option in argument.options), key=len)
    done = first - 1
    while (at := _place(made[done + 1 :], bare)) is not None:  # of several, parsers take the last
        done += at + 1
        made = _with_value(made, done, placeholder)
    if done >= first:
        return tuple(made)
    option = max(argument.options, key=len)
    return (*made, *([f"{option}{placeholder}"] if option.endswith("=") else [option, placeholder]))


def _place(words: Sequence[str], options: Sequence[str]) -> int | None:
    for at, word in enumerate(words):
        if word.partition("=")[0] in options:
            return at
        if len(options[0]) == 2 and word.startswith(options[0]) and word[2:].isdigit():
            return at
    return None


def _with_value(words: Sequence[str], at: int, value: str) -> list[str]:
    changed = list(words)
    name, equals, _ = changed[at].partition("=")
    if equals:
        changed[at] = f"{name}={value}"
    elif not name.startswith("--") and name[2:].isdigit():  # -b8
        changed[at] = f"{name[:2]}{value}"
    else:
        changed[at + 1 : at + 2] = [value]
    return changed
