"""Threads of the driver's linear algebra: one, because its matrices are small.

Threads of small products wait for each other, and longer where other processes use the cores: the
searches of `tuner demo` took four times the processor time with two threads. On a machine whose
cores are the devices they would also take them from the probes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from threadpoolctl import ThreadpoolController


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute in one thread; libraries that are loaded inside are not limited."""
    with ThreadpoolController().limit(limits=1):
        yield
