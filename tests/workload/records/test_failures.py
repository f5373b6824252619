"""The table of failures: every kind has an entry, and an unknown one has a meaning."""

from __future__ import annotations

import pytest

from tuner.workload.records.probe import FAILURES, Failure, failure_class, shown_by


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
    assert shown == ["node", "out_of_memory", "disk_full", "alone", "no_rank", "refused", "crash"]
    assert [shown_by(FAILURES[kind].evidence) for kind in shown] == shown
    assert shown_by("a later hook's") == ""
    assert [kind for kind, each in FAILURES.items() if each.lacks_memory] == ["out_of_memory"]
