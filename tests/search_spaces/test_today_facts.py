"""Sentences on today's training, and on what later looks change of them."""

from __future__ import annotations

from dataclasses import replace

from tuner.search_spaces.job import TodayFacts

COUNTED = TodayFacts(
    ranks=1,
    replicas=1,
    global_batch=32,
    micro_batch=16,
    accumulation=2,
    steps=None,
    knobs={"data_parallel": 1, "micro_batch": 16},
    sources=dict.fromkeys(("micro_batch", "accumulation"), "counted in 3 steps"),
)
PROOF = "--bs 16 and --accum 2: at 8 x 4 the same 32 samples a step and rank"


def test_no_line_is_made_of_no_knobs() -> None:
    assert len(COUNTED.lines) == 2
    set_by_user = replace(COUNTED, knobs={"threads": 4, "micro_batch": 16})
    assert set_by_user.lines[2] == "today's knobs: threads=4"


def test_each_knob_is_told_once() -> None:
    """They were told up to three times, each time with one knob more."""
    first = replace(COUNTED, knobs={**COUNTED.knobs, "zero_stage": 1})
    more = replace(first, knobs={**first.knobs, "optimizer_kernel": "loop", "threads": 2})
    assert more.changed_lines(first) == ("today's knobs: optimizer_kernel=loop, threads=2",)
    assert more.changed_lines(more) == ()
    other = replace(more, knobs={**more.knobs, "zero_stage": 2}, sources={"zero_stage": "--today"})
    assert other.changed_lines(more)[-1] == "today's knobs: zero_stage=2 (--today)"
    # A proof is told as one, whatever knobs came with it.
    proven = replace(more, sources=dict.fromkeys(COUNTED.sources, PROOF))
    assert proven.changed_lines(first) == (
        f"proven: micro-batch and accumulation: {PROOF}",
        "today's knobs: optimizer_kernel=loop, threads=2",
    )


def test_of_the_same_values_only_a_proof_is_new() -> None:
    proven = replace(COUNTED, sources=dict.fromkeys(COUNTED.sources, PROOF))
    assert proven.changed_lines(COUNTED) == (f"proven: micro-batch and accumulation: {PROOF}",)
    assert COUNTED.changed_lines(COUNTED) == ()
    # What was counted before is not proven by it.
    alone = replace(COUNTED, sources={**COUNTED.sources, "micro_batch": "--bs 16"})
    assert alone.changed_lines(COUNTED) == ("proven: micro-batch: --bs 16",)
    assert replace(COUNTED, sources={}).changed_lines(alone) == (
        replace(COUNTED, sources={}).lines[0],
    )


def test_other_values_are_told_with_their_line() -> None:
    assert replace(COUNTED, steps=500).changed_lines(COUNTED) == ("length: 500 optimizer steps",)
    other = replace(COUNTED, micro_batch=8, accumulation=4)
    assert other.changed_lines(COUNTED) == (other.lines[0],)
    changed = replace(other, sources=dict.fromkeys(COUNTED.sources, "--today"), steps=7)
    assert changed.changed_lines(COUNTED) == changed.lines[:2]
