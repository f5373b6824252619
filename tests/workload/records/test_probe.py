"""The table of failures: every kind has an entry, and an unknown one has a meaning."""

from __future__ import annotations

import pytest

from tuner.workload.records.probe import FAILURES, Failure, failure_class, shown_by, without_styles
from tuner.workload.scripts.inspection import _last_words


@pytest.mark.parametrize(
    ("kind", "blames"),
    [("out_of_memory", "launch"), ("not_taken", "setting"), ("node", None), ("cancelled", None)],
)
def test_a_failure_blames(kind: str, blames: str | None) -> None:
    assert failure_class(kind).blames == blames
    assert Failure(kind, "").blames_configuration is (blames is not None)


def test_a_kind_of_a_later_release_blames_its_setting_alone() -> None:
    unknown = failure_class("cable_cut")
    assert (unknown.phrase, unknown.blames) == ("cable cut", "setting")


def test_what_ranks_report_is_in_the_order_of_likelihood() -> None:
    shown = [kind for kind, each in FAILURES.items() if each.evidence]
    assert shown == [
        "node",
        "out_of_memory",
        "disk_full",
        "alone",
        "no_rank",
        "refused",
        "hook",
        "crash",
    ]
    assert [shown_by(FAILURES[kind].evidence) for kind in shown] == shown
    assert shown_by("a later hook's") == ""
    assert [kind for kind, each in FAILURES.items() if each.lacks_memory] == ["out_of_memory"]


@pytest.mark.parametrize(
    ("styled", "plain"),
    [
        (
            "(1) \x1b[1mdo those steps only if you trust\x1b[0m",
            "(1) do those steps only if you trust",
        ),
        ("\x1b[38;5;196;48:2::1:2:3mred\x1b[m", "red"),
        ("\x1b[1;35mKeyError\x1b[0m: \x1b[35m'loss'\x1b[0m", "KeyError: 'loss'"),  # Python 3.13
        ("see \x1b]8;id=1;https://a.b/c\x1b\\the page\x1b]8;;\x1b\\.", "see the page."),  # rich
        ("\x1b]8;;https://a.b\x07the page\x1b]8;;\x07", "the page"),
        ("\x1b]0;a title\x07text", "text"),
        ("\x1bP1$r0m\x1b\\a\x1b_G;x\x1b\\b", "ab"),
        ("\x1b(B\x1b7\x1b=text\x1b8\x1bM", "text"),
        ("\x9b31mred\x9b0m \x9d8;;u\x9ca\x9d8;;\x9c", "red a"),
        ("\x1b[2K\x1b[1A\x1b[?25lstep 3", "step 3"),
        ("one\n\x1b[31mtwo\x1b[0m\n\tthree", "one\ntwo\n\tthree"),
    ],
)
def test_sequences_of_a_terminal_are_left_out(styled: str, plain: str) -> None:
    assert without_styles(styled) == plain


@pytest.mark.parametrize(
    "text",
    [
        "array[1m] of 3 [0m]",
        "\x1b]8;;https://a.b no end, and\nthe cause in the next line",
        "\x1b[31",
        "Größe \x1b",
    ],
)
def test_no_word_is_left_out(text: str) -> None:
    words = text.replace("\x1b]", "").replace("\x1b[", "")
    assert without_styles(text) == words


def test_a_failure_is_told_in_plain_text_whoever_records_it() -> None:
    log = "\x1b[31m╭─\x1b[0m\x1b[1;31mTraceback\x1b[0m\n\x1b[1;91mdata.py: \x1b[0mno such column"
    failure = Failure("crash", "UnpicklingError: \x1b[1mWeights only\x1b[0m load failed", log)
    assert failure.sentence == "crash: UnpicklingError: Weights only load failed"
    assert failure.log_tail == "╭─Traceback\ndata.py: no such column"
    ended = Failure("crash", "rank 0 ended with exit code 1", log)
    assert _last_words(ended) == ': "data.py: no such column"'
