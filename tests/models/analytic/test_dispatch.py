"""Dispatch by the host: of eager and of compiled programs, and as one launch corrects it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest

from tuner.models.analytic.constants import constants_of
from tuner.models.analytic.model import AnalyticModel
from tuner.models.scale_out import ScaleOut, predictor
from tuner.search_spaces.cluster import load_cluster
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.job import TrainingJob, load_job

CLUSTER, JOB = load_cluster("a100-8"), load_job("opt-350m")
CONSTANTS = constants_of(CLUSTER.device)


@dataclass(frozen=True)
class Compiled(TrainingJob):
    """As a script's job whose inspection saw a compiled model."""

    @property
    def compiled(self) -> bool:
        """True."""
        return True


def exposed(job: TrainingJob, **knobs: object) -> float:
    """Return the seconds of dispatch of a step of small micro-batches."""
    configuration = Configuration.of(data_parallel=8, micro_batch=1, **knobs)
    return AnalyticModel(job, CLUSTER).breakdown(configuration).time_s.get("dispatch", 0.0)


def test_a_knob_says_whether_a_program_is_compiled_and_else_the_look_at_it() -> None:
    seen = Compiled(**{name: getattr(JOB, name) for name in JOB.__dataclass_fields__})
    eager = exposed(JOB)
    assert eager > 0
    assert exposed(JOB, compilation="regional") == exposed(JOB, compilation="full") == 0
    assert exposed(seen) == 0
    assert exposed(seen, compilation="none") == eager


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("true_s", [5e-6, 2e-4])
def test_one_launch_tells_dispatch_that_the_prior_hides_or_overstates(
    compiled: bool, true_s: float
) -> None:
    """Also from the side where a little more or less dispatch would not show in any time.

    A launch that hides its dispatch only bounds it, so more tensor parallelism stays uncertain.
    """
    names = ("operator_s", "compiled_operator_s")
    mode = "full" if compiled else "none"
    true = replace(CONSTANTS, **dict.fromkeys(names, true_s))
    one = [Configuration.of(data_parallel=8, micro_batch=1, compilation=mode)]
    every = [
        Configuration.of(data_parallel=8 // t, tensor_parallel=t, micro_batch=b, compilation=mode)
        for t in (1, 2, 4)
        for b in (1, 2, 4)
    ]
    measured = predictor(JOB, CLUSTER, one)(true)[:, :1]
    line = ScaleOut(
        CONSTANTS,
        predictor(JOB, CLUSTER, one),
        gpus=[8],
        launches=["one"],
        measured=measured,
    )
    found = line.medians(predictor(JOB, CLUSTER, every), [8] * len(every))[:, 0]
    wanted = predictor(JOB, CLUSTER, every)(true)[:, 0]
    before = predictor(JOB, CLUSTER, every)(CONSTANTS)[:, 0]
    assert np.abs(found - wanted).max() < max(0.1, 0.75 * np.abs(before - wanted).max())


def test_launches_tell_how_much_dispatch_is_hidden() -> None:
    true = replace(CONSTANTS, dispatch_hidden=0.3)
    few = [Configuration.of(data_parallel=8, micro_batch=b) for b in (1, 2, 4, 8, 16)]
    line = ScaleOut(
        CONSTANTS,
        predictor(JOB, CLUSTER, few),
        gpus=[8] * len(few),
        launches=list(range(len(few))),
        measured=predictor(JOB, CLUSTER, few)(true)[:, :1],
    )
    assert line.constants.dispatch_hidden < 0.75
    assert CONSTANTS.dispatch_hidden == 1.0


@pytest.mark.parametrize(
    ("true", "least", "most"),
    [
        ({"memory_efficiency": 0.3, "matrix_efficiency": 0.6}, 1.5, 1.7),
        ({"operator_s": 4e-4}, 1.0, 1.1),
    ],
    ids=["slow device", "slow host"],
)
def test_time_and_power_of_one_launch_tell_a_slow_device_from_a_slow_host(
    true: dict[str, float], least: float, most: float
) -> None:
    """At half the clock a slow device's step takes longer, and a slow host's does not."""
    one = [Configuration.of(data_parallel=8, micro_batch=8)]
    half = [Configuration.of(data_parallel=8, micro_batch=8, clock_MHz=705)]
    measured = predictor(JOB, CLUSTER, one)(replace(CONSTANTS, **true))
    line = ScaleOut(
        CONSTANTS, predictor(JOB, CLUSTER, one), gpus=[8], launches=["one"], measured=measured
    )
    clocks = [line.medians(predictor(JOB, CLUSTER, each), [8])[0, 0] for each in (one, half)]
    assert least < np.exp(clocks[1] - clocks[0]) < most
