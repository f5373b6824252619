"""The table of all faults, and the function that causes one of them."""

from __future__ import annotations

import traceback
from collections.abc import Sequence

from tests.faults import (
    device,
    driver,
    moments,
    open_launch,
    probe,
    ray_cluster,
    ray_moments,
    real_moments,
    storage,
)
from tests.faults.harness import Fault, Outcome, Unavailable, own_folder


def all_faults() -> Sequence[Fault]:
    """Every fault, in the table's order."""
    return (
        *driver.FAULTS,
        *open_launch.FAULTS,
        *storage.FAULTS,
        *probe.FAULTS,
        *device.FAULTS,
        *ray_cluster.FAULTS,
        *ray_moments.FAULTS,
        *moments.FAULTS,
        *real_moments.FAULTS,
    )


def try_fault(fault: Fault) -> Outcome:
    """Cause one fault in a folder of its own. An error of the harness is an outcome, too."""
    with own_folder() as folder:
        try:
            return fault.cause(folder)
        except Unavailable as why:
            return Outcome(skipped=str(why))
        except Exception:
            return Outcome(wrong=(traceback.format_exc(),))
