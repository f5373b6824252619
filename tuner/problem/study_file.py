"""Job, cluster and surrogate of study.toml, and of a result's `about`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tuner.models.surrogate.surrogate_choice import OURS
from tuner.search_spaces.cluster import Cluster, Device
from tuner.search_spaces.errors import InputError, InvalidValue
from tuner.search_spaces.job import TrainingJob
from tuner.search_spaces.typed import check_fields
from tuner.workload.scripts.script_job import ScriptJob

__all__ = ["parse_cluster", "parse_job", "parse_surrogate"]


def parse_job(study: Mapping[str, Any]) -> TrainingJob | None:
    """Return the job of study.toml or of a result's `about`; None if it has none.

    Raises:
        InputError: its section is no job.
    """
    section = study.get("job")
    if not isinstance(section, Mapping):
        return None
    try:
        kind = ScriptJob if "frame" in section else TrainingJob
        return kind.from_json({**section, "model": json.loads(section["model"])})
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"the [job] of study.toml is not a job: {error}") from error


def parse_surrogate(study: Mapping[str, Any]) -> str:
    """Return the surrogate of study.toml, as text (`tuner.models.surrogate.surrogate_choice`).

    Raises:
        InvalidValue: it is not a text.
    """
    text = study.get("settings", {}).get("surrogate", OURS)
    if not isinstance(text, str):
        raise InvalidValue("surrogate in study.toml", text, "a text")
    return text


def parse_cluster(study: Mapping[str, Any]) -> Cluster | None:
    """Return the cluster of study.toml or of a result's `about`; None if it has none.

    Raises:
        InputError: its section is no cluster.
    """
    section = study.get("cluster")
    if not isinstance(section, Mapping):
        return None

    def build(cls: type, data: Mapping[str, Any]) -> Any:
        made = cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in data.items()})
        return check_fields(made, cls.__name__.lower())

    try:
        return build(Cluster, {**section, "device": build(Device, section["device"])})
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(f"the [cluster] of study.toml is not a cluster: {error}") from error
