"""A window whose figures differ is measured again, and is never lost by it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tuner.workload.node.measure.measurement import AgreedWindow, Agreement, Levels
from tuner.workload.node.measure.statistics import Window
from tuner.workload.node.measure.window import ProbeFailed
from tuner.workload.node.meters.base import Reading
from tuner.workload.node.probe_run import SettingWindow
from tuner.workload.records.probe import Failure, PowerSample, WindowPolicy

POLICY = WindowPolicy(min_s=3.0)


def window_of(energy_J: float, power_W: float = 300.0, length_s: float = 3.0) -> Window:
    samples = tuple(PowerSample(0.05 + 0.1 * i, power_W) for i in range(round(10 * length_s)))
    ends = tuple(0.1 * (i + 1) for i in range(len(samples)))
    closed = Reading(length_s, energy_J)
    return Window(Reading(0.0, 0.0), closed, (0.1,) * len(ends), ends, samples)


class Conductor:
    """Gives these windows one after the other; one that is an error ends the probe."""

    def __init__(self, *windows: Window | ProbeFailed) -> None:
        self.left, self.policies = list(windows), list[WindowPolicy]()

    def measure(self, meter: Any, policy: WindowPolicy, *_: Any, **__: Any) -> Window:
        self.policies.append(policy)
        found = self.left.pop(0)
        if isinstance(found, ProbeFailed):
            raise found
        return found


def agreed(conductor: Conductor, *, independent: bool = True, left_s: float = 100.0) -> Any:
    kept: list[AgreedWindow] = []
    meter = SimpleNamespace(info=SimpleNamespace(independent=independent))
    setting = SettingWindow(conductor, meter, SimpleNamespace(samples=()))  # type: ignore[arg-type]
    try:
        found = setting.agreed(
            Agreement(Levels(most_W=400.0)), POLICY, 0.1, left_s=left_s, keep=kept.append
        )
    except ProbeFailed as failed:
        return kept, failed
    return kept, found


DIFFERS = window_of(990.0)  # 10 % above its samples
AGREES = window_of(1800.0, length_s=6.0)


def test_it_is_measured_again_over_twice_the_time() -> None:
    conductor = Conductor(DIFFERS, AGREES)
    assert agreed(conductor) == ([], AgreedWindow(AGREES))
    assert [policy.min_s for policy in conductor.policies] == [3.0, 6.0]


@pytest.mark.parametrize(
    ("window", "more"),
    [
        (window_of(905.0), {}),  # which agree
        (DIFFERS, {"independent": False}),  # one source only
        (DIFFERS, {"left_s": 11.0}),  # the probe's time is nearly up
    ],
)
def test_it_is_not_measured_again_without_reason_or_time(
    window: Window, more: dict[str, Any]
) -> None:
    conductor = Conductor(window)
    assert agreed(conductor, **more) == ([], AgreedWindow(window))


def test_a_program_that_ends_meanwhile_loses_no_window() -> None:
    ended = ProbeFailed(Failure("ended", "the program ended by itself"))
    kept, failed = agreed(Conductor(DIFFERS, ended))
    assert kept == [AgreedWindow(DIFFERS)]
    assert failed is ended
