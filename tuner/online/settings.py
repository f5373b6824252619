"""Live settings to choose from: clocks, or power limits where no clock can be set, and declared
live knobs.

Stages of a pipeline with slack run slower, in proportion to their work. A stage that computes for a
share s of the slowest one's time runs at s of its clock: if its time grows as its clock falls, at
most, it takes as long as the slowest. Perseus (arXiv 2312.06902) sets a clock for each computation,
which takes clocks that switch within a micro-batch, as NVML's do not.
"""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count, product
from pathlib import Path
from typing import Any

from tuner.answer.answer import Answer
from tuner.online.response import StudiedSetting
from tuner.online.windows import Window
from tuner.problem.run_folder import RunFolder
from tuner.search_spaces.configuration import Settings
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.job import steps_a_job_step
from tuner.search_spaces.knob_declarations import Knob
from tuner.search_spaces.knobs import Value, by_stage, stage_values
from tuner.search_spaces.safe_files import open_plain
from tuner.study.load import answer_of_run
from tuner.workload.node.clocks.base import Governor
from tuner.workload.records.probe import SAME_CLOCK_MHZ, MeterInfo

#: Values to choose from: so many, down to this share of the highest.
VALUES, LOWEST = 8, 0.5
#: Value of the machine as it is, and what may be chosen: the machine as it is, then falling values.
Offer = tuple[float, list[Settings]]
#: Power limits to choose from where a power is followed.
FINE = 48
#: Share of the slowest stage's time above which a stage has no slack: steps vary as much.
FULL = 0.95


def offers(governor: Governor, *, every: bool, measured_MHz: Collection[float]) -> list[Offer]:
    """Return the live settings to choose from, the better first, each with the machine's own
    value."""
    clocks = clock_settings(governor, every=every, measured_MHz=measured_MHz)
    limits = limit_settings(*governor.limit_range_W, every=every)
    tops = max(governor.supported_clocks_MHz, default=0), governor.limit_range_W[1]
    return [(top, each) for top, each in zip(tops, (clocks, limits), strict=True) if len(each) > 1]


def with_declared(
    settings: Sequence[Settings], knobs: Sequence[Knob], present: Mapping[str, Any]
) -> list[Settings]:
    """Return the settings with each combination of values of declared knobs, today's first.

    `present` are the values of the declared knobs, as the program reads them; today's value of one
    that is not among them has no name.
    """
    choices = []
    for knob in knobs:
        today, read = knob.baseline, present.get(knob.name)
        if today is None and knob.name not in present:
            choices.append([{}, *({knob.name: each} for each in knob.values)])
            continue
        if today is None:
            read = read if isinstance(read, int | float | str) else knob.values[0]
            today = next((each for each in knob.values if knob.reads_as(read, each)), read)
        others = [{knob.name: each} for each in knob.values if each != today]
        choices.append([{knob.name: today}, *others])
    return [
        Settings({key: value for part in (setting, *own) for key, value in part.items()})
        for own in product(*choices)
        for setting in settings
    ]


def limit_settings(low_W: float, high_W: float, *, every: bool = False) -> list[Settings]:
    """Return the machine as it is, then falling power limits in whole watts: some, or many."""
    least, count = (low_W, FINE) if every else (max(low_W, LOWEST * high_W), VALUES)
    spread = [high_W - (high_W - least) * (i + 1) / count for i in range(count)]
    watts = sorted({math.ceil(each) for each in spread} - {math.ceil(high_W)}, reverse=True)
    return [Settings(), *(Settings(power_limit_W=each) for each in watts)]


def clock_settings(
    governor: Governor, *, every: bool = False, measured_MHz: Collection[float] = ()
) -> list[Settings]:
    """Return the machine as it is, then falling clocks: some, with those measured, or every one."""
    clocks = governor.supported_clocks_MHz if governor.can_set else ()
    least = 0 if every else LOWEST * max(clocks, default=0)
    below = [each for each in clocks[:-1] if each >= least]
    count = len(below) if every else min(VALUES, len(below))
    offered = {below[-round((i + 1) * len(below) / count)] for i in range(count)}
    offered |= {each for each in below for clock in measured_MHz if abs(each - clock) <= 1}
    return [Settings(), *(Settings(clock_MHz=clock) for clock in sorted(offered, reverse=True))]


def mean_value(value: Value) -> float:
    """Return a setting's value, or the mean of the stages' values."""
    return statistics.fmean(map(float, stage_values(value)))


def log_slowest(value: Value, top: float) -> float:
    """Return the logarithm of the slowdown that a value causes at most: 0 for the highest.

    A path through the schedule holds each stage's work once at most, and is no shorter than the
    slowest stage's before: stages slowed by 1/s lengthen it by their work, s (1/s - 1) each.
    """
    values = [float(each) for each in stage_values(value)]
    high = max(values)
    return math.log(top / high) + math.log1p(sum(1 - each / high for each in values))


def stage_shares(busy_s: Mapping[int, Sequence[float]]) -> tuple[float, ...]:
    """Return the work of each rank as a share of the slowest one's; () if none has slack."""
    work_s = [statistics.median(busy_s[rank]) for rank in sorted(busy_s)]
    most_s = max(work_s, default=0.0)
    shares = tuple(1.0 if each > FULL * most_s else each / most_s for each in work_s)
    return shares if len(shares) > 1 and min(shares) < 1 else ()


def stage_settings(
    settings: Sequence[Settings], shares: Sequence[float], clocks_MHz: Sequence[int]
) -> list[Settings]:
    """Return settings with the clocks of stages by their shares; the machine's own stays first.

    Each is rounded up to one of `clocks_MHz`, which ascend.
    """
    top = clocks_MHz[-1]
    found = [settings[0]]
    for high in (top, *(setting["clock_MHz"] for setting in settings[1:])):
        least = [share * float(str(high)) for share in shares]
        found.append(
            Settings(clock_MHz=tuple(next(c for c in clocks_MHz if c >= low) for low in least))
        )
    return found


# Earlier measurements of live settings: of a study's point, or of a training that was tuned.
#
# A training that is tuned keeps its windows in `online.jsonl`: a line that says of what, then a
# line a window. Whether the job is the same is judged by what it takes and draws
# (`tuner.online.bandit`).


#: Name of the file in its folder, and version of its lines.
FILE, SCHEMA = "online.jsonl", 1
#: Least relative standard error of an earlier figure, and that of a single window.
LEAST_ERROR, WINDOW_ERROR = 0.003, 0.02


@dataclass(frozen=True)
class Setup:
    """Devices, meter (mark, name and scope) and number of ranks (0: unknown) of a measurement."""

    device: str
    meter: str
    ranks: int = 0

    @classmethod
    def of(cls, device: str, meter: MeterInfo, ranks: int = 0) -> Setup:
        """Return the setup of a device and the meter that charges it."""
        return cls(device, " ".join(filter(None, (meter.mark, meter.name, meter.scope))), ranks)


@dataclass(frozen=True)
class EarlierMeasurements:
    """Earlier measurements of one launch, of the run or folder that it is named after."""

    name: str
    setup: Setup
    points: Mapping[Settings, StudiedSetting]

    def why_not(self, now: Setup) -> str:
        """Return why these are of no use for a training of this setup, or ""."""
        then = self.setup
        if then.device != now.device:
            return f"it is of {then.device}, and this machine has {now.device}"
        if then.meter != now.meter:
            return f"it was metered by {then.meter}, and this training by {now.meter}"
        if now.ranks and then.ranks not in (0, now.ranks):
            return f"it is of {then.ranks} ranks, and this training has {now.ranks}"
        return ""

    @property
    def clocks_MHz(self) -> set[float]:
        """Clocks that were measured."""
        clocks = (live.get("clock_MHz") for live in self.points)
        return {each for each in clocks if isinstance(each, int | float)}

    def studied(self, settings: Sequence[Settings], top_MHz: float) -> dict[int, StudiedSetting]:
        """Return those measurements that are of one of these settings; of two, the surer.

        A setting that names no clock has `top_MHz`.
        """
        found: dict[int, StudiedSetting] = {}
        for live, studied in sorted(self.points.items(), key=lambda each: -each[1].error):
            same = (_same(each, live, settings[0], top_MHz) for each in settings)
            if (at := next((i for i, is_same in enumerate(same) if is_same), None)) is not None:
                found[at] = studied
        return found


def _same(one: Settings, other: Settings, first: Settings, top_MHz: float) -> bool:
    if any(map(by_stage, (*one.values(), *other.values()))):
        return one == other
    a, b = ({"clock_MHz": top_MHz, **first, **settings} for settings in (one, other))
    apart = abs(mean_value(a.pop("clock_MHz")) - mean_value(b.pop("clock_MHz")))
    return a == b and apart <= SAME_CLOCK_MHZ


def of_study(result: Answer, point: str) -> EarlierMeasurements:
    """Return a study's measurements of a point's launch at each of its live settings; InputError if
    there are none.
    """
    chosen = result.point(point)
    launch, cluster = chosen.configuration.launch, result.cluster
    points = {}
    for each in result.points:
        live, job = each.configuration.live, result.job
        stages = any(map(by_stage, live.values()))
        if each.configuration.launch != launch or each.source != "measured" or stages:
            continue
        steps = result.steps * steps_a_job_step(each.configuration, job)
        ends = (each.time_interval_s, each.power_interval_W or (each.power_W, each.power_W))
        error = max(math.log(high / low) / (2 * 1.645) for low, high in ends)
        step_time_s = each.time_to_solution_s / steps
        points[live] = StudiedSetting(step_time_s, each.power_W, max(error, LEAST_ERROR))
    sure = bool(points) and all(math.isfinite(each.error) for each in points.values())
    if not sure or cluster is None:
        raise InputError(
            f"run {result.name!r} measured nothing of {chosen.configuration.short} on a device, so "
            "there is nothing to begin with; leave it out"
        )
    setup = Setup.of(cluster.device.name, chosen.meter, chosen.configuration.world_size)
    return EarlierMeasurements(f"run {result.name}", setup, points)


def earlier_of(folder: Path, point: str = "recommended") -> EarlierMeasurements:
    """Return the measurements of a study's folder (of a point), or of a tuned training; InputError
    if it holds nothing of use.
    """
    run = RunFolder(folder)
    return (
        of_study(answer_of_run(run), point)
        if run.read_study() is not None
        else read_earlier(folder)
    )


def read_earlier(folder: Path) -> EarlierMeasurements:
    """Read the measurements of a tuned training between two changes, for the span with the most
    settings; InputError if that cannot be read.
    """
    path = folder / FILE
    try:
        text = path.read_text(encoding="utf-8")
        # The last line of a training that was killed may be torn.
        head, *lines = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
        if head["schema"] != SCHEMA:
            raise ValueError(f"schema {head['schema']}; this version reads {SCHEMA}")
        setup = Setup(str(head["device"]), str(head["meter"]), int(head["ranks"]))
        stretches: dict[int, dict[Settings, list[tuple[float, float]]]] = {}
        for line in lines:
            figures = (math.log(line["step_time_s"]), math.log(line["power_W"]))
            if not all(map(math.isfinite, figures)):
                raise ValueError(f"a window of {figures}")
            stretch = stretches.setdefault(line["epoch"], {})
            stretch.setdefault(Settings.from_json(line["live"], str(path)), []).append(figures)
        visits = max(stretches.values(), key=lambda each: (len(each), sum(map(len, each.values()))))
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        OverflowError,
        RecursionError,
    ) as problem:
        raise InputError(
            f"--transfer: {folder} holds no {FILE} of a tuned training that can be read: {problem}"
        ) from problem
    points = {}
    for live, pairs in visits.items():
        time_s, power_W = (math.exp(statistics.fmean(each)) for each in zip(*pairs, strict=True))
        error = max(LEAST_ERROR, WINDOW_ERROR / math.sqrt(len(pairs)))
        points[live] = StudiedSetting(time_s, power_W, error)
    return EarlierMeasurements(str(folder), setup, points)


class Record:
    """Writer of the windows of a tuned training; a folder is made with the first, and numbered."""

    def __init__(self, folder: Path, setup: Setup) -> None:
        self.folder: Path | None = None
        self._wanted, self._setup = folder, setup

    def add(self, live: Settings, window: Window, *, epoch: int, ranks: int) -> None:
        """Append a window, or raise OSError."""
        figures = {"step_time_s": window.step_time_s, "power_W": window.power_W}
        lines = [{"epoch": epoch, "live": live.to_json(), "steps": window.steps, **figures}]
        if self.folder is None:
            for number in count(1):
                folder = self._wanted.with_name(f"{self._wanted.name}-{number}")
                with suppress(FileExistsError):
                    folder.mkdir(parents=True)
                    break
            self.folder = folder
            lines.insert(0, {"schema": SCHEMA, **vars(self._setup), "ranks": ranks})
        fd = open_plain(self.folder / FILE, os.O_CREAT | os.O_APPEND)
        with open(fd, "a", encoding="utf-8") as file:
            file.writelines(json.dumps(each) + "\n" for each in lines)
