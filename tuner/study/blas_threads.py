"""Threads of the driver's linear algebra, which must not take cores from probes beside it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from threadpoolctl import ThreadpoolController

from tuner.problem.problem import Problem

__all__ = ["beside_probes"]


@contextmanager
def beside_probes(problem: Problem, in_flight: int) -> Iterator[None]:
    """Compute in one thread while real probes use this kind of machine's cores as devices.

    Args:
        problem: what is searched.
        in_flight: number of probes in flight.
    """
    cores = problem.cluster is not None and problem.cluster.device.type == "cpu"
    if not in_flight or not cores or problem.simulated:
        yield
        return
    with ThreadpoolController().limit(limits=1):
        yield
