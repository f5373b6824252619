"""What study.toml says was asked, read back as a job and a cluster."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from search_spaces.cluster import Cluster, Device
from search_spaces.errors import InputError
from search_spaces.job import TrainingJob
from search_spaces.typed import check_fields
from workload.script import ScriptJob

__all__ = ["known_cluster", "known_job"]


def known_job(known: Mapping[str, Any]) -> TrainingJob | None:
    """The job that study.toml or a result's `about` tells of; None where it tells of none.

    Raises:
        InputError: its section is no job.
    """
    section = known.get("job")
    if not isinstance(section, Mapping):
        return None
    try:
        kind = ScriptJob if "frame" in section else TrainingJob
        return kind.from_json({**section, "model": json.loads(section["model"])})
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"the [job] of study.toml is not a job: {error}") from error


def known_cluster(known: Mapping[str, Any]) -> Cluster | None:
    """The cluster that study.toml or a result's `about` tells of; None where it tells of none.

    Raises:
        InputError: its section is no cluster.
    """
    section = known.get("cluster")
    if not isinstance(section, Mapping):
        return None

    def build(cls: type, data: Mapping[str, Any]) -> Any:
        made = cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in data.items()})
        return check_fields(made, cls.__name__.lower())

    try:
        cluster: Cluster = build(Cluster, {**section, "device": build(Device, section["device"])})
        return cluster
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(f"the [cluster] of study.toml is not a cluster: {error}") from error
