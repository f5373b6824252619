"""Candidates that were never measured."""

from __future__ import annotations

from tuner.answer.choice import never_measured
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.workload.records.probe import Failure, Measurement, MeterInfo, ProbeRecord, ProbeRequest

SLOW, FAST = Configuration.of(micro_batch=1), Configuration.of(micro_batch=2, data_parallel=4)


def test_a_measured_setting_and_a_failed_launch_are_left_out() -> None:
    meter = MeterInfo("nvml", "gpu", "a counter")
    setting = Settings({"clock_MHz": 900})
    of_slow = Configuration(SLOW.launch, setting)
    window = Measurement(setting, 3, 5.0, 1.6, 1500.0, 300.0)
    failure = Failure("out_of_memory", "no room")
    records = [
        ProbeRecord(ProbeRequest("p0", SLOW.launch, (setting,)), (window,), meter),
        ProbeRecord(ProbeRequest("p1", FAST.launch), (), meter, failure=failure),
    ]
    assert never_measured([SLOW, of_slow, FAST], records) == (SLOW,)
