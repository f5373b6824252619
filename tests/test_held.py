"""Every fault that was found once stays held by a test that exists."""

from __future__ import annotations

from benchmarks.held import Fault, faults, functions_of_tests, without_a_test


def test_each_fault_has_tests_that_exist() -> None:
    assert without_a_test(faults(), functions_of_tests()) == []


def test_no_fault_stands_twice() -> None:
    told = [fault.what for fault in faults()]
    assert sorted(set(told)) == sorted(told)


def test_a_fault_without_a_test_is_found() -> None:
    none, gone = Fault("somebody", "a", ()), Fault("somebody", "b", ("test_held", "test_gone"))
    held = Fault("somebody", "c", ("test_held",))
    assert without_a_test([none, gone, held], {"test_held": []}) == [none, gone]
