"""`tuner jobs`, `clusters` and `spaces`: what is known by name."""

from __future__ import annotations

import argparse

from tuner.commands.shared import OK, Commands, answer, columns


def _jobs(args: argparse.Namespace) -> int:
    from search_spaces.job import job_names, load_job

    jobs = [load_job(name) for name in job_names()]
    rows = [
        (
            job.name,
            str(job.model.get("model_type")),
            f"sequences of {job.sequence_length} tokens, {job.global_batch} a step",
            f"{job.steps:,} steps",
            job.precision,
        )
        for job in jobs
    ]
    answer(args, [{**job.to_json(), "model": dict(job.model)} for job in jobs], columns(rows))
    return OK


def _clusters(args: argparse.Namespace) -> int:
    from dataclasses import asdict

    from search_spaces.cluster import cluster_names, load_cluster

    clusters = [load_cluster(name) for name in cluster_names()]
    rows = [
        (
            cluster.name,
            f"{cluster.nodes} node{'s' * (cluster.nodes != 1)}",
            f"{cluster.devices_per_node} x {cluster.device.name}",
            "clocks can be set" if cluster.clock_control else "clocks cannot be set",
        )
        for cluster in clusters
    ]
    answer(args, [asdict(cluster) for cluster in clusters], columns(rows))
    return OK


def _spaces(args: argparse.Namespace) -> int:
    from search_spaces.space import load_space, space_names

    spaces = [load_space(name) for name in space_names()]
    answer(
        args,
        [{"name": s.name, "what": s.what, "knobs": sorted(s.choices)} for s in spaces],
        columns([(space.name, space.what) for space in spaces]),
    )
    return OK


def add(commands: Commands) -> None:
    """The commands of this module."""
    commands.command("jobs", _jobs, "the jobs that are named")
    commands.command("clusters", _clusters, "the clusters that are named")
    commands.command("spaces", _spaces, "the search spaces that are named")
