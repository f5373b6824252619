"""The problem of an existing run, made again from its study.toml."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from tuner.models.surrogate.surrogate_choice import regressor_of
from tuner.problem.from_job import problem_of_job
from tuner.problem.from_recording import table_problem
from tuner.problem.problem import REAL_COST, Problem, digest_of
from tuner.problem.run_folder import RunFolder
from tuner.problem.study_file import parse_cluster, parse_job, parse_surrogate
from tuner.search_spaces.candidates import Candidates
from tuner.search_spaces.cluster import Cluster
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.job import TrainingJob

#: Largest number of candidates that are enumerated again: more takes seconds.
MOST_ENUMERATED = 20_000


def _candidates(
    study: Mapping[str, Any],
    visited: Sequence[Configuration],
    job: TrainingJob | None,
    cluster: Cluster | None,
) -> Candidates:
    """Return the candidates that were searched if they can be enumerated again, else the visited.

    Those never visited are what a result predicts (`Result.predicted`).
    """
    seen = Candidates.from_configurations(visited)
    space, recorded = study.get("space", {}), study.get("recorded", {})
    count = space.get("configurations", 0)
    if type(count) is not int or not 0 < count <= MOST_ENUMERATED:
        return seen
    key = study.get("baseline", {}).get("configuration")
    baseline = next((each for each in visited if each.key == key), None)
    # study.toml does not say whether changed training was allowed; the digest does.
    for plan, changed in product((False, True), (True, False)):
        try:
            if "path" in recorded:
                found = table_problem(Path(recorded["path"]), recorded.get("group"), None)[0]
            elif job is not None and cluster is not None and not recorded:
                found = problem_of_job(
                    job,
                    cluster,
                    space["name"],
                    baseline=baseline,
                    plan=plan,
                    max_gpus=study.get("constraints", {}).get("max_gpus"),
                    allow_changed_training=changed,
                )
            else:
                return seen
        except (InputError, OSError, KeyError, TypeError):  # it has gone since, or was edited
            return seen
        if digest_of(found.candidates) == space.get("digest"):
            return found.candidates
    return seen


def problem_of_run(
    folder: RunFolder, configurations: tuple[Configuration, ...], study: Mapping[str, Any]
) -> Problem:
    """Return the problem of an existing run, from its study.toml.

    The candidates are those that were searched if they can be enumerated again, else those visited.
    """
    job, cluster = parse_job(study), parse_cluster(study)
    recorded = study.get("recorded", {})
    steps = recorded.get("steps") or (job.steps or 1 if job else None)
    if steps is None:
        raise InputError(f"{folder.study_file} names neither a job nor a recording")
    return Problem(
        name=job.name if job else str(recorded.get("table", folder.name)),
        candidates=_candidates(study, configurations, job, cluster),
        steps=int(steps),
        baseline=None,
        cost=REAL_COST,
        identity={
            name: study[name]
            for name in ("job", "cluster", "recorded", "space", "baseline", "plan")
            if name in study
        },
        job=job,
        cluster=cluster,
        surrogate=regressor_of(parse_surrogate(study)),
        unit_of_work=str(recorded.get("unit_of_work", "optimizer step")),
    )
