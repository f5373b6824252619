"""`tuner run -- COMMAND`: an unchanged command and a receipt of its time and energy."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tuner.cli.options import announcer
from tuner.formatting import after_comma, duration, number, percent
from tuner.receipt.receipt import Receipt, TrainingShare
from tuner.search_spaces.errors import InputError, InvalidValue


def measure_command(args: argparse.Namespace) -> int:
    """Run the command after --, and print its receipt to standard error; return its exit code."""
    from tuner.receipt.measure import MeasureOptions, end_as, measure, receipt_file, words_of
    from tuner.receipt.receipt import write_comment
    from tuner.search_spaces.fields import JSON_SCHEMA, strict_json
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


#: A command with this share of the cores' busy time had the node for itself.
ALONE = 0.9
#: Characters of a command that are shown.
_SHOWN = 60
#: Trainings that are listed.
_LISTED = 10
#: Names of scopes in a sentence.
_SCOPES = {"gpu": "GPUs", "module": "GPU modules", "node": "node"}


def joules(energy_J: float) -> str:
    """Return an energy in the unit of its size: "9.81 J", "12.3 kJ", "4.56 kWh"."""
    if energy_J >= 3.6e6:
        return f"{number(energy_J / 3.6e6)} kWh"
    return f"{number(energy_J / 1000)} kJ" if energy_J >= 1000 else f"{number(energy_J)} J"


def seconds(time_s: float) -> str:
    """Return a time in the unit of its size: "0.152 ms", "45.3 s", "31 min"."""
    if time_s >= 60:
        return duration(time_s)
    return f"{number(time_s)} s" if time_s >= 1 else f"{number(1000 * time_s)} ms"


def receipt_lines(receipt: Receipt, file: Path | None = None) -> list[str]:
    """Return the receipt, a quantity a line, then notes on the run."""
    meter = receipt.meter
    scope = _SCOPES[meter.scope]
    rows = [
        ("energy", f"{joules(receipt.energy_J)} ({scope}, {meter.label}: {meter.source})"),
        ("by itself", _own(receipt)),
        ("time", f"{seconds(receipt.time_s)}, {_end(receipt)}"),
        *_step_rows(receipt),
        ("power", _power(receipt)),
        ("devices", _use(receipt)),
    ]
    if file is not None:
        rows.append(("file", str(file)))
    title = f"Receipt of {_command(receipt.command)} on {receipt.host}"
    return [title, *(f"  {name:<12}{text}" for name, text in rows if text), *receipt.notes]


def _own(receipt: Receipt) -> str:
    if not receipt.core_share < ALONE:
        return ""
    share = percent(receipt.core_share)
    return f"about {joules(receipt.own_energy_J)}: {share} of the cores' busy time was its own"


def _command(words: Sequence[str]) -> str:
    text = " ".join(shlex.join(words).split())
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def _end(receipt: Receipt) -> str:
    if receipt.signal is not None:
        name = signal.Signals(receipt.signal).name if receipt.signal < 32 else str(receipt.signal)
        return f"ended by {name}"
    return f"exit code {receipt.exit_code}" if receipt.state == "ended" else "still running"


def _step_rows(receipt: Receipt) -> Iterator[tuple[str, str]]:
    if not receipt.trainings:
        return
    until_J, until_s = receipt.first_step_energy_J, receipt.first_step_s
    yield "first step", f"after {seconds(until_s)} and {joules(until_J)}, which stand apart"
    several = len(receipt.trainings) > 1
    if several:
        yield "steps", f"{receipt.steps:,} in {len(receipt.trainings)} trainings"
    for index, training in enumerate(receipt.trainings[:_LISTED], 1):
        where = f": {_command(training.words)}" if several else ""
        yield (f"training {index}" if several else "steps"), _steps(training) + where
    if len(receipt.trainings) > _LISTED:
        yield "", f"and {len(receipt.trainings) - _LISTED} more trainings, which the file holds"


def _steps(training: TrainingShare) -> str:
    ranks = f" of {training.world} ranks" if training.world > 1 else ""
    parts = [f"{training.steps:,}{ranks}"]
    if training.steps > 1:
        step = f"{joules(training.step_energy_J)} and {seconds(training.step_time_s)} a step"
        parts.append(step)
    if training.samples > 0:
        parts.append(f"{joules(training.sample_energy_J)} a sample")
    return ", ".join(parts)


def _power(receipt: Receipt) -> str:
    text = f"{number(receipt.mean_W)} W on average"
    if len(receipt.devices) > 1:
        each = (f"{device.name} {number(device.mean_W)} W" for device in receipt.devices)
        text += f": {', '.join(each)}"
    return text + after_comma(receipt.meter.mark)


def _use(receipt: Receipt) -> str:
    shares = {"idle": receipt.idle, "throttled": receipt.throttled}
    share_texts = [
        f"{percent(share)} {name}" for name, share in shares.items() if math.isfinite(share)
    ]
    return f"{' and '.join(share_texts)} of the time" if share_texts else ""
