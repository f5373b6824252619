"""The table of failures: every kind has an entry, and an unknown one has a meaning."""

from __future__ import annotations

from typing import get_args

import pytest

from tuner.workload.probe import FAILURES, Failure, FailureKind, failure_class


def test_every_kind_has_an_entry() -> None:
    assert set(FAILURES) == set(get_args(FailureKind))


@pytest.mark.parametrize(
    ("kind", "blames"),
    [("out_of_memory", "launch"), ("not_taken", "setting"), ("node", None), ("cancelled", None)],
)
def test_a_failure_blames(kind: FailureKind, blames: str | None) -> None:
    assert failure_class(kind).blames == blames
    assert Failure(kind, "").blames_configuration is (blames is not None)


def test_a_kind_of_a_later_release_blames_its_setting_alone() -> None:
    unknown = failure_class("disk_full")
    assert (unknown.phrase, unknown.blames, unknown.t4) == ("disk full", "setting", "runtime")


def test_what_ranks_report_has_an_order_of_its_own_and_the_rest_has_none() -> None:
    """Of several causes the likelier one of the others is told: no two share a place."""
    reported = {kind: each.order for kind, each in FAILURES.items() if each.order}
    assert sorted(reported, key=reported.__getitem__) == [
        *("node", "out_of_memory", "alone", "refused", "crash")
    ]
    assert len(set(reported.values())) == len(reported)
    assert failure_class("disk_full").order == 0
    assert [kind for kind, each in FAILURES.items() if each.lacks_memory] == ["out_of_memory"]
