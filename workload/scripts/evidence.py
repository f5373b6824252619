"""From the counts of a program's first steps to its batches.

`tuner.workload.hook.counting` counts; here the counts become micro-batch and accumulation, or a
reason why they are not known. Nothing is guessed: what the counts leave open is unknown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Counted:
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


def batches_seen(facts: Mapping[str, Any]) -> Counted:
    """Return the batches that the hook's counts of the first steps show."""
    groups = list(facts.get("groups", ()))[1:]  # the first step may be special
    if not groups:
        return Counted(how="no second optimizer step was seen")
    loaders = [{entry[0] for entry in group["drawn"]} for group in groups]
    always = set.intersection(*loaders)
    if all(len(each) == 1 for each in loaders):  # one that is made anew for each epoch, too
        always = set.union(*loaders)
        loaders = [always]
    if len(always) > 1 and loaders != [always]:
        return Counted(how="each step draws from several loaders")
    if any(loaders) and not always:
        return Counted(how="not every step draws a batch")
    kept = [_group_of(group, always) for group in groups]
    whole = [group for group in kept if not group.ends_epoch] or kept
    if not always:
        return _without_loader(whole, facts)
    digests = facts.get("first_batches", [0])
    if facts.get("first_batch") is not None and None in digests:
        return Counted(how="one rank reads the batches of all")
    return _of_loader(whole)


def _group_of(group: Mapping[str, Any], loaders: set[int]) -> _Group:
    drawn = [entry for entry in group["drawn"] if entry[0] in loaders]
    return _Group(
        tuple(samples for _, samples, _ in drawn),
        int(group["passes"]),
        tuple(tuple(shape) for shape in group["shapes"]),
        any(last for _, _, last in drawn),
    )


def _of_loader(groups: Sequence[_Group]) -> Counted:
    sizes = {size for group in groups for size in group.samples}
    if None in sizes:
        return Counted(how="the loader does not tell how many samples a batch holds")
    if len(sizes) > 1:
        told = sorted(size for size in sizes if size is not None)
        return Counted(how=f"batches hold {told[0]} to {told[-1]} samples")
    counts = {(len(group.samples), group.passes) for group in groups}
    if len(counts) > 1:
        told = sorted({passes for _, passes in counts})
        return Counted(how=f"steps take {told[0]} to {told[-1]} backward passes")
    ((fetches, passes),), size = counts, next(iter(sizes))
    assert size is not None
    seen = len(groups)
    if passes == 0:
        return Counted(how="no backward pass was seen")
    if fetches % passes == 0:
        rows = _rows(groups)
        if fetches > passes and sum(rows or ()) != fetches * size * seen:
            return Counted(how=f"{fetches} batches are drawn for {passes} backward passes")
        how = f"{fetches // passes} batches in one pass" if fetches > passes else "drawn"
        return Counted(size * fetches // passes, passes, how, seen)
    rows = _rows(groups)
    if fetches == 1 and rows is not None and len(set(rows)) == 1:
        if rows[0] * passes == size:
            return Counted(rows[0], passes, f"{size} drawn and split by the script", seen)
        if rows[0] == size:
            return Counted(size, 1, f"one batch in {passes} passes", seen)
    return Counted(how=f"{fetches} batches are drawn for {passes} backward passes")


def _rows(groups: Sequence[_Group]) -> tuple[int, ...] | None:
    return tuple(shape[0] for group in groups for shape in group.shapes) or None


def _without_loader(groups: Sequence[_Group], facts: Mapping[str, Any]) -> Counted:
    # Return the batches where a dimension of the inputs is the one named batch.
    passes = {group.passes for group in groups}
    shapes = Counter(shape for group in groups for shape in group.shapes)
    if len(passes) > 1 or not shapes or 0 in passes:
        return Counted(how="no loader of torch was seen")
    shape = max(shapes, key=lambda each: (shapes[each], len(each)))
    found = {name: n for name, n in facts.get("named", {}).items() if n in shape}
    shown = " x ".join(map(str, shape))
    if len(set(found.values())) != 1:
        return Counted(how=f"no loader of torch was seen; inputs are {shown}")
    name, value = next(iter(found.items()))
    return Counted(value, passes.pop(), f"inputs are {shown}, and {name} is {value}", len(groups))
