"""Lines on the fastest and the largest safe micro-batch."""

from __future__ import annotations

from tuner.answer.micro_batch import MicroBatch, MicroBatchAdvice
from tuner.answer.significance import Difference
from tuner.formatting import label, number

_GIB = 2**30


def micro_batch_lines(found: MicroBatchAdvice) -> list[str]:
    """Return the fastest micro-batch against today's, and the largest safe one with its margin."""
    return [_fastest(found), _largest(found)]


def _fastest(found: MicroBatchAdvice) -> str:
    fastest, today = found.fastest, found.today
    text = f"Fastest micro-batch measured: {_figures(fastest)}"
    if today is None:
        return f"{text}. What you run today was not measured."
    if fastest.size == today.size:
        alone = ", and no other micro-batch was measured" if found.measured == 1 else ""
        return f"{text}: today's{alone}."
    text += f"; today {_figures(today)}"
    if fastest.time is None or fastest.energy is None:
        return f"{text}."
    words = f"time {_change(fastest.time)}"
    words += f", energy {_change(fastest.energy)}" if fastest.has_energy else ""
    unclear = "" if fastest.time.shown else ": no difference in time shown"
    return f"{text} ({words}{unclear})."


def _figures(each: MicroBatch) -> str:
    split = f"{each.size} x accumulation {each.accumulation}"
    joules = f", {number(each.J_per_sample)} J/sample{label(each.energy_mark)}"
    return f"{split}, {number(each.samples_per_s)} samples/s{joules * each.has_energy}"


def _change(difference: Difference) -> str:
    low, high = 100 * difference.low, 100 * difference.high
    return f"{100 * difference.relative:+.1f} % [{low:+.1f}, {high:+.1f}]"


def _largest(found: MicroBatchAdvice) -> str:
    beyond = {
        "whole_batch": "it is a rank's whole batch",
        "out_of_memory": f"{found.beyond_size} ran out of memory",
        "margin": f"{found.beyond_size} leaves less than {100 * (1 - found.safe_share):.0f} %",
        "failed": f"{found.beyond_size} failed",
        "not_tried": "no larger one was tried",
    }[found.beyond]
    each = found.largest_safe
    if each is None:
        if found.limit_bytes is None or found.fastest.peak_bytes is None:
            return "Largest safe micro-batch: unknown, as the memory of a rank was not measured."
        return f"Largest safe micro-batch: none was found ({beyond})."
    assert found.limit_bytes and found.margin_bytes is not None and each.peak_bytes  # noqa: PT018
    return (
        f"Largest safe micro-batch measured: {each.size}, peak {each.peak_bytes / _GIB:.1f} of "
        f"{found.limit_bytes / _GIB:.1f} GiB, {found.margin_bytes / _GIB:.1f} GiB "
        f"({100 * (found.margin_share or 0):.0f} %) left; {beyond}."
    )
