"""What a tuned training begins with: a study's measurements, or those of an earlier training."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.golden import prepared
from tests.online.test_agent import Devices, live_tuning, train
from tuner.answer.parts import Interval
from tuner.online.live import LiveTuning
from tuner.online.request import TuningRequest
from tuner.online.response import StudiedSetting
from tuner.online.settings import (
    FILE,
    EarlierMeasurements,
    Record,
    Setup,
    clock_settings,
    of_study,
    read_earlier,
)
from tuner.online.windows import Window
from tuner.problem.run_folder import RunFolder
from tuner.result import Result
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.search_spaces.errors import InputError
from tuner.study.load import answer_of_run

HERE = Setup("gpu", "nvml devices")


def point(
    clock_MHz: int | None, step_time_s: float, power_W: float
) -> tuple[Settings, StudiedSetting]:
    live = Settings() if clock_MHz is None else Settings(clock_MHz=clock_MHz)
    return live, StudiedSetting(step_time_s, power_W, 0.005)


def truth(clock_MHz: int) -> tuple[float, float]:
    """Step time and power of `Devices` at a clock."""
    devices = Devices()
    devices.clock_MHz = clock_MHz
    seconds = devices.step()
    return seconds, devices.energy_J / seconds


def true_points(
    factor: float = 1.0, clocks: Sequence[int] = (1400, 1300, 1100, 900)
) -> dict[Settings, StudiedSetting]:
    return dict(
        point(None if clock == 1400 else clock, factor * truth(clock)[0], truth(clock)[1])
        for clock in clocks
    )


def tuned(
    points: dict[Settings, StudiedSetting], ranks: int = 0, devices: Devices | None = None
) -> tuple[LiveTuning, Devices, list[str]]:
    devices, said = devices or Devices(), list[str]()
    earlier = EarlierMeasurements("run a", Setup("gpu", "nvml devices", ranks), points)
    live = live_tuning(devices, said, TuningRequest(earlier=earlier))
    train(live, devices, 1500)
    assert devices.time_s / (1500 * 0.5) - 1 <= 0.05
    return live, devices, said


def test_a_study_is_followed_from_the_first_setting_on() -> None:
    class Finer(Devices):
        supported_clocks_MHz = tuple(range(700, 1401, 50))

    clocks = [int(str(each["clock_MHz"])) for each in clock_settings(Finer())[1:]]  # type: ignore[arg-type]
    tried = []
    for known in (true_points(clocks=(1400, *clocks)), {}):
        live, devices, said = tuned(known, devices=Finer())
        assert said == []
        assert live.tuner.balance.saved_J[1] > 0
        tried.append(devices.log[0])
    assert tried[0] < tried[1]
    assert truth(tried[0])[0] <= 1.05 * 0.5


@pytest.mark.parametrize(
    ("points", "ranks", "said"),
    [
        (true_points(1.3), 0, "step time at the highest setting differs by -23 %"),
        (true_points(), 4, "it is of 4 ranks, and this training has 1"),
        (dict([point(1100, 0.3, 250.0)]), 0, "at 1100MHz differs by"),
    ],
)
def test_a_study_of_something_else_is_dropped_in_one_sentence(
    points: dict[Settings, StudiedSetting], ranks: int, said: str
) -> None:
    live, _, told = tuned(points, ranks)
    assert len(told) == 1
    assert told[0].startswith("run a is not used: ")
    assert said in told[0]
    assert live.tuner.balance.saved_J[1] > 0


@pytest.mark.parametrize("clock_MHz", [210, 1000, 1980])
def test_a_study_whose_clocks_lie_elsewhere_changes_nothing(clock_MHz: int) -> None:
    live, _, said = tuned(dict([point(clock_MHz, 0.4, 100.0)]))
    assert said == []
    assert live.tuner.balance.saved_J[1] > 0


def test_measured_clocks_are_offered_if_the_device_lists_them() -> None:
    devices = Devices()
    devices.supported_clocks_MHz = tuple(range(500, 1401, 5))
    found = clock_settings(devices, measured_MHz={1155.0, 1157.4, 300.0, 1400.0})  # type: ignore[arg-type]
    clocks = [setting["clock_MHz"] for setting in found[1:]]
    assert 1155 in clocks
    assert clocks == sorted(clocks, reverse=True)
    assert len(clocks) == len(clock_settings(devices)[1:]) + 1  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("now", "said"),
    [
        (Setup("another", "nvml devices"), "this machine has another"),
        (Setup("gpu", "twin nvml devices"), "by twin nvml devices"),
        (HERE, ""),
    ],
)
def test_another_device_or_meter_is_one_sentence(now: Setup, said: str) -> None:
    why = EarlierMeasurements("run a", HERE, true_points()).why_not(now)
    assert said in why
    assert bool(said) == bool(why)


# ---- the record of a tuned training


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    devices = Devices()
    record = Record(tmp_path / "runs" / "tuned", HERE)
    live = live_tuning(devices, record=record)
    train(live, devices, 1500)
    assert record.folder == tmp_path / "runs" / "tuned-1"
    found = read_earlier(record.folder)
    assert found.setup == replace(HERE, ranks=1)
    for setting, each in found.points.items():
        time_s, power_W = truth(int(str(setting.get("clock_MHz", 1400))))
        assert each.step_time_s == pytest.approx(time_s, rel=0.001)
        assert each.power_W == pytest.approx(power_W, rel=0.001)
    Record(tmp_path / "runs" / "tuned", HERE).add(Settings(), WINDOW, epoch=0, ranks=1)
    assert (tmp_path / "runs" / "tuned-2" / FILE).is_file()


WINDOW = Window(0, 10, 0.5, 300.0)


def test_of_several_stretches_that_of_most_settings_counts_and_a_torn_line_does_not(
    tmp_path: Path,
) -> None:
    record = Record(tmp_path / "tuned", HERE)
    record.add(Settings(), WINDOW, epoch=0, ranks=2)
    record.add(Settings(clock_MHz=900), Window(1, 9, 0.6, 200.0), epoch=0, ranks=2)
    for _ in range(5):
        record.add(Settings(), Window(0, 9, 0.8, 330.0), epoch=1, ranks=2)
    assert record.folder is not None
    with (record.folder / FILE).open("a") as file:
        file.write('{"epoch": 1, "li')
    found = read_earlier(record.folder)
    assert {live: each.power_W for live, each in found.points.items()} == {
        Settings(): pytest.approx(300),
        Settings(clock_MHz=900): pytest.approx(200),
    }


@pytest.mark.parametrize(
    "change",
    [
        {"schema": 2},
        {"step_time_s": -1.0},
        {"step_time_s": math.inf},
        {"power_W": "much"},
        {"live": 3},
        {"epoch": []},
    ],
)
def test_a_record_that_cannot_be_read_is_one_sentence(
    tmp_path: Path, change: dict[str, object]
) -> None:
    record = Record(tmp_path / "tuned", HERE)
    record.add(Settings(), WINDOW, epoch=0, ranks=2)
    assert record.folder is not None
    path = record.folder / FILE
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        line.update({name: value for name, value in change.items() if name in line})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(InputError, match=r"--transfer: .* holds no online.jsonl"):
        read_earlier(record.folder)


# ---- a study


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Result:
    work = tmp_path_factory.mktemp("study")
    prepared(work)
    return answer_of_run(RunFolder(work / "runs" / "measured"))


def test_a_study_tells_the_live_settings_of_a_points_launch_alone(study: Result) -> None:
    first, other = study.points[0], study.points[1]
    assert first.configuration.launch != other.configuration.launch
    slower = replace(
        first,
        configuration=Configuration(first.configuration.launch, Settings(clock_MHz=900)),
        time_to_solution_s=1.2 * first.time_to_solution_s,
        time_interval_s=Interval(*(1.2 * end for end in first.time_interval_s)),
    )
    stages = Configuration(first.configuration.launch, Settings(clock_MHz=(900, 1000)))
    points = (
        first,
        slower,
        other,
        replace(first, configuration=stages),
        replace(slower, source="predicted"),
    )
    found = of_study(replace(study, points=points), first.configuration.short)
    assert list(found.points) == [Settings(), Settings(clock_MHz=900)]
    high, low = found.points.values()
    assert low.step_time_s == pytest.approx(1.2 * high.step_time_s)
    assert high.step_time_s == pytest.approx(first.time_to_solution_s / study.steps)
    assert found.setup.ranks == first.configuration.world_size
    assert study.cluster is not None
    assert found.setup.device == study.cluster.device.name


def test_a_study_without_a_device_has_nothing_to_begin_with(study: Result) -> None:
    with pytest.raises(InputError, match="nothing to begin with"):
        of_study(replace(study, cluster=None), study.points[0].configuration.short)


def test_a_schema_of_two_lines_is_one_sentence(tmp_path: Path) -> None:
    from tuner.online.settings import FILE, read_earlier

    (tmp_path / FILE).write_text('{"schema": "a\\nb", "device": "core", "meter": "model"}\n')
    with pytest.raises(InputError) as refused:
        read_earlier(tmp_path)
    assert "\n" not in str(refused.value)
