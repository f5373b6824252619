"""Job, cluster and surrogate of study.toml, and of a result's `about`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tuner.models.surrogate.surrogate_choice import OURS
from tuner.search_spaces.cluster import Cluster, Device
from tuner.search_spaces.errors import InputError, InvalidValue
from tuner.search_spaces.job import TrainingJob
from tuner.search_spaces.typed import read_fields
from tuner.workload.scripts.script_job import ScriptJob


def parse_job(study: Mapping[str, Any]) -> TrainingJob | None:
    """Return the job of study.toml or of a result's `about`; None if it has none."""
    section = study.get("job")
    if not isinstance(section, Mapping):
        return None
    try:
        kind = ScriptJob if "frame" in section else TrainingJob
        return kind.from_json({**section, "model": json.loads(section["model"])})
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"the [job] of study.toml is not a job: {error}") from error


def parse_surrogate(study: Mapping[str, Any]) -> str:
    """Return the surrogate of study.toml, as text (`tuner.models.surrogate.surrogate_choice`)."""
    text = study.get("settings", {}).get("surrogate", OURS)
    if not isinstance(text, str):
        raise InvalidValue("surrogate in study.toml", text, "a text")
    return text


def parse_cluster(study: Mapping[str, Any]) -> Cluster | None:
    """Return the cluster of study.toml or of a result's `about`; None if it has none."""
    section = study.get("cluster")
    if not isinstance(section, Mapping):
        return None
    try:
        return read_fields(
            Cluster, section, "cluster", device=lambda data: read_fields(Device, data, "device")
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(f"the [cluster] of study.toml is not a cluster: {error}") from error
