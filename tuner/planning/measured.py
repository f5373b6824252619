"""The models corrected by measured launches: those of a run, or those that a file states.

Such a file names the job and the kind of device, and lists launches, one at least. What a
configuration leaves out is as in the one that is run without tuning, on all devices:

    job = "opt-350m"
    device = "A100-SXM-80GB"

    [[launch]]
    configuration = "dp8 mb4 zero0"
    step_time_s = 0.61
    power_W = 2100.0  # of all GPUs; may be left out
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tuner.models.analytic.constants import Constants, constants_of
from tuner.models.scale_out import Predict, ScaleOut, predictor
from tuner.search_spaces.baseline import changed_default
from tuner.search_spaces.cluster import Cluster
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.data_files import check_keys, read_toml
from tuner.search_spaces.errors import InputError, InvalidValue
from tuner.search_spaces.job import TrainingJob


@dataclass(frozen=True)
class Correction:
    """Models corrected by measured launches.

    Attributes:
        log_time, log_power: what the launches are above the corrected models, as logs.
        with_power: True if their power corrects the models, too.
    """

    constants: Constants
    log_time: float
    log_power: float
    launches: int
    with_power: bool

    @property
    def sentence(self) -> str:
        """Description of the correction for the user."""
        plural = "" if self.launches == 1 else "es"
        figures = "step time and power" if self.with_power else "step time"
        return (
            f"the models are corrected by the {figures} of {self.launches} measured "
            f"launch{plural}; the intervals are still those of models that nothing corrects"
        )


def read_correction(path: str | Path, job: TrainingJob, cluster: Cluster) -> Correction:
    """Correct the models by the launches of a file, which is of this job and device."""
    where = f"the measured launches {str(path)!r}"
    data = read_toml(Path(path), where.removeprefix("the "))
    check_keys(data, ("job", "device", "launch"), where)
    for name, here in (("job", job.name), ("device", cluster.device.name)):
        if name not in data:
            raise InputError(f"{where} state no {name}, which is {here!r} in this plan")
        if data[name] != here:
            raise InputError(f"{where} are of {name} {data[name]!r}; the plan is for {here!r}")
    stated = data.get("launch")
    if not isinstance(stated, list) or not stated or not all(isinstance(s, dict) for s in stated):
        raise InputError(f"{where} list no [[launch]] with configuration and step_time_s")
    configurations = [_configuration(each, job, cluster, where) for each in stated]
    names = ("step_time_s", *(["power_W"] if all("power_W" in each for each in stated) else []))
    logs = np.array([[_log(each, name, where) for name in names] for each in stated])
    return correction(job, cluster, configurations, logs)


def correction(
    job: TrainingJob,
    cluster: Cluster,
    configurations: Sequence[Configuration],
    logs: np.ndarray,
    launches: Sequence[object] | None = None,
) -> Correction:
    """Correct the models by windows, whose log step times (and log powers) are (n, 1 or 2).

    Args:
        launches: of each window; each is a launch of its own if None.
    """
    outputs = logs.shape[1]
    both = predictor(job, cluster, configurations)
    predict: Predict = lambda constants: both(constants)[:, :outputs]  # noqa: E731
    gpus = [each.world_size for each in configurations]
    launches = list(range(len(gpus))) if launches is None else launches
    model = ScaleOut(
        constants_of(cluster.device), predict, gpus=gpus, launches=launches, measured=logs
    )
    above = (model.medians(predict, gpus) - predict(model.constants)).mean(axis=0)
    return Correction(
        model.constants,
        float(above[0]),
        float(above[1]) if outputs == 2 else 0.0,
        len(set(launches)),
        outputs == 2,
    )


def _configuration(
    stated: dict[str, Any], job: TrainingJob, cluster: Cluster, where: str
) -> Configuration:
    check_keys(stated, ("configuration", "step_time_s", "power_W"), where)
    name = stated.get("configuration")
    if not isinstance(name, str) or not name.strip():
        raise InvalidValue(f"configuration in {where}", name, "a name such as 'dp8 mb4 zero0'")
    try:
        return changed_default(job, cluster, Configuration.parse(name))
    except InputError as error:
        raise InputError(f"{where} state {name!r}: {error}") from None


def _log(stated: dict[str, Any], name: str, where: str) -> float:
    value = stated.get(name)
    if type(value) not in (int, float) or not 0 < float(value) < math.inf:  # type: ignore[arg-type]
        raise InvalidValue(f"{name} in {where}", value, "a number above 0")
    return math.log(float(value))  # type: ignore[arg-type]
