"""Running a probe whose failure is a record, in an executor of one process and in an agent."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tuner.search_spaces.configuration import Settings
from tuner.search_spaces.errors import InputError
from tuner.workload.records.probe import (
    Continuation,
    Failure,
    Measurement,
    ProbeRecord,
    ProbeRequest,
    Runner,
)
from tuner.workload.records.trace import partial_record, save_partial


def run_safely(
    runner: Runner,
    request: ProbeRequest,
    keep_in: str | Path | None = None,
    *,
    next_settings: Continuation | None = None,
) -> ProbeRecord:
    """Run one probe; an exception becomes a failed record. It is kept in `keep_in`."""
    partial = ProbeRecord(request, (), runner.meter)

    def keep_and_continue(
        longer: ProbeRequest, measurements: Sequence[Measurement]
    ) -> Sequence[Settings]:
        nonlocal partial
        partial = partial_record(longer, measurements, runner.meter)
        save_partial(keep_in, partial)
        return next_settings(longer, measurements) if next_settings is not None else ()

    try:
        if next_settings is None or not request.extendable:
            record = runner.run(request)
        else:
            record = runner.run_interactive(request, keep_and_continue)
    except InputError as error:
        record = replace(partial, failure=Failure("refused", str(error)))
    except Exception as error:
        kind = type(error).__name__
        failure = Failure("crash", f"the runner raised {kind}: {error}", traceback.format_exc())
        record = replace(partial, failure=failure)
    save_partial(keep_in, record)
    return record
