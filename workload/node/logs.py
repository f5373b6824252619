"""The ranks' logs while a probe runs: a script that prints gigabytes must not fill the disk.

A log that exceeds a limit is cut to its end repeatedly, because its last lines explain a failure.
Ranks append to their logs, so they continue at the new end. A script that prints as fast as the
disk allows may overshoot the limit by what it prints in a quarter of a second.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Any

from tuner.search_spaces.safe_files import open_plain
from tuner.workload.meters.ticker import Ticker

#: A rank's log that grows beyond this is cut, ...
LOG_LIMIT_BYTES = 64 << 20
#: ... of which so much is kept.
KEPT_BYTES = 1 << 20
PERIOD_S = 0.25


@contextlib.contextmanager
def bounded_logs(folder: Path, environment: MutableMapping[str, Any]) -> Iterator[None]:
    """Keep logs from growing without bound while inside; note in `environment` if one was cut."""

    def cut() -> None:
        for path in folder.glob("rank*.log"):
            with contextlib.suppress(OSError):
                if path.stat().st_size <= LOG_LIMIT_BYTES:
                    continue
                with open(open_plain(path, os.O_APPEND), "r+b") as file:
                    file.seek(-KEPT_BYTES, os.SEEK_END)
                    end = file.read(KEPT_BYTES)
                    file.truncate(0)
                    file.write(end)
                environment[path.name] = (
                    f"more than {LOG_LIMIT_BYTES >> 20} MiB were printed; the end is kept"
                )

    ticker = Ticker(cut, period_s=PERIOD_S, name="joulefront-logs")
    try:
        yield
    finally:
        ticker.stop()
