"""Threads of a rank, which are searched on cores where nothing else of a script can be set."""

from __future__ import annotations

import os

from tuner.search_spaces.cluster import Cluster
from tuner.search_spaces.knob_declarations import Knob
from tuner.workload.scripts.script_job import THREADS, ScriptJob

_VARIABLE = "OMP_NUM_THREADS"


def with_threads(job: ScriptJob, cluster: Cluster) -> ScriptJob | None:
    """Return the job with the number of threads as a knob; None if there is none to choose.

    Numbers up to the cores that a rank has are halved down to 1; today's is the one observed.
    """
    today, most = job.frame.threads, cluster.devices_per_node // max(job.ranks_today, 1)
    taken = any(knob.name == THREADS or knob.how == f"env:{_VARIABLE}" for knob in job.knobs)
    # A program that computes with other threads than the variable says sets them itself.
    taken |= os.environ.get(_VARIABLE, str(today)) != str(today)
    if cluster.device.is_gpu or not today or taken:
        return None
    values = {today, *(most >> halvings for halvings in range(most.bit_length()))}
    if len(values) < 2:
        return None
    knob = Knob(THREADS, tuple(sorted(values)), baseline=today, how=f"env:{_VARIABLE}")
    return job.declares([*job.knobs, knob])
