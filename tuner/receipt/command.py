"""`tuner run -- COMMAND`: an unchanged command and a receipt of its time and energy."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from pathlib import Path

from tuner.cli.options import announcer
from tuner.search_spaces.errors import InputError, InvalidValue


def measure_command(args: argparse.Namespace) -> int:
    """Run the command after --, and print its receipt to standard error; return its exit code."""
    from tuner.receipt.measure import MeasureOptions, end_as, measure, receipt_file, words_of
    from tuner.receipt.receipt import write_comment
    from tuner.receipt.text import receipt_lines
    from tuner.search_spaces.typed_json import JSON_SCHEMA, strict_json
    from tuner.workload.node.meters.base import own_meter

    if args.samples is not None and not 0 < args.samples < float("inf"):
        raise InvalidValue("--samples", args.samples, "a number above 0")
    words_of(args.program)
    file = receipt_file(args.out, args.runs_dir, args.program)
    is_new = not file.exists()
    options = MeasureOptions(file, args.samples, args.ignored_signals, 2 if args.json else None)
    # Standard output is the command's; a closed standard error changes nothing for it.
    announce = announcer(args, "tuner: ")
    try:
        with own_meter(args.meter):
            receipt, status = measure(args.program, options, announce)
    except (InputError, KeyboardInterrupt):  # it did not run
        if is_new:
            file.unlink(missing_ok=True)
        if args.out is None:
            _remove_folders(file.parent)
        raise
    lines = receipt_lines(receipt, file)
    if args.slurm_comment:
        lines.append(write_comment(receipt))
    print("\n".join(lines), file=sys.stderr, flush=True)
    if args.json:
        whole = {"schema": JSON_SCHEMA, **receipt.to_json(), "file": str(file)}
        try:
            print(json.dumps(strict_json(whole), indent=2), flush=True)
        except OSError as error:
            announce(f"the output cannot be written: {error.strerror}; the receipt is in {file}")
    return end_as(status)


def _remove_folders(folder: Path) -> None:
    # Remove the folder of a receipt and that of all receipts, as far as they are empty.
    with contextlib.suppress(OSError):
        folder.rmdir()
        folder.parent.rmdir()
