"""What a tuned training begins with: a study's measurements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.golden import prepared
from tests.online.test_agent import Devices, live_tuning, train
from tuner.online.earlier import Earlier, Setup, of_study
from tuner.online.live import LiveTuning
from tuner.online.request import TuningRequest
from tuner.online.response import Studied
from tuner.online.settings import clock_settings
from tuner.problem.run_folder import RunFolder
from tuner.results.parts import Interval
from tuner.results.result import Result
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.search_spaces.errors import InputError
from tuner.study.load import result_of

HERE = Setup("gpu", "nvml devices")


def point(clock_MHz: int | None, step_time_s: float, power_W: float) -> tuple[Settings, Studied]:
    live = Settings() if clock_MHz is None else Settings(clock_MHz=clock_MHz)
    return live, Studied(step_time_s, power_W, 0.005)


def truth(clock_MHz: int) -> tuple[float, float]:
    """Step time and power of `Devices` at a clock."""
    devices = Devices()
    devices.clock_MHz = clock_MHz
    seconds = devices.step()
    return seconds, devices.energy_J / seconds


def true_points(
    factor: float = 1.0, clocks: Sequence[int] = (1400, 1300, 1100, 900)
) -> dict[Settings, Studied]:
    return dict(
        point(None if clock == 1400 else clock, factor * truth(clock)[0], truth(clock)[1])
        for clock in clocks
    )


def tuned(
    points: dict[Settings, Studied], ranks: int = 0, devices: Devices | None = None
) -> tuple[LiveTuning, Devices, list[str]]:
    devices, said = devices or Devices(), list[str]()
    earlier = Earlier("run a", Setup("gpu", "nvml devices", ranks), points)
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
    points: dict[Settings, Studied], ranks: int, said: str
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
    why = Earlier("run a", HERE, true_points()).why_not(now)
    assert said in why
    assert bool(said) == bool(why)


# ---- a study


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Result:
    work = tmp_path_factory.mktemp("study")
    prepared(work)
    return result_of(RunFolder(work / "runs" / "measured"))


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
