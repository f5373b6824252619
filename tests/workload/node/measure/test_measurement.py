"""What is made of a window: figures, flags, delivered clocks, power of parts, and drift."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pynvml
import pytest

from tests.support.studies import METER
from tests.twin import TwinGpu, TwinNode
from tuner.search_spaces.configuration import Settings
from tuner.workload.node.clocks.base import FASTEST
from tuner.workload.node.measure.measurement import (
    delivered_of,
    drift_of,
    measurement,
    not_applied,
    of_used_devices,
    part_lines,
    power_by_part,
    reached,
)
from tuner.workload.node.measure.statistics import Window
from tuner.workload.node.meters.base import Reading, device_number
from tuner.workload.node.meters.nvml import NvmlMeter
from tuner.workload.records.probe import (
    Measurement,
    PowerSample,
    ProbeRecord,
    ProbeRequest,
    UnappliedSetting,
    WindowPolicy,
)

POLICY = WindowPolicy(min_s=5.0, min_steps=3, max_s=15.0, target_se=0.01)


def window_of(
    power_W: float = 300.0,
    *,
    energy_J: float = math.nan,
    extra: Mapping[str, float] | None = None,
    sampled_s: Sequence[float] = tuple(0.1 * k for k in range(101)),
) -> Window:
    """Ten steps of 1 s at a constant power."""
    samples = tuple(PowerSample(at_s, power_W, dict(extra or {})) for at_s in sampled_s)
    counted_J = 10 * power_W if math.isnan(energy_J) else energy_J
    ends = tuple(float(k) for k in range(1, 11))
    return Window(Reading(0.0, 0.0), Reading(10.0, counted_J), (1.0,) * 10, ends, samples)


def made(window: Window, live: Settings | None = None, **more: Any) -> Measurement:
    found = measurement(live or Settings(), window, POLICY, **more)
    assert isinstance(found, Measurement)
    return found


class TestFlags:
    @pytest.mark.parametrize(
        ("window", "more", "flags"),
        [
            pytest.param(window_of(energy_J=3100.0), {"independent": True}, (), id="agree"),
            pytest.param(
                *(window_of(energy_J=4000.0), {"independent": True}),
                ("energy counter and integrated power differ by -25.0 %",),
                id="differ",
            ),
            pytest.param(window_of(energy_J=4000.0), {}, (), id="one source"),
            pytest.param(
                *(window_of(), {"resolution_s": 0.6}),
                ("window of 10 s is short for a counter that is updated every 600 ms",),
                id="a slow counter",
            ),
            pytest.param(
                *(window_of(extra={"throttle_power": 1.0}), {}),
                ("throttle_power in 101 of 101 samples",),
                id="throttled",
            ),
        ],
    )
    def test_what_a_reader_must_know_is_flagged(
        self, window: Window, more: dict[str, Any], flags: tuple[str, ...]
    ) -> None:
        assert made(window, **{"resolution_s": 0.1, **more}).flags == flags

    def test_two_sources_are_compared_and_one_is_not(self) -> None:
        agree = made(window_of(energy_J=3100.0), independent=True)
        assert agree.sampled_energy_J == pytest.approx(3000.0)
        differ = made(window_of(energy_J=4000.0), independent=True)
        assert differ.power_rse == pytest.approx(0.25)  # which of the two is right is not known
        assert differ.power_W == 400.0  # the counter is the truth
        assert np.mean(differ.power_blocks_W) == pytest.approx(400.0)
        assert math.isnan(made(window_of(energy_J=4000.0)).sampled_energy_J)

    @pytest.mark.parametrize(
        ("sampled_s", "flagged"),
        [
            ([0.1 * k for k in range(100)], False),
            ([0.1 * k for k in range(15)], True),  # the thread had ended
            ([0.1 * k for k in range(100) if not 30 < k < 52], False),  # some came late
            ([5.0], True),
            ([], True),
        ],
    )
    def test_a_window_with_half_of_its_samples_says_so(
        self, sampled_s: list[float], flagged: bool
    ) -> None:
        flags = made(window_of(sampled_s=sampled_s), independent=True).flags
        assert any("not sampled" in flag for flag in flags) == flagged

    def test_a_meter_without_samples_is_not_blamed_for_them(self) -> None:
        assert made(window_of(sampled_s=())).flags == ()

    @pytest.mark.parametrize(("doubt_J", "flags"), [(0.0, 0), (29.0, 0), (31.0, 1)])
    def test_a_window_says_how_well_its_energy_is_known(self, doubt_J: float, flags: int) -> None:
        found = made(replace(window_of(), opened=Reading(0.0, 0.0, doubt_J)))
        assert sum("power fell slowly" in flag for flag in found.flags) == flags

    def test_survives_json(self) -> None:
        found = made(window_of(extra={"clock_MHz": 1395.0}), independent=True)
        found = replace(found, peak_memory_bytes=None)
        assert Measurement.from_json(found.to_json()) == found

    def test_what_it_reaches_is_the_upper_end_of_its_intervals(self) -> None:
        found = Measurement(Settings(), 10, 5.0, 0.5, 500.0, 100.0, step_time_se_s=0.005)
        assert reached(found) == (
            pytest.approx(0.5 * math.exp(0.01645), rel=1e-4),
            pytest.approx(50.0 * math.exp(0.01645), rel=1e-4),
        )


class TestDelivered:
    def test_a_lock_that_is_ignored_is_no_data_point(self) -> None:
        window = window_of(extra={"clock_MHz": 1410.0})
        told = measurement(Settings(clock_MHz=900), window, POLICY)
        assert isinstance(told, UnappliedSetting)
        assert told.message == "clock_MHz was set to 900 and the devices ran at 1410 MHz"
        assert told.delivered == {"clock_MHz": 1410.0}

    @pytest.mark.parametrize(
        ("live", "extra", "delivered"),
        [
            ({"clock_MHz": 1410}, {"clock_MHz": 1245.0, "throttle_power": 0.0}, None),  # no reason
            # What power holds back is the models' input.
            (
                *({"clock_MHz": 1410}, {"clock_MHz": 1245.0, "throttle_power": 1.0}),
                {"clock_MHz": 1245.0},
            ),
            # Cores may stay below their highest clock and not above.
            ({"clock_MHz": 3000}, {FASTEST: 2800.0}, {"clock_MHz": 2800.0}),
            ({"clock_MHz": 2000}, {FASTEST: 2800.0}, None),
            ({"clock_MHz": 1395}, {"clock_MHz": 1391.2}, {"clock_MHz": 1395}),  # noise of the mean
            # A meter that tells no device judges nothing.
            (
                dict.fromkeys(("clock_MHz", "power_limit_W"), 300),
                {},
                {"clock_MHz": 300, "power_limit_W": 300},
            ),
            ({}, {"clock_MHz": 1391.2}, {}),  # a clock that was left alone stays so
        ],
    )
    def test_a_clock_is_delivered_or_was_not_taken(
        self, live: dict[str, int], extra: dict[str, float], delivered: dict[str, float] | None
    ) -> None:
        told = measurement(Settings(live), window_of(extra=extra), POLICY)
        assert isinstance(told, UnappliedSetting if delivered is None else Measurement)
        if isinstance(told, Measurement):
            assert told.live == Settings(live)
            assert told.as_delivered == Settings(delivered)

    def test_a_snapped_clock_is_judged_by_what_was_set(self) -> None:
        window, applied = window_of(extra={"clock_MHz": 1005.0}), Settings(clock_MHz=1005)
        found = made(window, Settings(clock_MHz=960), settings=applied)
        assert found.as_delivered == Settings(clock_MHz=1005.0)
        assert found.delivered == {"clock_MHz": pytest.approx(1005.0)}

    def test_stages_are_judged_one_by_one(self) -> None:
        live = Settings(clock_MHz=(900, 1305))
        ran = {f"gpu{i}_clock_MHz": c for i, c in enumerate((900.0, 900.0, 1305.0, 1305.0))}
        told = made(window_of(extra={"clock_MHz": 1102.0, **ran}), live)
        assert told.delivered == {"clock_MHz": 1102.0, "clock_MHz.0": 900.0, "clock_MHz.1": 1305.0}
        assert told.as_delivered == live
        ran["gpu3_clock_MHz"] = 1410.0
        missed = measurement(live, window_of(extra={"clock_MHz": 1128.0, **ran}), POLICY)
        assert isinstance(missed, UnappliedSetting)
        assert "of stage 1 was set to 1305" in missed.message

    def test_the_memory_clock_is_no_stages_sm_clock(self) -> None:
        extra = {"gpu0_memory_clock_MHz": 1593.0, "gpu1_memory_clock_MHz": 1593.0}
        samples = [PowerSample(0.0, 1.0, extra)]
        assert delivered_of(samples, Settings(clock_MHz=(900, 1305))) == {}

    def test_idle_samples_do_not_tell_the_clock_of_the_work(self) -> None:
        samples = [
            PowerSample(0.0, 1.0, {"clock_MHz": 1395.0, "utilisation": 1.0}),
            PowerSample(0.1, 1.0, {"clock_MHz": 210.0, "utilisation": 0.0}),
        ]
        assert delivered_of(samples, Settings()) == {"clock_MHz": 1395.0}

    def test_a_power_limit_that_does_not_act_was_not_taken(self) -> None:
        window = window_of(380.0, extra={"clock_MHz": 1410.0})
        live = Settings(power_limit_W=250)
        assert isinstance(measurement(live, window, POLICY), UnappliedSetting)
        assert not_applied(Settings(power_limit_W=375), {}, window.samples, 380.0, 1) == ""


# Of a job that uses some of its lease's GPUs.


Metered = Callable[..., tuple[TwinNode, NvmlMeter]]


def window_on(node: TwinNode, meter: NvmlMeter, clock_MHz: int, busy: int) -> Window:
    """Return a window of one second with the first `busy` GPUs at work, all locked."""
    for index in range(pynvml.nvmlDeviceGetCount()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        pynvml.nvmlDeviceSetGpuLockedClocks(handle, clock_MHz, clock_MHz)
        node.set(index, load=1.0 if index < busy else 0.0)
    opened = meter.boundary(opens=True)
    samples = []
    for _ in range(10):
        node.sleep(0.1)
        samples.append(meter.sample())
    closed = meter.read()
    ends = tuple(opened.time_s + 0.1 * k for k in range(1, 11))
    return Window(opened, closed, (0.1,) * 10, ends, tuple(samples))


@pytest.mark.needs("cc")
class TestUsedDevices:
    def test_models_learn_the_clock_of_the_gpus_that_worked(self, metered: Metered) -> None:
        node, meter = metered(*[TwinGpu(limit_W=250.0)] * 4)  # which holds the busy below the lock
        window = window_on(node, meter, 1410, busy=2)
        told = made(window, Settings(clock_MHz=1410), devices=range(2))
        truth_MHz = node.clock_MHz_s(0), node.clock_MHz_s(3)
        node.sleep(1.0)
        ran_MHz = node.clock_MHz_s(0) - truth_MHz[0]
        assert ran_MHz < 1200 < node.clock_MHz_s(3) - truth_MHz[1]  # the idle stand at the lock
        assert told.as_delivered["clock_MHz"] == pytest.approx(ran_MHz, rel=0.005)

    def test_idle_gpus_that_ignore_a_lock_do_not_cost_the_window(self, metered: Metered) -> None:
        live = Settings(clock_MHz=1200)
        window = window_on(*metered(*[TwinGpu(idle_follows=False)] * 4), 1200, busy=2)
        assert made(window, live, devices=range(2)).as_delivered == live
        # Judged by all of the lease, the same window would be lost.
        assert isinstance(measurement(live, window, POLICY), UnappliedSetting)


def test_heat_and_throttling_of_idle_devices_are_none_of_the_jobs() -> None:
    extra = {
        **{"clock_MHz": 1050.0, "temperature_C": 90.0, "throttle_thermal": 1.0},
        "averaged_W": 500.0,
        **{"gpu0_power_W": 300.0, "gpu0_clock_MHz": 900.0, "gpu0_temperature_C": 60.0},
        **{"gpu0_throttle_thermal": 0.0, "gpu1_power_W": 70.0, "gpu1_clock_MHz": 1200.0},
        **{"gpu1_temperature_C": 90.0, "gpu1_throttle_thermal": 1.0},
    }
    (sample,) = of_used_devices([PowerSample(0.0, 370.0, extra)], [0])
    assert sample.power_W == 370.0  # the lease's
    assert sample.extra["clock_MHz"] == 900.0
    assert (sample.extra["temperature_C"], sample.extra["throttle_thermal"]) == (60.0, 0.0)
    assert sample.extra["averaged_W"] == 500.0
    assert not [name for name in sample.extra if device_number(name) == 1]


def test_a_power_limit_is_judged_by_all_devices_of_the_lease() -> None:
    one = {"gpu0_power_W": 240.0, "gpu1_power_W": 60.0, "gpu0_clock_MHz": 900.0}
    made(window_of(extra=one), Settings(power_limit_W=250), devices=[0])


# Power of a superchip's parts, over a window and by phase.

#: A step of 1 s: the CPU encodes, then the GPU works.
MARKS = tuple(
    mark
    for step in range(4)
    for mark in ((step + 0.0, "forward.encoder"), (step + 0.4, "backward"))
)


def sample_at(time_s: float) -> PowerSample:
    gpu_W, cpu_W = (100.0, 200.0) if time_s % 1.0 < 0.4 else (600.0, 80.0)
    parts = {"gpu_W": gpu_W, "grace_W": cpu_W + 50, "cpu_W": cpu_W, "sysio_W": 20.0}
    return PowerSample(time_s, gpu_W + cpu_W + 90, parts)


SAMPLES = tuple(sample_at(0.05 + 0.1 * i) for i in range(40))


def with_parts(samples: tuple[PowerSample, ...]) -> Measurement:
    ends = (1.0, 2.0, 3.0, 4.0)
    opened, closed = Reading(0.0, 0.0), Reading(4.0, 2700.0)
    return made(Window(opened, closed, (1.0,) * 4, ends, samples, marks=MARKS))


def test_parts_are_told_for_the_window_and_for_each_phase() -> None:
    parts_W = power_by_part(SAMPLES, MARKS)
    assert parts_W["gpu"] == pytest.approx(0.4 * 100 + 0.6 * 600)
    assert parts_W["forward.encoder: gpu"] == 100
    assert parts_W["backward: gpu"] == 600
    assert parts_W["backward: cpu"] == 80
    assert parts_W["forward.encoder: grace"] == 250
    assert part_lines(parts_W) == [
        "window          GPU 400 W, Grace 178 W, CPU cores 128 W, SysIO 20 W",
        "forward.encoder GPU 100 W, Grace 250 W, CPU cores 200 W, SysIO 20 W",
        "backward        GPU 600 W, Grace 130 W, CPU cores 80 W, SysIO 20 W",
    ]
    assert part_lines({}) == []


def test_nothing_is_added_to_the_modules_energy() -> None:
    found = with_parts(SAMPLES)
    assert found.power_W == pytest.approx(2700 / 4)
    assert found.parts_W["gpu"] + found.parts_W["grace"] < found.power_W
    assert Measurement.from_json(found.to_json()) == found


def test_what_no_sensor_tells_is_left_out() -> None:
    bare = tuple(PowerSample(s.time_s, s.power_W, {"clock_MHz": 1980.0}) for s in SAMPLES)
    assert with_parts(bare).parts_W == {}
    assert power_by_part((), MARKS) == {}
    half = tuple(
        PowerSample(s.time_s, s.power_W, {"gpu_W": s.extra["gpu_W"]} if i % 2 else {})
        for i, s in enumerate(SAMPLES)
    )
    assert set(power_by_part(half, ())) == {"gpu"}


def test_samples_at_a_boundary_belong_to_no_phase() -> None:
    marks = ((0.0, "forward"), (1.0, "boundary"))
    parts_W = power_by_part([sample_at(0.5), sample_at(1.2)], marks)
    assert parts_W["gpu"] == 350
    assert parts_W["forward: gpu"] == 600
    assert not any(name.startswith("boundary") for name in parts_W)


class TestDrift:
    def visit(self, step_time_s: float, started_s: float, **more: Any) -> Measurement:
        return Measurement(
            Settings(clock_MHz=1200),
            steps=10,
            window_s=10 * step_time_s,
            step_time_s=step_time_s,
            step_time_se_s=0.002,
            energy_J=3000.0,
            power_W=300.0,
            power_se_W=1.0,
            started_s=started_s,
            **more,
        )

    def test_is_what_the_two_visits_differ_by(self) -> None:
        other = replace(self.visit(5.0, 30.0), live=Settings(clock_MHz=900))
        first, second = self.visit(1.0, 20.0, temperature_C=60), self.visit(1.03, 50.0)
        drift = drift_of([first, other, replace(second, temperature_C=68)])
        assert drift is not None
        assert drift.step_time == pytest.approx(0.03)
        assert (drift.apart_s, drift.temperature_C) == (30.0, 8)
        assert drift.notable
        assert drift.sentence == (
            "1200MHz visited again after 30 s and +8 C: step time +3.0 %, power +0.0 %"
        )

    def test_a_difference_within_its_error_or_without_a_second_visit_is_none(self) -> None:
        drift = drift_of([self.visit(1.0, 20.0), self.visit(1.004, 50.0)])
        assert drift is not None
        assert not drift.notable
        assert drift_of([self.visit(1.0, 20.0)]) is None

    def test_a_record_keeps_it_and_what_was_missed(self) -> None:
        record = ProbeRecord(
            ProbeRequest("p1", Settings(data_parallel=1)),
            (),
            METER,
            drift=drift_of([self.visit(1.0, 20.0), self.visit(1.1, 50.0)]),
            missed=(UnappliedSetting(Settings(clock_MHz=900), "not taken", {"clock_MHz": 1410.0}),),
            idle_W=61.5,
            waiting_devices=3,
        )
        again = ProbeRecord.from_json(record.to_json())
        assert (again.drift, again.missed) == (record.drift, record.missed)
        assert (again.idle_W, again.waiting_devices) == (61.5, 3)
