"""What a window under foreign load states: much less, and nothing less on a quiet node."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from tests.support.studies import METER, measured
from tuner.answer.posterior import LaunchPosterior, Windows
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.workload.node.measure.stragglers import ForeignLoad
from tuner.workload.records.probe import Measurement, ProbeRecord, ProbeRequest

QUIET, BUSY, HALF = ForeignLoad(), ForeignLoad(0.88), ForeignLoad(0.35)
ON_DEVICE = ForeignLoad(0.0, "at the end of the window, GPU 0 is used by process 4242")


def window(time_s: float = 1.0, load: ForeignLoad = QUIET) -> Measurement:
    return load.widened(measured(Settings(), time_s=time_s, power_W=100.0))


@pytest.mark.parametrize("load", [QUIET, ForeignLoad(0.09)])
def test_a_window_on_a_quiet_node_is_as_it_was(load: ForeignLoad) -> None:
    assert window(load=load) == replace(window(), foreign_share=load.share)
    assert load.notes == ()


@pytest.mark.parametrize("load", [HALF, BUSY, ON_DEVICE, replace(BUSY, device="a GPU is used")])
def test_a_disturbed_window_states_less(load: ForeignLoad) -> None:
    found = window(load=load)
    assert found.step_time_rse > 0.4
    assert found.power_rse > 0.4
    assert found.step_time_s == window().step_time_s  # what was measured stays
    assert len(load.notes) == bool(load.device) + (load.share > 0.1)


def test_an_unknown_error_becomes_a_known_one() -> None:
    unknown = replace(measured(Settings(), time_s=1.0, power_W=100.0), step_time_se_s=math.nan)
    assert math.isfinite(HALF.widened(unknown).step_time_rse)
    assert math.isfinite(ForeignLoad(1.0).error)  # all of the cores


def sure(loads: tuple[ForeignLoad, ForeignLoad]) -> float:
    """Return how sure it is that a configuration with a quarter of the step time is faster."""
    records = [
        ProbeRecord(
            ProbeRequest(f"p{number}", Configuration.of(micro_batch=number + 1).launch),
            (window(time_s, load),),
            METER,
        )
        for number, (time_s, load) in enumerate(zip((1.0, 0.25), loads, strict=True))
    ]
    today, faster = (record.request.configurations()[0] for record in records)
    posterior = LaunchPosterior.of(Windows.of(records))
    return posterior.saving(faster, today, energy=0.0, time=1.0).above(0.0)


def test_nothing_is_sure_of_windows_that_were_disturbed_differently() -> None:
    assert sure((QUIET, QUIET)) > 0.95
    assert sure((BUSY, HALF)) < 0.9
    assert sure((BUSY, QUIET)) < 0.9
    assert sure((QUIET, ON_DEVICE)) < sure((QUIET, QUIET))
