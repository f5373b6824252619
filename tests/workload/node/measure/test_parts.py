"""Power of a superchip's parts, over a window and by phase."""

from __future__ import annotations

import pytest

from tuner.search_spaces.configuration import Settings
from tuner.workload.node.measure.measurement import measurement, part_lines, power_by_part
from tuner.workload.node.measure.statistics import Window
from tuner.workload.node.meters.base import Reading
from tuner.workload.records.probe import Measurement, PowerSample, WindowPolicy

#: A step of 1 s: the CPU encodes, then the GPU works.
MARKS = tuple(
    mark
    for step in range(4)
    for mark in ((step + 0.0, "forward.encoder"), (step + 0.4, "backward"))
)


def sample(time_s: float, **more: float) -> PowerSample:
    encodes = time_s % 1.0 < 0.4
    gpu_W, cpu_W = (100.0, 200.0) if encodes else (600.0, 80.0)
    parts = {"gpu_W": gpu_W, "grace_W": cpu_W + 50, "cpu_W": cpu_W, "sysio_W": 20.0, **more}
    return PowerSample(time_s, gpu_W + cpu_W + 90, parts)


SAMPLES = tuple(sample(0.05 + 0.1 * i) for i in range(40))


def window(samples: tuple[PowerSample, ...]) -> Window:
    ends = (1.0, 2.0, 3.0, 4.0)
    return Window(Reading(0.0, 0.0), Reading(4.0, 2700.0), (1.0,) * 4, ends, samples, marks=MARKS)


def made(samples: tuple[PowerSample, ...]) -> Measurement:
    found = measurement(Settings(), window(samples), WindowPolicy(min_s=1.0))
    assert isinstance(found, Measurement)
    return found


def test_parts_are_told_for_the_window_and_for_each_phase() -> None:
    parts_W = power_by_part(SAMPLES, MARKS)
    assert parts_W["gpu"] == pytest.approx(0.4 * 100 + 0.6 * 600)
    assert parts_W["forward.encoder: gpu"] == 100
    assert parts_W["backward: gpu"] == 600
    assert parts_W["backward: cpu"] == 80
    assert parts_W["forward.encoder: grace"] == 250


def test_nothing_is_added_to_the_modules_energy() -> None:
    found = made(SAMPLES)
    assert found.power_W == pytest.approx(2700 / 4)
    assert found.parts_W["gpu"] + found.parts_W["grace"] < found.power_W
    assert Measurement.from_json(found.to_json()) == found


def test_what_no_sensor_tells_is_left_out() -> None:
    bare = tuple(PowerSample(s.time_s, s.power_W, {"clock_MHz": 1980.0}) for s in SAMPLES)
    assert made(bare).parts_W == {}
    assert power_by_part((), MARKS) == {}
    half = tuple(
        PowerSample(s.time_s, s.power_W, {"gpu_W": s.extra["gpu_W"]} if i % 2 else {})
        for i, s in enumerate(SAMPLES)
    )
    assert set(power_by_part(half, ())) == {"gpu"}


def test_samples_at_a_boundary_belong_to_no_phase() -> None:
    marks = ((0.0, "forward"), (1.0, "boundary"))
    parts_W = power_by_part([sample(0.5), sample(1.2)], marks)
    assert parts_W["gpu"] == 350
    assert parts_W["forward: gpu"] == 600
    assert not any(name.startswith("boundary") for name in parts_W)


def test_the_text_has_a_line_for_the_window_and_each_phase() -> None:
    assert part_lines(power_by_part(SAMPLES, MARKS)) == [
        "window          GPU 400 W, Grace 178 W, CPU cores 128 W, SysIO 20 W",
        "forward.encoder GPU 100 W, Grace 250 W, CPU cores 200 W, SysIO 20 W",
        "backward        GPU 600 W, Grace 130 W, CPU cores 80 W, SysIO 20 W",
    ]
    assert part_lines({}) == []
